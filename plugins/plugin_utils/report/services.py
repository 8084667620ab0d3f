# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Services for the page: frontends, endpoints, and what each node does with traffic to them.

Nodes that do the same are told of once: a service port has one Choice for each group of nodes. Keys are short, as there
may be ten thousand Services.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..addresses import endpoint_text
from ..engine import Engine
from ..explain.service import state_of
from ..proxy.endpoints import Endpoint
from ..proxy.facts import InvalidFacts, UnusableNode
from ..proxy.port_view import PortView
from ..proxy.reasons import Judged, Reason, judge
from ..proxy.traffic import Caller, Decision, Frontend, Reach, Traffic, Why
from ..proxy.view import FamilyView, NodeView
from .words import natural

_REACHES = {
    Reach.CLUSTER_IP: "cluster IP",
    Reach.LOAD_BALANCER: "load balancer IP",
    Reach.EXTERNAL_IP: "external IP",
    Reach.NODE_PORT: "node port",
}
_OUT = {
    Reason.NOT_READY: "not ready",
    Reason.TERMINATING: "terminating; ready ones are left",
    Reason.NOT_SERVING: "terminating, and serves no more",
    Reason.OTHER_NODE: "on another node; the policy is Local",
    Reason.OTHER_ZONE: "hint for zone {}",
    Reason.NODE_HINT: "hint for node {}",
}
_ENDS = {
    Why.NO_ENDPOINTS: ("refused", "No endpoint can serve. Callers are told at once that the port is unreachable."),
    Why.NO_LOCAL_ENDPOINTS: ("dropped", "The policy is Local, and the node runs no endpoint that can serve."),
    Why.LEFT_ALONE: ("passed", "No endpoint can serve, and no rule of the node takes the packet."),
    Why.SOURCE_RANGES: ("dropped", "The caller is in none of the source ranges."),
}
_KEPT, _REPLACED = "The endpoint sees the caller's address.", "The endpoint sees the node's address, not the caller's."
_KEPT_OF_PODS = "The endpoint sees a pod's own address, and the node's in place of any other."
# Of no cluster: RFC 5737 and RFC 3849 keep these for examples.
_OUTSIDE = {"IPv4": "198.51.100.77", "IPv6": "2001:db8:ffff::77"}


