# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which addresses Services may claim.

A user who may write a Service can name any external IP in it, and every node then sends traffic to that address to the
endpoints of that Service. kube-proxy does so without a word. Here each such claim to an address that
something else has is found, and it can be left out or stop the run.
"""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..addresses import Family, family_of, host_cidr, number_of, parse_cidr, parse_ip, span_of
from ..cluster.snapshot import Destination, Service, Snapshot
from ..errors import UserError
from .claims import EXTERNAL_IP, LOAD_BALANCER, Lost, Reserved, settle, settle_health_checks
from .config import ProxyConfig
from .facts import own_addresses
from .limits import CONTROL_PORTS, HEALTH_CHECK_PORTS, MOST_TOLD, port_range, too_large
from .portals import with_all_ingress
from .warned import Warned

ACTIONS = ("warn", "omit", "refuse")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class InvalidPolicy(UserError):
    """A policy that cannot be used; the message names the setting and its value."""


class RefusedVips(UserError):
    """Services claim addresses that the policy does not allow, and the policy says to stop."""

    def __init__(self, found: Iterable[Finding]) -> None:
        self.found = tuple(found)
        super().__init__("\n".join(str(each) for each in self.found))

    @property
    def sentence(self) -> str:
        """All claims in one line, and what to do."""
        return (
            f"refused, and no node was touched: {'; '.join(str(each) for each in self.found)}. Services may claim what "
            "lies in kube_proxy_external_ip_cidrs and kube_proxy_load_balancer_cidrs, and no address of another owner; "
            "kube_proxy_vip_policy=omit leaves such claims out, warn allows them"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class VipPolicy:
    """What Services may claim, and what becomes of a claim that is not allowed."""

    action: str = "warn"  # warn: as kube-proxy, and say so; omit: without that address; refuse: not at all
    external_ips: tuple[str, ...] | None = None  # CIDRs that externalIPs must lie in; None: anywhere
    load_balancer_ips: tuple[str, ...] | None = None  # the same for status.loadBalancer.ingress
    control_ports: tuple[int, ...] = CONTROL_PORTS  # by which the control host comes in; no Service gets them on a node
    health_check_ports: tuple[int, int] = HEALTH_CHECK_PORTS  # the first and the last that nodes open for health checks


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Whose addresses are known beside those that the objects of a cluster tell of."""

    interfaces: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # by Node
    url: str = ""  # the API server's, or another place where the cluster was read

    @classmethod
    def of(cls, facts: Mapping[str, Mapping[str, Any]], url: str) -> Known:
        """From what `akp-node facts` printed on nodes."""
        return cls({node: own_addresses(each) for node, each in facts.items()}, url)


