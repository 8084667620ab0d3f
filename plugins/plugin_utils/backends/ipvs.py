# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""ipvs mode.

The kernel's load balancer holds a virtual server per destination of a Service and a real server per endpoint. Its
addresses stand on the dummy device kube-ipvs0, so that packets for them reach it. iptables rules only decide what is
masqueraded, accepted or dropped; they ask ipsets instead of naming Services, so their number does not grow.

Rules, sets and virtual servers stand here as iptables-save, ipset save and ipvsadm -Sn print them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from ..addresses import Family, any_contains, endpoint_text, host_cidr, is_link_local_v6, is_loopback, parse_cidr
from ..cluster.objects import ANNOTATION_SCHEDULER
from ..proxy.compat import Compat
from ..proxy.config import Ipvs
from ..proxy.endpoints import Endpoint
from ..proxy.port_view import PortView
from ..proxy.services import ServicePort
from ..proxy.view import FamilyView, NodeView
from .common import (
    CONNTRACK,
    SERVICES,
    conntrack_sysctls,
    forget_views,
    owner_of,
    service_line,
    shared_frame,
    udp_frontends,
)
from .ipvs_file import REAL
from .ipvs_rules import FILTER_CHAINS, NAT_CHAINS, SETS, loop_back_rule, rules, set_name
from .state import EndpointsObject, Fragment, FrameObject, Object, State, fragment

SETTINGS: Object = ("file", "ipvs.conf")

MAXELEM = 65536  # kube-proxy's limit of a hash set; a set that needs more gets more

_SERVICE_OPTION = {"tcp": "-t", "udp": "-u", "sctp": "--sctp-service"}
_BITS = {name: 1 << index for index, name in enumerate(SETS)}
_PROTOCOL_NUMBER = {"tcp": 6, "udp": 17, "sctp": 132}


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """What a service port's text depends on beside its view; equal on most nodes of a cluster."""

    compat: Compat
    family: Family
    settings: Ipvs


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a service port is served on this node, as far as that is not the same on every node."""

    allows_node_ip: bool = False  # its source ranges contain the node
    elsewhere: tuple[str, ...] = ()  # its addresses that another interface holds already
    node_addresses: tuple[str, ...] = ()  # for its node port


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A fragment, and what the frame must know of it."""

    fragment: Fragment
    sets: int  # the sets it has entries in
    entries: int  # their number, in all sets


class Renderer:
    """Writes down the state of nodes; what nodes share is written once."""

    def __init__(self, compat: Compat) -> None:
        self._compat = compat
        self._pieces: dict[_Context, dict[tuple[PortView, _Place], _Piece]] = {}

    def forget(self, views: Iterable[PortView]) -> None:
        """Views that are not asked for any more."""
        forget_views(self._pieces.values(), views)

    def state(self, view: NodeView) -> State:
        """The state of one node."""
        frame = shared_frame(view, _sysctls(view))
        frame[SETTINGS] = FrameObject(_settings(view.config.ipvs))
        fragments: list[Fragment] = []
        for family in view.families:
            pieces = self._family_pieces(view, family)
            frame.update(_frame(view, family, pieces))
            fragments.extend(piece.fragment for piece in pieces)
        return State(view.facts.name, "ipvs", self._compat.minor, frame, tuple(fragments))

    def _family_pieces(self, view: NodeView, family: FamilyView) -> list[_Piece]:
        context = _Context(self._compat, family.family, view.config.ipvs)
        known = self._pieces.setdefault(context, {})
        held = set(_interface_addresses(view, family))
        node_addresses = _node_addresses(family, held)
        claimed = _claimed(family, set(node_addresses))
        pieces: list[_Piece] = []
        for each in family.ports:
            port = each.port
            place = _Place(
                bool(port.source_ranges) and family.allows_node_ip(port),
                tuple(ip for ip in (*port.external_ips, *port.load_balancer_vips) if ip in held),
                node_addresses if port.node_port else (),
            )
            if port.node_port:
                # The addresses of node ports are the node's own: no other node could use this text.
                pieces.append(_PortState(context, each, place).piece(claimed))
            else:
                made = known.get((each, place))
                if made is None:
                    made = known[each, place] = _PortState(context, each, place).piece(set())
                pieces.append(made)
        return pieces


