# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A host while a cluster is followed, as a machine: events in, a new host and effects out. Nothing here does anything.

    UNKNOWN ──▶ ASKED ──▶ CURRENT ◀──────────────┬───────────────┐
       ▲                     │ the cluster changes │               │
       │                     ▼                     │               │
       │                   STALE ──▶ PUSHED ───────┴─▶ TRIAL ──▶ CONFIRMING
       │                                (must be confirmed)
       └── PAUSED ◀── whatever fails

There are three views of a host, as in any tracker of deltas: what is desired, what is sent, and what it holds. `due`
tells the task that a host needs now; `step` takes what happened. One task at a time: what changes meanwhile is one more
change afterwards. Whatever goes wrong, a host is asked after a pause that grows, and gets its whole bundle if it lacks
anything.
"""

from __future__ import annotations

import dataclasses
import enum

from ..backends.state import State
from .vocabulary import (
    Answered,
    Applied,
    Arrived,
    Ask,
    Begun,
    Confirm,
    Confirmed,
    Effect,
    Event,
    Failed,
    How,
    NeedsBundle,
    Push,
    Returned,
    Say,
    TakenBack,
    Task,
    Touched,
    Trial,
    Wanted,
)

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# A restore loads each delta of a log: when a host has nothing else to do, a whole bundle replaces so many.
LONG_LOG = 100
# Up to so many service ports, comparing every rule costs a node no more than a look at the markers.
SMALL = 300


class Phase(enum.Enum):
    """The state that a host is in."""

    UNKNOWN = "unknown"  # it has to be asked before anything else
    ASKED = "asked"  # a question is under way
    UNDECIDED = "undecided"  # it answered, and nothing is desired of it: no cluster yet, or facts that are unusable
    CURRENT = "current"  # it holds what is desired
    STALE = "stale"  # it holds something else
    PUSHED = "pushed"  # a push is under way
    TRIAL = "trial"  # it took a push, and goes back by itself unless it is told that the change stays
    CONFIRMING = "confirming"  # it is being told
    PAUSED = "paused"  # something failed


_BUSY = frozenset({Phase.ASKED, Phase.PUSHED, Phase.CONFIRMING})


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a host said that it has, or took last."""

    generation: str = ""
    state: State | None = None  # of that generation, if it is known here
    intact: bool = False  # all of it, as far as is known

    def matched(self, *known: State | None) -> State | None:
        """The state of the generation, if it is one of these or known already."""
        return next((each for each in (*known, self.state) if each and each.generation == self.generation), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One host."""

    name: str
    node: str
    phase: Phase = Phase.UNKNOWN
    desired: State | None = None
    sent: Push | None = None  # while PUSHED
    held: Held = Held()
    trial: Trial | None = None  # while TRIAL or CONFIRMING
    whole: bool = False  # a delta will not do
    stepped: bool = False  # the last push that it took was a delta
    touched: bool = False  # others may have changed it since the task under way began
    silent: bool = False  # the last question was not answered
    deltas: int = 0  # that it keeps since its last whole bundle
    failures: int = 0  # in a row, until it holds what is desired
    resume_at: float = 0.0  # while PAUSED
    look_at: float = 0.0  # when to ask it, if nothing else happens

    @property
    def has(self) -> State | None:
        """What it has, as far as that is known for sure."""
        return self.held.state if self.held.intact else None

    @property
    def stale(self) -> bool:
        """Whether it has something else than is desired, or may have."""
        return self.desired is not None and (self.has is None or self.has.generation != self.desired.generation)

    @property
    def busy(self) -> bool:
        """Whether a task is under way."""
        return self.phase in _BUSY

    @property
    def wake_at(self) -> float:
        """When there may be something to do, if nothing happens until then."""
        if self.busy:
            return float("inf")
        return self.resume_at if self.phase is Phase.PAUSED else self.look_at


def due(host: Host, now: float, *, may_push: bool = True) -> Task | None:
    """The task that a host needs now."""
    if host.busy or (host.phase is Phase.PAUSED and now < host.resume_at):
        return None
    if host.phase in (Phase.UNKNOWN, Phase.PAUSED):
        return Ask(urgent=True, deep=_deep(host))
    if host.trial is not None:
        return Confirm(host.trial, urgent=host.stale)
    desired = host.desired if may_push else None
    if host.phase is Phase.STALE and desired is not None:
        delta = host.has is not None and not host.whole
        return Push(How.DELTA, desired, host.has) if delta else Push(How.BUNDLE, desired)
    if now < host.look_at:
        return None
    if host.deltas >= LONG_LOG and desired is not None:
        return Push(How.SNAPSHOT, desired)
    return Ask(urgent=False, deep=_deep(host))


def _deep(host: Host) -> bool:
    return host.stepped and host.has is not None and len(host.has.fragments) <= SMALL


def step(host: Host, event: Event) -> tuple[Host, tuple[Effect, ...]]:
    """The host after an event, and what follows from it."""
    match event:
        case Wanted(state):
            return _wanted(host, state), ()
        case Touched():
            return _resting(dataclasses.replace(host, touched=True)), ()
        case Begun(task):
            return _begun(host, task), ()
        case Answered() if host.phase is Phase.ASKED:
            return _answered(host, event)
        case Applied() if host.sent is not None and host.sent.state.generation == event.generation:
            return _applied(host, host.sent, event)
        case Confirmed() if host.phase is Phase.CONFIRMING and host.trial is not None:
            return _confirmed(host, host.trial)
        case NeedsBundle(reason) if host.phase is Phase.PUSHED:
            return _lost(host), (Say("whole", {"problem": reason}), Returned())
        case TakenBack() if host.busy:
            return _taken_back(host), (Returned(),)
        case Failed():
            return _failed(host, event)
    # It answers another question than the last one, or one that was asked under another name.
    return (_lost(host), (Returned(),)) if host.busy else (host, ())


def _wanted(host: Host, state: State | None) -> Host:
    held = dataclasses.replace(host.held, state=host.held.matched(state))
    return _resting(dataclasses.replace(host, desired=state, held=held))


def _begun(host: Host, task: Task) -> Host:
    match task:
        case Ask():
            return dataclasses.replace(host, phase=Phase.ASKED)
        case Push():
            return dataclasses.replace(host, phase=Phase.PUSHED, sent=task)
        case Confirm():
            return dataclasses.replace(host, phase=Phase.CONFIRMING)


def _answered(host: Host, event: Answered) -> tuple[Host, tuple[Effect, ...]]:
    held = Held(event.generation, host.held.state, event.intact)
    held = dataclasses.replace(held, state=held.matched(host.desired))
    after = dataclasses.replace(host, held=held, silent=False, touched=False, look_at=event.look_at)
    effects: list[Effect] = [Say("answers", {})] if host.silent else []
    if host.has is not None and after.has is None:
        effects.append(Say("drift", {"state": event.state, "differences": event.differences}))
    if not after.stale:
        # While pushes fail, an answer alone is no success: the pauses between them go on growing.
        after = dataclasses.replace(after, failures=0, whole=False)
        if after.has is not None:
            effects.append(Arrived(event.landed, current=True))
    return _done(after), tuple(effects)


def _applied(host: Host, sent: Push, event: Applied) -> tuple[Host, tuple[Effect, ...]]:
    after = dataclasses.replace(
        host,
        held=Held(event.generation, sent.state, intact=True),
        whole=False,
        stepped=sent.how is How.DELTA,
        deltas=event.deltas,
        look_at=event.look_at,
    )
    if event.trial is None:
        return _stays(after, sent.how, event.landed, changed=event.changed)
    trial = dataclasses.replace(event.trial, landed=event.landed, how=sent.how, changed=event.changed)
    return dataclasses.replace(after, phase=Phase.TRIAL, sent=None, trial=trial), ()


def _confirmed(host: Host, trial: Trial) -> tuple[Host, tuple[Effect, ...]]:
    return _stays(host, trial.how, trial.landed, changed=trial.changed)


def _stays(host: Host, how: How, landed: float, *, changed: bool) -> tuple[Host, tuple[Effect, ...]]:
    """What it took stays."""
    after = _done(dataclasses.replace(host, failures=0))
    told = {"how": how.value, "changed": changed, "generation": host.held.generation}
    return after, (Say("pushed", told), Arrived(landed, current=not after.stale))


def _taken_back(host: Host) -> Host:
    if host.phase is Phase.CONFIRMING:
        return dataclasses.replace(host, phase=Phase.TRIAL)
    return _lost(host) if host.phase is Phase.ASKED else _done(host)


def _failed(host: Host, event: Failed) -> tuple[Host, tuple[Effect, ...]]:
    failures = host.failures + 1
    pause = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 10)) * event.stretch
    if host.trial is not None:
        # What it says before it has gone back would soon be wrong.
        pause = max(pause, host.trial.until + 1 - event.at)
    after = dataclasses.replace(
        _lost(host),
        phase=Phase.PAUSED,
        silent=host.phase is Phase.ASKED,
        failures=failures,
        resume_at=event.at + pause,
    )
    problem = " ".join(event.reason.split())
    said = Say("failed", {"tries": failures, "again_in": round(pause, 1), "problem": problem})
    return after, (said, Returned())


def _lost(host: Host) -> Host:
    """Nothing is under way, and what it has is not known any more."""
    held = dataclasses.replace(host.held, intact=False)
    return dataclasses.replace(host, phase=Phase.UNKNOWN, sent=None, trial=None, held=held, whole=True)


def _done(host: Host) -> Host:
    """Nothing is under way, and what it has is known."""
    return _resting(dataclasses.replace(host, phase=Phase.CURRENT, sent=None, trial=None))


def _resting(host: Host) -> Host:
    """Of a host that waits for nothing: whether it has what is desired, or has to be asked."""
    if host.phase not in (Phase.UNDECIDED, Phase.CURRENT, Phase.STALE):
        return host
    if host.touched:
        return dataclasses.replace(host, phase=Phase.UNKNOWN)
    if host.desired is None:
        return dataclasses.replace(host, phase=Phase.UNDECIDED)
    return dataclasses.replace(host, phase=Phase.STALE if host.stale else Phase.CURRENT)