NOTHING = Known()


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A Service that claims an address which is not its own."""

    namespace: str
    name: str
    field: str  # externalIPs or loadBalancer
    address: str
    reason: str

    def __str__(self) -> str:
        return f"Service/{self.namespace}/{self.name}: {self.field} {self.address} {self.reason}"


def vip_policy(
    action: str,
    external: Iterable[str] | None,
    load_balancer: Iterable[str] | None,
    control_ports: Iterable[object] | None = None,
    health_check_ports: str = "",
) -> VipPolicy:
    """A policy from what was configured; what is not given is as by default."""
    if action not in ACTIONS:
        raise InvalidPolicy(f"the VIP policy {action!r} is not one of {', '.join(ACTIONS)}")
    opened = port_range(health_check_ports) if health_check_ports else HEALTH_CHECK_PORTS
    if opened is None:
        raise InvalidPolicy(f"the health check ports: {health_check_ports!r} is no range such as 30000-32767")
    ports = CONTROL_PORTS if control_ports is None else tuple(map(_port, control_ports))
    cidrs = (_cidrs("external IPs", external), _cidrs("load balancer IPs", load_balancer))
    return VipPolicy(action, *cidrs, ports, opened)


def _port(given: object) -> int:
    text = str(given)
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise InvalidPolicy(f"the control ports: {given!r} is no port")
    return int(text)


def _cidrs(what: str, given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    found = []
    for text in given:
        ip = parse_ip(str(text))
        cidr = parse_cidr(str(text) if ip is None else host_cidr(ip))
        if cidr is None:
            raise InvalidPolicy(f"the CIDRs of {what}: {text!r} is neither a CIDR nor an address")
        found.append(cidr)
    return tuple(found)


class _Networks:
    """What lies in which network, found in a step per prefix length: clusters have thousands of pod CIDRs."""

    def __init__(self, networks: Iterable[tuple[str, str]]) -> None:
        self._known: dict[tuple[Family, int], dict[int, str]] = {}
        for cidr, reason in networks:
            first, last = span_of(cidr)
            shift = (last - first).bit_length()
            self._known.setdefault((family_of(cidr), shift), {}).setdefault(first >> shift, reason)

    def reason(self, address: str) -> str:
        """The first reason not to use an address; empty if there is none."""
        family, number = family_of(address), number_of(address)
        for (of, shift), known in self._known.items():
            if of is family and (found := known.get(number >> shift)):
                return found
        return ""


def check_vips(
    snapshot: Snapshot, config: ProxyConfig, policy: VipPolicy, known: Known = NOTHING
) -> tuple[Finding, ...]:
    """Every claim of a Service that the policy does not allow, in the order of their names."""
    taken = _Networks(_taken(snapshot, config, known))
    interfaces = {ip: node.name for node in reversed(snapshot.nodes) for ip in known.interfaces.get(node.name, ())}
    allowed = {
        EXTERNAL_IP: (policy.external_ips, _allow(policy.external_ips)),
        LOAD_BALANCER: (policy.load_balancer_ips, _allow(policy.load_balancer_ips)),
    }
    found = []
    for service in snapshot.services:
        for field, address in _claims(service, config):
            cidrs, networks = allowed[field]
            reason = taken.reason(address)
            # What a load balancer brought to a node, its controller wrote down; who may write externalIPs is another.
            if (
                not reason
                and field == EXTERNAL_IP
                and address in interfaces
                and host_cidr(address) not in (cidrs or ())
            ):
                reason = f"is an address of an interface of the node {interfaces[address]}"
            if not reason and cidrs is not None and not networks.reason(address):
                reason = f"is not in {', '.join(cidrs) or 'any range, none is allowed'}"
            if reason:
                found.append(Finding(service.namespace, service.name, field, address, reason))
    return tuple(found)


def _allow(cidrs: tuple[str, ...] | None) -> _Networks:
    return _Networks((cidr, "allowed") for cidr in cidrs or ())


def _claims(service: Service, config: ProxyConfig) -> Iterator[tuple[str, str]]:
    if config.feature("AllowServiceExternalIPs"):
        yield from ((EXTERNAL_IP, ip) for ip in service.external_ips)
    yield from ((LOAD_BALANCER, ip) for ip in service.load_balancer_vips)


def api_servers(snapshot: Snapshot) -> tuple[tuple[str, int], ...]:
    """Where the API server is, address and port, as it says itself."""
    own = (each for each in snapshot.slices if (each.namespace, each.service) == ("default", "kubernetes"))
    return tuple(
        (endpoint.address, port.port)
        for each in own
        for endpoint in each.endpoints
        for port in each.ports
        if port.protocol == "tcp"
    )


def _all_api_servers(snapshot: Snapshot, known: Known) -> Iterator[tuple[str, int]]:
    """The same, and where the cluster was read, if that is an address and no name."""
    yield from api_servers(snapshot)
    try:
        url = urllib.parse.urlsplit(known.url)
        ip, port = parse_ip(url.hostname or ""), url.port or {"http": 80}.get(url.scheme, 443)
    except ValueError:
        return
    if ip is not None:
        yield ip, port


def _node_addresses(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Every address of a Node, as its object tells, and its name."""
    for node in snapshot.nodes:
        for sort, text in node.addresses:
            ip = parse_ip(text) if sort in ("InternalIP", "ExternalIP") else None
            if ip is not None:
                yield ip, node.name


def reserved(snapshot: Snapshot, config: ProxyConfig, policy: VipPolicy, known: Known = NOTHING) -> Reserved:
    """What no Service gets, whatever the policy says of claims, unless it allows an address by itself."""
    nodes = dict(_node_addresses(snapshot))
    kept: dict[Destination, str] = {
        ("", "tcp", port): "is the way in for the control host" for port in policy.control_ports
    }
    whole: dict[str, str] = {}
    for ip, name in nodes.items():
        for port in policy.control_ports:
            kept[ip, "tcp", port] = f"is the way in to the node {name} for the control host"
    for ip, port in _all_api_servers(snapshot, known):
        kept[ip, "tcp", port] = "is the API server"
        if ip in nodes:
            kept["", "tcp", port] = f"is the API server on the node {nodes[ip]}"
        if config.mode == "ipvs":
            # An address on kube-ipvs0 is the node's own at every port: no other node could reach the API server.
            whole[ip] = "is an address of the API server, which ipvs mode would take at every port"
    return Reserved(kept, whole, {field: named_alone(policy, field) for field in (EXTERNAL_IP, LOAD_BALANCER)})


