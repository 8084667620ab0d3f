# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The state of a node as kernel objects and their text.

A State is made of a frame, which belongs to the node, and of fragments, one per service port, which most nodes share.
An object of the frame may be open: every fragment can add lines to it (the dispatch rules of KUBE-SERVICES, the
elements of a map). All other objects of a fragment are its own. Digests are taken of fragments, so that the
generation of a node costs what is its own, not what the cluster holds.

Every object is of one part of a bundle: endpoints, dispatch or frontends. Who may sign a change depends on it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeAlias

# What the kernel knows an object by, e.g. ("IPv4", "nat", "KUBE-SERVICES"). Of ("file", NAME) the bundle holds a file.
Object: TypeAlias = tuple[str, ...]


class Part(enum.Enum):
    """What an object is there for; each part has files of its own, and they are loaded in this order."""

    ENDPOINTS = "1-endpoints"  # where the traffic of a service port goes
    DISPATCH = "2-dispatch"  # which traffic is a service port's, as long as there are endpoints, or what refuses it
    FRONTENDS = "3-frontends"  # all else: what no change of endpoints touches


class _Placed(tuple[str, ...]):
    """The name of an object that is not of the part FRONTENDS; equal to the same name without a part."""

    __slots__ = ()
    part: ClassVar[Part]


class EndpointsObject(_Placed):
    """The name of an object of the part ENDPOINTS."""

    __slots__ = ()
    part = Part.ENDPOINTS


class DispatchObject(_Placed):
    """The name of an object of the part DISPATCH."""

    __slots__ = ()
    part = Part.DISPATCH


def part_of(obj: Object) -> Part:
    """The part that an object was made for."""
    return obj.part if isinstance(obj, _Placed) else Part.FRONTENDS


class Allowed:
    """Every line that a service port may ever have in a dispatch file, whatever its endpoints; made when asked for."""

    def __init__(self, terms: Hashable, lines: Callable[[], Iterable[str]]) -> None:
        self._terms = terms  # all that the lines depend on
        self._make = lines

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines, each once."""
        return tuple(dict.fromkeys(self._make()))

    def differs(self, other: Allowed) -> bool:
        """Whether the lines are others; where the terms are the same nothing is made."""
        return self is not other and self._terms != other._terms and self.lines != other.lines


_NONE: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """What one service port contributes."""

    name: str  # "namespace/name:port protocol"
    family: str
    open: tuple[tuple[Object, str], ...]  # lines for open objects of the frame
    own: tuple[tuple[Object, str], ...]  # objects that exist for this service port alone
    digest: bytes
    service: str = ""  # "namespace/name"
    endpoints: int = 0  # that this node uses for it
    idle: bool = False  # whether none serves its cluster IP
    elements: Mapping[str, str] = dataclasses.field(default_factory=dict)  # lines that add an element -> its key
    allowed: Allowed | None = None


class Owner(NamedTuple):
    """A service port, as far as a State tells of it."""

    name: str  # "namespace/name:port protocol"
    family: str
    service: str  # "namespace/name"
    endpoints: int  # that this node uses for it
    idle: bool  # whether none serves its cluster IP


def fragment(
    owner: Owner,
    lines: Iterable[tuple[Object, str]],
    own: Iterable[tuple[Object, str]],
    *,
    elements: Mapping[str, str] = _NONE,
    allowed: Allowed | None = None,
    terms: str = "",
) -> Fragment:
    """A Fragment with its digest. `terms` is what lines depend on that it may have but has not now."""
    open_, own_ = tuple(lines), tuple(own)
    name, family, service, endpoints, idle = owner
    parts = [family, name, terms]
    for obj, text in (*open_, *own_):
        parts += obj
        parts.append(text)
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return Fragment(name, family, open_, own_, digest, service, endpoints, idle, elements, allowed)


@dataclasses.dataclass(frozen=True, slots=True)
class FrameObject:
    """An object of the node: its text before and after the lines of the fragments."""

    head: str = ""
    tail: str = ""
    elements: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)  # as of a fragment
    fixed: str = ""  # that part of its text that no delta may change
    # those of its lines that come and go with endpoints, in an object that is there for more
    of_endpoints: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The intended state of a node in one mode."""

    node: str
    mode: str
    compat: str
    frame: dict[Object, FrameObject]  # in the order in which objects are written
    fragments: tuple[Fragment, ...]  # in the order in which service ports are written
    allowed: tuple[str, ...] = ()  # lines of dispatch files that are there whatever Services there are

    @cached_property
    def generation(self) -> str:
        """Names this state: equal if and only if every object's text is."""
        digest = hashlib.sha256(f"{self.mode} {self.compat}\n".encode())
        for obj, text in self.frame.items():
            digest.update(f"{' '.join(obj)}\0{text.head}\0{text.tail}\0".encode())
        digest.update(_digests(self.fragments))
        return digest.hexdigest()

    @cached_property
    def totals(self) -> dict[str, int]:
        """How much it is, in numbers."""
        return _totals(self.fragments)

    @cached_property
    def open_objects(self) -> dict[Object, str]:
        """Every object of the frame with the fragments' lines in it."""
        lines = _lines(self.fragments, self.frame)
        return {obj: f"{text.head}{lines[obj]}{text.tail}" for obj, text in self.frame.items()}

    def objects(self) -> Iterator[tuple[Object, str]]:
        """Every kernel object and its text."""
        yield from self.open_objects.items()
        for each in self.fragments:
            yield from each.own


