# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What commands share towards a person: progress, and what was left out."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ..cluster.snapshot import Snapshot
from ..errors import UserError
from ..texts import visible

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_PATIENCE = 1.0  # seconds of silence before a bar appears


class UsageError(UserError):
    """A call that cannot be carried out; the message says what to do instead."""


class Progress:
    """A progress bar on a terminal, for work that takes longer than a second; silent otherwise."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._bar: Bar | None = None
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, text: str, done: int = 0, total: int | None = None) -> None:
        """Say what is being done, and how much of it is."""
        if not self._visible or time.monotonic() - self._started < _PATIENCE:
            return
        if self._bar is None:
            try:
                from rich.console import Console
                from rich.progress import Progress as Bar
            except ImportError:  # of the collection alone; it works as well without a bar
                self._visible = False
                return

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.add_task(text, total=None)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=total)


def report_left_out(snapshot: Snapshot, *, strict: bool) -> None:
    """Name every object that was left out; with --strict that is an error."""
    for problem in snapshot.problems:
        print(visible(f"left out: {problem}"), file=sys.stderr)
    for sort, count in snapshot.ignored.items():
        print(visible(f"not needed: {count} x {sort}"), file=sys.stderr)
    if strict and snapshot.problems:
        raise UsageError(
            f"{len(snapshot.problems)} problems in the input, see above; without --strict they are left out"
        )
