# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""All hosts while a cluster is followed: what happens to each, and what that means for changes, log and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..tasks.directory import WorkDirectory
from .changes import Change, Changes
from .desired import Desired
from .held_back import held_back
from .machine import Held, Host, step
from .measured import Measured
from .removals import Removals
from .results import event_of, failed
from .vocabulary import Answered, Arrived, Begun, Event, Failed, Push, Returned, Say, Wanted


class Fleet:
    """The hosts of the inventory."""

    def __init__(
        self,
        directory: WorkDirectory,
        desired: Desired,
        removals: Removals,
        measured: Measured,
        say: Callable[..., None],
    ) -> None:
        self._directory, self._desired, self._removals = directory, desired, removals
        self._measured, self._say = measured, say
        self._hosts: dict[str, Host] = {}
        self._settings: Mapping[str, Mapping[str, Any]] = {}
        self._changes = Changes()
        self.settled = False  # each had what it shall have, once

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts.values()))

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def roll_call(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """The inventory from now on: host -> its variables."""
        self._removals.changed()
        self._settings = settings
        for name in self._hosts.keys() - settings.keys():
            self._say("host", host=name, what="is not in the inventory any more")
            self._forget(name)
        new = sorted(settings.keys() - self._hosts.keys())
        if self._hosts and new:
            self._say("host", host=", ".join(new), what="new in the inventory")
        for name, values in settings.items():
            node = str(values.get("node_name") or name)
            if name in self._hosts and self._hosts[name].node == node:
                continue
            self._forget(name)
            last = (self._directory.answer(name) or {}).get("status") or {}
            self._hosts[name] = Host(name, node, held=Held(str(last.get("generation") or "")))

    def _forget(self, name: str) -> None:
        self._hosts.pop(name, None)
        self._changes.forget(name)
        self._desired.forget(name)
        self._removals.begin_anew(name)

    def want(self, change: Change | None) -> None:
        """The cluster or the settings changed, and this is how: each host shall have what is desired of it now."""
        for host in self:
            if self._want(host, host.held.generation) and change is not None:
                self._changes.add(change, host.name)
        if change is not None and change.hosts == 0 and self.settled:
            self._say("change", what=change.text, hosts=0)

    def _want(self, host: Host, generation: str) -> bool:
        """Compute what a host shall have in place of a generation; whether that is something new."""
        self._removals.changed()
        if not self._desired.knows(host.name):
            return False
        state = self._desired.state(host.name, host.node, generation)
        self.step(host.name, Wanted(state))
        return state is not None and (host.desired is None or host.desired.generation != state.generation)

    def answer(self, name: str, result: Mapping[str, Any]) -> None:
        """What came of a task. Whatever a node said, it hurts that node alone."""
        host = self._hosts.get(name)
        if host is None:
            return
        try:
            event = event_of(host.phase, result, self._period(host))
            if isinstance(event, Answered):
                self._answered(host, event, result)
            self.step(name, event)
        except Exception as error:
            self.step(name, failed(f"what it answered cannot be used: {type(error).__name__}: {error}"))

    def _period(self, host: Host) -> float:
        """Seconds until a host is asked again; after its first answer longer, and not as long for all."""
        choices = self._desired.choices
        period = choices.proxy.sync_period if choices else 30.0
        first = not self._desired.knows(host.name)
        return period * (1 + sorted(self._hosts).index(host.name) / len(self._hosts) if first else 1)

    def _answered(self, host: Host, event: Answered, result: Mapping[str, Any]) -> None:
        """What a host says of itself, before what it says that it has."""
        moved = event.generation != host.held.generation
        self._removals.changed()
        if moved:
            # What others gave it, or took back, is meant.
            self._removals.begin_anew(host.name)
        mode = self._desired.choices.proxy.mode if self._desired.choices else ""
        held = held_back(host, result, self._settings.get(host.name, {}), mode)
        if self._desired.answered(host.name, result.get("facts") or {}, held) or (moved and self._desired.split):
            self._want(host, event.generation)

    def step(self, name: str, event: Event) -> None:
        """Something happened to a host."""
        host, effects = step(self._hosts[name], event)
        self._hosts[name] = host
        if isinstance(event, Failed):
            self._measured.failed(host, event.reason)
        elif isinstance(event, Begun) and isinstance(event.task, Push):
            self._changes.sent(name)
        for effect in effects:
            match effect:
                case Say(said, fields):
                    self._say(said, host=name, **fields)
                case Returned():
                    self._changes.returned(name)
                case Arrived():
                    self._arrived(host, effect)

    def _arrived(self, host: Host, arrived: Arrived) -> None:
        self._removals.holds(host)
        self._measured.confirmed(host)
        when = time.time()
        for change in self._changes.arrived(host.name, arrived.landed, current=arrived.current):
            self._measured.programmed(arrived.landed, change.triggered)
            if not change.waiting:
                took, confirmed = (round(each - change.received, 3) for each in (change.landed, when))
                self._say("change", what=change.text, hosts=change.hosts, seconds=took, confirmed=confirmed)
        if not self.settled and all(map(self._has_settled, self._hosts.values())):
            self.settled = True
            self._say("settled", hosts=len(self._hosts))

    def _has_settled(self, host: Host) -> bool:
        """Whether a host answered, and has what it shall have for good."""
        return self._desired.knows(host.name) and not host.stale and host.trial is None
