# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who gets a destination, and which destinations no Service gets.

A destination is an address, a protocol and a port. Where two Services claim one, kube-proxy leaves it to chance, or to
the order of its rules, who has the packets. Here it is decided before any rule is written, so that no mode has a say:

1. What belongs to no Service stays free: the way in for the control host, and the API server.
2. The Service whose cluster IP it is goes before all others.
3. A load balancer IP, which a controller wrote down, goes before an external IP, which the author of a Service wrote.
4. Of two of the same sort, the older Service goes first. Where their ages are the same or not known, the order of their
   names decides.

Who loses a destination keeps all others, and is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from ..addresses import FAMILIES, endpoint_text, family_of, special
from ..cluster.snapshot import Destination, Service
from .config import ProxyConfig
from .services import cluster_ip, has_health_check

CLUSTER_IP, LOAD_BALANCER, EXTERNAL_IP, NODE_PORT = "clusterIP", "loadBalancer", "externalIPs", "nodePort"
HEALTH_CHECK = "healthCheckNodePort"
_RANKS = {CLUSTER_IP: 0, LOAD_BALANCER: 1, EXTERNAL_IP: 2, NODE_PORT: 3}
_WORDS = {CLUSTER_IP: "cluster IP", LOAD_BALANCER: "load balancer IP", EXTERNAL_IP: "external IP"}
_YOUNGEST = "~"  # sorts after every time
_Claim: TypeAlias = tuple[int, str]  # the position of a Service, and the field


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """What no Service gets, and why."""

    destinations: Mapping[Destination, str] = dataclasses.field(default_factory=dict)
    addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)  # at every port
    allowed: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)  # field -> addresses all the same

    def reason(self, field: str, destination: Destination) -> str:
        """Why no Service gets a destination by this field; empty if one may."""
        address = destination[0]
        if reason := special(address):
            return reason
        if address and address in self.allowed.get(field, ()):
            return ""
        return self.destinations.get(destination) or (self.addresses.get(address, "") if address else "")


