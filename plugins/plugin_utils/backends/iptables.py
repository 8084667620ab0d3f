# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""iptables mode.

Every rule stands here in the form in which iptables-save prints it: what an operator reads on the node is what is
written below, and a difference between the two is a drift, found by comparing text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from ..addresses import Family, host_cidr
from ..proxy.compat import Compat
from ..proxy.endpoints import Endpoint
from ..proxy.facts import DetectLocal
from ..proxy.port_view import PortView
from ..proxy.services import ServicePort
from ..proxy.view import FamilyView, NodeView
from .common import (
    CONNTRACK,
    SERVICES,
    Fragments,
    endpoint_variants,
    owner_of,
    service_line,
    shared_frame,
    udp_frontends,
)
from .iptables_frame import (
    COUNTERS,
    INVALID_COUNTER,
    LOCALHOST_COUNTER,
    allowed_rules,
    chain_object,
    frame,
    node_port_jump,
    sysctls,
)
from .names import hash16
from .state import Allowed, DispatchObject, EndpointsObject, Fragment, FrameObject, Object, State, fragment

# Above this many endpoints kube-proxy leaves the comments of endpoint rules out.
LARGE_CLUSTER_ENDPOINTS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """What the rules of a service port depend on beside its view; equal on most nodes of a cluster."""

    compat: Compat
    family: Family
    masquerade_all: bool
    detect_local: DetectLocal | None
    large: bool
    count_localhost: bool


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
        objects = shared_frame(view, sysctls(view))
        objects[COUNTERS] = FrameObject(f"{INVALID_COUNTER}\n{LOCALHOST_COUNTER}\n" if view.facts.nfacct else "")
        fragments: list[Fragment] = []
        allowed: list[str] = []
        for family in view.families:
            objects.update(frame(view, family))
            fragments.extend(self._family_fragments(view, family))
            allowed.extend(allowed_rules(family.family, "nat", node_port_jump(family)))
        return State(view.facts.name, "iptables", self._compat.minor, objects, tuple(fragments), tuple(allowed))

    def _family_fragments(self, view: NodeView, family: FamilyView) -> list[Fragment]:
        context = _Context(
            compat=self._compat,
            family=family.family,
            masquerade_all=view.config.masquerade_all,
            detect_local=family.detect_local,
            large=family.total_endpoints > LARGE_CLUSTER_ENDPOINTS,
            count_localhost=family.localhost_node_ports and view.facts.nfacct,
        )
        return self._fragments.of(family, context, _fragment)


def _fragment(context: _Context, view: PortView, allows_node_ip: bool) -> Fragment:
    return _PortRules(context, view, allows_node_ip=allows_node_ip).fragment()


@functools.cache
def _probability(choices: int) -> str:
    """1/choices as the kernel holds it, in 31 bits, printed as iptables-save prints it."""
    return f"{int(float(f'{1 / choices:.10f}') * 2**31 + 0.5) / 2**31:.11f}"


