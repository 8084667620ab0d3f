# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""userspace mode: portal rules lead every service port to a port of the node, where a proxy takes its endpoints in turn.

The rules are those of kube-proxy 1.25, the last release with this mode, in the form in which iptables-save prints them.
HAProxy carries TCP, and nginx carries UDP. Their files hold what follows from the cluster; all else that they are
told belongs to the node program, which puts it in front.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from ..addresses import Family, endpoint_text, family_of, host_cidr, is_loopback
from ..proxy.compat import Compat
from ..proxy.port_view import PortView
from ..proxy.view import FamilyView, NodeView
from .common import CONNTRACK, SERVICES, conntrack_sysctls, forget_views, owner_of, record_line, shared_frame
from .iptables_file import TOOLS, chain_lines, demands, marker, table_text
from .state import Delta, EndpointsObject, Fragment, FrameObject, Object, State, fragment

MINOR = "1.25"  # the last kube-proxy that has the mode
HAPROXY: Object = ("file", "haproxy.cfg")
NGINX: Object = ("file", "nginx.conf")
SERVERS_FILE = "haproxy.diff"  # of a delta
PORTS: Object = ("file", "ports.map")

_CHAINS = {
    "nat": ("KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST", "KUBE-NODEPORT-CONTAINER", "KUBE-NODEPORT-HOST"),
    "filter": ("KUBE-NODEPORT-NON-LOCAL",),
}
# Portals go first and node ports last: a node port may be the port of a cluster IP as well.
_JUMPS = {
    "nat": """\
-I PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
-I OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
-A PREROUTING -m addrtype --dst-type LOCAL -m comment \
--comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-CONTAINER
-A OUTPUT -m addrtype --dst-type LOCAL -m comment \
--comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-HOST
""",
    "filter": """\
-I INPUT -m comment --comment "Ensure that non-local NodePort traffic can flow" -j KUBE-NODEPORT-NON-LOCAL
""",
}
# HAProxy learns a client's endpoint once a connection to it stands. So the first call of a client goes on at once, and
# those that come with it wait a moment for what it finds.
_STICK = """\
    stick on src
    tcp-request inspect-delay 50ms
    tcp-request content accept if { src,table_server_id gt 0 } || { src_inc_gpc0 eq 1 } || WAIT_END
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """What a service port depends on beside its view and its proxy port; the host is another on every node."""

    family: Family
    host: str  # the node's address, which the proxy listens at as well
    bound: bool  # whether the proxy listens at that address alone
    udp_idle_timeout: float


class Renderer:
    """Writes down the state of nodes."""

    def __init__(self, _compat: Compat) -> None:
        # The mode ended with 1.25: whichever minor is asked for, its rules are these.
        self._made: dict[_Context, dict[tuple[PortView, int], Fragment]] = {}

    def forget(self, views: Iterable[PortView]) -> None:
        """Views that are not asked for any more."""
        forget_views(self._made.values(), views)

    def state(self, view: NodeView) -> State:
        """The state of one node."""
        frame = shared_frame(view, conntrack_sysctls(view))
        frame |= {HAPROXY: FrameObject(), NGINX: FrameObject(), PORTS: FrameObject()}
        fragments: list[Fragment] = []
        for family in view.families:
            for table, chains in _CHAINS.items():
                frame |= {(family.family.value, table, chain): FrameObject() for chain in chains}
            fragments.extend(self._family_fragments(view, family))
        return State(view.facts.name, "userspace", MINOR, frame, tuple(fragments))

    def _family_fragments(self, view: NodeView, family: FamilyView) -> Iterator[Fragment]:
        if is_loopback(family.node_ip):
            return  # a node without an address of this family has nowhere to listen
        bind = view.config.bind_address
        bound = bind not in ("0.0.0.0", "::") and family_of(bind) is family.family
        context = _Context(family.family, family.node_ip, bound, view.config.userspace.udp_idle_timeout)
        made = self._made.setdefault(context, {})
        for each in family.ports:
            port = each.port
            number = view.proxy_ports.get((port.namespace, port.name, port.port_name, port.protocol))
            if number is None:
                continue  # the range is used up
            known = made.get((each, number))
            if known is None:
                known = made[each, number] = _PortText(context, each, number).fragment()
            yield known


class _PortText:
    """What one service port adds to rules and to the files of the proxies."""

    def __init__(self, context: _Context, view: PortView, proxy_port: int) -> None:
        self._context = context
        self._view = view
        self._port = view.port
        self._proxy_port = proxy_port
        self._name = f'-m comment --comment "{view.port.name_string}"'
        to_host = f"DNAT --to-destination {endpoint_text(context.host, proxy_port)}"
        self._from_host = to_host
        self._from_container = to_host if context.bound else f"REDIRECT --to-ports {proxy_port}"

    def fragment(self) -> Fragment:
        """All that this service port contributes."""
        port, view = self._port, self._view
        family = self._context.family.value
        container, host = self._portals()
        node_container, node_host, non_local = self._node_ports()
        lines: dict[Object, str] = {
            (family, "nat", "KUBE-PORTALS-CONTAINER"): container,
            (family, "nat", "KUBE-PORTALS-HOST"): host,
            (family, "nat", "KUBE-NODEPORT-CONTAINER"): node_container,
            (family, "nat", "KUBE-NODEPORT-HOST"): node_host,
            (family, "filter", "KUBE-NODEPORT-NON-LOCAL"): non_local,
            HAPROXY: self._haproxy() if port.protocol == "tcp" else "",
            NGINX: self._nginx() if port.protocol == "udp" else "",
            PORTS: f"{port.protocol} {self._proxy_port} {port.name_string}\n",
            CONNTRACK: self._flows() if port.protocol == "udp" else "",
            SERVICES: record_line(port, view.selection.cluster, view.selection.local, self._proxy_port),
        }
        # Names that do not depend on the order: clients keep their endpoint when others come and go.
        servers = "".join(f"    server {e.ip}:{e.port} {e.text}\n" for e in view.proxied)
        return fragment(
            owner_of(view)._replace(idle=not view.proxied),
            [(obj, text) for obj, text in lines.items() if text],
            [(EndpointsObject(("haproxy", self._title)), servers)] if port.protocol == "tcp" else (),
        )

    def _portals(self) -> tuple[str, str]:
        """The rules for traffic to addresses of the Service: from elsewhere, and from the node itself."""
        port, name, proto = self._port, self._name, self._port.protocol
        container = host = ""
        for ip in dict.fromkeys((port.cluster_ip, *port.load_balancer_vips)):
            container += (
                f"-A KUBE-PORTALS-CONTAINER -d {host_cidr(ip)} -p {proto} {name} "
                f"-m {proto} --dport {port.port} -j {self._from_container}\n"
            )
            host += (
                f"-A KUBE-PORTALS-HOST -d {host_cidr(ip)} -p {proto} {name} "
                f"-m {proto} --dport {port.port} -j {self._from_host}\n"
            )
        for ip in dict.fromkeys(port.external_ips):
            container += (
                f"-A KUBE-PORTALS-CONTAINER -d {host_cidr(ip)} -p {proto} {name} "
                f"-m {proto} --dport {port.port} -m physdev ! --physdev-is-in -j {self._from_container}\n"
                f"-A KUBE-PORTALS-CONTAINER -d {host_cidr(ip)} -p {proto} {name} "
                f"-m {proto} --dport {port.port} -m addrtype --dst-type LOCAL -j {self._from_container}\n"
            )
            host += (
                f"-A KUBE-PORTALS-HOST -d {host_cidr(ip)} -p {proto} {name} "
                f"-m {proto} --dport {port.port} -m addrtype --dst-type LOCAL -j {self._from_host}\n"
            )
        return container, host

    def _node_ports(self) -> tuple[str, str, str]:
        """The rules for the node port: from elsewhere, from the node itself, and past a firewall to the proxy."""
        port, name, proto = self._port, self._name, self._port.protocol
        if not port.node_port:
            return "", "", ""
        return (
            f"-A KUBE-NODEPORT-CONTAINER -p {proto} {name} -m {proto} --dport {port.node_port} "
            f"-j {self._from_container}\n",
            f"-A KUBE-NODEPORT-HOST -p {proto} {name} -m {proto} --dport {port.node_port} -j {self._from_host}\n",
            f"-A KUBE-NODEPORT-NON-LOCAL -p {proto} {name} -m {proto} --dport {self._proxy_port} "
            "-m state --state NEW -j ACCEPT\n",
        )

    @property
    def _heading(self) -> str:
        return f"# {self._port.key} {self._context.family.value}\n"

    def _flows(self) -> str:
        """Where the kernel's UDP flows to this service port may lead: to the proxy port, at whichever address."""
        port, family = self._port, self._context.family.value.lower()
        addresses = dict.fromkeys((port.cluster_ip, *port.load_balancer_vips, *port.external_ips))
        frontends = [f"{ip} {port.port}" for ip in addresses] + [f"* {port.node_port}"] * bool(port.node_port)
        return "".join(f"{family} {frontend} *:{self._proxy_port}\n" for frontend in frontends)

    @property
    def _title(self) -> str:
        port = self._port
        return f"{port.namespace}.{port.name}" + (f":{port.port_name}" if port.port_name else "")

    def _haproxy(self) -> str:
        """A proxy for TCP, up to its servers. Without any it closes every connection at once."""
        port, ipv4 = self._port, self._context.family is Family.IPV4
        if self._context.bound:
            bind = endpoint_text(self._context.host, self._proxy_port)
        else:
            bind = f"*:{self._proxy_port}" if ipv4 else f":::{self._proxy_port} v6only"
        lines = [self._heading, f"listen {self._title}\n", f"    bind {bind}\n"]
        if port.sticky_seconds:
            kind = "ip" if ipv4 else "ipv6"
            lines.append(f"    stick-table type {kind} size 100k expire {port.sticky_seconds}s store gpc0 peers akp\n")
            lines.append(_STICK)
        return "".join(lines)

    def _nginx(self) -> str:
        """A proxy for UDP; none without endpoints, as nginx knows no upstream without servers."""
        port, ipv4 = self._port, self._context.family is Family.IPV4
        endpoints = self._view.proxied
        if not endpoints:
            return ""
        # A colon would begin the port of a host.
        title = f"{port.namespace}.{port.name}" + (f".{port.port_name}" if port.port_name else "")
        if self._context.bound:
            listen = endpoint_text(self._context.host, self._proxy_port)
        else:
            listen = f"{self._proxy_port}" if ipv4 else f"[::]:{self._proxy_port}"
        lines = [self._heading, f"upstream {title} {{\n"]
        if port.sticky_seconds:
            lines.append("    hash $remote_addr consistent;\n")
        lines += [f"    server {e.text};\n" for e in endpoints]
        lines += [
            "}\n",
            "server {\n",
            f"    listen {listen} udp{'' if ipv4 else ' ipv6only=on'};\n",
            f"    proxy_pass {title};\n",
            f"    proxy_timeout {max(1, round(self._context.udp_idle_timeout * 1000))}ms;\n",
            "}\n",
        ]
        return "".join(lines)


