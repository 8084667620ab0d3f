# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which addresses Services may claim.

Whoever may write a Service can name any external IP in it, and every node then sends traffic to that address to the
endpoints of that Service. kube-proxy does so without a word. Here each such claim that reaches for somebody else's
address is found, and it can be left out or stop the run.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..addresses import endpoint_text, parse_cidr, parse_ip
from ..cluster.snapshot import Service, Snapshot
from .config import ProxyConfig
from .facts import own_addresses
from .warned import Warned

ACTIONS = ("warn", "omit", "refuse")

_SPECIAL = {
    "0.0.0.0/8": "is no address that anybody could have",
    "127.0.0.0/8": "is a loopback address",
    "169.254.0.0/16": "is a link-local address, where clouds serve credentials",
    "224.0.0.0/4": "is a multicast address",
    "255.255.255.255/32": "is the broadcast address",
    "::/128": "is no address that anybody could have",
    "::1/128": "is a loopback address",
    "fe80::/10": "is a link-local address",
    "ff00::/8": "is a multicast address",
}


class InvalidPolicy(Exception):
    """A policy that cannot be used; the message names the setting and its value."""


class RefusedVips(Exception):
    """Services claim addresses that the policy does not allow, and the policy says to stop."""

    def __init__(self, found: Iterable[Finding]) -> None:
        self.found = tuple(found)
        super().__init__("\n".join(str(each) for each in self.found))


@dataclasses.dataclass(frozen=True, slots=True)
class VipPolicy:
    """What Services may claim, and what becomes of a claim that is not allowed."""

    action: str = "warn"  # warn: as kube-proxy, and say so; omit: without that address; refuse: not at all
    external_ips: tuple[str, ...] | None = None  # CIDRs that externalIPs must lie in; None: anywhere
    load_balancer_ips: tuple[str, ...] | None = None  # the same for status.loadBalancer.ingress


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
    field: str  # externalIPs, loadBalancer, or empty for a conflict between Services
    address: str
    reason: str

    def __str__(self) -> str:
        where = f"Service/{self.namespace}/{self.name}"
        return f"{where}: {self.field} {self.address} {self.reason}" if self.field else f"{where}: {self.reason}"


def vip_policy(action: str, external: Iterable[str] | None, load_balancer: Iterable[str] | None) -> VipPolicy:
    """A policy from what somebody configured."""
    if action not in ACTIONS:
        raise InvalidPolicy(f"the VIP policy {action!r} is not one of {', '.join(ACTIONS)}")
    return VipPolicy(action, _cidrs("external IPs", external), _cidrs("load balancer IPs", load_balancer))


