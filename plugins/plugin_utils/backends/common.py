# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What all modes write: sysctls, the UDP frontends whose stale flows are cleaned up, and the table of services."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from ..addresses import endpoint_text
from ..proxy.compat import Compat
from ..proxy.endpoints import Endpoint
from ..proxy.port_view import PortView
from ..proxy.services import ServicePort
from ..proxy.topology import Selection
from ..proxy.view import FamilyView, NodeView
from .state import Delta, EndpointsObject, Fragment, FrameObject, Object, Owner, State

SYSCTLS: Object = ("file", "sysctls.conf")
CONNTRACK: Object = EndpointsObject(("file", "conntrack.udp"))
SERVICES: Object = EndpointsObject(("file", "services.jsonl"))
HEALTH: Object = ("file", "health.conf")
HEALTH_COUNTS: Object = EndpointsObject(("file", "health.counts"))
ALLOW_FILE = "frontends.allow"

_CONNTRACK_MAX_LIMIT = 1048576
_SOME_ENDPOINT = Endpoint("", "", 0, "", True, True, False, frozenset(), frozenset())

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def forget_views(memories: Iterable[dict[tuple[PortView, K], V]], views: Iterable[PortView]) -> None:
    """Take views out of what a renderer remembers of them."""
    gone = set(views)
    for known in memories if gone else ():
        for key in [key for key in known if key[0] in gone]:
            del known[key]


class Fragments(Generic[K]):
    """The fragments of service ports that were made so far, by all that they depend on beside the port."""

    def __init__(self) -> None:
        self._made: dict[K, dict[tuple[PortView, bool], Fragment]] = {}
        self._last: dict[K, tuple[tuple[PortView, ...], list[Fragment]]] = {}

    def of(self, family: FamilyView, context: K, make: Callable[[K, PortView, bool], Fragment]) -> list[Fragment]:
        """Those of a family of a node; what is not known yet is made, given whether its sources contain the node."""
        known = self._made.setdefault(context, {})
        ports, last = self._last.get(context, ((), []))
        found: list[Fragment | None] = [None] * len(family.ports)
        differing = list(enumerate(family.ports))
        if len(ports) == len(family.ports):
            # Most are those of the state before, of this node or of another.
            found = list(last)
            pairs = enumerate(zip(ports, family.ports, strict=True))
            differing = [(i, each) for i, (then, each) in pairs if each is not then or each.port.source_ranges]
        for index, each in differing:
            key = (each, bool(each.port.source_ranges) and family.allows_node_ip(each.port))
            made = known.get(key)
            if made is None:
                made = known[key] = make(context, each, key[1])
            found[index] = made
        whole = [each for each in found if each is not None]
        self._last[context] = (family.ports, whole)
        return whole

    def forget(self, views: Iterable[PortView]) -> None:
        """Views that are asked for no more."""
        forget_views(self._made.values(), views)


def conntrack_sysctls(view: NodeView) -> Iterator[tuple[str, int]]:
    """The conntrack settings of the configuration; 0 leaves the kernel's value alone."""
    wanted = view.config.conntrack
    if wanted.max_per_core > 0 and view.facts.cpus is not None:
        scaled = wanted.max_per_core * view.facts.cpus
        limit = _CONNTRACK_MAX_LIMIT if scaled > _CONNTRACK_MAX_LIMIT else max(scaled, wanted.min)
        yield "net.netfilter.nf_conntrack_max", limit
    for name, seconds in (
        ("tcp_timeout_established", wanted.tcp_established_timeout),
        ("tcp_timeout_close_wait", wanted.tcp_close_wait_timeout),
        ("udp_timeout", wanted.udp_timeout),
        ("udp_timeout_stream", wanted.udp_stream_timeout),
    ):
        if seconds > 0:
            yield f"net.netfilter.nf_conntrack_{name}", int(seconds)
    if wanted.tcp_be_liberal:
        yield "net.netfilter.nf_conntrack_tcp_be_liberal", 1


def shared_frame(view: NodeView, sysctls: Iterable[tuple[str, int]]) -> dict[Object, FrameObject]:
    """The files that a bundle has in every mode; service ports add their lines to two of them."""
    return {
        SYSCTLS: FrameObject("".join(f"{name} = {value}\n" for name, value in sysctls)),
        CONNTRACK: FrameObject(),
        SERVICES: FrameObject(),
        HEALTH: FrameObject(health_lines(view)),
        HEALTH_COUNTS: FrameObject(health_counts(view)),
    }