def files(state: State) -> Iterator[tuple[str, str]]:
    """The files of a full bundle."""
    opened = state.open_objects
    for family in Family:
        if (family.value, "nat", _CHAINS["nat"][0]) in opened:
            head = f"# node {state.node}, {state.mode} mode, {family.value}, generation {state.generation}\n"
            yield (
                f"{TOOLS[family]}.rules",
                head
                + "".join(
                    table_text(
                        table,
                        chain_lines(
                            ((family.value, table, chain), opened[family.value, table, chain]) for chain in chains
                        ),
                        [marker(state.generation)],
                        [_JUMPS[table]],
                    )
                    for table, chains in _CHAINS.items()
                ),
            )
    for obj, text in opened.items():
        if obj == HAPROXY:
            yield obj[1], "".join(_with_servers(each) for each in state.fragments)
        elif obj[0] == "file":
            yield obj[1], text


def _with_servers(made: Fragment) -> str:
    return "".join(text for obj, text in (*made.open, *made.own) if obj == HAPROXY or obj[0] == "haproxy")


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """The files of a delta: markers of generations, and the servers of HAProxy that go and come."""
    for family in Family:
        if (family.value, "nat", _CHAINS["nat"][0]) in state.frame:
            rules = f"# node {state.node}, {state.mode} mode, {family.value}, {change.base} to {change.generation}\n"
            for table, jumps in _JUMPS.items():
                rules += table_text(table, [demands(change.base, jumps)], [marker(change.generation)])
            yield f"{TOOLS[family]}.rules", rules
    servers = [
        line
        for obj, text in change.changed.items()
        if obj[0] == "haproxy"
        for line in _server_changes(obj, text, change)
    ]
    if servers:
        yield SERVERS_FILE, "".join(servers)
    for obj, text in change.changed.items():
        if obj[0] == "file":
            yield obj[1], text


def _server_changes(obj: Object, text: str, change: Delta) -> Iterator[str]:
    """Servers of a proxy that go, and those that come."""
    old, new = ([line.split()[2] for line in each.splitlines()] for each in (change.before.get(obj, ""), text))
    yield from (f"-{obj[1]} {each}\n" for each in old if each not in new)
    yield from (f"+{obj[1]} {each}\n" for each in new if each not in old)
