# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The words of the machine that a host is: events go in, tasks and effects come out."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..backends.state import State


class How(enum.Enum):
    """What a push holds."""

    DELTA = "delta"
    BUNDLE = "bundle"
    SNAPSHOT = "snapshot"  # the whole bundle, in place of a long log of deltas; the kernel is left alone


# -- tasks: what a host needs


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """Ask a host what it is and has."""

    urgent: bool
    deep: bool = False  # compare every rule: after a delta a node does that only if it is told to


@dataclasses.dataclass(frozen=True, slots=True)
class Push:
    """Make a host equal to a state."""

    how: How
    state: State
    base: State | None = None  # of a delta


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A push that a host took and undoes by itself unless it is confirmed."""

    token: str
    previous: str  # the generation that it goes back to
    until: float
    landed: float = 0.0  # when it took the push, on the clock of the wall
    how: How = How.BUNDLE
    changed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Confirm:
    """Tell a host that what it took stays."""

    trial: Trial
    urgent: bool  # it has to take something else after that


Task: TypeAlias = Ask | Push | Confirm


# -- events: what happened to a host


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is desired of it from now on; None if that cannot be told."""

    state: State | None


@dataclasses.dataclass(frozen=True, slots=True)
class Touched:
    """Others may have changed it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A task is on its way to it."""

    task: Task


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """It said what it has."""

    generation: str
    intact: bool  # all of it, and to stay
    state: str = ""
    differences: int = 0
    landed: float = 0.0  # when it said so, on the clock of the wall
    look_at: float = 0.0  # when to ask again


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """It said that it took a push."""

    generation: str
    changed: bool = True
    deltas: int = 0  # that it keeps since its last whole bundle
    trial: Trial | None = None  # if that has to be confirmed
    landed: float = 0.0
    look_at: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class NeedsBundle:
    """It cannot take a delta."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Confirmed:
    """It knows that its trial is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class TakenBack:
    """The task had not begun, and will not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The task failed, or could not be made."""

    reason: str
    at: float
    stretch: float = 1.0  # of the pause, so that hosts that failed together do not come back together


Event: TypeAlias = Wanted | Touched | Begun | Answered | Applied | NeedsBundle | Confirmed | TakenBack | Failed


# -- effects: what follows from an event


@dataclasses.dataclass(frozen=True, slots=True)
class Say:
    """A line for the log."""

    event: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """It holds what was sent to it, for good; `current` if that is also what is desired."""

    landed: float
    current: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """What was sent to it is still to be sent."""


Effect: TypeAlias = Say | Arrived | Returned
