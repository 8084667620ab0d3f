# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What all modes write: sysctls, the UDP frontends whose stale flows are cleaned up, and the table of services."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from ..addresses import endpoint_text
from ..proxy.endpoints import Endpoint
from ..proxy.services import ServicePort
from ..proxy.view import NodeView, PortView
from .compat import Compat
from .state import FrameObject, Object

SYSCTLS: Object = ("file", "sysctls.conf")
CONNTRACK: Object = ("file", "conntrack.udp")
SERVICES: Object = ("file", "services.jsonl")
HEALTH: Object = ("file", "health.conf")

_CONNTRACK_MAX_LIMIT = 1048576

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def forget_views(memories: Iterable[dict[tuple[PortView, K], V]], views: Iterable[PortView]) -> None:
    """Take views out of what a renderer remembers of them."""
    gone = set(views)
    for known in memories if gone else ():
        for key in [key for key in known if key[0] in gone]:
            del known[key]


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
    }


def health_lines(view: NodeView) -> str:
    """What load balancers are told: about the node, and at the health check port of each Service."""
    lines = [f"eligible {str(view.facts.eligible).lower()}\n", f"period {math.ceil(view.config.sync_period)}\n"]
    for family in view.families:
        name = family.family.value.lower()
        anywhere = "0.0.0.0" if name == "ipv4" else "::"
        addresses = (anywhere,) if family.node_ports.match_all else family.node_ports.ips
        lines += [f"listen {name} {ip}\n" for ip in addresses]
        lines += [f"check {name} {c.port} {c.namespace} {c.name} {c.local_endpoints}\n" for c in family.health_checks]
    return "".join(lines)


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


def service_line(view: PortView) -> str:
    """A service port as people see it, one line of JSON: its frontends and the endpoints this node uses."""
    record = service_record(view.port, view.selection.cluster, view.selection.local)
    return json.dumps(record, separators=(",", ":")) + "\n"


def service_record(port: ServicePort, endpoints: Iterable[Endpoint], local: Iterable[Endpoint]) -> dict[str, object]:
    """The members of such a line; what is not set is left out."""
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
        "endpoints": [endpoint.text for endpoint in endpoints],
        "localEndpoints": [endpoint.text for endpoint in local],
    }
    return {key: value for key, value in fields.items() if value}
