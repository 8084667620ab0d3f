# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A limit on the time that one host may take: a node that never answers holds up itself and no other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .answers import NoAnswer

# Of a task for a host; kube_proxy_task_timeout is another. Loading all rules of a large cluster takes a minute.
TASK_SECONDS = 300
# What a carrier waits longer, so that the task itself can say and write down what happened.
GRACE_SECONDS = 15.0


# What a task takes beside the node's answers: the term of a confirmation.
_NUMBERS = {"task_timeout": TASK_SECONDS, "confirm_within": 60}


class LateAnswer(NoAnswer):
    """The node did not answer in time."""


class _TimeIsUp(BaseException):
    """No Exception: what tries again after errors must not catch it."""


def limit_of(settings: Mapping[str, Any]) -> float:
    """Seconds for a whole task of a host with these variables, named without their prefix, and a grace."""
    numbers = (_number(settings.get(name), default) for name, default in _NUMBERS.items())
    return sum(numbers) + probe_seconds(settings.get("probes")) + GRACE_SECONDS


def probe_seconds(probes: Any) -> int:
    """Seconds that probes, as a user lists them, may take."""
    return sum(_number(_timeout(each), 5) for each in (probes if isinstance(probes, list) else ()))


def _timeout(probe: Any) -> Any:
    return probe.get("timeout") if isinstance(probe, Mapping) else None


def _number(value: Any, default: int) -> int:
    try:
        return max(0, int(value))
    except (TypeError, ValueError):
        return default


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """LateAnswer if it takes longer; the commands that were started for it are ended.

    Where a task has a `timeout` of its own, that one holds.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def late(_number: int, _frame: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, late)
    try:
        # Again and again, should the first be lost in something that tidies up.
        signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsUp:
        signal.setitimer(signal.ITIMER_REAL, 0)
        end_children()
        raise LateAnswer(f"{what} did not answer within {seconds:g} s (kube_proxy_task_timeout)") from None
    finally:
        signal.signal(signal.SIGALRM, before)


def end_children() -> None:
    """End what this process started, such as an ssh that waits; on the node the program finishes or has not begun."""
    for process in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGTERM)


def _descendants(process: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text(encoding="ascii").split()):
                found += [*_descendants(child), child]
    return found
