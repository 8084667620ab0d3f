# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The state of a node as kernel objects and their text.

A State is made of a frame, which belongs to the node, and of fragments, one per service port, which most nodes share.
An object of the frame may be open: every fragment can add lines to it (the dispatch rules of KUBE-SERVICES, the
elements of a map). All other objects of a fragment are its own. Digests are taken of fragments, so that the
generation of a node costs what is its own, not what the cluster holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import TypeAlias

# What the kernel knows an object by, e.g. ("IPv4", "nat", "KUBE-SERVICES"). Of ("file", NAME) the bundle holds a file.
Object: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """What one service port contributes."""

    name: str  # "namespace/name:port protocol"
    family: str
    open: tuple[tuple[Object, str], ...]  # lines for open objects of the frame
    own: tuple[tuple[Object, str], ...]  # objects that exist for this service port alone
    digest: bytes


def fragment(
    name: str, family: str, lines: Iterable[tuple[Object, str]], own: Iterable[tuple[Object, str]]
) -> Fragment:
    """A Fragment with its digest."""
    open_, own_ = tuple(lines), tuple(own)
    parts = [family, name]
    for obj, text in (*open_, *own_):
        parts += obj
        parts.append(text)
    return Fragment(name, family, open_, own_, hashlib.sha256("\0".join(parts).encode()).digest())


@dataclasses.dataclass(frozen=True, slots=True)
class FrameObject:
    """An object of the node: its text before and after the lines of the fragments."""

    head: str = ""
    tail: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The intended state of a node in one mode."""

    node: str
    mode: str
    compat: str
    frame: dict[Object, FrameObject]  # in the order in which objects are written
    fragments: tuple[Fragment, ...]  # in the order in which service ports are written

    @cached_property
    def generation(self) -> str:
        """Names this state: equal if and only if every object's text is."""
        digest = hashlib.sha256(f"{self.mode} {self.compat}\n".encode())
        for obj, text in self.frame.items():
            digest.update(f"{' '.join(obj)}\0{text.head}\0{text.tail}\0".encode())
        digest.update(b"".join([each.digest for each in self.fragments]))
        return digest.hexdigest()

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


@dataclasses.dataclass(frozen=True)
class Delta:
    """What turns the kernel from one State into another: whole objects, set or removed."""

    base: str
    generation: str
    changed: dict[Object, str]
    before: dict[Object, str]  # the earlier text of changed objects that were there
    removed: tuple[Object, ...]
    names: tuple[str, ...]  # the service ports concerned
    needs_full: bool = False  # another mode or minor, or a family that came or went: no delta leads there


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What differs between the fragments of two States."""

    changed: dict[Object, str]
    before: dict[Object, str]
    removed: tuple[Object, ...]
    lines: dict[Object, tuple[str, str]]  # of open objects that fragments add other lines to: all of them, old and new
    names: tuple[str, ...]


# Most nodes of a cluster have the same fragments, so what differs for one differs for the next.
@lru_cache(maxsize=4)
def _step(old: tuple[Fragment, ...], new: tuple[Fragment, ...]) -> _Step:
    before = {(each.family, each.name): each for each in old}
    touched: list[Fragment] = []
    gone: list[Fragment] = []
    for each in new:
        known = before.pop((each.family, each.name), None)
        if known is None or known.digest != each.digest:
            touched.append(each)
            if known is not None:
                gone.append(known)
    gone.extend(before.values())
    was = {obj: text for each in gone for obj, text in each.own}
    changed = {obj: text for each in touched for obj, text in each.own if was.get(obj) != text}
    kept = {obj for each in touched for obj, _text in each.own}
    concerned = {obj for each in (*touched, *gone) for obj, _text in each.open}
    had, have = _lines(old, concerned), _lines(new, concerned)
    return _Step(
        changed=changed,
        before={obj: was[obj] for obj in changed if obj in was},
        removed=tuple(obj for obj in was if obj not in kept),
        lines={obj: (had[obj], have[obj]) for obj in sorted(concerned)},
        names=tuple(sorted({each.name for each in (*touched, *gone)})),
    )


def _lines(fragments: Iterable[Fragment], wanted: Iterable[Object]) -> dict[Object, str]:
    """What fragments add to open objects."""
    lines: dict[Object, list[str]] = {obj: [] for obj in wanted}
    for each in fragments:
        for obj, text in each.open:
            if obj in lines:
                lines[obj].append(text)
    return {obj: "".join(texts) for obj, texts in lines.items()}


def delta(old: State, new: State) -> Delta:
    """The Delta between two States of a node."""
    step = _step(old.fragments, new.fragments)
    changed, before = dict(step.changed), dict(step.before)
    lines = dict(step.lines)
    others = [obj for obj, text in new.frame.items() if obj not in lines and old.frame.get(obj) != text]
    if others:
        had, have = _lines(old.fragments, others), _lines(new.fragments, others)
        lines |= {obj: (had[obj], have[obj]) for obj in others}
    # In the order of the frame, which is one that the kernel can follow.
    for obj, text in new.frame.items():
        if obj in lines:
            earlier, now = old.frame.get(obj), f"{text.head}{lines[obj][1]}{text.tail}"
            then = f"{earlier.head}{lines[obj][0]}{earlier.tail}" if earlier is not None else None
            if then != now:
                changed[obj] = now
                if then is not None:
                    before[obj] = then
    return Delta(
        base=old.generation,
        generation=new.generation,
        changed=changed,
        before=before,
        removed=step.removed + tuple(obj for obj in old.frame if obj not in new.frame),
        names=step.names,
        needs_full=(old.mode, old.compat) != (new.mode, new.compat) or _families(old) != _families(new),
    )


def _families(state: State) -> set[str]:
    return {obj[0] for obj in state.frame}
