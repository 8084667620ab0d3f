"""From a cluster that differs to the smallest one that still does: what is left is the bug report."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .draw import Cluster
from .history import key

Object = dict[str, Any]
T = TypeVar("T")
Differs = Callable[[Cluster], bool]

# Fields that may go one by one. What the API server then refuses does not count as different, so nothing can go wrong.
SERVICE_FIELDS = (
    "externalIPs", "loadBalancerSourceRanges", "sessionAffinity", "sessionAffinityConfig", "internalTrafficPolicy",
    "externalTrafficPolicy", "healthCheckNodePort", "publishNotReadyAddresses", "trafficDistribution", "selector",
    "loadBalancerClass", "loadBalancerIP", "allocateLoadBalancerNodePorts",
)  # fmt: skip
ENDPOINT_FIELDS = ("hints", "conditions", "zone", "targetRef", "hostname", "nodeName")


class OutOfTime(Exception):
    pass


def minimise(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Leave out as many items as possible while it still fails: large parts first, then smaller ones."""
    kept, part = list(items), max(1, len(items))
    while kept and part:
        start = 0
        while start < len(kept):
            without = kept[:start] + kept[start + part :]
            if fails(without):
                kept = without
            else:
                start += part
        part //= 2
    return kept


class Shrinker:
    """Tries smaller and smaller clusters until nothing can go, or the time is up."""

    def __init__(self, differs: Differs, seconds: float) -> None:
        self._differs, self._deadline, self.tries = differs, time.monotonic() + seconds, 0

    def shrink(self, cluster: Cluster) -> Cluster:
        self.best = cluster
        try:
            size = None
            while size != (size := _size(self.best)):
                for attempt in (self._services, self._objects, self._endpoints, self._fields, self._config):
                    attempt()
        except OutOfTime:
            pass
        return self.best

    def _try(self, candidate: Cluster) -> bool:
        if time.monotonic() > self._deadline:
            raise OutOfTime
        self.tries += 1
        if not self._differs(candidate):
            return False
        self.best = candidate
        return True

    def _minimise(self, items: Sequence[T], build: Callable[[Sequence[T]], Cluster]) -> None:
        minimise(items, lambda kept: self._try(build(kept)))

    def _services(self) -> None:
        """Services together with their slices."""
        cluster = self.best
        groups: dict[tuple[str, str] | None, list[Object]] = {}
        for obj in cluster.objects:
            groups.setdefault(_owner(obj), []).append(obj)
        rest = groups.pop(None, [])
        self._minimise(
            list(groups.values()),
            lambda kept: replace(cluster, objects=(*rest, *(obj for group in kept for obj in group))),
        )

    def _objects(self) -> None:
        cluster = self.best
        own = ("Node", "", cluster.node)
        fixed = [obj for obj in cluster.objects if key(obj) == own]
        loose = [obj for obj in cluster.objects if key(obj) != own]
        self._minimise(loose, lambda kept: replace(cluster, objects=(*fixed, *kept)))

    def _endpoints(self) -> None:
        for index, obj in enumerate(self.best.objects):
            if obj["kind"] == "EndpointSlice":
                for field in ("endpoints", "ports"):
                    self._minimise(self.best.objects[index][field], self._with(index, field))

    def _with(self, index: int, field: str) -> Callable[[Sequence[Object]], Cluster]:
        def build(kept: Sequence[Object]) -> Cluster:
            objects = list(self.best.objects)
            objects[index] = {**objects[index], field: list(kept)}
            return replace(self.best, objects=tuple(objects))

        return build

    def _fields(self) -> None:
        for index in range(len(self.best.objects)):
            for path in _removable(self.best.objects[index]):
                objects = list(self.best.objects)
                if changed := _without(objects[index], path):
                    objects[index] = changed
                    self._try(replace(self.best, objects=tuple(objects)))

    def _config(self) -> None:
        for name in list(self.best.config):
            if name not in ("apiVersion", "kind", "mode", "hostnameOverride", "conntrack"):
                self._try(replace(self.best, config={k: v for k, v in self.best.config.items() if k != name}))


def shrink_step(
    before: Cluster, after: Cluster, differs: Callable[[Cluster, Cluster], bool], seconds: float
) -> tuple[Cluster, Cluster]:
    """The fewest Services with which going from one cluster to the other still ends in a difference."""
    deadline = time.monotonic() + seconds
    best = (before, after)

    def only(cluster: Cluster, owners: Sequence[tuple[str, str]]) -> Cluster:
        kept = set(owners)
        return replace(cluster, objects=tuple(o for o in cluster.objects if _owner(o) is None or _owner(o) in kept))

    def fails(owners: Sequence[tuple[str, str]]) -> bool:
        nonlocal best
        if time.monotonic() > deadline:
            raise OutOfTime
        candidate = (only(before, owners), only(after, owners))
        if not differs(*candidate):
            return False
        best = candidate
        return True

    owners = {owner for cluster in (before, after) for obj in cluster.objects if (owner := _owner(obj)) is not None}
    with contextlib.suppress(OutOfTime):
        minimise(sorted(owners), fails)
    return best


def _owner(obj: Object) -> tuple[str, str] | None:
    """The Service that an object is, or belongs to."""
    meta = obj["metadata"]
    name = meta["name"] if obj["kind"] == "Service" else meta.get("labels", {}).get("kubernetes.io/service-name")
    return (meta["namespace"], name) if name and obj["kind"] in ("Service", "EndpointSlice") else None


def _removable(obj: Object) -> Iterator[tuple[str | int, ...]]:
    """Paths of what may go from one object, the last of a list first."""
    if obj["kind"] == "Service":
        yield from (("spec", field) for field in SERVICE_FIELDS)
        yield from (("status",), ("metadata", "annotations"))
        yield from (("spec", "ports", number) for number in reversed(range(len(obj["spec"].get("ports", [])))))
    if obj["kind"] == "EndpointSlice":
        yield from (("endpoints", n, field) for n in range(len(obj["endpoints"])) for field in ENDPOINT_FIELDS)


def _without(obj: Object, path: tuple[str | int, ...]) -> Object | None:
    """The object without what the path names; None if it is not there."""
    changed = copy.deepcopy(obj)
    parent: Any = changed
    try:
        for name in path[:-1]:
            parent = parent[name]
        del parent[path[-1]]
    except (KeyError, IndexError):
        return None
    return changed


def _size(cluster: Cluster) -> tuple[int, int]:
    return len(repr(cluster.objects)), len(repr(cluster.config))
