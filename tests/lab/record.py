"""What a lab leaves in the file system while it lives, and how its remains are found and removed.

Each lab has a directory STATE under /run/akp-lab. It names the owner's process and the lab's process 1 together with
their start times, because a number alone may have been given to somebody else meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HOME = Path("/run/akp-lab")


class LabError(Exception):
    """The lab cannot do this; the message says why."""


@dataclass(frozen=True)
class Process:
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, start_time(pid))

    @property
    def alive(self) -> bool:
        return self.started != 0 and start_time(self.pid) == self.started


@dataclass(frozen=True)
class Record:
    """STATE/lab.json. There is no agent yet while the lab is being made, and no owner if it outlives its maker."""

    prefix: str
    nodes: int
    owner: Process | None
    agent: Process | None = None
    uml: int = 0

    @property
    def wanted(self) -> bool:
        """Whether somebody still uses this lab."""
        if self.owner is not None:
            return self.owner.alive
        return self.agent is not None and self.agent.alive

    def write(self, directory: Path) -> None:
        (directory / "lab.json").write_text(json.dumps(asdict(self), indent=2) + "\n")


def read(prefix: str) -> Record | None:
    try:
        fields = json.loads((HOME / prefix / "lab.json").read_text())
    except FileNotFoundError:
        return None
    for role in ("owner", "agent"):
        fields[role] = fields[role] and Process(**fields[role])
    # The lab may be the work of another version of this code, which records more.
    return Record(**{name: value for name, value in fields.items() if name in Record.__dataclass_fields__})


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def claim(record: Record) -> Path:
    """Makes STATE for a new lab, all at once. Labs whose owner died are cleared away, living labs are left alone."""
    HOME.mkdir(mode=0o700, exist_ok=True)
    for prefix in labs():
        found = read(prefix)
        if found is None or not found.wanted:
            remove(prefix)
        elif prefix == record.prefix:
            by = f"process {found.owner.pid}" if found.owner else "`python -m tests.lab up`"
            raise LabError(f"lab {prefix} is in use by {by}; `python -m tests.lab down {prefix}` removes it")
    fresh = Path(tempfile.mkdtemp(prefix=".", dir=HOME))
    record.write(fresh)
    try:
        return fresh.rename(HOME / record.prefix)
    except OSError:
        shutil.rmtree(fresh)
        raise LabError(f"lab {record.prefix} has just been made by somebody else") from None


def remove(prefix: str) -> bool:
    """Ends the lab's process 1, with which the kernel ends all others and frees every namespace; then removes STATE."""
    found = read(prefix)
    if found and found.agent and found.agent.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.agent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while found.agent.alive:
            if time.monotonic() > deadline:
                raise LabError(f"process {found.agent.pid} of lab {prefix} does not end")
            time.sleep(0.002)
    shutil.rmtree(HOME / prefix, ignore_errors=True)
    return found is not None


def labs() -> list[str]:
    """The prefixes of all labs on this machine, dead or alive."""
    if not HOME.exists():
        return []
    return sorted(path.name for path in HOME.iterdir() if not path.name.startswith("."))
