# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A directory that nodes pull from, over any static web server or file share.

    NODE.release      which bundle is meant for the node: a release and its signatures, one file
    objects/SHA256    archives of bundles and deltas; what a name holds never changes

Objects come first, then each release is replaced in one step, so a node that reads a release finds what it names. A
release that says nothing new is left alone until half of its time is over: polls that change nothing stay cheap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..backends.state import State, delta
from ..bundle.archive import SMALL, UnreadableArchive, archive, lines_of
from ..bundle.manifest import SERVICES_FILE
from ..bundle.release import (
    DeltaEntry,
    Entry,
    InvalidRelease,
    Object,
    Release,
    check_cluster,
    join,
    new_release,
    parse_release,
    sign,
    split,
)
from ..bundle.write import Parts, bundle_parts, delta_parts, sealed
from ..errors import UserError
from ..files import SUFFIX as TEMPORARY
from ..files import make_directory, sync_folder, write_atomic
from ..locks import Lock

SUFFIX = ".release"
_UNUSED = ".unused.json"  # objects that no release names any more, and since when
_LOCK = ".lock"


class PublishRefused(UserError):
    """A publication that must not go on; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """Under what releases are made."""

    cluster: str
    keys: tuple[Path, ...]
    valid_for: float  # seconds
    grace: float = 3600.0  # seconds that an object stays after the last release that named it
    renew: bool = False  # sign anew even what says nothing new


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """What became of one node."""

    node: str
    generation: str
    action: str  # changed, renewed, unchanged
    deltas: int
    size: int  # bytes of the full archive


class Publication:
    """The directory, while one publisher holds its lock."""

    def __init__(self, path: Path, terms: Terms) -> None:
        check_cluster(terms.cluster)
        self.path = path
        self.terms = terms
        self._objects = path / "objects"
        self._next: dict[str, Release] = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One publisher at a time; what a killed one left half-written goes away."""
        for each in (self.path, self._objects):
            make_directory(each, 0o755)
        with Lock(self.path / _LOCK, 0o644) as lock:
            if not lock.take():
                raise PublishRefused(f"{self.path}: another process is publishing there")
            for left in (*self.path.glob(f".*{TEMPORARY}"), *self._objects.glob(f".*{TEMPORARY}")):
                left.unlink()
            yield

    def current(self, node: str) -> Release | None:
        """What is published for a node; None if there is nothing, or nothing that can be read."""
        try:
            text, _signatures = split((self.path / f"{node}{SUFFIX}").read_text(encoding="utf-8"))
            return parse_release(text)
        except (OSError, UnicodeDecodeError, InvalidRelease):
            return None

    def offered(self) -> dict[str, str]:
        """The generation that each node is offered; empty if its release cannot be read."""
        found = {}
        for file in self.path.glob(f"*{SUFFIX}"):
            node = file.name.removesuffix(SUFFIX)
            known = self.current(node)
            found[node] = next((each.generation for each in known.bundles if each.node == node), "") if known else ""
        return found

    def services(self, node: str) -> list[str]:
        """What services.jsonl says in the bundle that a node is offered; UnreadableArchive if there is none to read."""
        known = self.current(node)
        bundles = {each.digest for each in known.bundles if each.node == node} if known else set()
        for each in known.objects if known else ():
            if each.digest in bundles:
                try:
                    return lines_of((self._objects / each.sha256).read_bytes(), SERVICES_FILE)
                except OSError as error:
                    raise UnreadableArchive(str(error)) from error
        raise UnreadableArchive(f"nothing is published for node {node}")

    def holds(self, node: str, generation: str) -> bool:
        """Whether the node is offered this generation already, and everything for it is there."""
        known = self.current(node)
        return (
            known is not None
            and known.cluster == self.terms.cluster
            and [each.generation for each in known.bundles if each.node == node] == [generation]
            and all((self._objects / each.sha256).is_file() for each in known.objects)
        )

    def keep(self, node: str) -> Published:
        """A node without news: its release is made anew only if its time runs out."""
        known = self.current(node)
        if known is None:
            raise ValueError(f"nothing is published for node {node}")
        left = known.expires - time.time()
        # A longer time than is asked for now is no reason to keep it.
        renew = self.terms.renew or left < self.terms.valid_for / 2 or left > self.terms.valid_for
        if renew:
            self._next[node] = self._release(node, known.bundles, known.deltas, known.objects)
        action = "renewed" if renew else "unchanged"
        return Published(node, known.bundles[0].generation, action, len(known.deltas), known.objects[0].size)

    def add(self, state: State, bases: Iterable[State]) -> Published:
        """A node with news: its bundle, and deltas from where it may be, as objects."""
        full = self._store(*_packed(bundle_parts(state)))
        objects, deltas = [full], []
        for base in bases:
            change = delta(base, state)
            if change.needs_full:
                continue
            packed = _packed(delta_parts(change, state))
            if packed[0].size < full.size // 2:
                objects.append(self._store(*packed))
                deltas.append(DeltaEntry(state.node, base.generation, state.generation, packed[0].digest))
        bundles = (Entry(state.node, state.generation, full.digest),)
        self._next[state.node] = self._release(state.node, bundles, tuple(deltas), tuple(objects))
        return Published(state.node, state.generation, "changed", len(deltas), full.size)

    def switch(self) -> None:
        """Sign the new releases, then put each in its place."""
        sync_folder(self._objects)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            contents = dict(zip(self._next, pool.map(self._signed, self._next.values()), strict=True))
        for node, content in contents.items():
            file = self.path / f"{node}{SUFFIX}"
            # Servers tell versions apart by the second.
            before = file.stat().st_mtime if file.exists() else 0.0
            _replace(file, content.encode(), newer_than=before)
        self._next = {}
        sync_folder(self.path)

    def withdraw(self, nodes: Iterable[str]) -> list[str]:
        """Remove the releases of all nodes but these; what those nodes have they keep."""
        wanted = {f"{node}{SUFFIX}" for node in nodes}
        gone = [file for file in self.path.glob(f"*{SUFFIX}") if file.name not in wanted]
        for file in gone:
            file.unlink()
        return sorted(file.name.removesuffix(SUFFIX) for file in gone)

    def prune(self) -> int:
        """Remove objects that no release has named for as long as the grace; how many went."""
        used: set[str] = set()
        for file in self.path.glob(f"*{SUFFIX}"):
            release = self.current(file.name.removesuffix(SUFFIX))
            if release is None:
                return 0  # what it names is not known, so nothing may go
            used.update(each.sha256 for each in release.objects)
        now = time.time()
        since = self._unused()
        unused = {
            file.name: since.get(file.name, now)
            for file in self._objects.iterdir()
            if not file.name.startswith(".") and file.name not in used
        }
        gone = [name for name, moment in unused.items() if moment + self.terms.grace <= now]
        for name in gone:
            (self._objects / name).unlink()
            del unused[name]
        if unused != since:
            _replace(self.path / _UNUSED, json.dumps(unused).encode())
        return len(gone)

    def _unused(self) -> dict[str, float]:
        try:
            return dict(json.loads((self.path / _UNUSED).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def _release(
        self, node: str, bundles: tuple[Entry, ...], deltas: tuple[DeltaEntry, ...], objects: tuple[Object, ...]
    ) -> Release:
        known = self.current(node)
        terms = self.terms
        return new_release(
            terms.cluster, terms.valid_for, bundles, deltas, objects, after=known.counter if known is not None else 0
        )

    def _signed(self, release: Release) -> str:
        text = release.text()
        return join(text, [sign(text, key) for key in self.terms.keys])

    def _store(self, obj: Object, data: bytes) -> Object:
        file = self._objects / obj.sha256
        if not file.is_file() or file.stat().st_size != obj.size:
            _replace(file, data)
        return obj


def _packed(parts: Parts) -> tuple[Object, bytes]:
    """A bundle or a delta as an archive."""
    digest, files = sealed(parts)
    # Many nodes fetch it, and each must start more programs than gzip to do so.
    data = archive(files, SMALL, plain_below=0)
    return Object(digest, hashlib.sha256(data).hexdigest(), len(data)), data


def _replace(file: Path, data: bytes, newer_than: float = 0.0) -> None:
    write_atomic(file, data, 0o644, durable=True, newer_than=newer_than)
