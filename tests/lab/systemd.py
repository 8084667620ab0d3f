"""A host with a real systemd as its process 1: for units, timers, and what happens at boot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .node import run
from .record import LabError

HERE = Path(__file__).parent
BOOT_WITHIN = 90.0


class SystemdHost:
    """Network, mount, UTS, IPC, PID and cgroup namespaces; only /tmp and the read part of / are the machine's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._disk = Path(tempfile.mkdtemp(prefix="akp-systemd-"))
        self._cgroup = _cgroup2() / f"akp-{name}-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        try:
            # An overlay cannot have its layers on one: a file system of our own will do.
            run(name, ["mount", "-n", "-t", "tmpfs", "tmpfs", str(self._disk)])
            self.boot()
        except BaseException:
            self.close()
            raise

    def boot(self) -> None:
        """Start it, and wait until it has nothing more to start."""
        self._cgroup.mkdir(exist_ok=True)
        # If whoever made the host dies, so does the host.
        argv = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            str(HERE / "systemd-init"),
            str(self._cgroup),
            str(self._disk),
            self.name,
        ]
        with (self._disk / "console").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + BOOT_WITHIN
        while self._state() not in ("running", "degraded"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"{self.name} does not boot:\n{(self._disk / 'console').read_text()}")
            time.sleep(0.05)

    def _state(self) -> str:
        try:
            self.pid = int((self._cgroup / "init.scope" / "cgroup.procs").read_text().split()[0])
        except (OSError, IndexError):
            return ""
        return self.run(["systemctl", "is-system-running"], check=False).stdout.strip()

    def power_off(self) -> None:
        """As if somebody pulled the plug."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        deadline = time.monotonic() + BOOT_WITHIN
        while True:
            left = [each for each in self._cgroup.rglob("cgroup.procs") if each.read_text().strip()]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.05)

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv as root on this host."""
        spaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup"]
        return ["nsenter", f"--target={self.pid}", *spaces, "--", *argv]

    def run(self, argv: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on the host."""
        return run(self.name, self.enter(argv), check=check)

    def sh(self, script: str, *, check: bool = True) -> str:
        """Run a line of shell on the host."""
        return self.run(["sh", "-euc", script], check=check).stdout

    def close(self) -> None:
        """Removes everything."""
        self.power_off()
        if self._cgroup.exists():
            for each in sorted((path for path in self._cgroup.rglob("*") if path.is_dir()), reverse=True):
                _remove(each)
            _remove(self._cgroup)
        subprocess.run(["umount", "-l", str(self._disk)], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self._disk, ignore_errors=True)

    def __enter__(self) -> SystemdHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove(cgroup: Path) -> None:
    """The kernel lists no process any more, and yet may need a moment to bury the last one."""
    deadline = time.monotonic() + BOOT_WITHIN
    while True:
        try:
            return cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _cgroup2() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, where, kind, *_rest = line.split()
        if kind == "cgroup2":
            return Path(where)
    raise LabError("a host with systemd needs cgroup2, and it is mounted nowhere")
