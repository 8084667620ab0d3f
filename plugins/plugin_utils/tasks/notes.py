# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What tasks of a run leave for later ones: a record for each sort of note, written and read here only.

    directory.note(Refused("no such Node"), "n1")
    directory.noted(Refused, "n1")              # the record, or None

Tasks are processes of their own, and what they hand on must not pass through Jinja: so each note is a small file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from ..bundle.compare import Change
from ..proxy.warned import Warned


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A note about a host, or about all of them: then the host is CONTROL."""

    SORT: ClassVar[str] = ""
    SHARED: ClassVar[tuple[str, ...]] = ()  # fields that many hosts have alike, as lists of changes

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """From what `dataclasses.asdict` made of it, and JSON of that."""
        return cls(**{each.name: content[each.name] for each in dataclasses.fields(cls) if each.name in content})


CONTROL = "localhost"


@dataclasses.dataclass(frozen=True, slots=True)
class Span(Note):
    """When something began and ended, on the clock that all processes of a machine share."""

    began: float
    ended: float


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotRead(Span):
    """The module snapshot read the cluster."""

    SORT: ClassVar[str] = "snapshot"

    problems: Sequence[str] = ()  # objects that were left out
    source: str = ""
    triggered: Sequence[float] = ()  # when the changes of endpoints began that are news


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered(Span):
    """The module bundle computed the bundles of hosts."""

    SORT: ClassVar[str] = "render"

    problems: Sequence[str] = ()  # objects that were left out
    warned: Sequence[Warned] = ()

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Lists of JSON are warnings again."""
        warned = tuple(Warned(*each) for each in content.get("warned", ()))
        return super(Rendered, cls).of({**content, "warned": warned})


@dataclasses.dataclass(frozen=True, slots=True)
class Configured(Note):
    """The configuration that holds in this run."""

    SORT: ClassVar[str] = "configured"

    mode: str
    origin: str  # for people
    kept: Mapping[str, Any]  # what a plan says of it


@dataclasses.dataclass(frozen=True, slots=True)
class About(Note):
    """What a run, or a push of `akp watch`, is about: for the ledger."""

    SORT: ClassVar[str] = "about"

    snapshot: str  # its digest
    plan: str = ""  # its digest
    approvers: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Note):
    """The host gets nothing in this run."""

    SORT: ClassVar[str] = "refused"

    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Planned(Note):
    """What the plan that is followed has for the host; empty if the plan leaves it as it is."""

    SORT: ClassVar[str] = "planned"

    generation: str = ""
    digest: str = ""  # of the bundle


@dataclasses.dataclass(frozen=True, slots=True)
class Asked(Span):
    """The host was asked what it has."""

    SORT: ClassVar[str] = "ask"

    failed: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Pushed(Span):
    """The host was given its bundle, or was up to date."""

    SORT: ClassVar[str] = "push"
    SHARED: ClassVar[tuple[str, ...]] = ("changes", "frame")

    failed: str = ""
    action: str = "sync"  # or heal, rollback, cleanup, release
    changed: bool = False
    node: str = ""
    previous: str | None = None  # generations
    generation: str | None = None
    digest: str | None = None  # of the bundle
    changes: Sequence[Change] = ()  # of Services
    frame: Sequence[Change] = ()  # of what belongs to no Service
    differences: Sequence[Mapping[str, Any]] = ()  # that a node found before


@dataclasses.dataclass(frozen=True, slots=True)
class Entered(Note):
    """The last entry of the ledger that a task wrote."""

    SORT: ClassVar[str] = "ledger"

    number: int
    hash: str
    file: str


@dataclasses.dataclass(frozen=True, slots=True)
class Audited(Note):
    """What was entered last about the host, to leave out the same failure for a while."""

    SORT: ClassVar[str] = "audited"

    what: str  # a digest
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped(Note):
    """A task that runs once for all hosts failed."""

    SORT: ClassVar[str] = "stopped"

    failed: str


SORTS: Mapping[str, type[Note]] = {
    each.SORT: each
    for each in (SnapshotRead, Rendered, Configured, About, Refused, Planned, Asked, Pushed, Entered, Audited, Stopped)
}
