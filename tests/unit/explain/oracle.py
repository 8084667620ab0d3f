"""Every question that a node's frontends allow, and what was decided beside what the rules do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from agentless_kube_proxy import backends
from agentless_kube_proxy.addresses import family_of
from agentless_kube_proxy.explain.packet import End, Origin, Packet, Verdict
from agentless_kube_proxy.explain.ruleset import Ruleset
from agentless_kube_proxy.explain.walk import Walker
from agentless_kube_proxy.proxy.traffic import Caller, Decision, Frontend, Reach, Traffic
from agentless_kube_proxy.proxy.view import FamilyView, NodeView

LOOPBACK = {"IPv4": "127.0.0.1", "IPv6": "::1"}
OUTSIDE = {"IPv4": ("203.0.113.7", "8.8.8.8"), "IPv6": ("2001:db8:51::7", "2001:db8:ffff::1")}
PODS = {"IPv4": ("10.244.1.200", "10.244.2.200"), "IPv6": ("fd00:10:244:1::200", "fd00:10:244:2::200")}


@dataclasses.dataclass(frozen=True)
class Case:
    """A packet, what was decided about it, and what the rules do with it."""

    packet: Packet
    frontend: Frontend
    decision: Decision
    verdict: Verdict

    @property
    def agrees(self) -> bool:
        count = len(self.decision.endpoints)
        shares = {endpoint.text: 1 / count for endpoint, _masked in self.decision.endpoints}
        masked = {endpoint.text: masked for endpoint, masked in self.decision.endpoints}
        return (
            self.verdict.end.value == self.decision.outcome
            and not self.verdict.skipped
            and {each: float(share) for each, share in self.verdict.shares.items()} == shares
            and self.verdict.masquerades == masked
            and len({each.end for each in self.verdict.paths}) == 1
        )

    def __str__(self) -> str:
        steps = "\n  ".join(f"{step.place}: {step.text}" for path in self.verdict.paths[:1] for step in path.steps)
        return (
            f"{self.packet}\n{self.frontend.reach} of {self.frontend.view.port}\ndecided {self.decision}\n"
            f"rules: {self.verdict.end} {self.verdict.shares} {self.verdict.masquerades} {self.verdict.skipped}\n  {steps}"
        )


def walker(view: NodeView, family: FamilyView) -> Walker:
    """What follows packets through the rules that are written for a view."""
    files = dict(backends.files(backends.renderer(view.config).state(view)))
    return Ruleset(files).walker(family.family, frozenset(view.facts.interface_addresses))


def cases(view: NodeView) -> Iterator[Case]:
    """Every frontend of a node, from every kind of caller."""
    for family in view.families:
        traffic, walks = Traffic(view, family), walker(view, family)
        for packet in packets(view, family):
            frontend = traffic.frontend(packet.destination, packet.protocol, packet.port)
            if frontend is None:
                continue
            caller = Caller(packet.source, packet.interface, packet.origin is Origin.NODE)
            yield Case(packet, frontend, traffic.decide(frontend, caller), walks.walk(packet))


def packets(view: NodeView, family: FamilyView) -> Iterator[Packet]:
    """To every destination of every service port."""
    name = family.family.value
    own = [ip for ip in view.facts.interface_addresses if family_of(ip) is family.family]
    for each in family.ports:
        port = each.port
        places = {(ip, port.port) for ip in (port.cluster_ip, *port.external_ips, *port.load_balancer_vips)}
        if port.node_port:
            places |= {(ip, port.node_port) for ip in own}
        callers = {*OUTSIDE[name], *PODS[name], *(endpoint.ip for endpoint in each.endpoints[:2])}
        for address, number in sorted(places):
            if address != LOOPBACK[name]:
                for source in sorted(callers):
                    pod = source in PODS[name] or any(source == e.ip for e in each.endpoints)
                    yield Packet(source, address, number, port.protocol, Origin.OUTSIDE, pod_interface(view, pod=pod))
            # What the Node object tells may be the address of a gateway in front of it.
            sending = [ip for ip in (family.node_ip, *own) if ip in own and ip != LOOPBACK[name]]
            if is_local(view, family, address):
                sending = [address]
            if sending:
                yield Packet(sending[0], address, number, port.protocol, Origin.NODE)


def is_local(view: NodeView, family: FamilyView, address: str) -> bool:
    """Whether the node has an address: in ipvs mode it has those of all Services."""
    bound = {
        ip
        for each in family.ports
        for ip in (each.port.cluster_ip, *each.port.external_ips, *each.port.load_balancer_vips)
    }
    return address in view.facts.interface_addresses or (view.config.mode == "ipvs" and address in bound)


def pod_interface(view: NodeView, *, pod: bool) -> str:
    """By which interface packets come in."""
    config = view.config
    return (config.detect_local.bridge_interface or f"{config.detect_local.interface_name_prefix}1") if pod else "eth0"


__all__ = ["Case", "End", "Reach", "cases"]
