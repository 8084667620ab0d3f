# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What becomes of traffic to a service port on a node: which endpoints it reaches, and whether its source stays.

These are the decisions that rules are written for, told as one packet sees them. The modes differ in few of them, as
kube-proxy's do: each difference is named here.
"""

from __future__ import annotations

import dataclasses
import enum

from ..addresses import any_contains, contains, is_loopback
from .endpoints import Endpoint
from .port_view import PortView
from .view import FamilyView, NodeView


class Reach(enum.Enum):
    """By which of its addresses a service port is reached."""

    CLUSTER_IP = "clusterIP"
    EXTERNAL_IP = "externalIP"
    LOAD_BALANCER = "loadBalancerIP"
    NODE_PORT = "nodePort"


class Why(enum.Enum):
    """Why traffic ends as it does."""

    SERVED = "served"
    SOURCE_RANGES = "sourceRanges"  # its source may not use the load balancer
    NO_ENDPOINTS = "noEndpoints"
    NO_LOCAL_ENDPOINTS = "noLocalEndpoints"  # the policy is Local, and the node has none
    LEFT_ALONE = "leftAlone"  # there are no endpoints, and no rule refuses what the node itself sends


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Where traffic comes from, as a node can tell."""

    source: str
    interface: str = ""  # by which it comes in
    is_node: bool = False  # a process of the node itself


