# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The way of a packet on a node, and why, as data: what the rules do, beside what was decided."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..addresses import family_of
from ..proxy.reasons import Judged, judge
from ..proxy.traffic import Caller, Decision, Frontend, Reach
from .intent import Place
from .packet import End, Origin, Packet, Path, Verdict
from .question import Sender

if TYPE_CHECKING:
    from .compare import Difference


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint of the Service: what was decided about it, and what the rules do."""

    judged: Judged
    zone: str
    share: Fraction
    masquerade: bool

    @property
    def address(self) -> str:
        """IP and port."""
        return self.judged.endpoint.text


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known about a packet on a node."""

    node: str
    zone: str
    mode: str
    sender: Sender
    packet: Packet
    verdict: Verdict
    frontend: Frontend | None  # what it is for
    decision: Decision | None
    candidates: tuple[Candidate, ...]
    strangers: tuple[tuple[str, Fraction], ...]  # where rules send it without a decision
    live: tuple[Difference, ...] | None = None  # how the kernel differs; None if it was not asked

    @property
    def agrees(self) -> bool:
        """Whether the rules do what was decided."""
        return not problems(self)

    @property
    def masquerade(self) -> bool:
        """Whether its source is replaced, whatever endpoint is chosen."""
        found = self.verdict.masquerades
        return bool(found) and all(found.values())

    @property
    def deciding(self) -> Path:
        """The way that is told: of the first endpoint, but rather not back to the sender itself."""
        found = [each for each in self.verdict.paths if each.end is self.verdict.end]
        return min(found, key=lambda each: each.packet.masqueraded)

    @property
    def other_way(self) -> Path | None:
        """Where the source is replaced only on some ways, such as back to a pod itself: one of these."""
        if self.masquerade or not any(self.verdict.masquerades.values()):
            return None
        return next((each for each in self.verdict.paths if each.packet.masqueraded), None)


def explain(
    place: Place, zones: dict[str, str], asked: Sender, packet: Packet, live: Place | None = None
) -> Explanation:
    """Follow a packet through the rules of a place, and through those of a live one."""
    family = family_of(packet.destination)
    verdict = place.walkers[family].walk(packet)
    traffic = place.traffic(family)
    frontend = traffic.frontend(packet.destination, packet.protocol, packet.port)
    caller = Caller(packet.source, packet.interface, packet.origin is Origin.NODE)
    decision = traffic.decide(frontend, caller) if frontend else None
    facts = place.view.facts
    candidates: tuple[Candidate, ...] = ()
    if frontend is not None and decision is not None:
        judged = judge(frontend.view, local=decision.local, node_name=facts.name, zone=facts.zone)
        shares, masked = verdict.shares, verdict.masquerades
        candidates = tuple(
            Candidate(
                each,
                zones.get(each.endpoint.node_name, ""),
                shares.get(each.endpoint.text, Fraction(0)),
                masked.get(each.endpoint.text, False),
            )
            for each in judged
        )
    known = {each.address for each in candidates}
    strangers = tuple((to, share) for to, share in verdict.shares.items() if to not in known)
    return Explanation(
        node=facts.name,
        zone=facts.zone,
        mode=place.rules.mode,
        sender=asked,
        packet=packet,
        verdict=verdict,
        frontend=frontend,
        decision=decision,
        candidates=candidates,
        strangers=strangers,
        live=None if live is None else _differences(place, live, packet),
    )


def _differences(place: Place, live: Place, packet: Packet) -> tuple[Difference, ...]:
    from .compare import differences

    return tuple(differences(place, live, packet))


def problems(told: Explanation) -> list[str]:
    """Where the rules do not do what was decided."""
    found = [f"rules could not be followed: {each}" for each in told.verdict.skipped]
    if told.decision is None:
        if told.verdict.end is End.DELIVERED:
            found.append("rules send it on, though no Service has this destination")
        return found
    if told.verdict.end.value != told.decision.outcome:
        found.append(f"decided: {told.decision.outcome}; the rules: {told.verdict.end.value}")
        return found
    found += [f"the rules send it to {to}, which is no endpoint of the Service" for to, _share in told.strangers]
    if told.verdict.lost:
        found.append(f"{float(told.verdict.lost):.1%} of such packets are sent to no endpoint")
    wanted = {endpoint.text: masked for endpoint, masked in told.decision.endpoints}
    share = Fraction(1, len(wanted)) if wanted else Fraction(0)
    for each in told.candidates:
        is_in = each.address in wanted
        if (each.share > 0) is not is_in:
            found.append(f"{each.address} is {'in' if is_in else 'out'} by decision, and the rules do not do so")
        elif is_in and each.masquerade is not wanted[each.address]:
            verb = "replaced" if each.masquerade else "kept"
            found.append(f"the rules leave the source {verb} on the way to {each.address}, which was not decided")
        elif is_in and abs(each.share - share) > Fraction(1, 2**20):
            found.append(f"the share of {each.address} is {float(each.share):.4f} instead of {float(share):.4f}")
    return found


def as_json(told: Explanation) -> dict[str, Any]:
    """For programs."""
    packet, port = told.packet, told.frontend.view.port if told.frontend else None
    return {
        "apiVersion": "akp/v2",
        "kind": "Explanation",
        "node": told.node,
        "mode": told.mode,
        "packet": {
            "source": packet.source,
            "destination": packet.destination,
            "port": packet.port,
            "protocol": packet.protocol,
            "origin": packet.origin.value,
        },
        "outcome": told.verdict.end.value,
        "service": f"{port.namespace}/{port.name}" if port else None,
        "port": port.port_name if port else None,
        "reachedBy": told.frontend.reach.value if told.frontend else None,
        "policy": _policy(told),
        "why": told.decision.why.value if told.decision else None,
        "masquerade": told.masquerade,
        "affinitySeconds": port.sticky_seconds if port else 0,
        "endpoints": [_used(each) for each in told.candidates if each.share]
        + [{"address": to, "share": float(share), "reason": "unknown"} for to, share in told.strangers],
        "unused": [_endpoint(each) for each in told.candidates if not each.share],
        "rules": [_rule(each.place, each.text) for each in told.deciding.steps],
        "problems": problems(told),
        **({} if told.live is None else {"live": [dataclasses.asdict(each) for each in told.live]}),
    }


def _policy(told: Explanation) -> dict[str, Any] | None:
    if told.frontend is None:
        return None
    external = told.frontend.external
    return {
        "name": "externalTrafficPolicy" if external else "internalTrafficPolicy",
        "value": "Local" if told.frontend.policy_local else "Cluster",
        "local": bool(told.decision and told.decision.local),
        "sourceRanges": list(told.frontend.view.port.source_ranges) if _is_guarded(told.frontend) else [],
    }


def _is_guarded(frontend: Frontend) -> bool:
    return frontend.reach is Reach.LOAD_BALANCER


def _used(each: Candidate) -> dict[str, Any]:
    return {**_endpoint(each), "share": float(each.share), "masquerade": each.masquerade}


def _endpoint(each: Candidate) -> dict[str, Any]:
    endpoint = each.judged.endpoint
    found: dict[str, Any] = {
        "address": endpoint.text,
        "pod": endpoint.pod,
        "node": endpoint.node_name,
        "zone": each.zone,
        "reason": each.judged.reason.value,
    }
    return {**found, "hints": list(each.judged.hints)} if each.judged.hints else found


def _rule(place: str, text: str) -> dict[str, str]:
    table, _space, chain = place.rpartition(" ")
    return {"table": table, "chain": chain, "rule": text}