def health_lines(view: NodeView) -> str:
    """What load balancers may ask: at which addresses, and at which port for which Service."""
    lines = [f"period {math.ceil(view.config.sync_period)}\n"]
    for family in view.families:
        name = family.family.value.lower()
        anywhere = "0.0.0.0" if name == "ipv4" else "::"
        addresses = (anywhere,) if family.node_ports.match_all else family.node_ports.ips
        lines += [f"listen {name} {ip}\n" for ip in addresses]
        lines += [f"check {name} {c.port} {c.namespace} {c.name}\n" for c in family.health_checks]
    return "".join(lines)


def health_counts(view: NodeView) -> str:
    """What load balancers are told: whether the node takes traffic, and how many endpoints it has for each port."""
    lines = [f"eligible {str(view.facts.eligible).lower()}\n"]
    for family in view.families:
        name = family.family.value.lower()
        lines += [f"count {name} {check.port} {check.local_endpoints}\n" for check in family.health_checks]
    return "".join(lines)


def endpoint_variants(view: PortView) -> Iterator[PortView]:
    """A service port with no endpoint, with one elsewhere and with one here: all that dispatch can depend on."""
    some = (_SOME_ENDPOINT,)
    cluster = some if view.port.uses_cluster else ()
    for selection in (
        Selection(),
        Selection(cluster=cluster, all=cluster, has_any=True),
        Selection(cluster=cluster, local=some, all=some, has_any=True),
    ):
        yield dataclasses.replace(view, endpoints=some, selection=selection)


def allow_file(state: State) -> str:
    """frontends.allow of a full bundle: every line that its dispatch files may come to hold."""
    found = dict.fromkeys(state.allowed)
    for each in state.fragments:
        if each.allowed is not None:
            found.update(dict.fromkeys(each.allowed.lines))
    return "".join([f"+{line}\n" for line in found])


def allow_changes(change: Delta) -> str:
    """frontends.allow of a delta: the lines that go and come; empty if Services and node ask for the same lines."""
    old, new = dict.fromkeys(change.allowed[0]), dict.fromkeys(change.allowed[1])
    for then, now in change.pairs:
        before, after = then.allowed if then else None, now.allowed if now else None
        if before is not None and after is not None and not after.differs(before):
            continue
        old.update(dict.fromkeys(before.lines if before else ()))
        new.update(dict.fromkeys(after.lines if after else ()))
    return "".join(
        [f"-{line}\n" for line in old if line not in new] + [f"+{line}\n" for line in new if line not in old]
    )


def udp_frontends(view: PortView, compat: Compat) -> str:
    """The frontends of a UDP service port, each with the reply sources that its live flows may have."""
    port = view.port
    if port.protocol != "udp":
        return ""
    serving = ",".join(e.text for e in view.endpoints if e.serving)
    if not serving and not compat.cleans_unserved_udp:
        return ""
    family = port.family.value.lower()
    frontends = dict.fromkeys((port.cluster_ip, *port.load_balancer_vips, *port.external_ips))
    lines = [f"{family} {ip} {port.port} {serving or '-'}\n" for ip in frontends]
    if port.node_port and serving:
        lines.append(f"{family} * {port.node_port} {serving}\n")
    return "".join(lines)


def owner_of(view: PortView) -> Owner:
    """Whose fragment it is, and with how many endpoints."""
    port, selection = view.port, view.selection
    service = f"{port.namespace}/{port.name}"
    return Owner(port.key, port.family.value, service, len(selection.all), not selection.cluster)


def service_line(view: PortView) -> str:
    """A service port as people see it, one line of JSON: its frontends and the endpoints this node uses."""
    return record_line(view.port, view.selection.cluster, view.selection.local)


def record_line(
    port: ServicePort, endpoints: Iterable[Endpoint], local: Iterable[Endpoint], proxy_port: int = 0
) -> str:
    """Such a line with other endpoints; what is not set is left out."""
    fields: dict[str, object] = {
        "service": f"{port.namespace}/{port.name}",
        "port": port.port_name,
        "protocol": port.protocol,
        "family": port.family.value,
        "clusterIP": endpoint_text(port.cluster_ip, port.port),
        "nodePort": port.node_port,
        "externalIPs": port.external_ips,
        "loadBalancerIPs": port.load_balancer_vips,
        "sourceRanges": port.source_ranges,
        "affinitySeconds": port.sticky_seconds,
        "internalTrafficPolicy": "Local" if port.internal_policy_local else "",
        "externalTrafficPolicy": "Local" if port.external_policy_local else "",
        "healthCheckNodePort": port.health_check_node_port,
        "proxyPort": proxy_port,
        "endpoints": [endpoint.text for endpoint in endpoints],
        "localEndpoints": [endpoint.text for endpoint in local],
    }
    return json.dumps({key: value for key, value in fields.items() if value}, separators=(",", ":")) + "\n"