@dataclasses.dataclass(frozen=True, slots=True)
class Frontend:
    """A service port and the address by which it is reached."""

    view: PortView
    reach: Reach
    address: str

    @property
    def external(self) -> bool:
        """Whether the external policy counts."""
        return self.reach is not Reach.CLUSTER_IP

    @property
    def policy_local(self) -> bool:
        """Whether the policy that counts is Local."""
        port = self.view.port
        return port.external_policy_local if self.external else port.internal_policy_local


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of traffic."""

    why: Why
    endpoints: tuple[tuple[Endpoint, bool], ...] = ()  # each with whether the source is replaced on the way there
    local: bool = False  # whether only endpoints of the node count

    @property
    def outcome(self) -> str:
        """endpoints, dropped, refused or passed."""
        return _OUTCOMES[self.why]


_OUTCOMES = {
    Why.SERVED: "endpoints",
    Why.SOURCE_RANGES: "dropped",
    Why.NO_ENDPOINTS: "refused",
    Why.NO_LOCAL_ENDPOINTS: "dropped",
    Why.LEFT_ALONE: "passed",
}


class Traffic:
    """The decisions of one node in one family."""

    def __init__(self, node: NodeView, family: FamilyView) -> None:
        self._node = node
        self._family = family
        self._mode = node.config.mode
        self._own = frozenset(node.facts.interface_addresses)
        self._served: dict[tuple[str, str, int], Frontend] = {}
        self._node_ports: dict[tuple[str, int], PortView] = {}
        for each in family.ports:
            port = each.port
            addresses = [(port.cluster_ip, Reach.CLUSTER_IP)]
            addresses += [(ip, Reach.EXTERNAL_IP) for ip in port.external_ips]
            addresses += [(ip, Reach.LOAD_BALANCER) for ip in port.load_balancer_vips]
            for ip, reach in addresses:
                self._served.setdefault((ip, port.protocol, port.port), Frontend(each, reach, ip))
            if port.node_port:
                self._node_ports.setdefault((port.protocol, port.node_port), each)
        self._addresses = frozenset(ip for ip, _protocol, _port in self._served)
        self._cluster_ips = frozenset(each.port.cluster_ip for each in family.ports)

    def frontend(self, address: str, protocol: str, port: int) -> Frontend | None:
        """The service port that takes traffic to a destination, if one does."""
        known = self._served.get((address, protocol, port))
        if known is not None:
            return known
        view = self._node_ports.get((protocol, port))
        if view is not None and self._takes_node_ports(address):
            return Frontend(view, Reach.NODE_PORT, address)
        return None

    def unclaimed(self, address: str) -> str:
        """What becomes of traffic to an address of a Service at a port that no Service has: refused or passed."""
        if self._mode in ("iptables", "userspace") or self._is_own(address):
            return "passed"
        if self._mode == "ipvs":
            return "refused" if address in self._addresses else "passed"
        return "refused" if address in self._cluster_ips else "passed"

    def _takes_node_ports(self, address: str) -> bool:
        if self._mode == "userspace":
            return self._is_own(address)
        accepted = self._family.node_ports
        if is_loopback(address):
            # ipvs and nftables serve none there, iptables only those of IPv4.
            return self._mode == "iptables" and self._family.localhost_node_ports and ":" not in address
        return address in (self._own if accepted.match_all else accepted.ips)

    def is_pod(self, caller: Caller) -> bool:
        """Whether the node takes the caller for one of its pods."""
        detect = self._family.detect_local
        if detect is None:
            return False
        if detect.cidr:
            return contains(detect.cidr, caller.source)
        if detect.interface:
            return caller.interface == detect.interface
        return bool(caller.interface) and caller.interface.startswith(detect.prefix)

    def decide(self, frontend: Frontend, caller: Caller) -> Decision:
        """What becomes of traffic of a caller."""
        if self._mode == "userspace":
            return self._by_proxy(frontend, caller)
        selection = frontend.view.selection
        served = selection.has_any if self._mode != "ipvs" else bool(selection.cluster or selection.local)
        # Rules of iptables guard a load balancer only as long as there is something behind it; where the node itself
        # calls, ip_vs finds that there is nothing before a rule is asked.
        unguarded = not served and (self._mode == "iptables" or (self._mode == "ipvs" and caller.is_node))
        if self._guarded(frontend) and not unguarded and not self._allowed(frontend, caller):
            return Decision(Why.SOURCE_RANGES)
        if not served:
            # In iptables mode, what the node sends to external addresses is refused only where it has them itself.
            alone = self._mode == "iptables" and caller.is_node and frontend.external
            return Decision(Why.LEFT_ALONE if alone and not self._is_own(frontend.address) else Why.NO_ENDPOINTS)
        local = self._only_local(frontend, caller)
        chosen = selection.local if local else selection.cluster
        if not chosen:
            if self._mode != "ipvs" or not selection.cluster:
                return Decision(Why.NO_LOCAL_ENDPOINTS, local=True)
            local, chosen = False, selection.cluster  # ipvs falls back to all endpoints
        masked = self._masqueraded(frontend, caller, local)
        ways = tuple((each, self._replaced(each, caller, masked)) for each in chosen)
        return Decision(Why.SERVED, ways, local)

    def _by_proxy(self, frontend: Frontend, caller: Caller) -> Decision:
        """In userspace mode a process of the node calls the endpoint, whichever client it does so for."""
        if frontend.reach is Reach.EXTERNAL_IP and caller.is_node and not self._is_own(frontend.address):
            return Decision(Why.LEFT_ALONE)
        chosen = frontend.view.proxied
        local = chosen is not frontend.view.selection.cluster
        return Decision(Why.SERVED if chosen else Why.NO_ENDPOINTS, tuple((each, True) for each in chosen), local)

    def _guarded(self, frontend: Frontend) -> bool:
        """Whether source ranges count."""
        port = frontend.view.port
        if not port.source_ranges or frontend.reach is Reach.NODE_PORT:
            return False
        # An address that is external IP and load balancer IP at once is an external IP first, in iptables mode.
        return frontend.reach is Reach.LOAD_BALANCER or (
            self._mode != "iptables" and frontend.address in port.load_balancer_vips
        )

    def _allowed(self, frontend: Frontend, caller: Caller) -> bool:
        port = frontend.view.port
        by_node = self._family.allows_node_ip(port)
        if self._mode == "ipvs" and caller.is_node:
            return by_node or caller.source != frontend.address
        if any_contains(port.source_ranges, caller.source):
            return True
        known = (frontend.address,) if self._mode == "ipvs" else port.load_balancer_vips
        return by_node and caller.source in known

    def _only_local(self, frontend: Frontend, caller: Caller) -> bool:
        """Whether only the node's own endpoints count: not for the node and its pods at external addresses."""
        if not frontend.policy_local:
            return False
        if not frontend.external or self._mode == "ipvs":
            return True
        return not (self.is_pod(caller) or self._is_own(caller.source))

    def _is_own(self, address: str) -> bool:
        return address in self._own or is_loopback(address)

    def _masqueraded(self, frontend: Frontend, caller: Caller, local: bool) -> bool:
        """Whether the source is replaced whatever endpoint is chosen."""
        if self._mode == "ipvs":
            return self._masqueraded_by_sets(frontend, caller)
        if not frontend.external:
            if self._node.config.masquerade_all:
                return True
            return self._family.detect_local is not None and not self.is_pod(caller)
        if not frontend.policy_local:
            return True
        return not local and not self.is_pod(caller)

    def _masqueraded_by_sets(self, frontend: Frontend, caller: Caller) -> bool:
        if is_loopback(caller.source):
            return False
        if not frontend.external:
            if self._node.config.masquerade_all:
                return True
            if self._family.detect_local is None:
                return caller.source == frontend.address
            return not self.is_pod(caller)
        return not frontend.policy_local

    def _replaced(self, endpoint: Endpoint, caller: Caller, masked: bool) -> bool:
        """Whether an endpoint sees another source; one that reaches itself must not see its own address."""
        # In ipvs mode a node takes the addresses of Services for its own, also one that is another node's.
        here = endpoint.ip in self._own or (self._mode == "ipvs" and endpoint.ip in self._addresses)
        if here and not caller.is_node:
            return False  # the endpoint is a process of the node, so the packet does not leave
        itself = endpoint.ip == caller.source
        return masked or (itself and (self._mode == "iptables" or endpoint.node_name == self._node.facts.name))