class _PortRules:
    """The rules of one service port."""

    def __init__(self, context: _Context, view: PortView, *, allows_node_ip: bool) -> None:
        self._context = context
        self._view = view
        self._port: ServicePort = view.port
        self._allows_node_ip = allows_node_ip
        self._name = self._port.name_string
        self._family = context.family.value
        hashed = hash16(self._name + self._port.protocol)
        self._svc = f"KUBE-SVC-{hashed}"
        self._svl = f"KUBE-SVL-{hashed}"
        self._ext = f"KUBE-EXT-{hashed}"
        self._fw = f"KUBE-FW-{hashed}"
        self._uses_fw = bool(view.selection.has_any and self._port.load_balancer_vips and self._port.source_ranges)
        detect = context.detect_local
        # iptables-save prints a source before the destination and an interface after it.
        self._local_source = f"-s {detect.cidr} " if detect and detect.cidr else ""
        self._local_input = ""
        if detect and not detect.cidr:
            self._local_input = f"-i {detect.interface or detect.prefix + '+'} "

    def fragment(self) -> Fragment:
        """All that this service port contributes."""
        view = self._view
        filter_services, external_services, firewall, health = self._filter()
        services, node_ports = self._dispatch()
        lines = {
            ("filter", "KUBE-SERVICES"): filter_services,
            ("filter", "KUBE-EXTERNAL-SERVICES"): external_services,
            ("filter", "KUBE-PROXY-FIREWALL"): firewall,
            ("filter", "KUBE-NODEPORTS"): health,
            ("nat", "KUBE-SERVICES"): services,
            ("nat", "KUBE-NODEPORTS"): node_ports,
        }
        opened = [(chain_object(self._family, *key), text) for key, text in lines.items() if text]
        opened.append((SERVICES, service_line(view)))
        if udp := udp_frontends(view, self._context.compat):
            opened.append((CONNTRACK, udp))
        return fragment(
            owner_of(view),
            opened,
            self._chains(),
            allowed=Allowed((self._terms, self._port), self._allowed),
            terms=self._terms,
        )

    @property
    def _terms(self) -> str:
        """What its dispatch rules depend on beside the Service, whether or not it has endpoints and so the rules."""
        port, context = self._port, self._context
        local = f"{context.detect_local}" if port.external_policy_local and port.externally_accessible else ""
        return f"{local} {context.count_localhost}" if port.node_port else local

    def _allowed(self) -> Iterator[str]:
        """Every rule of dispatch chains that this service port may ever have."""
        family = self._context.family
        for view in endpoint_variants(self._view):
            rules = _PortRules(self._context, view, allows_node_ip=self._allows_node_ip)
            services, external, _firewall, _health = rules._filter()
            yield from allowed_rules(family, "nat", "".join(rules._dispatch()))
            yield from allowed_rules(family, "filter", services + external)
            if view.uses_external_chain:
                yield from allowed_rules(family, "nat", rules._external())

    def _filter(self) -> tuple[str, str, str, str]:
        """Rules of the filter table: destinations without endpoints, firewalls, health check ports."""
        port, name, proto = self._port, self._name, self._port.protocol
        services = external = ""
        reject = "icmp-port-unreachable" if self._context.family is Family.IPV4 else "icmp6-port-unreachable"
        if self._view.selection.has_any:
            reason, verdict = f'-m comment --comment "{name} has no local endpoints"', "DROP"
        else:
            reason, verdict = f'-m comment --comment "{name} has no endpoints"', f"REJECT --reject-with {reject}"
        if not self._view.has_internal:
            services = (
                f"-A KUBE-SERVICES -d {host_cidr(port.cluster_ip)} -p {proto} {reason} "
                f"-m {proto} --dport {port.port} -j {verdict}\n"
            )
        if not self._view.has_external:
            external = "".join(
                f"-A KUBE-EXTERNAL-SERVICES -d {host_cidr(ip)} -p {proto} {reason} "
                f"-m {proto} --dport {port.port} -j {verdict}\n"
                for ip in (*port.external_ips, *port.load_balancer_vips)
            )
            if port.node_port:
                external += (
                    f"-A KUBE-EXTERNAL-SERVICES -p {proto} {reason} -m addrtype --dst-type LOCAL "
                    f"-m {proto} --dport {port.node_port} -j {verdict}\n"
                )
        firewall = "".join(
            f'-A KUBE-PROXY-FIREWALL -d {host_cidr(ip)} -p {proto} -m comment --comment "{name} traffic not accepted by {self._fw}" '
            f"-m {proto} --dport {port.port} -j DROP\n"
            for ip in (port.load_balancer_vips if self._uses_fw else ())
        )
        health = ""
        if port.health_check_node_port:
            health = (
                f'-A KUBE-NODEPORTS -p tcp -m comment --comment "{name} health check node port" '
                f"-m tcp --dport {port.health_check_node_port} -j ACCEPT\n"
            )
        return services, external, firewall, health

    def _dispatch(self) -> tuple[str, str]:
        """Rules of the nat table that lead to this service port's chains."""
        port, name, proto = self._port, self._name, self._port.protocol
        services = node_ports = ""
        if self._view.has_internal:
            chain = self._svl if port.internal_policy_local else self._svc
            services = (
                f'-A KUBE-SERVICES -d {host_cidr(port.cluster_ip)} -p {proto} -m comment --comment "{name} cluster IP" '
                f"-m {proto} --dport {port.port} -j {chain}\n"
            )
        if not self._view.selection.has_any:
            return services, node_ports
        for ip in port.external_ips:
            services += (
                f'-A KUBE-SERVICES -d {host_cidr(ip)} -p {proto} -m comment --comment "{name} external IP" '
                f"-m {proto} --dport {port.port} -j {self._ext}\n"
            )
        for ip in port.load_balancer_vips:
            services += (
                f'-A KUBE-SERVICES -d {host_cidr(ip)} -p {proto} -m comment --comment "{name} loadbalancer IP" '
                f"-m {proto} --dport {port.port} -j {self._fw if self._uses_fw else self._ext}\n"
            )
        if port.node_port:
            if self._context.count_localhost:
                node_ports = (
                    f'-A KUBE-NODEPORTS -d 127.0.0.0/8 -p {proto} -m comment --comment "{name}" '
                    f"-m {proto} --dport {port.node_port} -m nfacct --nfacct-name {LOCALHOST_COUNTER} -j {self._ext}\n"
                )
            node_ports += (
                f'-A KUBE-NODEPORTS -p {proto} -m comment --comment "{name}" '
                f"-m {proto} --dport {port.node_port} -j {self._ext}\n"
            )
        return services, node_ports

    def _chains(self) -> Iterator[tuple[Object, str]]:
        """The service port's own chains of the nat table."""
        view, selection = self._view, self._view.selection
        prefix = self._name + self._port.protocol
        endpoint_chains = {e.text: "KUBE-SEP-" + hash16(prefix + e.text) for e in selection.all}
        masquerade = self._internal_masquerade()
        if view.uses_cluster_chain:
            mine = "" if self._port.internal_policy_local else masquerade
            yield self._endpoints(self._svc), mine + self._load_balance(self._svc, selection.cluster, endpoint_chains)
        if view.uses_local_chain:
            mine = masquerade if self._port.internal_policy_local else ""
            yield self._endpoints(self._svl), mine + self._load_balance(self._svl, selection.local, endpoint_chains)
        if view.uses_external_chain:
            yield DispatchObject((self._family, "nat", self._ext)), self._external()
        if self._uses_fw:
            yield (self._family, "nat", self._fw), self._firewall()
        for endpoint in selection.all:
            chain = endpoint_chains[endpoint.text]
            yield self._endpoints(chain), self._endpoint(chain, endpoint)

    def _endpoints(self, chain: str) -> Object:
        return EndpointsObject((self._family, "nat", chain))

    def _internal_masquerade(self) -> str:
        """Traffic to the cluster IP that did not start in a pod of this node needs its replies back through here."""
        port, proto = self._port, self._port.protocol
        if not self._view.has_internal:
            return ""
        if self._context.masquerade_all:
            source = interface = ""
        elif self._context.detect_local is not None:
            source = f"! {self._local_source}" if self._local_source else ""
            interface = f"! {self._local_input}" if self._local_input else ""
        else:
            return ""
        chain = self._svl if port.internal_policy_local else self._svc
        return (
            f"-A {chain} {source}-d {host_cidr(port.cluster_ip)} {interface}-p {proto} "
            f'-m comment --comment "{self._name} cluster IP" -m {proto} --dport {port.port} -j KUBE-MARK-MASQ\n'
        )

    def _external(self) -> str:
        """KUBE-EXT: what comes to an external destination."""
        ext, svc, name = self._ext, self._svc, self._name
        if not self._port.external_policy_local:
            rules = f'-A {ext} -m comment --comment "masquerade traffic for {name} external destinations" -j KUBE-MARK-MASQ\n'
            chain = svc
        else:
            rules = ""
            if self._context.detect_local is not None:
                rules = (
                    f"-A {ext} {self._local_source}{self._local_input}"
                    f'-m comment --comment "pod traffic for {name} external destinations" -j {svc}\n'
                )
            rules += f"""\
-A {ext} -m comment --comment "masquerade LOCAL traffic for {name} external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A {ext} -m comment --comment "route LOCAL traffic for {name} external destinations" -m addrtype --src-type LOCAL -j {svc}
"""
            chain = self._svl
        return f"{rules}-A {ext} -j {chain}\n" if self._view.has_external else rules

    def _firewall(self) -> str:
        """KUBE-FW: sources that may use the load balancer addresses; the others fall through and are dropped."""
        sources = list(self._port.source_ranges)
        if self._allows_node_ip:
            # A node that may connect does so from the very address that it connects to.
            sources += [host_cidr(ip) for ip in self._port.load_balancer_vips]
        rules = [
            f'-A {self._fw} -s {source} -m comment --comment "{self._name} loadbalancer IP" -j {self._ext}\n'
            for source in sources
        ]
        comment = f"other traffic to {self._name} will be dropped by KUBE-PROXY-FIREWALL"
        return "".join(rules) + f'-A {self._fw} -m comment --comment "{comment}"\n'

    def _load_balance(self, chain: str, endpoints: tuple[Endpoint, ...], chains: dict[str, str]) -> str:
        """One of the endpoints, each with the same probability; with affinity, the one of last time."""
        rules: list[str] = []
        comments = [
            "" if self._context.large else f'-m comment --comment "{self._name} -> {e.text}" ' for e in endpoints
        ]
        if self._port.sticky_seconds:
            rules = [
                f"-A {chain} {comment}-m recent --rcheck --seconds {self._port.sticky_seconds} --reap "
                f"--name {chains[e.text]} --mask {self._full_mask} --rsource -j {chains[e.text]}\n"
                for e, comment in zip(endpoints, comments, strict=True)
            ]
        last = len(endpoints)
        for index, endpoint in enumerate(endpoints):
            left = last - index
            chance = f"-m statistic --mode random --probability {_probability(left)} " if left > 1 else ""
            rules.append(f"-A {chain} {comments[index]}{chance}-j {chains[endpoint.text]}\n")
        return "".join(rules)

    @property
    def _full_mask(self) -> str:
        if self._context.family is Family.IPV4:
            return "255.255.255.255"
        return "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"

    def _endpoint(self, chain: str, endpoint: Endpoint) -> str:
        """KUBE-SEP: to one endpoint; a connection from the endpoint to itself must not keep its source."""
        proto = self._port.protocol
        comment = "" if self._context.large else f'-m comment --comment "{self._name}" '
        recent = ""
        if self._port.sticky_seconds:
            recent = f"-m recent --set --name {chain} --mask {self._full_mask} --rsource "
        return (
            f"-A {chain} -s {host_cidr(endpoint.ip)} {comment}-j KUBE-MARK-MASQ\n"
            f"-A {chain} -p {proto} {comment}{recent}-m {proto} -j DNAT --to-destination {endpoint.text}\n"
        )
