# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Questions as people ask them: who sends to whom. A wrong one is answered with the nearest right one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from ..addresses import Family, any_contains, endpoint_text, family_of, parse_cidr, parse_ip
from ..cluster.snapshot import Node, Service, Snapshot
from ..errors import UserError
from .intent import Place
from .packet import Origin
from .suggestions import listed, near, same_name

PROTOCOLS = ("tcp", "udp", "sctp")
_DESTINATION = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^\[\]/]+?)):(?P<port>\d{1,5})(?:/(?P<protocol>\w+))?")
_SERVICE = re.compile(
    r"(?P<namespace>[a-z0-9.-]+)/(?P<name>[a-z0-9-]+)(?::(?P<port>[a-z0-9-]+)(?:/(?P<protocol>\w+))?)?"
)


class WrongQuestion(UserError):
    """A question that has no answer; the message ends with a right one that is near."""


class UnclearDestination(WrongQuestion):
    """A destination of no form that is known; what it may mean, the Services of the cluster tell."""


class NoService(WrongQuestion):
    """A Service that is not there, or has no rules."""


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """Where a packet shall go: an address, or a Service whose address depends on the family of the source."""

    address: str = ""
    port: int = 0
    protocol: str = ""
    service: tuple[str, str] = ("", "")  # namespace and name
    port_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sender:
    """Who sends: an address, and what is known about it."""

    address: str
    origin: Origin
    pod: str = ""  # namespace/name
    node: str = ""  # where the pod runs, or the node that has the address


def parse_destination(text: str, nodes: Iterable[Node] = ()) -> Destination:
    """ADDR:PORT[/PROTO], NODE:PORT[/PROTO], localhost:PORT or NAMESPACE/SERVICE[:PORT[/PROTO]]."""
    match = _DESTINATION.fullmatch(text)
    if match and parse_ip(_host(match)) is None and "/" in _host(match):
        match = None
    if match:
        address = _address(_host(match), nodes)
        port, protocol = int(match["port"]), (match["protocol"] or "tcp").lower()
        if address and 0 < port < 65536 and protocol in PROTOCOLS:
            return Destination(address, port, protocol)
        if protocol not in PROTOCOLS:
            raise WrongQuestion(f"--to {text}: {protocol} is not one of {', '.join(PROTOCOLS)}")
        if not address:
            found = near(_host(match), [node.name for node in nodes])
            raise UnclearDestination(f"--to {text}: {_host(match)} is neither an address nor a Node{found}")
        raise WrongQuestion(f"--to {text}: a port is between 1 and 65535")
    named = _SERVICE.fullmatch(text)
    if named:
        protocol = (named["protocol"] or "").lower()
        return Destination(
            service=(named["namespace"], named["name"]), port_name=named["port"] or "", protocol=protocol
        )
    if (ip := parse_ip(text.strip("[]"))) is not None:
        raise WrongQuestion(f"--to {text}: which port? Say for example --to {endpoint_text(ip, 80)}/tcp")
    raise UnclearDestination(
        f"--to {text}: must be ADDRESS:PORT/PROTOCOL, such as 10.96.0.10:53/udp or [fd00::1]:80/tcp, or "
        "NAMESPACE/SERVICE:PORT, such as kube-system/kube-dns:dns"
    )


def _host(match: re.Match[str]) -> str:
    return match["v6"] or match["host"] or ""


def _address(host: str, nodes: Iterable[Node]) -> str:
    if host == "localhost":
        return "127.0.0.1"
    own = [ip for node in nodes if node.name == host for sort, ip in node.addresses if sort == "InternalIP"]
    return parse_ip(host) or (own[0] if own else "")


def known_node(snapshot: Snapshot, name: str) -> Node:
    """The Node of that name."""
    node = snapshot.node(name)
    if node is None:
        names = [each.name for each in snapshot.nodes]
        raise WrongQuestion(f"--node {name}: the cluster has no such Node{near(name, names) or listed(names)}")
    return node


def sender(snapshot: Snapshot, place: Place, text: str, family: Family | None) -> Sender:
    """Who sends, from an address, NAMESPACE/POD or the name of a Node."""
    name = place.view.facts.name
    address = parse_ip(text.strip("[]")) if text != "localhost" else "127.0.0.1"
    if address is not None:
        return _by_address(snapshot, place, address)
    if "/" in text:
        return _by_pod(snapshot, place, text, family)
    node = snapshot.node(text)
    if node is None:
        pods = [f"{namespace}/{pod}" for namespace, pod, _ip, _node in _pods(snapshot)]
        names = [each.name for each in snapshot.nodes]
        found = same_name(pods, text) or near(text, [*names, *pods]) or f"; Nodes are {', '.join(names[:5])}"
        raise WrongQuestion(f"--from {text}: is no address, no Pod as NAMESPACE/NAME, and no Node{found}")
    own = [ip for sort, ip in node.addresses if sort in ("InternalIP", "ExternalIP") and parse_ip(ip)]
    fitting = [ip for ip in own if family is None or family_of(ip) is family]
    if not fitting:
        raise WrongQuestion(f"--from {text}: this Node has no address of the family of the destination{listed(own)}")
    return Sender(fitting[0], Origin.NODE if node.name == name else Origin.OUTSIDE, node=node.name)


