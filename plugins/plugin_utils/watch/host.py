# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What is known of one host while a cluster is followed, and what it needs next.

A host is asked what it is and has; from then on it is given what changed, a delta at a time. Whatever goes wrong, it is
asked again, after a pause that grows, and gets its whole bundle if the answer calls for it. One task at a time; what
changes meanwhile is one more change afterwards. Where changes are confirmed, that is a task of its own: other hosts
get their rules meanwhile.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Mapping
from typing import Any

from ..backends.state import State
from ..carry.answers import settled
from ..plan.removal_limit import Most

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# A restore loads each delta of a log: when a host has nothing else to do, a whole bundle replaces so many.
LONG_LOG = 100


class Need(enum.Enum):
    """What a host needs now."""

    NOTHING = "nothing"
    QUESTION = "question"
    DELTA = "delta"
    BUNDLE = "bundle"
    SNAPSHOT = "snapshot"  # its whole bundle, in place of a long log of deltas; its kernel is left alone
    CONFIRMATION = "confirmation"


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A change that a host undoes by itself unless it is confirmed."""

    token: str
    previous: str  # the generation that it goes back to
    until: float
    how: Need
    changed: bool


@dataclasses.dataclass(slots=True)
class Change:
    """A change of the cluster on its way to hosts."""

    text: str  # for people
    received: float
    triggered: tuple[float, ...]
    waiting: set[str] = dataclasses.field(default_factory=set)  # hosts that do not have it yet
    hosts: int = 0
    landed: float = 0.0  # when the last of them that is done had it in its kernel


@dataclasses.dataclass(slots=True)
class Host:
    """One host."""

    name: str
    node: str
    facts: Mapping[str, Any] | None = None  # None until it answered
    has: State | None = None  # what it has, as far as that is known for sure
    recorded: str = ""  # the generation that it said it has, to stay
    last: str = ""  # the generation that it was given last, intact or not
    given: State | None = None  # the state of that name, if it is known here
    most: Most = dataclasses.field(default_factory=Most)  # of the service ports that were given from here
    whole: bool = False  # a delta will not do
    wanted: State | None = None
    ahead: bool = False  # it has a plan that not all hosts have
    unusable: str = ""  # why nothing can be wanted of it
    busy: Need = Need.NOTHING
    sent: State | None = None
    term: Term | None = None  # it has to be told that the change stays, before anything else
    landed: float = 0.0  # when it said that it has what was sent
    ask: bool = True  # it has to be asked before anything else
    stepped: bool = False  # the last thing it got was a delta
    log: int = 0  # deltas that it keeps since its last whole bundle
    failures: int = 0  # in a row, until it has what it shall have
    silent: bool = False  # the last question was not answered
    warnings: tuple[str, ...] = ()  # what was said of its addresses
    retry_at: float = 0.0
    check_at: float = 0.0
    changes: list[Change] = dataclasses.field(default_factory=list)  # on their way
    carried: list[Change] = dataclasses.field(default_factory=list)  # in what was sent

    def need(self, now: float) -> Need:
        """What to do with it now."""
        if self.busy is not Need.NOTHING or now < self.retry_at:
            return Need.NOTHING
        if self.term is not None:
            return Need.CONFIRMATION
        if self.ask or self.facts is None:
            return Need.QUESTION
        if self.wanted is not None and self.stale:
            return Need.DELTA if self.has is not None and not self.whole else Need.BUNDLE
        if now < self.check_at:
            return Need.NOTHING
        return Need.SNAPSHOT if self.log >= LONG_LOG and self.wanted is not None else Need.QUESTION

    @property
    def stale(self) -> bool:
        """Whether it has something else than it shall have."""
        return self.wanted is not None and (self.has is None or self.has.generation != self.wanted.generation)

    def next_need(self) -> float:
        """When there may be something to do, if nothing happens until then."""
        if self.busy is not Need.NOTHING:
            return float("inf")
        return self.retry_at or self.check_at

    def sending(self, what: Need) -> None:
        """A task is on its way."""
        self.busy = what
        if what in (Need.DELTA, Need.BUNDLE, Need.SNAPSHOT):
            self.sent = self.wanted
            self.carried, self.changes = self.carried + self.changes, []

    def failed(self, now: float) -> float:
        """The task failed; seconds until the next try, which begins with a question."""
        self.failures += 1
        self.silent = self.busy is Need.QUESTION
        delay: float = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(self.failures - 1, 10))
        delay *= random.uniform(0.9, 1.1)
        if self.term is not None:
            # What it says before it has gone back would soon be wrong.
            delay = max(delay, self.term.until + 1 - now)
            self.term = None
        self._done()
        self.retry_at = now + delay
        self.ask, self.has = True, None
        self.changes, self.carried = self.carried + self.changes, []
        return delay

    def needs_whole(self) -> None:
        """A delta will not do; it is asked what it has."""
        self._done()
        self.ask, self.has, self.whole = True, None, True
        self.changes, self.carried = self.carried + self.changes, []

    def answered(self, result: Mapping[str, Any], next_check: float) -> None:
        """It said what it is and has."""
        self._done()
        # An answer is no success while pushes fail: the pauses between those go on growing.
        self.silent, self.retry_at, self.ask, self.check_at = False, 0.0, False, next_check
        self.facts = result.get("facts") or {}
        self.last = str(result.get("generation") or "")
        self.recorded = self.last if settled(result) else ""
        self.has = next((each for each in (self.wanted, self.has) if each and each.generation == self.recorded), None)
        if not self.stale:
            self.well()

    def well(self) -> None:
        """It has what it shall have, to stay."""
        self.failures, self.retry_at = 0, 0.0

    def want(self, state: State | None) -> bool:
        """What it shall have from now on; whether that is something new."""
        new = state is not None and (self.wanted is None or self.wanted.generation != state.generation)
        self.wanted = state
        if self.has is None and state is not None and state.generation == self.recorded:
            self.has = state
        return new

    def applied(self, generation: str, next_check: float) -> bool:
        """It was made equal to what was sent; False if that is not what it says, and it has to be asked."""
        sent, delta = self.sent, self.busy is Need.DELTA
        self._done()
        if sent is None or sent.generation != generation:
            self.ask, self.has = True, None
            return False
        # It may have to be confirmed before it counts.
        self.retry_at, self.check_at = 0.0, next_check
        self.has, self.recorded, self.stepped = sent, generation, delta
        self.given, self.last = sent, generation
        self.whole = self.whole and delta
        return True

    def waits(self, token: str, previous: str, until: float, *, changed: bool) -> None:
        """What it was just given has to be confirmed."""
        self.term = Term(token, previous, until, Need.DELTA if self.stepped else Need.BUNDLE, changed)

    def confirmed(self) -> Term | None:
        """The change stays."""
        term, self.term = self.term, None
        self._done()
        self.well()
        return term

    def arrived(self) -> list[Change]:
        """The changes that it has now."""
        done, self.carried = self.carried, []
        if not self.stale:
            done, self.changes = done + self.changes, []
        return done

    def dropped(self) -> None:
        """The task was taken back before it began."""
        self.changes, self.carried = self.carried + self.changes, []
        self._done()

    def _done(self) -> None:
        self.busy, self.sent = Need.NOTHING, None
