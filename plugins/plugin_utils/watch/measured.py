# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The metrics of a watch, written from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..plan.metrics import Freshness
from ..tasks.directory import WorkDirectory
from .machine import Host

METRICS_SECONDS = 1.0


class Measured:
    """What was observed and is not written yet."""

    def __init__(self, directory: WorkDirectory, cluster: str, textfile: Path | None) -> None:
        self._directory, self._cluster, self._textfile = directory, cluster, textfile
        self._observed: list[Callable[[Freshness], None]] = []
        self._due = 0.0

    def confirmed(self, host: Host) -> None:
        """A host holds what was sent to it."""
        generation, when = host.has.generation if host.has else "", time.time()
        self._observed.append(lambda fresh: fresh.confirmed(host.name, host.node, generation, when))

    def failed(self, host: Host, why: str) -> None:
        """A host failed."""
        self._observed.append(lambda fresh: fresh.failed(host.name, host.node, why))

    def programmed(self, landed: float, triggered: Iterable[float]) -> None:
        """Changes of endpoints that began then are in a kernel."""
        for each in triggered:
            seconds = max(0.0, landed - each)
            self._observed.append(lambda fresh, seconds=seconds: fresh.programmed(seconds))  # type: ignore[misc]

    def write(self, *, at_once: bool = False) -> str:
        """Write if it is time to, and there is something to write; why that failed, if it did."""
        now = time.monotonic()
        if not self._observed or (now < self._due and not at_once):
            return ""
        self._due = now + METRICS_SECONDS
        observed, self._observed = self._observed, []
        try:
            with Freshness(self._directory, self._cluster) as fresh:
                for each in observed:
                    each(fresh)
                if self._textfile is not None:
                    fresh.write(self._textfile)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""