# Most nodes of a cluster have the same fragments: what is told of all of them is told once.
@lru_cache(maxsize=4)
def _digests(fragments: tuple[Fragment, ...]) -> bytes:
    return b"".join([each.digest for each in fragments])


@lru_cache(maxsize=4)
def _totals(fragments: tuple[Fragment, ...]) -> dict[str, int]:
    return {
        "services": len({each.service for each in fragments}),
        "servicePorts": len(fragments),
        # The API server writes its own endpoints itself, whatever becomes of all others.
        "endpoints": sum([each.endpoints for each in fragments if each.service != "default/kubernetes"]),
    }


# A service port's fragment before and after; None where there was or is none.
Pair: TypeAlias = tuple[Fragment | None, Fragment | None]


@dataclasses.dataclass(frozen=True)
class Delta:
    """What turns the kernel from one State into another: whole objects, set or removed."""

    base: str
    generation: str
    changed: dict[Object, str]
    before: dict[Object, str]  # the earlier text of changed objects that were there
    removed: tuple[Object, ...]
    names: tuple[str, ...]  # the service ports concerned
    pairs: tuple[Pair, ...] = ()  # their fragments, before and after
    elements: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of changed objects, as they were
    allowed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # State.allowed, before and after
    needs_full: bool = False  # another mode or minor, a family that came or went, or what no delta may change


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What differs between the fragments of two States."""

    changed: dict[Object, str]
    before: dict[Object, str]
    removed: tuple[Object, ...]
    lines: dict[Object, tuple[str, str]]  # of open objects that fragments add other lines to: all of them, old and new
    pairs: tuple[Pair, ...]


@lru_cache(maxsize=4)
def _step(old: tuple[Fragment, ...], new: tuple[Fragment, ...]) -> _Step:
    pairs = _pairs(old, new)
    was = {obj: text for then, _now in pairs if then for obj, text in then.own}
    now_own = [(obj, text) for _then, now in pairs if now for obj, text in now.own]
    changed = {obj: text for obj, text in now_own if was.get(obj) != text}
    kept = {obj for obj, _text in now_own}
    concerned: set[Object] = set()
    for then, now in pairs:
        had_lines, has_lines = (dict(each.open) if each else {} for each in (then, now))
        concerned |= {obj for obj in had_lines.keys() | has_lines.keys() if had_lines.get(obj) != has_lines.get(obj)}
    had, have = _lines(old, concerned), _lines(new, concerned)
    return _Step(
        changed=changed,
        before={obj: was[obj] for obj in changed if obj in was},
        removed=tuple(obj for obj in was if obj not in kept),
        lines={obj: (had[obj], have[obj]) for obj in sorted(concerned)},
        pairs=tuple(pairs),
    )


def _pairs(old: tuple[Fragment, ...], new: tuple[Fragment, ...]) -> list[Pair]:
    """The service ports that differ."""
    if len(old) == len(new):
        # Most often endpoints changed, and every service port stands where it stood.
        others = [(then, now) for then, now in zip(old, new, strict=True) if then is not now]
        if all(then.name == now.name and then.family == now.family for then, now in others):
            return [(then, now) for then, now in others if then.digest != now.digest]
    before = {(each.family, each.name): each for each in old}
    pairs: list[Pair] = []
    for each in new:
        known = before.pop((each.family, each.name), None)
        if known is None or known.digest != each.digest:
            pairs.append((known, each))
    pairs.extend((each, None) for each in before.values())
    return pairs


def _lines(fragments: Iterable[Fragment], wanted: Iterable[Object]) -> dict[Object, str]:
    """What fragments add to open objects."""
    lines: dict[Object, list[str]] = {obj: [] for obj in wanted}
    if len(lines) == 1:
        # Services whose endpoints change most often change services.jsonl alone.
        (one,) = lines
        return {one: _lines_of(tuple(fragments), one)}
    for each in fragments:
        for obj, text in each.open:
            if obj in lines:
                lines[obj].append(text)
    return {obj: "".join(texts) for obj, texts in lines.items()}


# What is new in one step is old in the next.
@lru_cache(maxsize=4)
def _lines_of(fragments: tuple[Fragment, ...], one: Object) -> str:
    """What fragments add to one open object. To compare is faster than to hash."""
    return "".join([text for each in fragments for obj, text in each.open if obj is one or obj == one])


def delta(old: State, new: State) -> Delta:
    """The Delta between two States of a node."""
    step = _step(old.fragments, new.fragments)
    changed, before = dict(step.changed), dict(step.before)
    lines = dict(step.lines)
    others = [obj for obj, text in new.frame.items() if obj not in lines and old.frame.get(obj) != text]
    if others:
        had, have = _lines(old.fragments, others), _lines(new.fragments, others)
        lines |= {obj: (had[obj], have[obj]) for obj in others}
    elements = {line: key for then, _now in step.pairs if then for line, key in then.elements.items()}
    fixed = False
    # In the order of the frame, which is one that the kernel can follow.
    for obj, text in new.frame.items():
        if obj in lines:
            earlier, now = old.frame.get(obj), f"{text.head}{lines[obj][1]}{text.tail}"
            then = f"{earlier.head}{lines[obj][0]}{earlier.tail}" if earlier is not None else None
            if then != now:
                changed[obj] = now
                if earlier is not None and then is not None:
                    before[obj] = then
                    elements |= earlier.elements
                    fixed = fixed or earlier.fixed != text.fixed
    removed = step.removed + tuple(obj for obj in old.frame if obj not in new.frame)
    return Delta(
        base=old.generation,
        generation=new.generation,
        changed=changed,
        before=before,
        removed=removed,
        names=tuple(sorted({each.name for pair in step.pairs for each in pair if each})),
        pairs=step.pairs,
        elements=elements,
        allowed=(old.allowed, new.allowed),
        needs_full=fixed
        or new.mode in _WHOLE_MODES
        or (new.mode in _FRONTENDS_WHOLE and any(part_of(obj) is not Part.ENDPOINTS for obj in (*changed, *removed)))
        or (old.mode, old.compat) != (new.mode, new.compat)
        or _families(old) != _families(new),
    )


# Windows nodes compare all themselves. A proxy in user space can be told of endpoints; for all else it reads a whole file.
_WHOLE_MODES = frozenset({"kernelspace"})
_FRONTENDS_WHOLE = frozenset({"userspace"})


def _families(state: State) -> set[str]:
    return {obj[0] for obj in state.frame}
