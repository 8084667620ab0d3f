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

from ..addresses import Family, host_cidr, is_loopback
from ..proxy.compat import Compat
from ..proxy.endpoints import Endpoint
from ..proxy.facts import DetectLocal
from ..proxy.services import ServicePort
from ..proxy.view import FamilyView, NodeView, PortView
from .common import (
    ALLOW_FILE,
    CONNTRACK,
    SERVICES,
    Fragments,
    allow_changes,
    allow_file,
    conntrack_sysctls,
    endpoint_variants,
    service_line,
    shared_frame,
    udp_frontends,
)
from .names import hash16
from .state import (
    Allowed,
    Delta,
    DispatchObject,
    EndpointsObject,
    Fragment,
    FrameObject,
    Object,
    Part,
    State,
    fragment,
    part_of,
)

# Above this many endpoints kube-proxy leaves the comments of endpoint rules out.
LARGE_CLUSTER_ENDPOINTS = 1000

INVALID_COUNTER = "ct_state_invalid_dropped_pkts"
LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"
COUNTERS: Object = ("file", "nfacct.rules")

CANARY_CHAIN = "KUBE-PROXY-CANARY"
MASQUERADE_CHAIN = "KUBE-MARK-MASQ"
FIREWALL_CHAIN = "KUBE-FIREWALL"  # kubelet has rules in it too
TOOLS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

_FILTER_CHAINS = (
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-FORWARD",
    "KUBE-NODEPORTS",
    "KUBE-PROXY-FIREWALL",
    FIREWALL_CHAIN,
    CANARY_CHAIN,
)
_NAT_CHAINS = ("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", MASQUERADE_CHAIN, CANARY_CHAIN)
# Chains whose rules come and go with the endpoints of service ports.
_DISPATCH = {
    ("nat", "KUBE-SERVICES"),
    ("nat", "KUBE-NODEPORTS"),
    ("filter", "KUBE-SERVICES"),
    ("filter", "KUBE-EXTERNAL-SERVICES"),
}

# In the order in which kube-proxy installs them; each goes to the top of its chain.
_JUMPS = {
    "filter": """\
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I INPUT -j KUBE-FIREWALL
-I OUTPUT -j KUBE-FIREWALL
""",
    "nat": """\
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
""",
}

_NODEPORTS_COMMENT = (
    '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain"'
)


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
        """Views that nobody will ask for any more."""
        self._fragments.forget(views)

    def state(self, view: NodeView) -> State:
        """The state of one node."""
        frame = shared_frame(view, _sysctls(view))
        frame[COUNTERS] = FrameObject(f"{INVALID_COUNTER}\n{LOCALHOST_COUNTER}\n" if view.facts.nfacct else "")
        fragments: list[Fragment] = []
        allowed: list[str] = []
        for family in view.families:
            frame.update(_frame(view, family))
            fragments.extend(self._family_fragments(view, family))
            allowed.extend(_allowed(family.family, "nat", _node_port_jump(family)))
        return State(view.facts.name, "iptables", self._compat.minor, frame, tuple(fragments), tuple(allowed))

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


def _sysctls(view: NodeView) -> Iterator[tuple[str, int]]:
    yield from conntrack_sysctls(view)
    if any(family.localhost_node_ports for family in view.families):
        yield "net.ipv4.conf.all.route_localnet", 1


def _frame(view: NodeView, family: FamilyView) -> Iterator[tuple[Object, FrameObject]]:
    """The chains that exist whatever Services there are."""
    name = family.family.value
    yield (name, "mangle", CANARY_CHAIN), FrameObject()
    rules = _static_rules(view, family)
    for table, chains in (("filter", _FILTER_CHAINS), ("nat", _NAT_CHAINS)):
        for chain in chains:
            head, tail = rules.get((table, chain), ("", ""))
            fixed = head if chain == FIREWALL_CHAIN else ""
            yield _static(name, table, chain), FrameObject(head, tail, fixed=fixed)


def _static(family: str, table: str, chain: str) -> Object:
    """The name of a chain of the frame."""
    name = (family, table, chain)
    return DispatchObject(name) if (table, chain) in _DISPATCH else name


def _allowed(family: Family, table: str, rules: str) -> Iterator[str]:
    """Rules as frontends.allow has them."""
    digit = "4" if family is Family.IPV4 else "6"
    return (f"{digit} {table} {rule}" for rule in rules.splitlines())


