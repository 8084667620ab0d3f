# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Endpoints, the older form of EndpointSlices, read as the EndpointSlice mirroring controller makes slices of them.

Exports of old clusters and files written by hand hold them, and so does an API server without that controller. They
count for a Service that no EndpointSlice belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..addresses import family_of, parse_ip, special
from . import fields
from .fields import Object, Skipped
from .slices import LABEL_HEADLESS, NO_HINTS, Tell, pod_name
from .snapshot import Endpoints, EndpointSlice, SliceEndpoint, SlicePort

LABEL_SKIP_MIRROR = "endpointslice.kubernetes.io/skip-mirror"
LOST = "Endpoints of a Service that has EndpointSlices"
# The controller mirrors no more addresses of one subset.
MOST_ADDRESSES = 1_000


def read_endpoints(obj: Object, problem: Tell) -> Endpoints:
    """The slices that an Endpoints object stands for; what of it cannot be used is told, by field and reason."""
    metadata = fields.typed(obj, "", "metadata", dict, {})
    name = fields.object_name(metadata, fields.DNS_LABEL, "DNS label")
    namespace = fields.namespace(metadata)
    labels = fields.typed(metadata, "metadata", "labels", dict, {})
    if LABEL_HEADLESS in labels:
        raise Skipped("Endpoints of a headless Service")
    # The API server writes both forms of its own Service, so it asks for no mirror. An export may hold only this one.
    if labels.get(LABEL_SKIP_MIRROR) == "true" and (namespace, name) != ("default", "kubernetes"):
        raise Skipped("Endpoints that ask not to be mirrored")
    found: list[EndpointSlice] = []
    for index, (path, subset) in enumerate(fields.mappings(obj, "", "subsets")):
        ports = tuple(
            SlicePort(
                fields.port_name(entry, where),
                fields.protocol(entry, where),
                fields.port_number(entry, where, "port", zero=False),
            )
            for where, entry in fields.mappings(subset, path, "ports")
        )
        endpoints = list(_endpoints(path, subset, problem))
        for family in ("IPv4", "IPv6"):
            own = tuple(each for each in endpoints if family_of(each.address).value == family)
            if own:
                # A name that no EndpointSlice can have.
                title = f"endpoints/{name}/{index}-{family.lower()}"
                found.append(EndpointSlice(namespace, title, name, family, ports, own))
    return Endpoints(namespace, name, tuple(found))


def _endpoints(path: str, subset: Object, problem: Tell) -> Iterator[SliceEndpoint]:
    """The endpoints of a subset. An address that is both ready and not ready is ready."""
    known: set[str] = set()
    for key, ready in (("addresses", True), ("notReadyAddresses", False)):
        for where, entry in fields.mappings(subset, path, key):
            text = fields.typed(entry, where, "ip", str, "")
            node_name = fields.typed(entry, where, "nodeName", str, "")
            address = parse_ip(text)
            reason = "is not an IP address" if address is None else special(address)
            if address is None or reason:
                problem(f"{where}.ip", f"{fields.shown(text)} {reason}; the endpoint is left out")
            elif len(known) == MOST_ADDRESSES and address not in known:
                problem(path, f"has more than {MOST_ADDRESSES} addresses; the others are left out")
                return
            elif address not in known:
                known.add(address)
                pod = pod_name(entry.get("targetRef"))
                yield SliceEndpoint(address, node_name, ready, True, False, NO_HINTS, NO_HINTS, pod)


def with_mirrored(
    slices: tuple[EndpointSlice, ...], endpoints: Iterable[Endpoints]
) -> tuple[tuple[EndpointSlice, ...], int]:
    """EndpointSlices and those that Endpoints stand for, in order, and how many Endpoints lost against slices."""
    owners = {(each.namespace, each.service) for each in slices}
    found: list[EndpointSlice] = []
    lost = 0
    for each in endpoints:
        if (each.namespace, each.name) in owners:
            lost += 1
        else:
            found += each.slices
    if not found:
        return slices, lost
    return tuple(sorted((*slices, *found), key=lambda each: (each.namespace, each.name))), lost
