# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Of the objects of a cluster, those that a question about one destination depends on.

The rest of a large cluster is not even read: the rules of a service port are its own. What is left out never changes
the rules that are left: Services that claim the same address or node port stay together, and as many others are counted
as iptables mode needs to see that a cluster is large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from ..addresses import parse_ip
from ..cluster.slices import LABEL_SERVICE_NAME

# So many endpoints of a family tell that iptables mode leaves comments out, if all of them count.
COUNTED = 1001

Object: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a question is about."""

    addresses: frozenset[str] = frozenset()
    ports: frozenset[int] = frozenset()
    service: tuple[str, str] = ("", "")  # namespace and name
    sender: str = ""  # an address, or the name of a Pod
    counted: bool = False  # whether the number of all endpoints matters


@dataclasses.dataclass(frozen=True, slots=True)
class Needed:
    """The objects that matter, and what was left out."""

    objects: list[Object]
    services: frozenset[tuple[str, str]]  # namespace and name of those that were asked for
    left_out: int = 0  # objects
    cut: frozenset[str] = frozenset()  # families of which not all endpoints were read


def objects_of(documents: Iterable[Any]) -> Iterator[tuple[str, Object]]:
    """Kind and object of every object of documents and Lists; what is none is passed on as it is, without a kind."""
    for document in documents:
        named = document.get("kind") if isinstance(document, dict) else None
        kind = named if isinstance(named, str) else ""
        items = document.get("items") if kind.endswith("List") else None
        if not isinstance(items, list):
            yield kind, document
            continue
        for item in items:
            own = item.get("kind") if isinstance(item, dict) else None
            if isinstance(own, str) and not own.endswith("List"):
                yield own, item
            elif isinstance(item, dict) and "kind" not in item and kind != "List":
                item = {"kind": kind.removesuffix("List"), "apiVersion": document.get("apiVersion"), **item}
                yield item["kind"], item
            else:
                yield from objects_of([item])


def needed(objects: Iterable[tuple[str, Object]], wanted: Wanted) -> Needed:
    """What a question depends on."""
    kept: list[Object] = []
    services: list[Object] = []
    slices: list[Object] = []
    for kind, each in objects:
        (services if kind == "Service" else slices if kind == "EndpointSlice" else kept).append(each)
    chosen = {_name(each) for each in services if _concerns(each, wanted)}
    owned = [(_owner(each), each) for each in slices]
    others, cut = _some_others(owned, chosen, {_name(each) for each in services}) if wanted.counted else (set(), set())
    both = chosen | others
    found = [each for each in services if _name(each) in both]
    found_slices = [each for owner, each in owned if owner in both or _names(each, wanted.sender)]
    left_out = len(services) + len(slices) - len(found) - len(found_slices)
    return Needed([*kept, *found, *found_slices], frozenset(chosen), left_out, frozenset(cut))


def _metadata(obj: Object) -> Object:
    metadata = obj.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _name(obj: Object) -> tuple[str, str]:
    metadata = _metadata(obj)
    return str(metadata.get("namespace") or "default"), str(metadata.get("name") or "")


def _owner(obj: Object) -> tuple[str, str]:
    metadata = _metadata(obj)
    labels = metadata.get("labels")
    owner = labels.get(LABEL_SERVICE_NAME) if isinstance(labels, dict) else ""
    return str(metadata.get("namespace") or "default"), str(owner or "")


def _concerns(service: Object, wanted: Wanted) -> bool:
    """Whether a Service claims an address or a node port that was asked for; one of an odd form is kept."""
    try:
        spec = service.get("spec") or {}
        if _name(service) == wanted.service:
            return True
        if spec.get("healthCheckNodePort") in wanted.ports:
            return True
        if any(port.get("nodePort") in wanted.ports for port in spec.get("ports") or ()):
            return True
        ingress = (service.get("status") or {}).get("loadBalancer") or {}
        claimed = [spec.get("clusterIP") or "", *(spec.get("clusterIPs") or ()), *(spec.get("externalIPs") or ())]
        claimed += [entry["ip"] for entry in ingress.get("ingress") or () if entry.get("ip")]
        # An address can be written in many ways.
        return not wanted.addresses.isdisjoint(map(parse_ip, claimed))
    except (AttributeError, TypeError):
        return True


def _names(slice_: Object, sender: str) -> bool:
    """Whether an EndpointSlice tells of the sender."""
    endpoints = slice_.get("endpoints")
    if not sender or not isinstance(endpoints, list):
        return False
    last = sender[-1]
    try:
        for each in endpoints:
            written = each["addresses"][0]
            # An address can be written in many ways, but few end alike: only these are taken apart.
            if written[-1:].lower() == last and parse_ip(written) == sender:
                return True
            if (ref := each.get("targetRef")) and ref["name"] == sender:
                return True
    except (AttributeError, LookupError, TypeError):
        return True
    return False


def _some_others(
    slices: list[tuple[tuple[str, str], Object]], chosen: set[tuple[str, str]], known: set[tuple[str, str]]
) -> tuple[set[tuple[str, str]], set[str]]:
    """Services with so many endpoints that the cluster counts as large, if it is; and the families that have more."""
    counts: dict[str, int] = {}
    found: set[tuple[str, str]] = set()
    cut: set[str] = set()
    for owner, each in slices:
        family, endpoints = str(each.get("addressType")), each.get("endpoints")
        if owner not in known or owner in chosen:
            continue
        if counts.get(family, 0) < COUNTED:
            found.add(owner)
            counts[family] = counts.get(family, 0) + (len(endpoints) if isinstance(endpoints, list) else 0)
        else:
            cut.add(family)
    return found, cut
