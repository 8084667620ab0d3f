# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What each host shall have, as the cluster, the settings and the facts of hosts change.

Where changes need approval, Services are those of the last plan that was carried out, for hosts that took a later plan
which stopped half way those of that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..backends.state import State
from ..choices import Choices
from ..cluster.snapshot import Snapshot
from ..cluster.watch import Update
from ..engine import Engine
from ..plan.consent import Consent
from ..plan.removal_limit import Frontends
from ..proxy.facts import InvalidFacts, UnusableNode
from ..proxy.policy import Known, RefusedVips

Say = Callable[..., None]


class Desired:
    """The states of all hosts."""

    def __init__(self, consent: Consent, frontends: Frontends, say: Say) -> None:
        self._consent, self._frontends, self._say = consent, frontends, say
        self.choices: Choices | None = None
        self.update: Update | None = None  # the cluster as it is
        self.digest = ""  # names the cluster that the states are of
        self._engine: Engine | None = None
        self._ahead: Engine | None = None  # for hosts that took a plan which others do not have
        self._took: dict[str, bool] = {}  # host -> whether it is one of those
        self._facts: dict[str, Mapping[str, Any]] = {}  # host -> what it said of itself
        self._held: dict[str, str] = {}  # host -> why it is left as it is, by what it answered
        self._unusable: dict[str, str] = {}  # host -> why nothing can be desired of it
        self._warnings: dict[str, tuple[str, ...]] = {}  # host, or "" for all of them -> what was said

    def configure(self, choices: Choices) -> bool:
        """The settings from now on; whether they are others than before."""
        if choices == self.choices:
            return False
        self.choices = choices
        self._engine, self._ahead = Engine(choices), None
        return True

    def answered(self, host: str, facts: Mapping[str, Any], held: str) -> bool:
        """What a host says of itself from now on, and why it is left as it is; whether either is news."""
        changed = self._facts.get(host) != facts or self._held.get(host, "") != held
        self._facts[host], self._held[host] = facts, held
        return changed

    def knows(self, host: str) -> bool:
        """Whether the host has said what it is."""
        return host in self._facts

    def forget(self, host: str) -> None:
        """Nothing is known of a host any more."""
        for known in (self._took, self._facts, self._held, self._unusable, self._warnings):
            known.pop(host, None)

    def compute(self, url: str) -> bool:
        """Compute anew for the cluster as it is, whose API server has this URL. False if nothing is desired of it."""
        if self._engine is None or self.update is None:
            return False
        snapshot, waiting = self._consent.allowed(self.update.snapshot)
        try:
            self._engine.update(snapshot, Known(url=url))
            self._compute_ahead(self.update.snapshot, url)
        except RefusedVips as error:
            self._say("refused", problem="; ".join(str(error).splitlines()))
            return False
        self.digest = self.update.digest
        self._warn("", (*waiting, *(each.text for each in self._engine.warnings)))
        return True

    def _compute_ahead(self, snapshot: Snapshot, url: str) -> None:
        allowed = self._consent.ahead(snapshot)
        if allowed is None or self.choices is None:
            self._ahead = None
            return
        self._ahead = self._ahead or Engine(self.choices)
        self._ahead.update(allowed, Known(url=url))

    @property
    def split(self) -> bool:
        """Whether what a host shall have depends on what it has: some took a plan that others do not have."""
        return self._ahead is not None

    def _engine_of(self, host: str, generation: str) -> Engine | None:
        """Where the frontends of the generation that a host has were not learned yet, it stays where it was."""
        name = self._frontends.name(generation) if self._ahead is not None else ""
        if name:
            self._took[host] = self._consent.took_plan(host, name)
        return self._ahead if self._ahead is not None and self._took.get(host) else self._engine

    def state(self, host: str, node: str, generation: str) -> State | None:
        """What a host that answered shall have in place of a generation; None if that cannot be told."""
        engine, facts = self._engine_of(host, generation), self._facts.get(host)
        if engine is None or self.update is None or facts is None:
            return None
        state, unusable = None, self._held.get(host, "")
        try:
            state = None if unusable else engine.state(node, facts)
            self._warn(host, [each.text for each in engine.warnings_of(node, facts)])
        except Exception as error:
            # Whatever a node says of itself, the others get what they shall have.
            known = isinstance(error, UnusableNode | InvalidFacts)
            unusable = str(error) if known else f"{type(error).__name__}: {error}"
        if unusable and unusable != self._unusable.get(host):
            self._say("unusable", host=host, problem=unusable)
        self._unusable[host] = unusable
        return state

    def foreseen(self, host: str, node: str, generation: str, facts: Mapping[str, Any] | None) -> State | None:
        """What a host that has not answered yet will have to get, as far as these earlier facts tell."""
        engine = self._engine_of(host, generation)
        if engine is None or self.update is None:
            return None
        try:
            return engine.state(node, facts)
        except Exception:
            return None  # when it has answered, it is told why

    def _warn(self, host: str, texts: Iterable[str]) -> None:
        """Say what was not said of a host before."""
        said, now = self._warnings.get(host, ()), tuple(texts)
        for text in now:
            if text not in said:
                self._say("warning", problem=text)
        self._warnings[host] = now