class Texts(dict[str, int]):
    """Sentences, each written once: those of ten thousand Services are the same few."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """What a group of nodes does with traffic of one policy, inside or outside."""

    used: tuple[int, ...]  # positions of the endpoints that share it
    unused: tuple[tuple[int, str], ...]  # positions of the others, each with the reason
    words: str  # which ones are used
    source: str  # what becomes of the caller's address
    end: str = ""  # what becomes of traffic that goes to no endpoint, in a word

    def data(self, texts: Texts) -> list[Any]:
        """For JSON; the share of an endpoint is that of all that are used."""
        share = round(100 / len(self.used), 1) if self.used else 0
        unused = [(index, texts[reason]) for index, reason in self.unused]
        return [self.used, share, unused, texts[self.words], texts[self.source], self.end]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A group of nodes that do the same."""

    nodes: tuple[int, ...]  # positions of nodes
    inside: Lane
    outside: Lane | None  # None if it has no frontend for callers from outside


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """A service port in one family."""

    title: str
    family: str
    frontends: tuple[tuple[str, str, str], ...]  # address, kind, for whom
    policies: tuple[str, str]  # internal and external
    notes: tuple[str, ...]  # affinity, health checks
    endpoints: tuple[tuple[str, int, str, str], ...]  # address, position of the node or -1, pod, condition
    choices: tuple[Choice, ...]
    serving: int  # endpoints that at least one node uses

    def data(self, texts: Texts) -> dict[str, Any]:
        """For JSON. A group that holds all nodes is written as null."""
        lanes: dict[Lane, int] = {}
        groups = []
        for each in self.choices:
            pair = [-1 if lane is None else lanes.setdefault(lane, len(lanes)) for lane in (each.inside, each.outside)]
            groups.append([each.nodes if len(self.choices) > 1 else None, *pair])
        return {
            "t": self.title,
            "f": self.family,
            "fr": self.frontends,
            "po": self.policies,
            "no": self.notes,
            "e": self.endpoints,
            "l": [each.data(texts) for each in lanes],
            "g": groups,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A Service."""

    namespace: str
    name: str
    type: str
    ports: tuple[Port, ...]
    tags: tuple[str, ...]  # what a filter asks for

    @property
    def endpoints(self) -> tuple[int, int]:
        """How many serve, and how many there are; of the port that has most."""
        return max((each.serving for each in self.ports), default=0), max(len(each.endpoints) for each in self.ports)

    def data(self, texts: Texts) -> list[Any]:
        """For JSON."""
        ports = [each.data(texts) for each in self.ports]
        return [self.namespace, self.name, self.type, [texts[tag] for tag in self.tags], *self.endpoints, ports]


FILTERS = (
    "without endpoints",
    "not all endpoints used",
    "reached from outside",
    "Local policy",
    "topology hints",
    "source ranges",
)


class Table:
    """All Services of a cluster, as its nodes see them."""

    def __init__(self, engine: Engine, facts: Mapping[str, Mapping[str, Any]]) -> None:
        self.nodes = [each.name for each in engine.snapshot.nodes]
        self.unusable: dict[str, str] = {}  # nodes for which nothing can be decided, and why
        self._positions = {name: index for index, name in enumerate(self.nodes)}
        self._zones = {each.name: each.zone for each in engine.snapshot.nodes}
        self._types = {(each.namespace, each.name): each.type for each in engine.snapshot.services}
        self._views: list[tuple[int, NodeView]] = []
        for index, name in enumerate(self.nodes):
            try:
                self._views.append((index, engine.view(name, facts.get(name))))
            except (UnusableNode, InvalidFacts) as error:
                self.unusable[name] = str(error)

    def rows(self) -> list[Row]:
        """The Services, by namespace and name."""
        found: dict[tuple[str, str], list[Port]] = {}
        for port, tagged in self._ports():
            found.setdefault(tagged, []).append(port)
        names = sorted(found, key=lambda name: (natural(name[0]), natural(name[1])))
        return [self._row(name, found[name]) for name in names]

    def _row(self, name: tuple[str, str], ports: Sequence[Port]) -> Row:
        served, total = max(each.serving for each in ports), max(len(each.endpoints) for each in ports)
        told = {
            "without endpoints": not served,
            "not all endpoints used": 0 < served < total,
            "reached from outside": any(len(each.frontends) > 1 for each in ports),
            "Local policy": any("Local" in each.policies for each in ports),
            "topology hints": any(
                "hint" in why for each in ports for choice in each.choices for _at, why in choice.inside.unused
            ),
            "source ranges": any(whom.startswith("for ") for each in ports for _at, _kind, whom in each.frontends),
        }
        tags = [word for word in FILTERS if told[word]]
        return Row(*name, self._types.get(name, ""), tuple(ports), tuple(tags))

    def _ports(self) -> Iterator[tuple[Port, tuple[str, str]]]:
        places: dict[str, list[_Place]] = {}
        for index, view in self._views:
            for family in view.families:
                places.setdefault(family.family.value, []).append(_Place.of(index, view, family))
        for found in places.values():
            every = tuple(range(len(found)))
            same_detection = len({each.family.detect_local is None for each in found}) == 1
            for seen in zip(*(each.family.ports for each in found), strict=True):
                # Most look the same from all nodes.
                if same_detection and len(set(map(id, seen))) == 1:
                    groups: dict[tuple[int, bool], Sequence[int]] = {(0, False): every}
                else:
                    groups = _groups(seen, found)
                port = seen[0].port
                yield self._port(seen, groups.values(), found), (port.namespace, port.name)

    def _port(self, seen: Sequence[PortView], groups: Iterable[Sequence[int]], places: Sequence[_Place]) -> Port:
        choices: dict[tuple[Lane, Lane | None], list[int]] = {}
        for group in groups:
            lanes = _lanes(seen[group[0]], places[group[0]])
            choices.setdefault(lanes, []).extend([places[index].node for index in group])
        found = tuple(Choice(tuple(sorted(nodes)), *lanes) for lanes, nodes in choices.items())
        used = [lane.used for each in found for lane in (each.inside, each.outside) if lane is not None]
        first = seen[0]
        port = first.port
        return Port(
            title=f"{port.port_name} {port.port}/{port.protocol}".strip(),
            family=port.family.value,
            frontends=tuple((_at(each), _REACHES[each.reach], _whom(each)) for each in _frontends(first)),
            policies=(_policy(port.internal_policy_local), _policy(port.external_policy_local)),
            notes=tuple(_notes(first)),
            endpoints=tuple(
                (each.text, self._positions.get(each.node_name, -1), each.pod, _condition(each))
                for each in first.endpoints
            ),
            choices=found,
            serving=len(set().union(*used)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A node in one family, and what decides there."""

    node: int
    view: NodeView
    family: FamilyView
    traffic: Traffic
    pod: Caller

    @classmethod
    def of(cls, node: int, view: NodeView, family: FamilyView) -> _Place:
        # Frontends are given here, so no table of them is needed.
        return cls(node, view, family, Traffic(view, dataclasses.replace(family, ports=())), _pod(family))


def _groups(seen: Sequence[PortView], places: Sequence[_Place]) -> dict[tuple[int, bool], Sequence[int]]:
    """Places that see the same."""
    found: dict[tuple[int, bool], list[int]] = {}
    for index, each in enumerate(seen):
        found.setdefault((id(each), places[index].family.detect_local is None), []).append(index)
    return dict(found)


def _lanes(seen: PortView, place: _Place) -> tuple[Lane, Lane | None]:
    """What a node does with traffic from inside, and from outside."""
    frontends = list(_frontends(seen))
    view, traffic = place.view, place.traffic
    pod, outside = place.pod, Caller(_source(seen), interface="eth0")
    inside = traffic.decide(frontends[0], pod)
    if _replaces(inside):
        source = _REPLACED
    else:
        source = _KEPT_OF_PODS if _replaces(traffic.decide(frontends[0], outside)) else _KEPT
    first = _lane(frontends[0], inside, view, source)
    if len(frontends) == 1:
        return first, None
    decided = traffic.decide(frontends[1], outside)
    return first, _lane(frontends[1], decided, view, _REPLACED if _replaces(decided) else _KEPT)


def _lane(frontend: Frontend, decision: Decision, view: NodeView, source: str) -> Lane:
    facts, seen = view.facts, frontend.view
    local = decision.local if decision.endpoints else frontend.policy_local
    chosen = {each.text for each, _replaced in decision.endpoints}
    judged = judge(seen, local=local, node_name=facts.name, zone=facts.zone)
    used = tuple(index for index, each in enumerate(judged) if each.endpoint.text in chosen)
    unused = tuple((index, _reason(each)) for index, each in enumerate(judged) if each.endpoint.text not in chosen)
    if not used:
        end, words = _ENDS[decision.why]
        return Lane(used, unused, words, "", end)
    return Lane(used, unused, _words([judged[index] for index in used], judged, local=local), source)


def _words(used: Sequence[Judged], judged: Sequence[Judged], *, local: bool) -> str:
    """Which endpoints a node uses, as a sentence."""
    ready = any(each.reason is Reason.READY for each in used)
    what = "ready endpoints" if ready else "terminating endpoints, as no ready one is left,"
    if local:
        return f"The {what} on the node itself."
    hinted = {each.reason for each in judged} & {Reason.OTHER_ZONE, Reason.NODE_HINT}
    if hinted:
        return f"The {what} with a hint for the node" + ("." if Reason.NODE_HINT in hinted else "'s zone.")
    return f"All {what} on any node."


def _reason(each: Judged) -> str:
    if each.used:
        return "not used"  # by policy Cluster it would be, but nothing is
    return _OUT[each.reason].format(", ".join(each.hints))


def _replaces(decision: Decision) -> bool:
    return any(replaced for _endpoint, replaced in decision.endpoints)


def _pod(family: FamilyView) -> Caller:
    """A caller that the node takes for one of its pods, if it can tell."""
    detect = family.detect_local
    if detect is None:
        return Caller(_OUTSIDE[family.family.value], interface="veth0")
    # The first address of a range is no pod's.
    source = detect.cidr.partition("/")[0] if detect.cidr else _OUTSIDE[family.family.value]
    return Caller(source, interface=detect.interface or f"{detect.prefix or 'veth'}0")


def _source(seen: PortView) -> str:
    """A caller from outside that may use the Service."""
    ranges = seen.port.source_ranges
    return ranges[0].partition("/")[0] if ranges else _OUTSIDE[seen.port.family.value]


def _frontends(seen: PortView) -> Iterator[Frontend]:
    """The cluster IP first; of the others, the one that most callers use."""
    port = seen.port
    yield Frontend(seen, Reach.CLUSTER_IP, port.cluster_ip)
    yield from (Frontend(seen, Reach.LOAD_BALANCER, ip) for ip in port.load_balancer_vips)
    yield from (Frontend(seen, Reach.EXTERNAL_IP, ip) for ip in port.external_ips)
    if port.node_port:
        yield Frontend(seen, Reach.NODE_PORT, "")


def _at(frontend: Frontend) -> str:
    port = frontend.view.port
    return str(port.node_port) if frontend.reach is Reach.NODE_PORT else endpoint_text(frontend.address, port.port)


def _whom(frontend: Frontend) -> str:
    if frontend.reach is Reach.NODE_PORT:
        return "on every node"
    if frontend.reach is Reach.LOAD_BALANCER and frontend.view.port.source_ranges:
        return f"for {', '.join(frontend.view.port.source_ranges)}"
    return ""


def _notes(seen: PortView) -> Iterable[str]:
    port = seen.port
    if port.sticky_seconds:
        yield f"A client stays with its endpoint for {port.sticky_seconds:,} s (sessionAffinity ClientIP)."
    if port.health_check_node_port:
        yield f"Load balancers ask nodes at port {port.health_check_node_port} whether they run an endpoint."


def _policy(local: bool) -> str:
    return "Local" if local else "Cluster"


def _condition(endpoint: Endpoint) -> str:
    """The word for an endpoint that is not ready."""
    return "" if endpoint.ready else state_of(endpoint)
