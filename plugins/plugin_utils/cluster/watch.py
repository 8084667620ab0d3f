# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Waiting until something changes that a rule depends on.

Most of what a cluster writes does not matter here: a Node's heartbeat, an annotation, a Service's selector. An event
counts only if the facts that are read from its object are not those that were known.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from .api import RESOURCES, SERVICE_CIDRS, Api, ApiError, Expired, Forbidden, NotServed, Resource, Unauthorized
from .objects import Reader
from .record import Listing, Record
from .snapshot import EndpointSlice, Node, Service, ServiceCIDR, Snapshot

Facts = Service | EndpointSlice | Node | ServiceCIDR
Key = tuple[str, str, str]  # kind, namespace, name

RETRY_SECONDS = 2.0
# A watcher in trouble says so at least this often.
STILL_TROUBLE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ObjectChange:
    """An object whose rule-relevant facts are not what they were."""

    kind: str
    namespace: str
    name: str
    action: str  # added, changed or removed


@dataclasses.dataclass(frozen=True, slots=True)
class _News:
    """What a watcher has to say: an object's facts now, or why it cannot go on."""

    key: Key | None = None
    facts: Facts | None = None
    error: ApiError | None = None


def facts_of(listings: Iterable[Listing]) -> dict[Key, Facts]:
    """The facts of all objects, by what they are called."""
    reader = Reader()
    for each in listings:
        for item in each.items:
            reader.add_object(json.loads(item), each.kind, each.api_version)
    return _by_key(reader.snapshot())


def _by_key(snapshot: Snapshot) -> dict[Key, Facts]:
    known: dict[Key, Facts] = {}
    for service in snapshot.services:
        known["Service", service.namespace, service.name] = service
    for each in snapshot.slices:
        known["EndpointSlice", each.namespace, each.name] = each
    for node in snapshot.nodes:
        # Labels and readiness are for inventories; no rule depends on them.
        known["Node", "", node.name] = dataclasses.replace(node, labels=(), ready=False)
    for cidr in snapshot.service_cidrs:
        known["ServiceCIDR", "", cidr.name] = cidr
    return known


def _facts_of_object(resource: Resource, obj: dict[str, Any]) -> Facts | None:
    reader = Reader()
    reader.add_object(obj, resource.kind, resource.api_version)
    return next(iter(_by_key(reader.snapshot()).values()), None)


def changes(before: Mapping[Key, Facts], after: Mapping[Key, Facts]) -> list[ObjectChange]:
    """What is not as it was, in order."""
    found = []
    for key in before.keys() | after.keys():
        if key not in before:
            found.append(ObjectChange(*key, "added"))
        elif key not in after:
            found.append(ObjectChange(*key, "removed"))
        elif before[key] != after[key]:
            found.append(ObjectChange(*key, "changed"))
    return sorted(found)


class _Watcher(threading.Thread):
    """Follows one resource until the time is over."""

    def __init__(
        self, api: Api, resource: Resource, start: str, known: dict[Key, Facts], news: queue.Queue[_News], until: float
    ) -> None:
        super().__init__(daemon=True, name=f"watch {resource.name}")
        self._api = api
        self._resource = resource
        self._version = start
        self._names = {key for key in known if key[0] == resource.kind}
        self._news = news
        self._until = until

    def run(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            try:
                if not self._version:
                    self._list()
                self._follow(left)
            except Expired:
                self._version = ""
            except NotServed as error:
                if self._resource.kind != SERVICE_CIDRS.kind:
                    self._news.put(_News(error=error))
                return
            except ApiError as error:
                self._news.put(_News(error=error))
                if isinstance(error, Forbidden | Unauthorized):
                    return
                time.sleep(min(RETRY_SECONDS, left))

    def _list(self) -> None:
        """Start anew from the whole list: what is not in it any more was removed."""
        listing = self._api.list(self._resource)
        found = facts_of([listing])
        for key in self._names - found.keys():
            self._news.put(_News(key))
        for key, facts in found.items():
            self._news.put(_News(key, facts))
        self._names = set(found)
        self._version = listing.resource_version

    def _follow(self, seconds: float) -> None:
        for event, obj in self._api.watch(self._resource, self._version, seconds):
            metadata = obj.get("metadata") or {}
            self._version = str(metadata.get("resourceVersion") or self._version)
            if event == "BOOKMARK":
                continue
            key = (self._resource.kind, str(metadata.get("namespace") or ""), str(metadata.get("name") or ""))
            facts = None if event == "DELETED" else _facts_of_object(self._resource, obj)
            self._names.add(key)
            self._news.put(_News(key, facts))


def wait_for_change(api: Api, base: Record | None, *, timeout: float, settle: float = 0.0) -> list[ObjectChange]:
    """Block until facts differ from those of a record, or until the time is over; what differs, perhaps nothing.

    After the first change more are collected until there was none for `settle` seconds, for at most ten times as long.
    Without a record, what the API server has now is what was known.
    """
    deadline = time.monotonic() + timeout
    if base is None:
        base = api.record()
    before = facts_of(base.lists)
    versions = base.resource_versions
    now = dict(before)
    news: queue.Queue[_News] = queue.Queue()
    for resource in RESOURCES:
        start = versions.get(resource.kind, "")
        _Watcher(api, resource, start, before, news, deadline).start()
    trouble: tuple[float, ApiError] | None = None
    last = first = None
    while True:
        moment = time.monotonic()
        end = deadline
        if first is not None and last is not None:
            end = min(deadline, last + settle, first + 10 * settle)
        if moment >= end:
            break
        try:
            each = news.get(timeout=end - moment)
        except queue.Empty:
            continue
        if each.error is not None:
            if isinstance(each.error, Forbidden | Unauthorized | NotServed):
                raise each.error
            trouble = (time.monotonic(), each.error)
            continue
        if each.key is None:
            continue
        if each.facts is None:
            now.pop(each.key, None)
        else:
            now[each.key] = each.facts
        if now.get(each.key) != before.get(each.key):
            last = time.monotonic()
            first = first or last
    found = changes(before, now)
    if not found and trouble is not None and time.monotonic() - trouble[0] < STILL_TROUBLE_SECONDS:
        raise trouble[1]
    return found