def named_alone(policy: VipPolicy, field: str) -> frozenset[str]:
    """The addresses that a policy names by themselves, so that Services may have them all the same."""
    cidrs = {EXTERNAL_IP: policy.external_ips, LOAD_BALANCER: policy.load_balancer_ips}.get(field) or ()
    return frozenset(ip for ip in (cidr.partition("/")[0] for cidr in cidrs) if host_cidr(ip) in cidrs)


def _taken(snapshot: Snapshot, config: ProxyConfig, known: Known) -> Iterator[tuple[str, str]]:
    """Networks that have an owner, the narrowest first."""
    for ip, name in _node_addresses(snapshot):
        yield host_cidr(ip), f"is an address of the node {name}"
    for ip, _port_number in _all_api_servers(snapshot, known):
        yield host_cidr(ip), "is an address of the API server"
    for service in snapshot.services:
        for ip in dict.fromkeys((service.cluster_ip, *service.cluster_ips)):
            yield host_cidr(ip), f"is the cluster IP of {service.namespace}/{service.name}"
    for node in snapshot.nodes:
        for cidr in node.pod_cidrs:
            yield cidr, f"is in the pod CIDR {cidr} of the node {node.name}"
    for text in config.cluster_cidrs:
        yield parse_cidr(text) or text, f"is in the pod network {text}"
    for each_cidr in snapshot.service_cidrs:
        for cidr in each_cidr.cidrs:
            yield cidr, f"is in the range of cluster IPs {cidr}"


def without(snapshot: Snapshot, found: Iterable[Finding]) -> Snapshot:
    """The cluster without the claims that were found; the Services stay, with what is theirs."""
    claims: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for each in found:
        claims.setdefault((each.namespace, each.name), set()).add((each.field, each.address))
    return dataclasses.replace(snapshot, services=tuple(_remaining(each, claims) for each in snapshot.services))


def _remaining(service: Service, claims: Mapping[tuple[str, str], set[tuple[str, str]]]) -> Service:
    gone = claims.get((service.namespace, service.name))
    if not gone:
        return service
    return dataclasses.replace(
        service,
        external_ips=tuple(ip for ip in service.external_ips if (EXTERNAL_IP, ip) not in gone),
        load_balancer_vips=tuple(ip for ip in service.load_balancer_vips if (LOAD_BALANCER, ip) not in gone),
    )


def under_policy(
    snapshot: Snapshot, config: ProxyConfig, policy: VipPolicy, known: Known = NOTHING
) -> tuple[Snapshot, tuple[Warned, ...]]:
    """The cluster as the policy lets it be, and what there is to say about it; or RefusedVips."""
    snapshot, too_much = _of_bearable_size(with_all_ingress(snapshot, config))
    found = check_vips(snapshot, config, policy, known)
    if found and policy.action == "refuse":
        raise RefusedVips(found)
    if policy.action == "omit":
        snapshot = without(snapshot, found)
    left_out = "; it is left out" if policy.action == "omit" else ""
    claimed = _told("claimed, but not theirs", found, left_out)
    services, lost = settle(snapshot.services, config, reserved(snapshot, config, policy, known))
    services, closed = settle_health_checks(services, *policy.health_check_ports)
    if services is not snapshot.services:
        snapshot = dataclasses.replace(snapshot, services=services)
    return snapshot, too_much + claimed + _told("claimed, and not granted", (*lost, *closed))


def _of_bearable_size(snapshot: Snapshot) -> tuple[Snapshot, tuple[Warned, ...]]:
    """The cluster without Services that no node would take, whatever their endpoints are."""
    reasons = {id(each): reason for each in snapshot.services if (reason := too_large(each))}
    if not reasons:
        return snapshot, ()
    gone = [each for each in snapshot.services if id(each) in reasons]
    told = (f"Service/{each.namespace}/{each.name}: {reasons[id(each)]}; it is left out" for each in gone)
    kept = tuple(each for each in snapshot.services if id(each) not in reasons)
    return dataclasses.replace(snapshot, services=kept), tuple(Warned("left out", text) for text in told)


def _told(heading: str, found: Iterable[Finding | Lost], end: str = "") -> tuple[Warned, ...]:
    """In words; a Service that claims a thousand things does not bury the claims of others."""
    counts: dict[tuple[str, str], int] = {}
    told = []
    for each in found:
        number = counts[each.namespace, each.name] = counts.get((each.namespace, each.name), 0) + 1
        if number <= MOST_TOLD:
            told.append(Warned(heading, f"{each}{end}"))
    for (namespace, name), count in counts.items():
        if count > MOST_TOLD:
            told.append(
                Warned(heading, f"Service/{namespace}/{name}: {count - MOST_TOLD:,} more claims like these{end}")
            )
    return tuple(told)
