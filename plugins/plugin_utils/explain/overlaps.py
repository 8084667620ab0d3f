# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Addresses with two owners among Services, nodes, pods and the API server; and frontends that two Services claim."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator

from ..addresses import Family, endpoint_text, family_of, number_of, span_of
from ..cluster.snapshot import Service, Snapshot


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Overlap:
    """An address or frontend, and those who have it."""

    address: str
    one: str
    other: str

    def __str__(self) -> str:
        return f"{self.address} is {self.one} and {self.other}"


class Intervals:
    """Networks of one family in order; those that hold an address are found by bisection."""

    def __init__(self, networks: Iterable[tuple[str, str]]) -> None:
        self._spans = sorted((*span_of(cidr), owner) for cidr, owner in networks)
        self._starts = [first for first, _last, _owner in self._spans]
        # The furthest end of all networks up to each: where it lies before an address, none of them holds it.
        self._reach: list[int] = []
        for _first, last, _owner in self._spans:
            self._reach.append(max(last, self._reach[-1]) if self._reach else last)

    def owners(self, address: str) -> Iterator[str]:
        """Who has a network that holds an address."""
        number = number_of(address)
        at = bisect.bisect_right(self._starts, number) - 1
        while at >= 0 and self._reach[at] >= number:
            if self._spans[at][1] >= number:
                yield self._spans[at][2]
            at -= 1


def overlaps(snapshot: Snapshot) -> Iterator[Overlap]:
    """Addresses of Services that are a node's, a pod's or the API server's as well."""
    held = {family: Intervals(_held(snapshot, family)) for family in Family}
    for service in snapshot.services:
        for address, what in _addresses(service):
            for owner in held[family_of(address)].owners(address):
                yield Overlap(address, what, owner)


def _addresses(service: Service) -> Iterator[tuple[str, str]]:
    title = f"of Service {service.namespace}/{service.name}"
    yield from ((ip, f"cluster IP {title}") for ip in dict.fromkeys((service.cluster_ip, *service.cluster_ips)))
    yield from ((ip, f"external IP {title}") for ip in service.external_ips)
    yield from ((ip, f"load balancer IP {title}") for ip in service.load_balancer_vips)


def _held(snapshot: Snapshot, family: Family) -> Iterator[tuple[str, str]]:
    """Networks that are not for Services, and what they are."""
    bits = family.bits
    for node in snapshot.nodes:
        for sort, ip in node.addresses:
            if sort in ("InternalIP", "ExternalIP") and family_of(ip) is family:
                yield f"{ip}/{bits}", f"an address of node {node.name}"
        yield from (
            (cidr, f"in the pod CIDR of node {node.name}") for cidr in node.pod_cidrs if family_of(cidr) is family
        )
    for each in snapshot.slices:
        if (each.namespace, each.service) == ("default", "kubernetes") and each.address_type == family.value:
            yield from ((f"{e.address}/{bits}", "an address of the API server") for e in each.endpoints)


def double_claims(services: Iterable[Service]) -> Iterator[Overlap]:
    """Frontends that two Services claim: address, protocol and port, or a node port."""
    first: dict[tuple[str, str, int], str] = {}
    for service in services:
        title = f"Service {service.namespace}/{service.name}"
        addresses = dict.fromkeys(
            (service.cluster_ip, *service.cluster_ips, *service.external_ips, *service.load_balancer_vips)
        )
        for port in service.ports:
            frontends = [(ip, port.protocol, port.port) for ip in addresses]
            frontends += [("", port.protocol, port.node_port)] if port.node_port else []
            for frontend in frontends:
                other = first.setdefault(frontend, title)
                if other != title:
                    ip, protocol, number = frontend
                    name = f"{endpoint_text(ip, number)}/{protocol}" if ip else f"node port {number}/{protocol}"
                    yield Overlap(name, f"of {other}", f"of {title}")