def age(service: Service) -> tuple[str, str, str]:
    """The order among Services that claim the same: the oldest first, then by name."""
    return service.created or _YOUNGEST, service.namespace, service.name


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A claim that was not granted."""

    namespace: str
    name: str
    field: str
    destination: Destination
    reason: str

    def __str__(self) -> str:
        address, protocol, port = self.destination
        where = f"{endpoint_text(address, port)}/{protocol}" if address else f"{port}/{protocol}"
        return f"Service/{self.namespace}/{self.name}: {self.field} {where} {self.reason}; it is left out"


def settle(
    services: Iterable[Service], config: ProxyConfig, reserved: Reserved
) -> tuple[tuple[Service, ...], tuple[Lost, ...]]:
    """The Services, each with what it gets, and the claims that were not granted, in the order of their names."""
    services = tuple(services)
    owners = _claimed(services, _cluster_ips)
    found = [each for destination, claims in owners.items() for each in _losers(services, destination, claims, claims)]
    # A port without its cluster IP has no rules in that family, so it claims nothing else there either.
    gone = {(index, ":" in lost.destination[0], *lost.destination[1:]) for index, lost in found}
    external_ips = config.feature("AllowServiceExternalIPs")
    for destination, claims in _claimed(services, partial(_other_claims, external_ips=external_ips)).items():
        if gone and destination[0]:
            claims = [each for each in claims if (each[0], ":" in destination[0], *destination[1:]) not in gone]
        refused = {each: reason for each in claims if (reason := reserved.reason(each[1], destination))}
        if refused or len(claims) > 1 or destination in owners:
            eligible = [each for each in claims if each not in refused]
            found += _losers(services, destination, claims, owners.get(destination, eligible), refused)
    lost: dict[int, set[Destination]] = {}
    for index, each in found:
        lost.setdefault(index, set()).add(each.destination)
    settled = (
        dataclasses.replace(each, lost=frozenset(lost[index])) if index in lost else each
        for index, each in enumerate(services)
    )
    told = tuple(each for _index, each in sorted(found, key=lambda pair: pair[0]))
    return tuple(settled) if lost else services, told


def _claimed(
    services: tuple[Service, ...], claims_of: Callable[[Service], Iterator[tuple[str, Destination]]]
) -> dict[Destination, list[_Claim]]:
    """Every destination, and who claims it by which field."""
    claimed: dict[Destination, list[_Claim]] = {}
    for index, service in enumerate(services):
        for field, destination in claims_of(service):
            claimed.setdefault(destination, []).append((index, field))
    return claimed


def _losers(
    services: tuple[Service, ...],
    destination: Destination,
    claims: list[_Claim],
    eligible: list[_Claim],
    refused: Mapping[_Claim, str] = MappingProxyType({}),
) -> Iterator[tuple[int, Lost]]:
    """The claims to a destination that are not granted: what is refused, and all but one of the eligible ones."""
    if len(claims) == 1 and claims is eligible:
        return
    owner = min(eligible, key=lambda each: (_RANKS[each[1]], age(services[each[0]])), default=None)
    for index, field in claims:
        if owner is not None and owner[0] == index:
            continue
        service = services[index]
        reason = refused.get((index, field)) or (_why(services[owner[0]], owner[1], service, field) if owner else "")
        yield index, Lost(service.namespace, service.name, field, destination, reason)


def _why(owner: Service, owners_field: str, service: Service, field: str) -> str:
    whose = f"{owner.namespace}/{owner.name}"
    if owners_field == field:
        first = "is older" if age(owner)[0] < age(service)[0] else "comes first by its name"
        return f"is claimed by {whose}, too, which {first}"
    return f"is the {_WORDS[owners_field]} of {whose}"


def _cluster_ips(service: Service) -> Iterator[tuple[str, Destination]]:
    for ip in dict.fromkeys((service.cluster_ip, *service.cluster_ips)):
        yield from dict.fromkeys((CLUSTER_IP, (ip, port.protocol, port.port)) for port in service.ports)


def _other_claims(service: Service, *, external_ips: bool) -> Iterator[tuple[str, Destination]]:
    """Every destination that a Service claims beside its cluster IP, each once for a field.

    Without a cluster IP in a family it has no rules there, and what it names of that family stays for others.
    """
    families = [family for family in FAMILIES if cluster_ip(service, family) is not None]
    for field, addresses in (
        (LOAD_BALANCER, service.load_balancer_vips),
        (EXTERNAL_IP, service.external_ips if external_ips else ()),
    ):
        for ip in dict.fromkeys(ip for ip in addresses if family_of(ip) in families):
            yield from dict.fromkeys((field, (ip, port.protocol, port.port)) for port in service.ports)
    yield from dict.fromkeys(
        (NODE_PORT, ("", port.protocol, port.node_port)) for port in service.ports if port.node_port
    )


def settle_health_checks(
    services: tuple[Service, ...], low: int, high: int
) -> tuple[tuple[Service, ...], tuple[Lost, ...]]:
    """The Services, none with a health check port that nodes do not open or that another one has, and those claims."""
    asking = {index: each for index, each in enumerate(services) if has_health_check(each)}
    owners: dict[int, Service] = {}
    for each in sorted(asking.values(), key=age):
        owners.setdefault(each.health_check_node_port, each)
    found: dict[int, Lost] = {}
    for index, each in asking.items():
        port, owner = each.health_check_node_port, owners[each.health_check_node_port]
        reason = "" if owner is each else f"is that of {owner.namespace}/{owner.name}, too, which goes first"
        if not low <= port <= high:
            reason = f"is not one of {low}-{high}, which nodes open for health checks"
        if reason:
            found[index] = Lost(each.namespace, each.name, HEALTH_CHECK, ("", "tcp", port), reason)
    if not found:
        return services, ()
    settled = (
        dataclasses.replace(each, health_check_node_port=0) if index in found else each
        for index, each in enumerate(services)
    )
    return tuple(settled), tuple(found.values())