def _static_rules(view: NodeView, family: FamilyView) -> dict[tuple[str, str], tuple[str, str]]:
    """The rules before and after those of the service ports."""
    mark = f"{view.config.masquerade_mark:#x}"
    firewall = forward = ""
    if family.localhost_node_ports:
        firewall = (
            "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 "
            '-m comment --comment "block incoming localnet connections" '
            "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\n"
        )
    if not (view.facts.tcp_be_liberal or view.config.conntrack.tcp_be_liberal):
        counter = f"-m nfacct --nfacct-name {INVALID_COUNTER} " if view.facts.nfacct else ""
        forward = f"-A KUBE-FORWARD -m conntrack --ctstate INVALID {counter}-j DROP\n"
    forward += f"""\
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {mark}/{mark} -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
"""
    postrouting = f"""\
-A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark {mark}/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
"""
    return {
        ("filter", FIREWALL_CHAIN): (firewall, ""),
        ("filter", "KUBE-FORWARD"): (forward, ""),
        ("nat", "KUBE-POSTROUTING"): (postrouting, ""),
        ("nat", MASQUERADE_CHAIN): (f"-A KUBE-MARK-MASQ -j MARK --set-xmark {mark}/{mark}\n", ""),
        ("nat", "KUBE-SERVICES"): ("", _node_port_jump(family)),
    }


