# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Windows nodes: the documents that kube-proxy gives to the Host Networking Service (HNS). A preview, never run there.

HNS balances connections itself. It is given endpoints, one for each address that it does not have yet, and load
balancers, one for each address and port at which a Service is reached. It names both by GUIDs, which exist on a node
only; here an endpoint is named by its address. One document is one line of hns.json.

    {"network": {"Name": "…", "Type": "Overlay"},
     "endpoints": [{"IpConfigurations": [{"IpAddress": "10.244.1.5"}], "Flags": 1, …}],
     "loadBalancers": [{"FrontendVIPs": ["10.96.0.10"], "HostComputeEndpoints": ["10.244.1.5"], …}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from ..addresses import Family, packed
from ..cluster.objects import ANNOTATION_PRESERVE
from ..proxy.compat import Compat
from ..proxy.endpoints import Endpoint
from ..proxy.facts import UnusableNode
from ..proxy.hns import HostNetwork
from ..proxy.port_view import PortView
from ..proxy.services import ServicePort
from ..proxy.view import FamilyView, NodeView
from .common import SERVICES, owner_of, record_line
from .state import Delta, EndpointsObject, Fragment, FrameObject, Object, State, fragment

Document: TypeAlias = dict[str, Any]

NETWORK: Object = ("network",)
_FILE = "hns.json"

PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
_SCHEMA = {"Major": 2, "Minor": 0}
# Flags of a load balancer
_DSR, IPV6_FLAG = 1, 2
# Flags of a port mapping
_LOCAL_ROUTED, _USE_MUX, _PRESERVE_DIP, _VIP_EXTERNAL = 2, 4, 8, 16
_REMOTE = 1  # flag of an endpoint
_BY_SOURCE = 2  # distribution: a client address stays with an endpoint


class Renderer:
    """Writes down the documents of Windows nodes."""

    def __init__(self, compat: Compat) -> None:
        self._compat = compat

    def state(self, view: NodeView) -> State:
        """The state of one node."""
        node = _Node(view)
        fragments = tuple(node.fragment(family, each) for family in view.families for each in family.ports)
        frame: dict[Object, FrameObject] = {SERVICES: FrameObject(), NETWORK: FrameObject(_text(node.network))}
        for ip in sorted(node.endpoints, key=packed):
            frame[EndpointsObject(("endpoint", ip))] = FrameObject(_text(node.endpoints[ip]))
        return State(view.facts.name, "kernelspace", self._compat.minor, frame, fragments)

    def forget(self, views: Iterable[PortView]) -> None:
        """Nothing is remembered: what a node writes depends on which pods are its own."""


class _Node:
    """A Windows node while its documents are written; service ports share endpoints and load balancers."""

    def __init__(self, view: NodeView) -> None:
        self._name = view.facts.name
        self._config = view.config
        self._hns = view.facts.hns or HostNetwork()
        self._winkernel = view.config.winkernel
        self.endpoints: dict[str, Document] = {}
        self._made: set[Object] = set()
        self._check()
        kind = "Overlay" if self._hns.overlay else "L2Bridge"
        self.network: Document = {"Name": self._winkernel.network_name, "Type": kind}
        if self._hns.overlay and not self._exists(self._winkernel.source_vip):
            document = _endpoint(self._winkernel.source_vip, self._hns.host_mac, remote=False)
            self.endpoints[self._winkernel.source_vip] = document

    def _check(self) -> None:
        """What kube-proxy would not start without."""
        if self._winkernel.enable_dsr and not self._hns.does_dsr:
            version = ".".join(map(str, self._hns.version))
            raise UnusableNode(f"node {self._name}: winkernel.enableDSR: HNS {version} has no direct server return")
        if self._hns.overlay and not self._winkernel.source_vip:
            raise UnusableNode(f"node {self._name}: an overlay network needs winkernel.sourceVip in the configuration")
        if self._hns.overlay and not self._hns.host_mac:
            raise UnusableNode(f"node {self._name}: an overlay network needs hns.hostMac in the facts of the node")

    def _exists(self, ip: str) -> bool:
        """Whether HNS has an endpoint of that address that the CNI plugin made."""
        return self._hns.endpoints is not None and ip in self._hns.endpoints

    def fragment(self, family: FamilyView, view: PortView) -> Fragment:
        """The load balancers of a service port; its endpoints go to `endpoints`."""
        port = view.port
        if self._hns.overlay and not self._exists(port.cluster_ip) and port.cluster_ip not in self.endpoints:
            document = _endpoint(port.cluster_ip, self._hns.host_mac, provider=family.node_ip)
            self.endpoints[port.cluster_ip] = document
        balanced = _Balanced(port, view.endpoints, self._name, self._hns)
        taken = [each for each in balanced.taken if self._found(each, family.node_ip)]
        local = [each for each in taken if self._is_pod_here(each)]
        own = []
        if taken:
            source = self._source_vip(taken, family.node_ip)
            for identity, document in self._load_balancers(balanced, taken, local, source):
                if identity not in self._made:
                    self._made.add(identity)
                    own.append((identity, _text(document)))
        line = record_line(port, taken, local)
        owner = owner_of(view)._replace(endpoints=len(taken), idle=False)
        return fragment(owner, [(SERVICES, line)], own)

    def _is_pod_here(self, endpoint: Endpoint) -> bool:
        """Whether HNS has an endpoint of that address that is not remote."""
        if self._hns.endpoints is None:
            return endpoint.node_name == self._name
        return endpoint.ip in self._hns.endpoints

    def _found(self, endpoint: Endpoint, node_ip: str) -> bool:
        """Whether HNS has an endpoint of that address, which is made for pods elsewhere."""
        if self._is_pod_here(endpoint) or endpoint.ip in self.endpoints:
            return True
        if endpoint.node_name == self._name:
            return False  # the CNI plugin makes it; until then there is nothing to send packets to
        provider = (self._hns.provider(endpoint.ip) or node_ip) if self._hns.overlay else ""
        self.endpoints[endpoint.ip] = _endpoint(endpoint.ip, _remote_mac(endpoint.ip), provider=provider)
        return True

    def _source_vip(self, taken: Iterable[Endpoint], node_ip: str) -> str:
        """What the source address is replaced by; to what is no pod the node itself speaks."""
        if not self._hns.overlay:
            return ""
        for each in taken:
            if each.node_name != self._name and self._hns.provider(each.ip) in ("", each.ip):
                return node_ip
        return self._winkernel.source_vip

    def _load_balancers(
        self, service: _Balanced, taken: list[Endpoint], local: list[Endpoint], source_vip: str
    ) -> Iterator[tuple[Object, Document]]:
        """A load balancer for each way to reach a service port, in the order in which kube-proxy makes them."""
        port, internal = service.port, service.taken[-1].port
        ipv6 = IPV6_FLAG if port.family is Family.IPV6 else 0
        dsr_if_local = _DSR if service.local else 0

        def balancer(
            vip: str, external: int, to: list[Endpoint], flags: int, mapping: int
        ) -> Iterator[tuple[Object, Document]]:
            if to:
                ips = [each.ip for each in to]
                affinity = _BY_SOURCE if port.sticky_seconds else 0
                ports = _mapping(port.protocol, internal, external, affinity, mapping)
                yield _load_balancer(vip, ports, ips, flags | ipv6, source_vip)

        dsr = _DSR if self._winkernel.enable_dsr else 0
        yield from balancer(port.cluster_ip, port.port, local if port.internal_policy_local else taken, dsr, 0)
        if port.node_port and service.available:
            to = local if service.local or service.preserve else taken
            yield from balancer("", port.node_port, to, dsr_if_local, _LOCAL_ROUTED | _VIP_EXTERNAL)
        for ip in port.external_ips if service.available else ():
            yield from balancer(ip, port.port, local if service.local else taken, dsr_if_local, _VIP_EXTERNAL)
        kept = _USE_MUX | _PRESERVE_DIP if service.preserve else 0
        for ip in port.load_balancer_vips:
            only_local = service.local or service.preserve
            to, flags = (local, _DSR) if only_local else (taken, 0)
            yield from balancer(ip, port.port, to, flags, _VIP_EXTERNAL | kept)
            root = self._hns.root_endpoint
            if self._winkernel.forward_health_check_vip and root and service.available:
                number = port.health_check_node_port or self._config.healthz_port
                yield _load_balancer(ip, _mapping(port.protocol, number, number, 0, kept), [root], 0, source_vip)


class _Balanced:
    """A service port as a Windows node sees it: which endpoints count, and what its policies mean there."""

    def __init__(self, port: ServicePort, endpoints: tuple[Endpoint, ...], node: str, hns: HostNetwork) -> None:
        self.port = port
        self.local = port.external_policy_local and hns.does_dsr
        self.preserve = dict(port.annotations).get(ANNOTATION_PRESERVE) == "true" and hns.does_dsr
        counted = [each for each in endpoints if not self.local or each.node_name == node]
        terminating = serving_none = False
        if port.load_balancer_vips:
            terminating = all(each.terminating for each in counted if each.ready or each.terminating)
            serving_none = not any(each.serving for each in counted)
        self.available = not terminating and not serving_none
        only_here = port.internal_policy_local and self.local
        self.taken = [
            each
            for each in endpoints
            if not (only_here and each.node_name != node)
            and (serving_none or ((each.ready or terminating) and each.serving))
        ]


def _remote_mac(ip: str) -> str:
    """The MAC address of an endpoint elsewhere, made of its address: no packet on the wire has it."""
    octets = packed(ip)
    return "-".join(["02", "11", *(f"{each:02x}" for each in (octets if len(octets) == 4 else octets[:-5:-1]))])


def _endpoint(ip: str, mac: str, *, provider: str = "", remote: bool = True) -> Document:
    document: Document = {"IpConfigurations": [{"IpAddress": ip}], "MacAddress": mac}
    if provider:
        policy = {"Type": "ProviderAddress", "Settings": {"ProviderAddress": provider}}
        document["Policies"] = [policy]
    if remote:
        document["Flags"] = _REMOTE
    return {**document, "Dns": {}, "Health": {"Extra": {}}, "SchemaVersion": _SCHEMA}


def _mapping(protocol: str, internal: int, external: int, distribution: int, flags: int) -> Document:
    """What is zero is left out, as in all documents."""
    mapping = {"Protocol": PROTOCOLS[protocol], "InternalPort": internal, "ExternalPort": external}
    return mapping | {k: v for k, v in (("DistributionType", distribution), ("Flags", flags)) if v}


def _load_balancer(vip: str, mapping: Document, ips: list[str], flags: int, source_vip: str) -> tuple[Object, Document]:
    """A document, and what HNS knows the load balancer by: an endpoint that is there twice counts as none."""
    odd = sorted(ip for ip in set(ips) if ips.count(ip) % 2)
    parts = (
        mapping["Protocol"],
        mapping["InternalPort"],
        mapping["ExternalPort"],
        vip,
        flags & IPV6_FLAG,
        ",".join(odd),
    )
    document: Document = {"HostComputeEndpoints": ips}
    if source_vip:
        document["SourceVIP"] = source_vip
    if vip:
        document["FrontendVIPs"] = [vip]
    document |= {"PortMappings": [mapping], "SchemaVersion": _SCHEMA}
    if flags:
        document["Flags"] = flags
    return ("loadBalancer", *map(str, parts)), document


def _text(document: Document) -> str:
    return json.dumps(document, separators=(",", ":"))


def files(state: State) -> Iterator[tuple[str, str]]:
    """Names and contents of the files of a full bundle."""
    endpoints = [text.head for obj, text in state.frame.items() if obj[0] == "endpoint"]
    balancers = [text for each in state.fragments for _obj, text in each.own]
    head = f'{{"network": {state.frame[NETWORK].head}'
    yield _FILE, f'{head},\n"endpoints": {_lines(endpoints)},\n"loadBalancers": {_lines(balancers)}}}\n'
    yield SERVICES[1], state.open_objects[SERVICES]


def _lines(documents: list[str]) -> str:
    """A JSON list with a line for each document, so that a difference of two files shows documents."""
    return "[\n" + ",\n".join(documents) + "]" if documents else "[]"


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """A delta of this mode would not be smaller than what a node compares anyway: it always gets the whole."""
    raise ValueError(f"node {state.node}: {change.generation} is given as a full bundle in kernelspace mode")