def _cidrs(what: str, given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    found = []
    for text in given:
        ip = parse_ip(str(text))
        cidr = parse_cidr(str(text) if ip is None else f"{ip}/{128 if ':' in ip else 32}")
        if cidr is None:
            raise InvalidPolicy(f"the CIDRs of {what}: {text!r} is neither a CIDR nor an address")
        found.append(cidr)
    return tuple(found)


class _Networks:
    """What lies in which network, found in a step per prefix length: clusters have thousands of pod CIDRs."""

    def __init__(self, networks: Iterable[tuple[str, str]]) -> None:
        self._known: dict[tuple[int, int], dict[int, str]] = {}
        for cidr, reason in networks:
            network = ipaddress.ip_network(cidr)
            shift = network.max_prefixlen - network.prefixlen
            self._known.setdefault((network.version, shift), {}).setdefault(
                int(network.network_address) >> shift, reason
            )

    def reason(self, address: str) -> str:
        """The first reason not to use an address; empty if there is none."""
        ip = ipaddress.ip_address(address)
        number = int(ip)
        for (version, shift), known in self._known.items():
            if version == ip.version and (found := known.get(number >> shift)):
                return found
        return ""


def check_vips(
    snapshot: Snapshot, config: ProxyConfig, policy: VipPolicy, known: Known = NOTHING
) -> tuple[Finding, ...]:
    """Every claim of a Service that the policy does not allow, in the order of their names."""
    taken = _Networks(_taken(snapshot, config, known))
    interfaces = {ip: node.name for node in reversed(snapshot.nodes) for ip in known.interfaces.get(node.name, ())}
    allowed = {
        "externalIPs": (policy.external_ips, _allow(policy.external_ips)),
        "loadBalancer": (policy.load_balancer_ips, _allow(policy.load_balancer_ips)),
    }
    found = []
    for service in snapshot.services:
        for field, address in _claims(service, config):
            cidrs, networks = allowed[field]
            reason = taken.reason(address)
            # What a load balancer brought to a node, its controller wrote down; who may write externalIPs is another.
            if not reason and field == "externalIPs" and address in interfaces and _host(address) not in (cidrs or ()):
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
        yield from (("externalIPs", ip) for ip in service.external_ips)
    yield from (("loadBalancer", ip) for ip in service.load_balancer_vips)


def api_servers(snapshot: Snapshot) -> tuple[str, ...]:
    """Where the API server is, as it says itself."""
    own = (each for each in snapshot.slices if (each.namespace, each.service) == ("default", "kubernetes"))
    return tuple(endpoint.address for each in own for endpoint in each.endpoints)


def _literal(url: str) -> str | None:
    """The address in a URL that has one instead of a name."""
    try:
        return parse_ip(urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return None


def _taken(snapshot: Snapshot, config: ProxyConfig, known: Known) -> Iterator[tuple[str, str]]:
    """Networks that belong to somebody, the narrowest first."""
    for node in snapshot.nodes:
        for sort, text in node.addresses:
            ip = parse_ip(text) if sort in ("InternalIP", "ExternalIP") else None
            if ip is not None:
                yield _host(ip), f"is an address of the node {node.name}"
    for ip in (*api_servers(snapshot), _literal(known.url)):
        if ip is not None:
            yield _host(ip), "is an address of the API server"
    for service in snapshot.services:
        for ip in dict.fromkeys((service.cluster_ip, *service.cluster_ips)):
            yield _host(ip), f"is the cluster IP of {service.namespace}/{service.name}"
    for node in snapshot.nodes:
        for cidr in node.pod_cidrs:
            yield cidr, f"is in the pod CIDR {cidr} of the node {node.name}"
    for text in config.cluster_cidrs:
        yield parse_cidr(text) or text, f"is in the pod network {text}"
    for each_cidr in snapshot.service_cidrs:
        for cidr in each_cidr.cidrs:
            yield cidr, f"is in the range of cluster IPs {cidr}"
    yield from _SPECIAL.items()


def _host(ip: str) -> str:
    return f"{ip}/{128 if ':' in ip else 32}"


def conflicts(snapshot: Snapshot, config: ProxyConfig) -> tuple[Finding, ...]:
    """Services that claim the same address, protocol and port; only one of them can have the traffic."""
    owners: dict[tuple[str, str, int], Service] = {}
    found: dict[tuple[str, str, str, str], Finding] = {}
    for service in snapshot.services:
        for destination in _destinations(service, config):
            owner = owners.setdefault(destination, service)
            if owner is not service:
                ip, protocol, port = destination
                where = f"{endpoint_text(ip, port)}/{protocol}" if ip else f"node port {port}/{protocol}"
                reason = f"claims {where}, as {owner.namespace}/{owner.name} does"
                key = (service.namespace, service.name, where, owner.name)
                found[key] = Finding(service.namespace, service.name, "", ip, reason)
    return tuple(found.values())


def _destinations(service: Service, config: ProxyConfig) -> Iterator[tuple[str, str, int]]:
    addresses = dict.fromkeys(
        (service.cluster_ip, *service.cluster_ips, *(ip for _field, ip in _claims(service, config)))
    )
    for port in service.ports:
        yield from ((ip, port.protocol, port.port) for ip in addresses)
        if port.node_port:
            yield "", port.protocol, port.node_port
    if service.health_check_node_port:
        yield "", "tcp", service.health_check_node_port


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
        external_ips=tuple(ip for ip in service.external_ips if ("externalIPs", ip) not in gone),
        load_balancer_vips=tuple(ip for ip in service.load_balancer_vips if ("loadBalancer", ip) not in gone),
    )


def under_policy(
    snapshot: Snapshot, config: ProxyConfig, policy: VipPolicy, known: Known = NOTHING
) -> tuple[Snapshot, tuple[Warned, ...]]:
    """The cluster as the policy lets it be, and what there is to say about it; or RefusedVips."""
    found = check_vips(snapshot, config, policy, known)
    if found and policy.action == "refuse":
        raise RefusedVips(found)
    if policy.action == "omit":
        snapshot = without(snapshot, found)
    left_out = "; it is left out" if policy.action == "omit" else ""
    claimed = tuple(Warned("claimed, but not theirs", f"{each}{left_out}") for each in found)
    twice = tuple(Warned("claimed by more than one", str(each)) for each in conflicts(snapshot, config))
    return snapshot, claimed + twice
