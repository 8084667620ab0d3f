# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""External IPs that are addresses of a node's interfaces, as that node says: judged for that node and no other.

What Node objects say of addresses holds for the whole cluster, and `policy` judges it there. What a node says of itself
may be a lie: it can cost the node itself an external IP, or its rules, and never another one.

Whatever the policy is, no Service gets the way in to a node on that node: an address of the node at the port by which
the control host comes in. A Service that reaches for it gets none of its external addresses at that port there, so that
all nodes which it reaches for share one view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ..cluster.snapshot import PortSpec, Service, Snapshot
from .claims import EXTERNAL_IP, LOAD_BALANCER, NODE_PORT, Lost
from .config import ProxyConfig
from .facts import control_port, own_addresses
from .policy import Finding, Known, RefusedVips, VipPolicy, check_vips, named_alone, without
from .view import ClusterView
from .warned import Warned

_Way: TypeAlias = tuple[str, str, str, int]  # namespace, name, field and port of a claim on the way in to a node


class OwnAddresses:
    """The views of nodes that have addresses which Services claim."""

    def __init__(self, snapshot: Snapshot, config: ProxyConfig, policy: VipPolicy, view: ClusterView) -> None:
        """Of a cluster under its policy, and its view."""
        self._snapshot, self._config, self._policy, self._view = snapshot, config, policy, view
        self._claims: dict[str, list[Service]] = {}
        for service in snapshot.services:
            for address in service.external_ips:
                self._claims.setdefault(address, []).append(service)
        self._told = {node.name: {address for _sort, address in node.addresses} for node in snapshot.nodes}
        # What Node objects say was judged for all nodes.
        for address in self._claims.keys() & set().union(*self._told.values()):
            del self._claims[address]
        self._at: dict[int, list[tuple[Service, str, tuple[str, ...]]]] = {}
        self._views: dict[tuple[tuple[Finding, ...], tuple[_Way, ...]], ClusterView] = {}

    def found(self, node: str, gathered: Mapping[str, Any] | None) -> tuple[Finding, ...]:
        """The claims of Services on addresses of the node's interfaces."""
        addresses = own_addresses(gathered) if gathered and self._claims else ()
        services = {
            (each.namespace, each.name): each for ip in addresses if ip in self._claims for each in self._claims[ip]
        }
        if not services:
            return ()
        nodes = tuple(each for each in self._snapshot.nodes if each.name == node)
        claiming = tuple(services[key] for key in sorted(services))
        alone = dataclasses.replace(self._snapshot, services=claiming, nodes=nodes, slices=(), service_cidrs=())
        known = Known({node: tuple(ip for ip in addresses if ip in self._claims)}, "")
        found = check_vips(alone, self._config, self._policy, known)
        return tuple(each for each in found if each.field == "externalIPs" and each.address in known.interfaces[node])

    def view(self, node: str, gathered: Mapping[str, Any] | None) -> ClusterView:
        """The cluster as this node may have it; RefusedVips if it may have nothing."""
        found = self.found(node, gathered) if self._policy.action != "warn" else ()
        if found and self._policy.action == "refuse":
            raise RefusedVips(found)
        ways = tuple(dict.fromkeys(way for way, _lost in self._reaching(node, gathered)))
        if not found and not ways:
            return self._view
        key = (tuple(dataclasses.replace(each, reason="") for each in found), ways)
        if key not in self._views:
            left = _closed(without(self._snapshot, found), ways)
            self._views[key] = ClusterView(left, self._config, self._view)
        return self._views[key]

    def _reaching(self, node: str, gathered: Mapping[str, Any] | None) -> Iterator[tuple[_Way, Lost]]:
        """The claims of Services on the way in to the node, as far as it is known from asking it."""
        if not gathered:
            return
        own = control_port(gathered)
        told = self._told.get(node, set())
        # A controller may have brought a load balancer IP to an interface; it is not by that one that we come in.
        ours = {EXTERNAL_IP: told.union(own_addresses(gathered)), LOAD_BALANCER: told, NODE_PORT: {""}}
        ours = {field: addresses - named_alone(self._policy, field) for field, addresses in ours.items()}
        for number in sorted({*self._policy.control_ports, *([own] if own else [])}):
            for service, field, addresses in self._claims_at(number):
                for ip in sorted(ours[field].intersection(addresses)):
                    if (ip, "tcp", number) not in service.lost:
                        reason = f"is the way in to the node {node} for the control host"
                        lost = Lost(service.namespace, service.name, field, (ip, "tcp", number), reason)
                        yield (service.namespace, service.name, field, number), lost

    def _claims_at(self, number: int) -> list[tuple[Service, str, tuple[str, ...]]]:
        """What Services claim at a TCP port, by field; node ports have an empty address."""
        if number not in self._at:
            found = self._at[number] = []
            for service in self._snapshot.services:
                for port in service.ports:
                    if port.protocol == "tcp" and number in (port.port, port.node_port):
                        for field, addresses in _addresses(service, port, number).items():
                            found.append((service, field, addresses))
        return self._at[number]

    def warnings(self, node: str, gathered: Mapping[str, Any] | None) -> tuple[Warned, ...]:
        """What there is to say about it."""
        left_out = "; it is left out there" if self._policy.action == "omit" else ""
        claimed = [Warned("claimed, but not theirs", f"{each}{left_out}") for each in self.found(node, gathered)]
        ways = [Warned("claimed, and not granted", f"{lost} there") for _way, lost in self._reaching(node, gathered)]
        return (*claimed, *ways)

    @property
    def views(self) -> tuple[ClusterView, ...]:
        """Those that were made for single nodes."""
        return tuple(self._views.values())


def _addresses(service: Service, port: PortSpec, number: int) -> dict[str, tuple[str, ...]]:
    """By field, where a port of a Service asks to be reached at this number."""
    found: dict[str, tuple[str, ...]] = {NODE_PORT: ("",)} if port.node_port == number else {}
    if port.port == number:
        found |= {EXTERNAL_IP: service.external_ips, LOAD_BALANCER: service.load_balancer_vips}
    return {field: addresses for field, addresses in found.items() if addresses}


def _closed(snapshot: Snapshot, ways: Iterable[_Way]) -> Snapshot:
    """The cluster without what Services claim by a field at a port."""
    gone: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for namespace, name, field, number in ways:
        gone.setdefault((namespace, name), []).append((field, number))

    def left(service: Service) -> Service:
        lost = {
            (ip, "tcp", number)
            for field, number in gone.get((service.namespace, service.name), ())
            for port in service.ports
            for ip in _addresses(service, port, number).get(field, ())
        }
        return dataclasses.replace(service, lost=service.lost | lost) if lost else service

    return dataclasses.replace(snapshot, services=tuple(map(left, snapshot.services)))
