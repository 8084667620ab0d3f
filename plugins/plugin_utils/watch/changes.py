# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Changes of the cluster on their way to hosts, and how long each takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..cluster.watch import Update


@dataclasses.dataclass(slots=True)
class Change:
    """A change of the cluster."""

    text: str  # for people
    received: float
    triggered: tuple[float, ...] = ()
    waiting: set[str] = dataclasses.field(default_factory=set)  # hosts that do not have it yet
    hosts: int = 0
    landed: float = 0.0  # when the last of them that is done had it in its kernel

    @classmethod
    def of(cls, update: Update) -> Change:
        """What an update changes, with the names of the first few objects."""
        names = [f"{each.kind} {f'{each.namespace}/' if each.namespace else ''}{each.name}" for each in update.changes]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return cls(", ".join(names[:3]) + more, update.received, tuple(sorted(update.triggered.values())))


class Changes:
    """Which changes each host still has to get."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Change]] = {}  # host -> those that wait for its next push
        self._sent: dict[str, list[Change]] = {}  # host -> those in the push under way

    def add(self, change: Change, host: str) -> None:
        """A change that concerns a host."""
        change.waiting.add(host)
        change.hosts += 1
        self._waiting.setdefault(host, []).append(change)

    def sent(self, host: str) -> None:
        """A push is under way, with all that waited."""
        self._sent.setdefault(host, []).extend(self._waiting.pop(host, ()))

    def returned(self, host: str) -> None:
        """The push came to nothing."""
        self._waiting[host] = self._sent.pop(host, []) + self._waiting.get(host, [])

    def forget(self, host: str) -> None:
        """A host is no host any more."""
        for change in self._sent.pop(host, []) + self._waiting.pop(host, []):
            change.waiting.discard(host)

    def arrived(self, host: str, landed: float, *, current: bool) -> Iterator[Change]:
        """The changes that a host has now: those of the push, or all if it is current. Others may wait for some."""
        done = self._sent.pop(host, []) + (self._waiting.pop(host, []) if current else [])
        for change in done:
            change.landed = max(change.landed, landed)
            change.waiting.discard(host)
            yield change