def _sysctls(view: NodeView) -> Iterator[tuple[str, int]]:
    yield from conntrack_sysctls(view)
    yield "net.ipv4.vs.conntrack", 1
    # Between these kernels, reusing a port delayed the connection by a second unless told otherwise.
    if view.facts.kernel is not None and (4, 1) <= view.facts.kernel < (5, 9):
        yield "net.ipv4.vs.conn_reuse_mode", 0
    yield "net.ipv4.vs.expire_nodest_conn", 1
    yield "net.ipv4.vs.expire_quiescent_template", 1
    yield "net.ipv4.ip_forward", 1
    if view.config.ipvs.strict_arp:
        yield "net.ipv4.conf.all.arp_ignore", 1
        yield "net.ipv4.conf.all.arp_announce", 2


def _settings(ipvs: Ipvs) -> str:
    """What no listing shows: the timeouts of `ipvsadm --set` (0 leaves one as it is), and what is left alone."""
    timeouts = [int(seconds) for seconds in (ipvs.tcp_timeout, ipvs.tcp_fin_timeout, ipvs.udp_timeout)]
    lines = [f"timeouts {' '.join(map(str, timeouts))}\n"] if any(timeouts) else []
    return "".join(lines + [f"exclude {parse_cidr(cidr)}\n" for cidr in ipvs.exclude_cidrs])


def _interface_addresses(view: NodeView, family: FamilyView) -> Iterator[str]:
    """The node's addresses on its real interfaces."""
    colon = family.family is Family.IPV6
    for ip in view.facts.interface_addresses:
        if (":" in ip) is colon and not is_loopback(ip) and not is_link_local_v6(ip):
            yield ip


def _node_addresses(family: FamilyView, held: set[str]) -> tuple[str, ...]:
    """Where node ports are served."""
    if not any(each.port.node_port for each in family.ports):
        return ()
    if family.node_ports.match_all:
        return tuple(sorted(held))
    chosen = {ip for ip in family.node_ports.ips if not is_loopback(ip)}
    # Interfaces are listed with kube-ipvs0 among them, so what is bound there counts as well.
    networks = [cidr for cidr in family.node_ports.cidrs if not cidr.endswith(f"/{family.family.bits}")]
    hosts = {cidr.rpartition("/")[0] for cidr in family.node_ports.cidrs}
    for each in family.ports:
        for ip in _bound(each.port, held):
            if ip not in chosen and (ip in hosts or (networks and any_contains(networks, ip))):
                chosen.add(ip)
    return tuple(sorted(chosen))


def _bound(port: ServicePort, elsewhere: Iterable[str]) -> Iterator[str]:
    """The addresses that a service port needs on kube-ipvs0."""
    yield port.cluster_ip
    for ip in (*port.external_ips, *port.load_balancer_vips):
        if ip not in elsewhere:
            yield ip


def _claimed(family: FamilyView, node_addresses: set[str]) -> set[tuple[str, str]]:
    """Virtual servers on node addresses that are no node ports; a node port of that number has to stand back."""
    if not node_addresses:
        return set()
    return {
        (port.protocol, endpoint_text(ip, port.port))
        for port in (each.port for each in family.ports)
        for ip in (port.cluster_ip, *port.external_ips, *port.load_balancer_vips)
        if ip in node_addresses
    }


