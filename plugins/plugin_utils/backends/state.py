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
from collections.abc import Container, Iterable, Iterator
from functools import cached_property
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
        return self.opened(self.frame)

    def opened(self, wanted: Container[Object]) -> dict[Object, str]:
        """Those objects of the frame with the fragments' lines in them."""
        lines: dict[Object, list[str]] = {obj: [text.head] for obj, text in self.frame.items() if obj in wanted}
        for each in self.fragments:
            for obj, text in each.open:
                if obj in lines:
                    lines[obj].append(text)
        return {obj: "".join([*texts, self.frame[obj].tail]) for obj, texts in lines.items()}

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


def delta(old: State, new: State) -> Delta:
    """The Delta between two States of a node."""
    before = {(each.family, each.name): each for each in old.fragments}
    touched: list[Fragment] = []
    gone: list[Fragment] = []
    for each in new.fragments:
        known = before.pop((each.family, each.name), None)
        if known is None or known.digest != each.digest:
            touched.append(each)
            if known is not None:
                gone.append(known)
    gone.extend(before.values())
    was = {obj: text for each in gone for obj, text in each.own}
    changed = {obj: text for each in touched for obj, text in each.own if was.get(obj) != text}
    earlier = {obj: was[obj] for obj in changed if obj in was}
    kept = {obj for each in touched for obj, _text in each.own}
    concerned = {obj for each in (*touched, *gone) for obj, _text in each.open}
    concerned.update(obj for obj, text in new.frame.items() if old.frame.get(obj) != text)
    if concerned:
        opened = old.opened(concerned)
        for obj, text in new.opened(concerned).items():
            if opened.get(obj) != text:
                changed[obj] = text
                if obj in opened:
                    earlier[obj] = opened[obj]
    return Delta(
        base=old.generation,
        generation=new.generation,
        changed=changed,
        before=earlier,
        removed=tuple(obj for obj in was if obj not in kept) + tuple(obj for obj in old.frame if obj not in new.frame),
        names=tuple(sorted({each.name for each in (*touched, *gone)})),
        needs_full=(old.mode, old.compat) != (new.mode, new.compat) or _families(old) != _families(new),
    )


def _families(state: State) -> set[str]:
    return {obj[0] for obj in state.frame}
