# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Every frontend of every node, from every kind of source: the rules do what was decided, and the modes agree.

Packets are not sampled. Sources fall into classes that no rule can tell apart: the node itself, what it takes for its
pods, everybody else, and these inside and outside of source ranges; an endpoint that calls itself is followed in the
rules that lead to it. Destinations are those that rules name, and each must be a frontend. One packet of each class is
followed with all of its choices, so what holds for it holds for all of the class.

Most of the rules of a cluster are shared by its nodes; what was proved for one holds for all that have the same rules.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TypeAlias

from .. import backends
from ..addresses import any_contains, endpoint_text, family_of, is_loopback, last_host
from ..backends.state import Fragment, State
from ..proxy.port_view import PortView
from ..proxy.traffic import Caller, Decision, Frontend, Reach, Traffic
from ..proxy.view import FamilyView, NodeView
from .intent import Intent, Place
from .iptables_walk import IptablesWalker, IpvsWalker
from .nft_walk import NftWalker
from .packet import End, Origin, Packet, Verdict
from .ruleset import Ruleset
from .walk import Walker

_NEAR = Fraction(1, 2**20)
# Objects of the frame that hold endpoints of the node alone; they are looked at apart.
_OWN_ENDPOINTS = ("hairpin-connections", "KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK")


@dataclasses.dataclass(frozen=True, slots=True)
class Counterexample:
    """A packet with which rules do not do what was decided."""

    size: int  # endpoints of the Service: the fewer, the easier to see
    node: str
    mode: str
    service: str
    source: str
    destination: str
    decided: str
    rules: str

    def __str__(self) -> str:
        return (
            f"on {self.node} ({self.mode}), from {self.source} to {self.destination}, which is {self.service}: "
            f"decided {self.decided}; the rules: {self.rules}"
        )


@dataclasses.dataclass(slots=True)
class Proof:
    """What was looked at, and what does not hold."""

    nodes: int = 0
    ports: int = 0  # service ports of all nodes
    walked: int = 0  # packets
    wrong: list[Counterexample] = dataclasses.field(default_factory=list)


def smallest(found: Iterable[Counterexample]) -> Counterexample | None:
    """The counterexample that is easiest to see."""
    return min(
        found, key=lambda each: (each.size, each.node, each.service, each.destination, each.source), default=None
    )


# Service port, frontend and class of source -> the node and the packet that stood for it, and what became of it.
Ends: TypeAlias = dict[tuple[object, ...], tuple[Counterexample, tuple[End, frozenset[str], frozenset[bool]]]]


class Prover:
    """Proves node after node in one mode; what nodes share is proved once."""

    def __init__(self) -> None:
        self.proof = Proof()
        self.ends: Ends = {}
        self._proved: set[tuple[int, str]] = set()  # fragments, by identity, in a frame
        self._kept: list[Fragment] = []  # so that no other one gets the same identity

    def node(self, intent: Intent, name: str) -> None:
        """The rules that are meant for a node."""
        view = intent.view(name)
        state = intent.renderer.state(view)
        frame = _frame_key(state, view.facts.interface_addresses)
        fresh = [each for each in state.fragments if (id(each), frame) not in self._proved]
        self._kept += fresh
        self._proved.update((id(each), frame) for each in fresh)
        alone = dataclasses.replace(state, fragments=tuple(fresh))
        names = {(each.family, each.name) for each in fresh}
        families = tuple(
            dataclasses.replace(
                family,
                ports=tuple(each for each in family.ports if (family.family.value, each.port.key) in names)
                if names
                else (),
            )
            for family in view.families
        )
        self.proof.ports += sum(len(family.ports) for family in view.families)
        narrowed = dataclasses.replace(view, families=families)
        self._place(Place(narrowed, Ruleset(dict(backends.files(alone)), state.mode)))

    def texts(self, view: NodeView, rules: Ruleset) -> None:
        """Rules of a bundle or a kernel, all of them."""
        self.proof.ports += sum(len(family.ports) for family in view.families)
        self._place(Place(view, rules))

    def _place(self, place: Place) -> None:
        self.proof.nodes += 1
        for family in place.view.families:
            _Family(self, place, family).prove()


