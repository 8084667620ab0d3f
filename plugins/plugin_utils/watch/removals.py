# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How much hosts may lose: if one would lose too many of its service ports, nothing is pushed to any.

What hosts hold is learned, so that a watch that starts again can compare with it. A namespace is not deleted in one
moment: each push is compared with the most that a host had within some minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..backends.state import State
from ..plan.removal_limit import ERODING_SECONDS, Frontends, Most, Ports, losses, service_ports
from ..tasks.directory import WorkDirectory
from .desired import Desired
from .machine import Host

# After so many generations, those that no node has are forgotten.
FORGET_AFTER = 500


class Removals:
    """Whether hosts would lose too much."""

    def __init__(
        self, directory: WorkDirectory, frontends: Frontends, desired: Desired, say: Callable[..., None]
    ) -> None:
        self._directory, self._frontends = directory, frontends
        self._desired, self._say = desired, say
        self._percents: Mapping[str, int] = {}  # host -> the share of its service ports that it may lose
        self._most: dict[str, Most] = {}
        self._refused = ""  # why nothing is pushed, if that is so
        self._judged = False  # that is still true
        self._unlearned: dict[str, State] = {}  # host -> what it holds
        self._learned = 0

    def allow(self, percents: Mapping[str, int]) -> None:
        """The share that each host may lose from now on."""
        self._percents, self._judged = percents, False

    def changed(self) -> None:
        """What a host has, or shall have, is not what it was."""
        self._judged = False

    def begin_anew(self, host: str) -> None:
        """What a host has is where losses count from: an operator gave it that, or took the rest back."""
        self._most.pop(host, None)

    def pushing(self, host: Host) -> None:
        """A host gets something else than it has."""
        had = self._ports(host)
        if had is None or self._percents.get(host.name, 100) >= 100:
            self.begin_anew(host.name)
        else:
            self._most.setdefault(host.name, Most()).had(had, time.monotonic())

    @property
    def refusing(self) -> bool:
        """Whether nothing may be pushed, as far as that was judged."""
        return bool(self._refused)

    def refuse(self, hosts: Iterable[Host]) -> bool:
        """Whether one of all hosts would lose more than it may: then none is pushed to."""
        if not self._judged:
            told = losses(dict(self._steps(hosts)))
            if told and told != self._refused:
                self._say(
                    "refused",
                    problem=f"{told}, of what there was within {ERODING_SECONDS / 60:.0f} minutes. If that is meant, "
                    "run sync_services with kube_proxy_max_removed_percent=100, or set it in the inventory and reload "
                    "(SIGHUP)",
                )
            elif self._refused and not told:
                self._say("allowed")
            self._refused, self._judged = told, True
        return bool(self._refused)

    def _steps(self, hosts: Iterable[Host]) -> Iterator[tuple[str, tuple[Ports, Ports, int]]]:
        """Of each host that what it has is known of: its service ports now and then, and the share it may lose."""
        for host in hosts:
            percent, answered = self._percents.get(host.name, 100), self._desired.knows(host.name)
            if percent >= 100 or not host.held.generation or (answered and not host.stale):
                continue
            has, after = self._ports(host), host.desired if answered else self._foreseen(host)
            if has is not None and after is not None:
                before = self._most.get(host.name, Most()).of(has, time.monotonic())
                yield host.name, (before, service_ports(after.fragments), percent)

    def _foreseen(self, host: Host) -> State | None:
        facts = (self._directory.answer(host.name) or {}).get("facts")
        return self._desired.foreseen(host.name, host.node, host.held.generation, facts)

    def _ports(self, host: Host) -> Ports | None:
        if host.held.state is not None:
            return service_ports(host.held.state.fragments)
        return self._frontends.ports(host.held.generation)

    def holds(self, host: Host) -> None:
        """What a host holds will be learned."""
        if host.has is not None:
            self._unlearned[host.name] = host.has

    def learn(self, hosts: Iterable[Host]) -> None:
        """Keep what hosts hold, to compare it with what comes after a restart."""
        unlearned, self._unlearned = self._unlearned, {}
        choices = self._desired.choices
        if choices is None:
            return
        for state in unlearned.values():
            self._frontends.learn(state, choices.frontends_text)
        self._learned += len(unlearned)
        if self._learned > FORGET_AFTER:
            self._learned = 0
            self._frontends.forget(self._directory.recorded() | {host.held.generation for host in hosts})