def _node_port_jump(family: FamilyView) -> str:
    """The way from KUBE-SERVICES to the node ports."""
    with_loopback = family.family is Family.IPV4 and family.localhost_node_ports
    if family.node_ports.match_all:
        unless = "" if with_loopback else f"! -d {family.family.loopback} "
        return f"-A KUBE-SERVICES {unless}{_NODEPORTS_COMMENT} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"
    return "".join(
        f"-A KUBE-SERVICES -d {host_cidr(ip)} {_NODEPORTS_COMMENT} -j KUBE-NODEPORTS\n"
        for ip in family.node_ports.ips
        if with_loopback or not is_loopback(ip)
    )


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
        opened = [(_static(self._family, *key), text) for key, text in lines.items() if text]
        opened.append((SERVICES, service_line(view)))
        if udp := udp_frontends(view, self._context.compat):
            opened.append((CONNTRACK, udp))
        return fragment(
            self._port.key,
            self._family,
            opened,
            self._chains(),
            service=f"{self._port.namespace}/{self._port.name}",
            endpoints=len(view.selection.all),
            idle=not view.selection.cluster,
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
            yield from _allowed(family, "nat", "".join(rules._dispatch()))
            yield from _allowed(family, "filter", services + external)
            if view.uses_external_chain:
                yield from _allowed(family, "nat", rules._external())

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


# ---------------------------------------------------------------- files


def files(state: State) -> Iterator[tuple[str, str]]:
    """The files of a full bundle."""
    opened = state.open_objects
    for family in Family:
        if (family.value, "mangle", CANARY_CHAIN) in opened:
            place = f"# node {state.node}, {state.mode} mode, {family.value}"
            head = f"{place}, generation {state.generation}\n"
            yield _name(family, Part.ENDPOINTS), head + _endpoints_file(state, family.value)
            yield _name(family, Part.DISPATCH), head + _dispatch_file(state, family.value, opened)
            # The same bytes as long as no frontend changes: that is what a node compares.
            yield _name(family, Part.FRONTENDS), f"{place}\n{_frontends_file(state, family.value, opened)}"
    for obj, text in opened.items():
        if obj[0] == "file":
            yield obj[1], text
    yield ALLOW_FILE, allow_file(state)


def _name(family: Family, part: Part) -> str:
    return f"{TOOLS[family]}-{part.value}.rules"


def marker_chain(generation: str) -> str:
    """The chain that names a generation; 28 characters are all that a name may have."""
    return f"KUBE-PROXY-GEN-{generation[:13].upper()}"


def marker(generation: str) -> str:
    """What makes that chain, with a rule that has the whole generation."""
    chain = marker_chain(generation)
    return f":{chain} - [0:0]\n-A {chain} -m comment --comment {generation}\n"


def demands(base: str, jumps: str) -> str:
    """What the kernel refuses where the base, or a jump to our chains, is not there. The base's marker goes."""
    chain = marker_chain(base)
    return f"-F {chain}\n-X {chain}\n" + "".join(f"-C{line[2:]}" for line in jumps.splitlines(keepends=True))


def chain_lines(chains: Iterable[tuple[Object, str]]) -> Iterator[str]:
    """Chains and then their rules, so that rules find each other's chains; chains that are there are emptied."""
    chains = tuple(chains)
    yield from (f":{obj[2]} - [0:0]\n" for obj, _text in chains)
    yield from (text for _obj, text in chains)


def table_text(table: str, *parts: Iterable[str]) -> str:
    """A table of a restore file; nothing if there is nothing in it."""
    text = "".join(line for lines in parts for line in lines)
    return f"*{table}\n{text}COMMIT\n" if text else ""


_ALL_SERVICES = "# all services\n"


def _own_chains(state: State, family: str, part: Part, declared: Part | None = None) -> Iterator[str]:
    """The chains of service ports, below the name of each; those of `declared` are made here and filled elsewhere."""
    for each in state.fragments:
        if each.family == family:
            chains = [(obj, text) for obj, text in each.own if part_of(obj) is part]
            early = [(obj, "") for obj, _text in each.own if part_of(obj) is declared]
            if chains or early:
                yield f"# {each.name}\n"
                yield from chain_lines([*early, *chains])


def _endpoints_file(state: State, family: str) -> str:
    """The chains that lead to endpoints."""
    return table_text("nat", [f":{MASQUERADE_CHAIN} - [0:0]\n"], _own_chains(state, family, Part.ENDPOINTS))


def _dispatch_file(state: State, family: str, opened: dict[Object, str]) -> str:
    """What leads to the chains of service ports, or refuses; and the marker, as only with this there is service."""
    nat, filter_ = (chain_lines(_chains(opened, family, table, Part.DISPATCH)) for table in ("nat", "filter"))
    own = _own_chains(state, family, Part.DISPATCH, declared=Part.FRONTENDS)
    mark = [marker(state.generation)]
    return table_text("nat", own, [_ALL_SERVICES], nat, mark) + table_text("filter", filter_, mark)


def _frontends_file(state: State, family: str, opened: dict[Object, str]) -> str:
    """What all service ports share, the firewalls of load balancers, and at last the jumps of the built-in chains."""
    own = _own_chains(state, family, Part.FRONTENDS)
    nat, filter_, mangle = (
        chain_lines(_chains(opened, family, table, Part.FRONTENDS)) for table in ("nat", "filter", "mangle")
    )
    return (
        table_text("nat", own, [_ALL_SERVICES], nat, [_JUMPS["nat"]])
        + table_text("filter", filter_, [_JUMPS["filter"]])
        + table_text("mangle", mangle)
    )


def _chains(objects: dict[Object, str], family: str, table: str, part: Part) -> list[tuple[Object, str]]:
    return [(obj, text) for obj, text in objects.items() if obj[:2] == (family, table) and part_of(obj) is part]


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """The files of a delta bundle: the changed chains whole, the stale ones deleted, and the new generation."""
    for family in Family:
        if (family.value, "mangle", CANARY_CHAIN) in state.frame:
            head = f"# node {state.node}, {state.mode} mode, {family.value}, {change.base} to {change.generation}\n"
            for part, text in _family_delta(change, family.value).items():
                if text:
                    yield _name(family, part), head + text
    for obj, text in change.changed.items():
        if obj[0] == "file":
            yield obj[1], text
    if allow := allow_changes(change):
        yield ALLOW_FILE, allow


def _family_delta(change: Delta, family: str) -> dict[Part, str]:
    """The texts of the three files. A chain goes at the end of a table, when nothing refers to it any more."""
    found = dict.fromkeys(Part, "")
    for table in ("nat", "filter"):
        sections: dict[Part, list[str]] = {}
        removed = [obj for obj in change.removed if obj[:2] == (family, table)]
        for part in Part:
            emptied = [(obj, "") for obj in removed if part_of(obj) is part]
            sections[part] = [*chain_lines([*_chains(change.changed, family, table, part), *emptied])]
        if sections[Part.DISPATCH] and table == "nat":
            # Load balancer addresses may lead to firewalls that are new.
            fresh = _chains(change.changed, family, table, Part.FRONTENDS)
            declared = [f":{obj[2]} - [0:0]\n" for obj, _text in fresh if obj not in change.before]
            sections[Part.DISPATCH] = [*declared, *sections[Part.DISPATCH]]
        last = max((part for part in Part if sections[part]), key=[*Part].index, default=Part.ENDPOINTS)
        sections[last] += [f"-X {obj[2]}\n" for obj in removed]
        sections[Part.ENDPOINTS] = [
            demands(change.base, _JUMPS[table]),
            *sections[Part.ENDPOINTS],
            marker(change.generation),
        ]
        for part, lines in sections.items():
            found[part] += table_text(table, lines)
    return found
