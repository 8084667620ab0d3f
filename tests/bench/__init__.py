"""Speed as ratios: every figure is measured in one run beside what it is compared with."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AKP = str(Path(sys.executable).parent / "akp")


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure, what it was measured against, and the bar it must not exceed."""

    what: str
    value: float
    against: str
    reference: float
    limit: float  # of value / reference
    unit: str = "s"

    @property
    def ratio(self) -> float:
        """How many times the reference; of nothing, nothing or without bounds."""
        if not self.reference:
            return float("inf") if self.value else 0.0
        return self.value / self.reference

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.ratio <= self.limit


def timed(
    argv: Sequence[str], *, netns: str = "", stdin: Path | None = None, env: dict[str, str] | None = None
) -> float:
    """Seconds that a command takes; it must succeed."""
    prefix = ["ip", "netns", "exec", netns] if netns else []
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(stdin.open("rb")) if stdin else subprocess.DEVNULL
        started = time.perf_counter()
        done = subprocess.run(
            [*prefix, *argv],
            stdin=source,
            capture_output=True,
            check=False,
            text=True,
            env={**os.environ, **(env or {})},
        )
        seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return seconds


def peak_memory(argv: Sequence[str]) -> float:
    """Largest resident size of a command, in MiB."""
    program = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, check=True, text=True)
    return int(done.stdout) / 1024


@contextlib.contextmanager
def namespace(name: str) -> Iterator[str]:
    """An empty network namespace that is gone afterwards."""
    name = f"akp-bench-{name}-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
