# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A cluster in memory, kept current object by object.

Most of what a cluster writes does not matter here: a Node's heartbeat, an annotation, a Service's selector. An object
counts as changed only if the facts that are read from it are not those that were known. Facts that did not change stay
the very same Python objects from one Snapshot to the next, so a caller compares two of them by identity.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from .mirror import LOST, with_mirrored
from .objects import Reader
from .record import Listing, digest_of, item_digest, item_of
from .snapshot import Endpoints, EndpointSlice, Node, Problem, Service, ServiceCIDR, Snapshot

Facts: TypeAlias = Service | EndpointSlice | Node | ServiceCIDR | Endpoints
Key: TypeAlias = tuple[str, str, str]  # kind, namespace, name

_NOTHING: Mapping[str, int] = {}
_KINDS = ("Service", "EndpointSlice", "Node", "ServiceCIDR", "Endpoints")
F = TypeVar("F", Service, EndpointSlice, Node, ServiceCIDR, Endpoints)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ObjectChange:
    """An object whose rule-relevant facts are not what they were."""

    kind: str
    namespace: str
    name: str
    action: str  # added, changed or removed


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one object."""

    facts: Facts | None  # None if no rule can come of it
    problems: tuple[Problem, ...] = ()
    ignored: Mapping[str, int] = dataclasses.field(default_factory=lambda: _NOTHING)
    digest: bytes = b""  # of its item in a record, without what no rule depends on


def read_object(obj: dict[str, Any], kind: str, api_version: str, item: str = "") -> Entry:
    """The facts of one object, without what no rule depends on; with its item, if it comes from a record."""
    reader = Reader()
    reader.add_object(obj, kind, api_version)
    read = reader.snapshot()
    found: list[Facts] = [*reader.endpoints(), *read.services, *read.slices, *read.service_cidrs]
    # Labels and readiness are for inventories.
    found += [dataclasses.replace(node, labels=(), ready=False) for node in read.nodes]
    digest = item_digest(kind, item or item_of(kind, obj))
    return Entry(found[0] if found else None, read.problems, read.ignored or _NOTHING, digest)


def read_listing(listing: Listing) -> dict[Key, Entry]:
    """The entries of a whole list."""
    found: dict[Key, Entry] = {}
    for item in listing.items:
        obj = json.loads(item)
        found[key_of(listing.kind, obj)] = read_object(obj, listing.kind, listing.api_version, item)
    return found


def key_of(kind: str, obj: dict[str, Any]) -> Key:
    """What an object is called."""
    metadata = obj.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return kind, str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


class Store:
    """Objects by what they are called, and which of them changed since the last question. Not for several threads."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[Key, Entry]] = {kind: {} for kind in _KINDS}
        # key -> the facts when they were asked for last
        self._before: dict[Key, Facts | None] = {}
        # What is made of all objects of a kind is kept until it is different.
        self._order: dict[str, list[Key]] = {}
        self._sorted: dict[str, tuple[Any, ...]] = {}
        self._mirrored: tuple[object, object, tuple[tuple[EndpointSlice, ...], int]] | None = None
        self._odd: dict[Key, Entry] = {}  # those with problems, or with something that was ignored

    def keys(self, kind: str) -> set[Key]:
        """All objects of a kind that are known."""
        return set(self._entries[kind])

    def put(self, key: Key, entry: Entry | None) -> bool:
        """An object as it is now, or None if it is gone. Whether facts changed by that."""
        entries = self._entries[key[0]]
        known = entries.get(key)
        old = known.facts if known else None
        new = entry.facts if entry else None
        if (entry is None) != (known is None):
            self._order.pop(key[0], None)
        self._odd.pop(key, None)
        if entry is None:
            entries.pop(key, None)
        else:
            # Equal facts keep their identity.
            entries[key] = dataclasses.replace(entry, facts=old) if new == old and new is not old else entry
            if entry.problems or entry.ignored:
                self._odd[key] = entry
        if new == old:
            return False
        self._sorted.pop(key[0], None)
        self._before.setdefault(key, old)
        return True

    def replace(self, kind: str, entries: Mapping[Key, Entry]) -> bool:
        """All objects of a kind, anew: what is not among them is gone."""
        changed = [self.put(key, None) for key in self.keys(kind) - entries.keys()]
        changed += [self.put(key, entry) for key, entry in entries.items()]
        return any(changed)

    @property
    def pending(self) -> bool:
        """Whether something is not as it was at the last question."""
        return any(self._facts(key) != before for key, before in self._before.items())

    def take(self) -> list[ObjectChange]:
        """What is not as it was at the last question, in order. What was changed and changed back is not told."""
        found = []
        for key, before in self._before.items():
            now = self._facts(key)
            if now != before:
                action = "added" if before is None else "removed" if now is None else "changed"
                found.append(ObjectChange(*key, action))
        self._before.clear()
        return sorted(found)

    def _facts(self, key: Key) -> Facts | None:
        entry = self._entries[key[0]].get(key)
        return entry.facts if entry else None

    def snapshot(self) -> Snapshot:
        """Everything that is known now."""
        problems: list[Problem] = []
        ignored: dict[str, int] = {}
        for entry in self._odd.values():
            problems += entry.problems
            for sort, count in entry.ignored.items():
                ignored[sort] = ignored.get(sort, 0) + count
        slices, lost = self._slices()
        if lost:
            ignored[LOST] = lost
        return Snapshot(
            services=self._all("Service", Service),
            slices=slices,
            nodes=self._all("Node", Node),
            service_cidrs=self._all("ServiceCIDR", ServiceCIDR),
            problems=tuple(sorted(problems, key=str)),
            ignored=dict(sorted(ignored.items())),
        )

    def _slices(self) -> tuple[tuple[EndpointSlice, ...], int]:
        """All slices, and how many Endpoints do not count; the same tuple as before if neither changed."""
        slices, endpoints = self._all("EndpointSlice", EndpointSlice), self._all("Endpoints", Endpoints)
        if self._mirrored is None or self._mirrored[0] is not slices or self._mirrored[1] is not endpoints:
            self._mirrored = (slices, endpoints, with_mirrored(slices, endpoints))
        return self._mirrored[2]

    def digest(self) -> str:
        """The digest of a record of everything that is known now."""
        return digest_of(
            (kind, [entries[key].digest for key in self._ordered(kind)]) for kind, entries in self._entries.items()
        )

    def _ordered(self, kind: str) -> list[Key]:
        known = self._order.get(kind)
        if known is None:
            known = self._order[kind] = sorted(self._entries[kind])
        return known

    def _all(self, kind: str, _type: type[F]) -> tuple[F, ...]:
        known = self._sorted.get(kind)
        if known is None:
            entries = self._entries[kind]
            known = tuple([facts for key in self._ordered(kind) if (facts := entries[key].facts) is not None])
            self._sorted[kind] = known
        return known
