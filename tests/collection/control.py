"""A control host with a cron, or a systemd, of its own: a mount namespace that shows nothing of the machine's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# The lab's directory stays visible: through it ssh finds the nodes.
_SCRIPT = """
mount --make-rprivate /
mkdir -p "$1/lab" /run/akp-lab
mount --rbind /run/akp-lab "$1/lab"
mount -t tmpfs tmpfs /run
mkdir -p /run/akp-lab /run/lock
mount --rbind "$1/lab" /run/akp-lab
mount -t tmpfs -o mode=755 tmpfs /var/spool/cron
mkdir -m 1730 /var/spool/cron/crontabs
chgrp crontab /var/spool/cron/crontabs
mount -t tmpfs tmpfs /etc/cron.d
mount -t tmpfs tmpfs /etc/systemd/system
exec "$1/wait" infinity
"""
_SYSTEMD = """
umount --recursive /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/system "$1/runtime"
exec /lib/systemd/systemd --user --log-target=console
"""


@dataclass(frozen=True)
class ControlHost:
    """Where the schedule lives. Commands run as root with a home of their own."""

    process: int
    home: Path

    def command(self, argv: Sequence[str]) -> list[str]:
        """The argv that runs something there."""
        return ["nsenter", "--target", str(self.process), "--mount", *argv]

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "runtime")}

    def run(self, *argv: str, check: bool = True) -> str:
        done = subprocess.run(
            self.command(argv),
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.environment},
        )
        assert not check or done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def cron(self) -> Iterator[None]:
        """Debian's cron, in the foreground."""
        with _running(self.command(["cron", "-f", "-L", "15"]), self.home / "cron.log"):
            yield

    @contextlib.contextmanager
    def systemd(self) -> Iterator[None]:
        """A systemd of the user, which is the same program as the system's."""
        group = Path("/sys/fs/cgroup/unified") if Path("/sys/fs/cgroup/unified").is_dir() else Path("/sys/fs/cgroup")
        group /= f"akp-{os.getpid()}"
        group.mkdir()
        (self.home / "runtime").mkdir(mode=0o700, exist_ok=True)
        # It believes that its cgroup is the root of all, so that it leaves none of its own behind elsewhere.
        enter = f'echo $$ >{group}/cgroup.procs && exec unshare --cgroup sh -euc "$0" sh "$1"'
        argv = self.command(["sh", "-euc", enter, _SYSTEMD, str(self.home)])
        try:
            with _running(argv, self.home / "systemd.log", {**os.environ, **self.environment}):
                wait_for(lambda: self.run("systemctl", "--user", "is-system-running", check=False).strip() == "running")
                yield
        finally:
            for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                _remove(folder)
            _remove(group)


@contextlib.contextmanager
def control_host(home: Path) -> Iterator[ControlHost]:
    """A host whose crontabs, units and /run are gone with it."""
    home.mkdir()
    (home / "wait").symlink_to("/bin/sleep")
    argv = ["unshare", "--mount", "sh", "-euc", _SCRIPT, "sh", str(home)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as holder:
        try:
            command = Path(f"/proc/{holder.pid}/cmdline")
            wait_for(lambda: command.read_bytes().startswith(f"{home}/wait\0".encode()))
            yield ControlHost(holder.pid, home)
        finally:
            holder.kill()


@contextlib.contextmanager
def _running(argv: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    with (
        log.open("wb") as output,
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _remove(group: Path) -> None:
    """A cgroup goes when its last process is gone."""

    def removed() -> bool:
        try:
            group.rmdir()
        except OSError:
            return not group.exists()
        return True

    wait_for(removed)


def wait_for(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)
    return value