def disagreements(one: Ends, other: Ends) -> Iterator[Counterexample]:
    """Traffic that two modes do not treat alike."""
    for key in one.keys() & other.keys():
        (first, end), (second, other_end) = one[key], other[key]
        if end != other_end:
            decided = f"in mode {first.mode} {first.rules}, source {_sources(end[2])}"
            yield dataclasses.replace(second, decided=decided, rules=f"{second.rules}, source {_sources(other_end[2])}")


def _sources(masked: frozenset[bool]) -> str:
    return " or ".join("replaced" if each else "kept" for each in sorted(masked)) or "not looked at"


def _frame_key(state: State, addresses: Iterable[str]) -> str:
    """Names the rules that nodes share beside those of service ports; each has its own addresses in the same places."""
    words = "|".join(re.escape(each) for each in sorted(addresses, key=len, reverse=True))
    own = re.compile(rf"(?<![\w.:])(?:{words or '(?!)'})(?![\w.:])")
    digest = hashlib.sha256()
    for obj, text in state.frame.items():
        if obj[0] != "file" and obj[-1] not in _OWN_ENDPOINTS:
            digest.update(own.sub("NODE", f"{' '.join(obj)}\0{text.head}\0{text.tail}\0").encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A class of sources, and one of it."""

    what: str
    address: str
    origin: Origin


class _Family:
    """The frontends of a node in one family."""

    def __init__(self, prover: Prover, place: Place, family: FamilyView) -> None:
        self._prover = prover
        self._place = place
        self._view = family
        self._walker: Walker = place.walkers[family.family]
        self._traffic: Traffic = place.traffic(family.family)
        self._mode = place.view.config.mode
        self._called = False  # whether an endpoint has called itself

    def prove(self) -> None:
        known: set[tuple[str, str, int]] = set()
        for view in self._view.ports:
            for address, number in _frontends(self._place, view):
                known.add((address, view.port.protocol, number))
                frontend = self._traffic.frontend(address, view.port.protocol, number)
                if frontend is None or frontend.view is not view:
                    continue  # another Service has it, which is told of as a double claim
                for source in self._sources(frontend):
                    self._packet(frontend, source, number)
            self._itself(view)
        self._unclaimed()
        known |= {("", view.port.protocol, view.port.node_port) for view in self._view.ports}
        for stray in sorted(set(_destinations(self._walker)) - known):
            if family_of(stray[0] or _OUTSIDE[self._view.family.value]) is self._view.family:
                self._stray(*stray)
        self._hairpins()

    def _sources(self, frontend: Frontend) -> Iterator[_Source]:
        """One source of each class that rules can tell apart."""
        detect, name = self._view.detect_local, self._view.family.value
        pod = _inside(detect.cidr, name) if detect and detect.cidr else _POD[name]
        if not is_loopback(frontend.address):  # which only the node itself can send to
            yield _Source("a pod of this node", pod, Origin.POD)
            yield _Source("outside", _OUTSIDE[name], Origin.OUTSIDE)
        yield _Source("the node itself", self._place.source_of(self._view.family, frontend.address), Origin.NODE)
        if frontend.address in frontend.view.port.load_balancer_vips:
            for cidr in frontend.view.port.source_ranges:
                yield _Source(f"outside, in {cidr}", _inside(cidr, name), Origin.OUTSIDE)

    def _packet(self, frontend: Frontend, source: _Source, number: int) -> None:
        port = frontend.view.port
        packet = self._place.packet(source.address, (frontend.address, number, port.protocol), source.origin)
        caller = Caller(packet.source, packet.interface, source.origin is Origin.NODE)
        decision = self._traffic.decide(frontend, caller)
        verdict = self._walker.ends(packet)
        self._prover.proof.walked += 1
        wrong = _wrong(decision, verdict) or self._not_itself(verdict, source)
        if wrong:
            self._found(frontend, source, packet, decision, wrong)
        elif not _differs_by_design(frontend, decision, self._mode, source, self._view):
            self._keep(frontend, source, packet, verdict)

    def _itself(self, view: PortView) -> None:
        """One endpoint of this node that calls its own Service; sets name the others, and are looked at apart."""
        node = self._place.view.facts.name
        local = next((each for each in view.selection.cluster if each.node_name == node), None)
        frontend = self._traffic.frontend(view.port.cluster_ip, view.port.protocol, view.port.port)
        if local is None or frontend is None or self._called or local.ip in self._place.addresses:
            return
        self._called = True
        self._packet(frontend, _Source(f"endpoint {local.text} itself", local.ip, Origin.POD), view.port.port)

    def _unclaimed(self) -> None:
        """Ports that no Service has, at the addresses of Services."""
        family, node = self._view.family, self._place.view.facts.name
        for address in dict.fromkeys(ip for view in self._view.ports for ip, _port in _addresses(view)):
            if self._place.is_own(address):
                continue
            number = next(each for each in _UNUSED if self._traffic.frontend(address, "tcp", each) is None)
            wanted = self._traffic.unclaimed(address)
            own = _Source("the node itself", self._place.source_of(family, address), Origin.NODE)
            for source in (_Source("outside", _OUTSIDE[family.value], Origin.OUTSIDE), own):
                packet = self._place.packet(source.address, (address, number, "tcp"), source.origin)
                verdict = self._walker.ends(packet)
                if verdict.end.value != wanted or verdict.skipped:
                    what, to = f"{source.what} ({packet.source})", f"{packet.target}/tcp"
                    told = verdict.skipped[0] if verdict.skipped else _told(verdict)
                    self._prover.proof.wrong.append(
                        Counterexample(0, node, self._mode, "no Service", what, to, wanted, told)
                    )

    def _not_itself(self, verdict: Verdict, source: _Source) -> str:
        """An endpoint that calls itself needs another source: in iptables mode a rule of its own says so."""
        if self._mode != "iptables" or source.origin is not Origin.POD or not isinstance(self._walker, IptablesWalker):
            return ""
        for path in verdict.paths:
            if path.end is End.DELIVERED and not self._walker.masks(path.steps[-1].place, path.packet.destination):
                return f"{path.packet.target} would see its own address when it calls itself"
        return ""

    def _keep(self, frontend: Frontend, source: _Source, packet: Packet, verdict: Verdict) -> None:
        """What becomes of the packet, to be compared with other modes."""
        port = frontend.view.port
        chosen = tuple(each.text for each in frontend.view.selection.all)
        key = (self._view.family.value, port.key, frontend.reach.value, source.what, chosen, frontend.address)
        if key not in self._prover.ends:
            end = (verdict.end, frozenset(verdict.shares), frozenset(verdict.masquerades.values()))
            self._prover.ends[key] = (self._example(frontend, source, packet, "", _told(verdict)), end)

    def _found(self, frontend: Frontend, source: _Source, packet: Packet, decision: Decision, wrong: str) -> None:
        self._prover.proof.wrong.append(self._example(frontend, source, packet, _decided(decision), wrong))

    def _example(self, frontend: Frontend, source: _Source, packet: Packet, decided: str, rules: str) -> Counterexample:
        return Counterexample(
            len(frontend.view.endpoints),
            self._place.view.facts.name,
            self._mode,
            frontend.view.port.name_string,
            f"{source.what} ({packet.source})",
            f"{packet.target}/{packet.protocol}",
            decided,
            rules,
        )

    def _stray(self, address: str, protocol: str, number: int) -> None:
        """Rules that catch what is no frontend."""
        where = f"{endpoint_text(address, number) if address else number}/{protocol}"
        node = self._place.view.facts.name
        self._prover.proof.wrong.append(
            Counterexample(0, node, self._mode, "no Service", "anywhere", where, "left alone", "they catch it")
        )

    def _hairpins(self) -> None:
        """In ipvs and nftables mode, sets say which endpoints of this node may call themselves."""
        held = set(_self_callers(self._walker))
        node = self._place.view.facts.name
        if self._mode in ("iptables", "userspace"):
            return
        for view in self._view.local_ports:
            for each in view.selection.all:
                if each.node_name == node and (each.ip, view.port.protocol, each.port) not in held:
                    wrong = f"{each.text} would see its own address when it calls itself"
                    name = view.port.name_string
                    self._prover.proof.wrong.append(
                        Counterexample(
                            len(view.endpoints), node, self._mode, name, each.text, name, "another source", wrong
                        )
                    )


def _frontends(place: Place, view: PortView) -> Iterator[tuple[str, int]]:
    """Address and port of every frontend of a service port on a node."""
    port = view.port
    yield from _addresses(view)
    if port.node_port:
        yield from ((ip, port.node_port) for ip in sorted(place.addresses) if family_of(ip) is port.family)


def _addresses(view: PortView) -> Iterator[tuple[str, int]]:
    """Address and port of every frontend that is the Service's own."""
    port = view.port
    yield from (
        (ip, port.port) for ip in dict.fromkeys((port.cluster_ip, *port.external_ips, *port.load_balancer_vips))
    )


_UNUSED = range(4, 65536)  # a port that few Services have comes first
_OUTSIDE = {"IPv4": "192.0.0.8", "IPv6": "100::8"}  # in no range but the one of all addresses
_POD = {"IPv4": "192.0.0.9", "IPv6": "100::9"}


def _inside(cidr: str, family: str) -> str:
    """An address inside a network that is not likely to be taken."""
    return last_host(cidr) if cidr else _POD[family]


def _wrong(decision: Decision, verdict: Verdict) -> str:
    """How what the rules do differs from a decision; empty if it does not."""
    if verdict.skipped:
        return f"a rule cannot be followed: {verdict.skipped[0]}"
    if verdict.end.value != decision.outcome:
        return _told(verdict)
    shares = verdict.shares
    wanted = {endpoint.text: masked for endpoint, masked in decision.endpoints}
    if shares.keys() != wanted.keys() or (wanted and verdict.lost):
        return _told(verdict)
    alike = Fraction(1, len(wanted)) if wanted else _NEAR
    if any(share != alike and abs(share - alike) > _NEAR for share in shares.values()):
        return f"shares of {', '.join(f'{float(share):.3f}' for share in shares.values())}"
    for to, masked in verdict.masquerades.items():
        if masked is not wanted[to]:
            return f"the source is {'replaced' if masked else 'kept'} on the way to {to}"
    return ""


def _told(verdict: Verdict) -> str:
    to = ", ".join(sorted(verdict.shares))
    lost = f", and {float(verdict.lost):.1%} to no endpoint" if verdict.lost else ""
    return f"to {to}{lost}" if to else verdict.end.value


def _decided(decision: Decision) -> str:
    to = ", ".join(endpoint.text for endpoint, _masked in decision.endpoints)
    return f"to {to}" if to else f"{decision.outcome} ({decision.why.value})"


def _differs_by_design(frontend: Frontend, decision: Decision, mode: str, source: _Source, family: FamilyView) -> bool:
    """Where kube-proxy's modes differ by design: each of these is named in docs/explain.md."""
    if is_loopback(frontend.address) or decision.outcome == "passed":
        return True  # node ports at loopback addresses are served in iptables mode alone
    if frontend.policy_local or (frontend.external and source.origin is Origin.NODE):
        return True  # ipvs falls back to all endpoints, and makes no exception for the node and its pods
    if family.detect_local is None or any_contains(frontend.view.port.source_ranges, family.node_ip):
        return True
    return bool(frontend.view.port.source_ranges) and frontend.reach is not Reach.NODE_PORT and mode != ""


def _destinations(walker: Walker) -> Iterable[tuple[str, str, int]]:
    """The destinations that rules send to endpoints: address, protocol and port; of node ports the address is empty."""
    if isinstance(walker, IpvsWalker):
        return (_server(protocol, place) for protocol, place in walker.servers)
    if isinstance(walker, NftWalker):
        return walker.destinations()
    return walker.destinations() if isinstance(walker, IptablesWalker) else ()


def _server(protocol: str, place: str) -> tuple[str, str, int]:
    address, _colon, port = place.rpartition(":")
    return address.strip("[]"), protocol, int(port)


def _self_callers(walker: Walker) -> Iterator[tuple[str, str, int]]:
    """Endpoints for which a set says that they get another source when they call themselves."""
    if isinstance(walker, NftWalker) and "hairpin-connections" in walker.table.containers:
        for key in walker.table.containers["hairpin-connections"].all_keys():
            if len(key) == 4 and key[0] == key[1]:
                yield key[0], key[2], int(key[3])
    if isinstance(walker, IpvsWalker):
        for name in ("KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK"):
            for entry in walker.sets[name].entries if name in walker.sets else ():
                ip, port, source = entry.split(",")
                if ip == source:
                    protocol, _colon, number = port.partition(":")
                    yield ip, protocol, int(number)
