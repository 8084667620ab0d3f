"""From a cluster that differs to the smallest one that still does: what is left is the bug report."""

from __future__ import annotations

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
        """Leave out as many items as possible: large parts first, then smaller ones."""
        kept, part = list(items), max(1, len(items))
        while kept and part:
            start = 0
            while start < len(kept):
                without = kept[:start] + kept[start + part :]
                if self._try(build(without)):
                    kept = without
                else:
                    start += part
            part //= 2

    def _services(self) -> None:
        """Services together with their slices."""
        cluster = self.best
        groups: dict[tuple[str, str], list[Object]] = {}
        rest: list[Object] = []
        for obj in cluster.objects:
            meta = obj["metadata"]
            if obj["kind"] == "Service":
                groups.setdefault((meta["namespace"], meta["name"]), []).append(obj)
            elif owner := meta.get("labels", {}).get("kubernetes.io/service-name"):
                groups.setdefault((meta["namespace"], owner), []).append(obj)
            else:
                rest.append(obj)
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