class _PortState:
    """What one service port needs in the kernel."""

    def __init__(self, context: _Context, view: PortView, place: _Place) -> None:
        self._context = context
        self._view = view
        self._port: ServicePort = view.port
        self._place = place
        self._family = context.family
        self._sets = 0
        self._entries = 0
        self._lines: dict[Object, list[str]] = {}

    def piece(self, claimed: set[tuple[str, str]]) -> _Piece:
        """All that it contributes, but no virtual server for a node port where another address claims it."""
        name = self._family.value
        self._cluster_ip()
        self._external_ips()
        self._load_balancer()
        self._node_port()
        opened = [(obj, "".join(lines)) for obj, lines in self._lines.items()]
        opened.append((SERVICES, service_line(self._view)))
        if udp := udp_frontends(self._view, self._context.compat):
            opened.append((CONNTRACK, udp))
        servers = self._virtual_servers(claimed)
        made = fragment(
            owner_of(self._view),
            opened,
            (((name, "ipvs", key), text) for key, text in servers),
        )
        return _Piece(made, self._sets, self._entries)

    def _add(self, name: str, *entries: str) -> None:
        own = set_name(name, self._family)
        lines = self._lines.setdefault((self._family.value, "ipset", own), [])
        lines.extend(f"add {own} {entry}\n" for entry in entries if f"add {own} {entry}\n" not in lines)
        self._sets |= _BITS[name]
        self._entries += len(entries)

    def _cluster_ip(self) -> None:
        port = self._port
        self._add("KUBE-CLUSTER-IP", f"{port.cluster_ip},{port.protocol}:{port.port}")
        self._add("KUBE-IPVS-IPS", *_bound(port, self._place.elsewhere))

    def _external_ips(self) -> None:
        port = self._port
        name = "KUBE-EXTERNAL-IP-LOCAL" if port.external_policy_local else "KUBE-EXTERNAL-IP"
        for ip in port.external_ips:
            self._add(name, f"{ip},{port.protocol}:{port.port}")

    def _load_balancer(self) -> None:
        port, proto, number = self._port, self._port.protocol, self._port.port
        for vip in port.load_balancer_vips:
            entry = f"{vip},{proto}:{number}"
            self._add("KUBE-LOAD-BALANCER", entry)
            if port.external_policy_local:
                self._add("KUBE-LOAD-BALANCER-LOCAL", entry)
            if not port.source_ranges:
                continue
            self._add("KUBE-LOAD-BALANCER-FW", entry)
            for cidr in port.source_ranges:
                # The kernel prints a network of one address without its length.
                source = cidr.removesuffix(f"/{self._family.bits}")
                self._add("KUBE-LOAD-BALANCER-SOURCE-CIDR", f"{entry},{source}")
            if self._place.allows_node_ip:
                # A node that may connect does so from the very address that it connects to.
                self._add("KUBE-LOAD-BALANCER-SOURCE-IP", f"{entry},{vip}")
            else:
                self._lines.setdefault((self._family.value, "filter", "KUBE-IPVS-OUT-FILTER"), []).append(
                    f"-A KUBE-IPVS-OUT-FILTER -s {host_cidr(vip)} -m ipvs --vproto {_PROTOCOL_NUMBER[proto]} "
                    f"--vaddr {vip} --vport {number} -j DROP\n"
                )

    def _node_port(self) -> None:
        port, addresses = self._port, self._place.node_addresses
        if port.node_port:
            if not addresses:
                return  # without an address for its node port, its health check port is not opened either
            names = ["KUBE-NODE-PORT-{}"] + ["KUBE-NODE-PORT-LOCAL-{}"] * port.external_policy_local
            for name in names:
                if port.protocol == "sctp":
                    self._add(name.format("SCTP-HASH"), *(f"{ip},sctp:{port.node_port}" for ip in addresses))
                else:
                    self._add(name.format(port.protocol.upper()), f"{port.node_port}")
        if port.health_check_node_port:
            self._add("KUBE-HEALTH-CHECK-NODE-PORT", f"{port.health_check_node_port}")

    def _virtual_servers(self, claimed: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Name and text of each; where this node has no endpoint of its own, Local policies use all endpoints."""
        port, selection = self._port, self._view.selection
        cluster, local = selection.cluster, selection.local or selection.cluster
        internal = local if port.internal_policy_local else cluster
        external = local if port.external_policy_local else cluster
        servers = {endpoint_text(port.cluster_ip, port.port): internal}
        for ip in (*port.external_ips, *port.load_balancer_vips):
            servers.setdefault(endpoint_text(ip, port.port), external)
        for ip in self._place.node_addresses:
            address = endpoint_text(ip, port.node_port)
            if (port.protocol, address) not in claimed:
                servers.setdefault(address, external)
        option, scheduler = _SERVICE_OPTION[port.protocol], self._scheduler()
        affinity = f" -p {port.sticky_seconds}" if port.sticky_seconds else ""
        # Maglev hashing only spreads the connections of one client if the port counts.
        flags = " -b mh-port" if scheduler == "mh" else ""
        for address, endpoints in servers.items():
            real = "".join(f"-a {option} {address} -r {e.text}{REAL}" for e in endpoints)
            yield f"{option} {address}", f"-A {option} {address} -s {scheduler}{affinity}{flags}\n{real}"

    def _scheduler(self) -> str:
        """A Service's own scheduler, if it has one; what is configured goes before what is annotated."""
        settings, port = self._context.settings, self._port
        own = _service_schedulers(settings).get(f"{port.namespace}/{port.name}", "")
        if not own and settings.scheduler_annotations:
            own = dict(port.annotations).get(ANNOTATION_SCHEDULER, "")
        return own or settings.scheduler


@functools.lru_cache(maxsize=8)
def _service_schedulers(settings: Ipvs) -> dict[str, str]:
    return dict(settings.service_schedulers)


def _loop_backs(view: NodeView, family: FamilyView) -> str:
    """Every endpoint of this node, whatever its conditions: a pod that reaches itself must not see its own address."""
    name = set_name("KUBE-LOOP-BACK", family.family)
    return "".join(
        f"add {name} {e.ip},{each.port.protocol}:{e.port},{e.ip}\n"
        for each in family.local_ports
        for e in _own_endpoints(each, view.facts.name)
    )


def _own_endpoints(view: PortView, node: str) -> Iterator[Endpoint]:
    return (e for e in view.endpoints if e.node_name == node)


def _frame(view: NodeView, family: FamilyView, pieces: list[_Piece]) -> Iterator[tuple[Object, FrameObject]]:
    """The chains and sets that exist whatever Services there are."""
    name = family.family.value
    loop_backs = _loop_backs(view, family)
    used = _BITS["KUBE-LOOP-BACK"] if loop_backs else 0
    for piece in pieces:
        used |= piece.sets
    limits = _limits(family.family, pieces, loop_backs)
    for each, (kind, _comment) in SETS.items():
        own = set_name(each, family.family)
        if kind == "bitmap:port":
            create = f"create {own} {kind} range 0-65535\n"
        else:
            inet = "inet" if family.family is Family.IPV4 else "inet6"
            create = f"create {own} {kind} family {inet} hashsize 1024 maxelem {limits.get(own, MAXELEM)}\n"
        if each == "KUBE-LOOP-BACK":
            yield EndpointsObject((name, "ipset", own)), FrameObject(create + loop_backs, fixed=create)
        else:
            yield (name, "ipset", own), FrameObject(create, fixed=create)
    written = rules(view, family, {each for each, bit in _BITS.items() if used & bit})
    for table, chains in (("filter", FILTER_CHAINS), ("nat", NAT_CHAINS)):
        for chain in chains:
            text = "".join(f"{rule}\n" for rule in written[table] if rule.split(None, 2)[1] == chain)
            follows = frozenset({loop_back_rule(family.family)}) if chain == "KUBE-POSTROUTING" else frozenset[str]()
            yield (name, table, chain), FrameObject(text, of_endpoints=follows)


def _limits(family: Family, pieces: list[_Piece], loop_backs: str) -> dict[str, int]:
    """The sets that need room for more entries than usual: the next power of two."""
    lengths = {set_name("KUBE-LOOP-BACK", family): loop_backs.count("\n")}
    if sum(piece.entries for piece in pieces) > MAXELEM:
        for piece in pieces:
            for obj, text in piece.fragment.open:
                if obj[1] == "ipset":
                    lengths[obj[2]] = lengths.get(obj[2], 0) + text.count("\n")
    return {name: 1 << (length - 1).bit_length() for name, length in lengths.items() if length > MAXELEM}