def _by_address(snapshot: Snapshot, place: Place, address: str) -> Sender:
    name = place.view.facts.name
    if place.is_own(address):
        return Sender(address, Origin.NODE, node=name)
    known = next(((f"{ns}/{pod}", node) for ns, pod, ip, node in _pods(snapshot) if ip == address), None)
    if known is not None and known[1]:
        return Sender(address, Origin.POD if known[1] == name else Origin.OUTSIDE, pod=known[0], node=known[1])
    for node in snapshot.nodes:
        if any(ip == address for _sort, ip in node.addresses):
            return Sender(address, Origin.OUTSIDE, node=node.name)
    here = any_contains(place.view.facts.pod_cidrs, address) or _is_stray_pod(snapshot, place, address)
    pod = known[0] if known else ""
    return Sender(address, Origin.POD if here else Origin.OUTSIDE, pod=pod, node=name if here else "")


def _is_stray_pod(snapshot: Snapshot, place: Place, address: str) -> bool:
    """Whether an address is a pod's, and of no other node: not every Node tells pod CIDRs of both families."""
    cidrs = [parse_cidr(each) or "" for each in place.view.config.cluster_cidrs]
    others = (cidr for node in snapshot.nodes for cidr in node.pod_cidrs)
    own = [cidr for cidr in place.view.facts.pod_cidrs if family_of(cidr) is family_of(address)]
    return not own and any_contains(filter(None, cidrs), address) and not any_contains(others, address)


def _by_pod(snapshot: Snapshot, place: Place, text: str, family: Family | None) -> Sender:
    found = [(ip, node) for ns, pod, ip, node in _pods(snapshot) if f"{ns}/{pod}" == text]
    fitting = [each for each in found if family is None or family_of(each[0]) is family]
    if not found:
        behind = dict.fromkeys(f"{ns}/{pod}" for ns, pod, _ip, _node in _pods(snapshot, of=text))
        if behind:
            raise WrongQuestion(f"--from {text}: is a Service; ask for one of its Pods{listed(list(behind))}")
        names = dict.fromkeys(f"{ns}/{pod}" for ns, pod, _ip, _node in _pods(snapshot))
        raise WrongQuestion(
            f"--from {text}: no EndpointSlice names such a Pod{near(text, list(names))}; "
            "ask by its address where it is behind no Service"
        )
    if not fitting:
        raise WrongQuestion(f"--from {text}: this Pod has no address of the family of the destination")
    ip, node = fitting[0]
    if place.is_own(ip):
        return Sender(ip, Origin.NODE, pod=text, node=node)
    return Sender(ip, Origin.POD if node == place.view.facts.name else Origin.OUTSIDE, pod=text, node=node)


def _pods(snapshot: Snapshot, of: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Namespace, name, address and node of every Pod that an EndpointSlice names, or one of a Service."""
    for each in snapshot.slices:
        if of and f"{each.namespace}/{each.service}" != of:
            continue
        for endpoint in each.endpoints:
            if endpoint.pod:
                yield each.namespace, endpoint.pod, endpoint.address, endpoint.node_name


def resolved(snapshot: Snapshot, destination: Destination, family: Family | None) -> tuple[str, int, str]:
    """Address, port and protocol of a destination."""
    if destination.address:
        return destination.address, destination.port, destination.protocol
    namespace, name = destination.service
    service = known_service(snapshot.services, namespace, name)
    ips = [ip for ip in service.cluster_ips if family is None or family_of(ip) is family]
    if not ips:
        raise WrongQuestion(
            f"--to {namespace}/{name}: the source is an address of {family.value if family else 'a family'}, and the "
            f"Service has none: it has {', '.join(service.cluster_ips)}"
        )
    port = _port(service, destination)
    return ips[0], port[0], port[1]


def known_service(services: Iterable[Service], namespace: str, name: str) -> Service:
    """The Service of that name."""
    names = []
    for each in services:
        if (each.namespace, each.name) == (namespace, name):
            return each
        names.append(f"{each.namespace}/{each.name}")
    found = same_name(names, name) or near(f"{namespace}/{name}", names)
    raise NoService(f"{namespace}/{name}: the cluster has no such Service with a cluster IP{found}")


def _port(service: Service, destination: Destination) -> tuple[int, str]:
    """Number and protocol of the port that was asked for by name or number; one alone need not be named."""
    wanted = destination.port_name
    found = [
        each
        for each in service.ports
        if (not wanted or wanted in (each.name, str(each.port)))
        and (not destination.protocol or destination.protocol == each.protocol)
    ]
    title = f"{service.namespace}/{service.name}"
    if len(found) == 1 or (found and len({each.port for each in found}) == 1):
        return found[0].port, found[0].protocol
    ports = [f"{title}:{each.name or each.port}/{each.protocol}" for each in service.ports]
    if found:
        raise WrongQuestion(f"--to {title}: which port? One of {', '.join(ports)}")
    close = near(f"{title}:{wanted}", ports) or listed(ports)
    raise WrongQuestion(f"--to {title}:{wanted}: the Service has no such port{close}")
