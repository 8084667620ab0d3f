# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""nftables mode.

Packets find their Service in maps: one element leads from a destination to a chain of the service port, so a lookup
costs the same for ten Services and for ten thousand. Every line below is a command that an operator could type after
`nft`, and the file of a bundle is such lines and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from ..addresses import Family, is_loopback
from ..proxy.compat import Compat
from ..proxy.endpoints import Endpoint
from ..proxy.facts import DetectLocal
from ..proxy.port_view import PortView
from ..proxy.view import FamilyView, NodeView
from .common import (
    CONNTRACK,
    SERVICES,
    Fragments,
    conntrack_sysctls,
    endpoint_variants,
    owner_of,
    service_line,
    shared_frame,
    udp_frontends,
)
from .names import nftables_endpoint_base, nftables_port_base
from .nftables_file import ADDRESS, BASE_CHAINS, CONTAINERS, NFT, container_object, element_line, rule_lines
from .state import Allowed, DispatchObject, EndpointsObject, Fragment, FrameObject, Object, State, fragment

# Longer comments of elements are refused, by nft and by the kernel.
COMMENT_LIMIT = 128


_CHAINS = (
    "nodeport-endpoints-check",
    "service-endpoints-check",
    "firewall-check",
    "cluster-ips-check",
    "services",
    "masquerading",
    "reject-chain",
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """What the rules of a service port depend on beside its view; equal on most nodes of a cluster."""

    compat: Compat
    family: Family
    mark: str
    detect_local: DetectLocal | None
    reject_on_localhost: tuple[str, ...]  # protocols whose node ports are rejected on the loopback address


class Renderer:
    """Writes down the state of nodes; what nodes share is written once."""

    def __init__(self, compat: Compat) -> None:
        self._compat = compat
        self._fragments: Fragments[_Context] = Fragments()

    def forget(self, views: Iterable[PortView]) -> None:
        """Views that are not asked for any more."""
        self._fragments.forget(views)

    def state(self, view: NodeView) -> State:
        """The state of one node."""
        frame = shared_frame(view, conntrack_sysctls(view))
        fragments: list[Fragment] = []
        for family in view.families:
            context = _Context(
                compat=self._compat,
                family=family.family,
                mark=f"{view.config.masquerade_mark:#010x}",
                detect_local=family.detect_local,
                reject_on_localhost=_rejected_protocols(view, family),
            )
            frame.update(_frame(view, family, context))
            fragments.extend(self._fragments.of(family, context, _fragment))
        return State(view.facts.name, "nftables", self._compat.minor, frame, tuple(fragments))


def _fragment(context: _Context, view: PortView, allows_node_ip: bool) -> Fragment:
    return _PortRules(context, view, allows_node_ip=allows_node_ip).fragment()


def _rejected_protocols(view: NodeView, family: FamilyView) -> tuple[str, ...]:
    """The protocols whose node ports are answered with a reject on the loopback address, if that is asked for."""
    if not view.config.feature("KubeProxyNFTablesLocalhostNodePorts"):
        return ()
    return ("udp", "sctp") if family.node_ports.contains_explicit_loopback else ("tcp", "udp", "sctp")


def _frame(view: NodeView, family: FamilyView, context: _Context) -> Iterator[tuple[Object, FrameObject]]:
    """The sets, maps and chains that exist whatever Services there are."""
    name = family.family.value
    keys: dict[str, Iterable[str]] = {
        "hairpin-connections": _hairpins(view.facts.name, family),
        "nodeport-ips": [ip for ip in family.node_ports.ips if not is_loopback(ip)],
    }
    for kind, container in CONTAINERS:
        if container == "nodeport-ips" and family.node_ports.match_all:
            continue
        if container == "localhost-nodeport-reject-ports" and not context.reject_on_localhost:
            continue
        elements = {element_line(name, container, key): key for key in keys.get(container, ())}
        yield container_object(name, kind, container), FrameObject("".join(elements), elements=elements)
    for protocol in context.reject_on_localhost:
        yield (name, "counter", f"localhost-nodeport-rejected-{protocol}"), FrameObject()
    rules = _static_rules(view, family, context)
    for chain in (*BASE_CHAINS, *_CHAINS, *(f"localhost-nodeport-reject-{p}" for p in context.reject_on_localhost)):
        yield (name, "chain", chain), FrameObject(rule_lines(name, chain, *rules[chain]))


def _hairpins(node: str, family: FamilyView) -> Iterable[str]:
    """Connections of the node's endpoints to themselves, which would never come back by way of the node."""
    return {
        f"{e.ip} . {e.ip} . {each.port.protocol} . {e.port}": None
        for each in family.local_ports
        for e in each.selection.all
        if e.node_name == node
    }


def _static_rules(view: NodeView, family: FamilyView, context: _Context) -> dict[str, tuple[str, ...]]:
    """The rules of the frame's chains."""
    ip, mark = NFT[family.family.value], context.mark
    loopback = "ip daddr 127.0.0.0/8" if family.family is Family.IPV4 else "ip6 daddr ::1"
    not_loopback = "ip daddr != 127.0.0.0/8" if family.family is Family.IPV4 else "ip6 daddr != ::1"
    if family.node_ports.match_all:
        node_port, local_node_port = not_loopback, f"fib daddr type local {not_loopback}"
    else:
        node_port = local_node_port = f"{ip} daddr @nodeport-ips"
    cluster_ips = [f'{ip} daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"']
    if family.service_cidrs:
        cidrs = " , ".join(family.service_cidrs)
        cluster_ips.append(f'{ip} daddr {{ {cidrs} }} drop comment "Drop traffic to unallocated ClusterIPs"')
    node_ports_check = [f"{node_port} meta l4proto . th dport vmap @no-endpoint-nodeports"]
    if context.reject_on_localhost:
        node_ports_check.append(f"{loopback} meta l4proto . th dport vmap @localhost-nodeport-reject-ports")
    services = []
    if view.config.masquerade_all:
        services.append(f'{ip} daddr @cluster-ips mark set mark or {mark} comment "masquerade all clusterIP traffic"')
    elif context.detect_local is not None:
        services.append(
            f"{ip} daddr @cluster-ips {_local_source(ip, context.detect_local, '!= ')} mark set mark or {mark} "
            'comment "masquerade clusterIP traffic from outside cluster"'
        )
    services += [
        f"{ip} daddr . meta l4proto . th dport vmap @service-ips",
        f"{local_node_port} meta l4proto . th dport vmap @service-nodeports",
    ]
    return {
        "filter-prerouting-pre-dnat": ("ct state new jump firewall-check",),
        "filter-output-pre-dnat": ("ct state new jump firewall-check",),
        "filter-input": ("ct state new jump nodeport-endpoints-check", "ct state new jump service-endpoints-check"),
        "filter-forward": ("ct state new jump service-endpoints-check", "ct state new jump cluster-ips-check"),
        "filter-output": ("ct state new jump service-endpoints-check", "ct state new jump cluster-ips-check"),
        "nat-prerouting": ("jump services",),
        "nat-output": ("jump services",),
        "nat-postrouting": ("jump masquerading",),
        "nodeport-endpoints-check": tuple(node_ports_check),
        "service-endpoints-check": (f"{ip} daddr . meta l4proto . th dport vmap @no-endpoint-services",),
        "firewall-check": (f"{ip} daddr . meta l4proto . th dport vmap @firewall-ips",),
        "cluster-ips-check": tuple(cluster_ips),
        "services": tuple(services),
        "masquerading": (
            f"mark and {mark} != 0 mark set mark xor {mark} masquerade fully-random",
            f"ct status dnat {ip} saddr . {ip} daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random",
        ),
        "reject-chain": ("reject",),
        **{
            f"localhost-nodeport-reject-{protocol}": (f'counter name "localhost-nodeport-rejected-{protocol}" reject',)
            for protocol in context.reject_on_localhost
        },
    }


def _local_source(ip: str, detect: DetectLocal, negation: str = "") -> str:
    """The match for packets of this node's pods, or of everybody else."""
    if detect.cidr:
        return f"{ip} saddr {negation}{detect.cidr}"
    return f'iifname {negation}"{detect.interface or detect.prefix + "*"}"'


class _PortRules:
    """The elements, chains and sets of one service port."""

    def __init__(self, context: _Context, view: PortView, *, allows_node_ip: bool) -> None:
        self._context = context
        self._view = view
        self._port = view.port
        self._allows_node_ip = allows_node_ip
        self._family = context.family.value
        self._ip = NFT[self._family]
        port = view.port
        self._names = (port.namespace, port.name, port.port_name, port.protocol)
        base = nftables_port_base(*self._names)
        self._service = f"service-{base}"
        self._local = f"local-{base}"
        self._external = f"external-{base}"
        self._firewall = f"firewall-{base}"

    def fragment(self) -> Fragment:
        """All that this service port contributes."""
        lines: dict[Object, dict[str, str]] = {}
        keys: dict[str, str] = {}
        for kind, container, key, value in self._elements():
            known = lines.setdefault(container_object(self._family, kind, container), {})
            line = known.setdefault(key, element_line(self._family, container, key + value))
            keys[line] = key
        opened = [(obj, "".join(elements.values())) for obj, elements in lines.items()]
        opened.append((SERVICES, service_line(self._view)))
        if udp := udp_frontends(self._view, self._context.compat):
            opened.append((CONNTRACK, udp))
        return fragment(
            owner_of(self._view),
            opened,
            self._objects(),
            elements=keys,
            allowed=Allowed((self._terms, self._port), self._allowed),
            terms=self._terms,
        )

    @property
    def _terms(self) -> str:
        """What its dispatch rules depend on beside the Service, whether or not it has endpoints and so the rules."""
        if not self._port.externally_accessible:
            return ""
        return f"{self._context.mark} {self._context.detect_local if self._port.external_policy_local else ''}"

    def _allowed(self) -> Iterator[str]:
        """Every element and rule of the dispatch files that this service port may ever have."""
        for view in endpoint_variants(self._view):
            rules = _PortRules(self._context, view, allows_node_ip=self._allows_node_ip)
            for kind, container, key, value in rules._elements():
                if isinstance(container_object(self._family, kind, container), DispatchObject):
                    yield element_line(self._family, container, key + value).rstrip("\n")
            if view.uses_external_chain:
                yield from rule_lines(self._family, self._external, *rules._external_rules()).splitlines()

    def _elements(self) -> Iterator[tuple[str, str, str, str]]:
        """Kind and name of a set or map, the key, and what follows it."""
        port, view, proto = self._port, self._view, self._port.protocol
        internal = self._local if port.internal_policy_local else self._service
        verdict = "drop" if view.selection.has_any else "goto reject-chain"
        no_endpoint = f' comment "{port.name_string[:COMMENT_LIMIT]}" : {verdict}'
        external = f" : goto {self._external}"

        yield "set", "cluster-ips", port.cluster_ip, ""
        key = f"{port.cluster_ip} . {proto} . {port.port}"
        if view.has_internal:
            yield "map", "service-ips", key, f" : goto {internal}"
        else:
            yield "map", "no-endpoint-services", key, no_endpoint
        for ip in (*port.external_ips, *port.load_balancer_vips):
            key = f"{ip} . {proto} . {port.port}"
            if view.selection.has_any:
                yield "map", "service-ips", key, external
            if not view.has_external:
                yield "map", "no-endpoint-services", key, no_endpoint
        if port.source_ranges:
            for ip in port.load_balancer_vips:
                yield "map", "firewall-ips", f"{ip} . {proto} . {port.port}", f" : goto {self._firewall}"
        if port.node_port:
            key = f"{proto} . {port.node_port}"
            if view.selection.has_any:
                yield "map", "service-nodeports", key, external
            if not view.has_external:
                yield "map", "no-endpoint-nodeports", key, no_endpoint
            if proto in self._context.reject_on_localhost:
                rejecting = f" : goto localhost-nodeport-reject-{proto}"
                yield "map", "localhost-nodeport-reject-ports", key, rejecting

    def _objects(self) -> Iterator[tuple[Object, str]]:
        """The chains and affinity sets of this service port alone."""
        view, selection = self._view, self._view.selection
        sticky: dict[str, str] = {}
        if self._port.sticky_seconds:
            sticky = {e.text: nftables_endpoint_base(*self._names, e.ip, e.port) for e in selection.all}
        for base in sticky.values():
            yield EndpointsObject((self._family, "set", f"affinity-{base}")), self._affinity_set(base)
        for endpoint in selection.all if sticky else ():
            base = sticky[endpoint.text]
            yield self._endpoints(
                f"endpoint-{base}", f"update @affinity-{base} {{ {self._ip} saddr }}", self._dnat(endpoint)
            )
        if view.uses_cluster_chain:
            yield self._endpoints(self._service, *self._load_balance(selection.cluster, sticky))
        if view.uses_local_chain:
            yield self._endpoints(self._local, *self._load_balance(selection.local, sticky))
        if view.uses_external_chain:
            rules = rule_lines(self._family, self._external, *self._external_rules())
            yield DispatchObject((self._family, "chain", self._external)), rules
        if self._port.load_balancer_vips and self._port.source_ranges:
            rules = rule_lines(self._family, self._firewall, self._firewall_rule())
            yield (self._family, "chain", self._firewall), rules

    def _endpoints(self, name: str, *rules: str) -> tuple[Object, str]:
        return EndpointsObject((self._family, "chain", name)), rule_lines(self._family, name, *rules)

    def _affinity_set(self, base: str) -> str:
        address, timeout = ADDRESS[self._family], self._port.sticky_seconds
        return (
            f"add set {self._ip} kube-proxy affinity-{base} "
            f"{{ type {address} ; flags dynamic,timeout ; timeout {timeout}s ; }}\n"
        )

    def _dnat(self, endpoint: Endpoint) -> str:
        return f"meta l4proto {self._port.protocol} dnat to {endpoint.text}"

    def _load_balance(self, endpoints: tuple[Endpoint, ...], sticky: dict[str, str]) -> Iterator[str]:
        """One of the endpoints at random; with affinity, the one of last time."""
        count = len(endpoints)
        if sticky:
            bases = [sticky[endpoint.text] for endpoint in endpoints]
            for base in bases:
                yield f"{self._ip} saddr @affinity-{base} goto endpoint-{base}"
            choices = " , ".join(f"{index} : goto endpoint-{base}" for index, base in enumerate(bases))
            yield f"numgen random mod {count} vmap {{ {choices} }}"
        elif count == 1 and self._context.compat.short_dnat:
            yield self._dnat(endpoints[0])
        else:
            choices = " , ".join(f"{index} : {e.ip} . {e.port}" for index, e in enumerate(endpoints))
            yield (
                f"meta l4proto {self._port.protocol} dnat {self._ip} addr . port "
                f"to numgen random mod {count} map {{ {choices} }}"
            )

    def _external_rules(self) -> Iterator[str]:
        """What comes to an external destination."""
        masquerade = f"mark set mark or {self._context.mark}"
        if not self._port.external_policy_local:
            yield f'{masquerade} comment "masquerade"'
        else:
            if self._context.detect_local is not None:
                source = _local_source(self._ip, self._context.detect_local)
                yield f'{source} goto {self._service} comment "short-circuit pod traffic"'
            yield f'fib saddr type local {masquerade} comment "masquerade local traffic"'
            yield f'fib saddr type local goto {self._service} comment "short-circuit local traffic"'
        if self._view.has_external:
            yield f"goto {self._local if self._port.external_policy_local else self._service}"

    def _firewall_rule(self) -> str:
        """Sources that may not use the load balancer addresses."""
        sources = list(self._port.source_ranges)
        if self._allows_node_ip:
            # A node that may connect does so from the very address that it connects to.
            sources += self._port.load_balancer_vips
        return f"{self._ip} saddr != {{ {' , '.join(sources)} }} drop"
