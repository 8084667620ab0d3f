# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The node's view of the cluster: all decisions made, nothing written down yet.

Most of a cluster looks the same from every node. A service port whose endpoints do not depend on the node has one
PortView for all of them, so whoever writes it down can do that once and remember it by identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..addresses import FAMILIES, Family, any_contains, family_of
from ..cluster.snapshot import EndpointSlice, Service, Snapshot
from .config import ProxyConfig
from .endpoints import Endpoint, ServicePortKey, merge_slices
from .facts import (
    DetectLocal,
    NodeFacts,
    NodePortAddresses,
    UnusableNode,
    detect_local,
    node_ips,
    node_port_addresses,
)
from .services import ServicePort, service_ports
from .topology import Selection, select_endpoints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PortView:
    """A service port and the endpoints that a node uses for it."""

    port: ServicePort
    endpoints: tuple[Endpoint, ...]  # all of them, whatever their conditions
    selection: Selection
    contested: bool = False  # another service port claims one of its destinations

    @property
    def has_internal(self) -> bool:
        """Whether traffic to the cluster IP finds an endpoint here."""
        return self.selection.has_any and not (self.port.internal_policy_local and not self.selection.local)

    @property
    def has_external(self) -> bool:
        """Whether traffic from outside finds an endpoint here."""
        return self.selection.has_any and not (self.port.external_policy_local and not self.selection.local)

    @property
    def uses_cluster_chain(self) -> bool:
        """Whether something dispatches to the cluster's endpoints."""
        return bool(self.selection.cluster) and self.port.uses_cluster

    @property
    def uses_local_chain(self) -> bool:
        """Whether something dispatches to the node's own endpoints."""
        return bool(self.selection.local) and self.port.uses_local

    @property
    def uses_external_chain(self) -> bool:
        """Whether external destinations are dispatched at all; that they find an endpoint here is another matter."""
        return self.selection.has_any and self.port.externally_accessible


class _PortViews:
    """The views of one service port from all nodes, each made once."""

    def __init__(self, port: ServicePort, endpoints: tuple[Endpoint, ...], *, contested: bool) -> None:
        self.port = port
        self.contested = contested
        self.endpoints = endpoints
        self.node_names = {endpoint.node_name for endpoint in endpoints}
        self._views: dict[tuple[str | None, str | None], PortView] = {}
        hinted = port.uses_cluster and any(e.node_hints or e.zone_hints for e in endpoints)
        nodes = {e.node_name for e in endpoints} if port.uses_local else set()
        self._nodes = nodes.union(*(e.node_hints for e in endpoints)) if hinted else nodes
        self._zones = frozenset().union(*(e.zone_hints for e in endpoints)) if hinted else frozenset()
        self.shared = None if self._nodes or self._zones else self.view(None, None)

    def view(self, node_name: str | None, zone: str | None) -> PortView:
        """The view of a node. Nodes that no endpoint and no hint names all see the same."""
        key = (node_name if node_name in self._nodes else None, zone if zone in self._zones else None)
        known = self._views.get(key)
        if known is None:
            selection = select_endpoints(
                self.endpoints,
                uses_cluster=self.port.uses_cluster,
                uses_local=self.port.uses_local,
                node_name=key[0],
                zone=key[1],
            )
            known = self._views[key] = PortView(self.port, self.endpoints, selection, self.contested)
        return known

    def views(self) -> Iterable[PortView]:
        """Those that were made so far."""
        return self._views.values()


@dataclasses.dataclass(frozen=True, slots=True)
class HealthCheck:
    """What a load balancer is told at the health check port of a Service."""

    namespace: str
    name: str
    port: int
    local_endpoints: int  # distinct addresses on this node that are ready


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FamilyView:
    """One family of a node's view."""

    family: Family
    node_ip: str
    detect_local: DetectLocal | None
    node_ports: NodePortAddresses
    localhost_node_ports: bool
    ports: tuple[PortView, ...]  # sorted by namespace, name, port name, protocol
    local_ports: tuple[PortView, ...]  # those with an endpoint on this node
    total_endpoints: int
    service_cidrs: tuple[str, ...]
    health_checks: tuple[HealthCheck, ...] = ()  # sorted by port

    def allows_node_ip(self, port: ServicePort) -> bool:
        """Whether the source ranges of a service port contain this node."""
        return any_contains(port.source_ranges, self.node_ip)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NodeView:
    """Everything a backend needs to write down the state of a node."""

    facts: NodeFacts
    config: ProxyConfig
    families: tuple[FamilyView, ...]


class ClusterView:
    """A cluster under a configuration; gives the view of each of its nodes.

    Given the view before, of a snapshot that shares what did not change with this one, only what changed is decided
    anew; the result is the same as without it.
    """

    def __init__(self, snapshot: Snapshot, config: ProxyConfig, before: ClusterView | None = None) -> None:
        self._snapshot = snapshot
        self._config = config
        if before is not None and before._config is not config:
            before = None
        same_services = before is not None and before._snapshot.services is snapshot.services
        changed = _services_of_changed_slices(before._snapshot.slices if before else (), snapshot.slices)
        self._endpoints = {family: self._merged(family, before, changed) for family in FAMILIES}
        self._ports: dict[Family, list[tuple[ServicePort, ...]]] = {}
        self._contested: dict[Family, set[int]] = {}
        for family in FAMILIES:
            if before is not None and same_services:
                self._ports[family], self._contested[family] = before._ports[family], before._contested[family]
            else:
                self._ports[family] = self._service_ports(family, before)
                self._contested[family] = _contested(port for ports in self._ports[family] for port in ports)
        self._views = {family: self._port_views(family, before) for family in FAMILIES}
        self._located = {family: _located(views) for family, views in self._views.items()}
        self._totals = {family: sum(len(each.endpoints) for each in views) for family, views in self._views.items()}
        self._health = {family: self._health_checks(family) for family in FAMILIES}

    def _merged(
        self, family: Family, before: ClusterView | None, changed: set[tuple[str, str]]
    ) -> dict[ServicePortKey, tuple[Endpoint, ...]]:
        """The endpoints of every service port."""
        if before is None:
            return merge_slices(self._snapshot.slices, family)
        if not changed:
            return before._endpoints[family]
        merged = {key: known for key, known in before._endpoints[family].items() if key[:2] not in changed}
        merged.update(
            merge_slices((each for each in self._snapshot.slices if (each.namespace, each.service) in changed), family)
        )
        return merged

    def _service_ports(self, family: Family, before: ClusterView | None) -> list[tuple[ServicePort, ...]]:
        """The service ports of every Service, in order: Services are sorted, and so are the ports of each."""
        known = dict(zip(map(id, before._snapshot.services), before._ports[family], strict=True)) if before else {}
        return [
            known[id(service)] if id(service) in known else _sorted_ports(service, family, self._config)
            for service in self._snapshot.services
        ]

    def _port_views(self, family: Family, before: ClusterView | None) -> list[_PortViews]:
        known = {id(each.port): each for each in before._views[family]} if before else {}
        merged, contested = self._endpoints[family], self._contested[family]
        made = []
        for index, port in enumerate(port for ports in self._ports[family] for port in ports):
            endpoints = merged.get((port.namespace, port.name, port.port_name, port.protocol), ())
            same = known.get(id(port))
            if same is not None and same.endpoints is endpoints and same.contested == (index in contested):
                made.append(same)
            else:
                made.append(_PortViews(port, endpoints, contested=index in contested))
        return made

    def dropped(self, after: ClusterView) -> Iterable[PortView]:
        """The views of service ports that a later view of the cluster does not have any more."""
        for family in FAMILIES:
            alive = {id(each) for each in after._views[family]}
            for each in self._views[family]:
                if id(each) not in alive:
                    yield from each.views()

    def _health_checks(self, family: Family) -> list[tuple[ServicePort, dict[str, set[str]]]]:
        """By port, one service port of each Service with a health check, and its ready addresses by node.

        Every port of its EndpointSlices counts, even one that the Service does not have.
        """
        claimed: dict[int, ServicePort] = {}
        for each in self._views[family]:
            if each.port.health_check_node_port:
                claimed.setdefault(each.port.health_check_node_port, each.port)
        ready: dict[tuple[str, str], dict[str, set[str]]] = {(p.namespace, p.name): {} for p in claimed.values()}
        for (namespace, name, _port, _protocol), endpoints in self._endpoints[family].items() if ready else ():
            found = ready.get((namespace, name))
            if found is not None:
                for endpoint in endpoints:
                    if endpoint.ready:
                        found.setdefault(endpoint.node_name, set()).add(endpoint.ip)
        return [(port, ready[port.namespace, port.name]) for _number, port in sorted(claimed.items())]

    def node_view(self, facts: NodeFacts) -> NodeView:
        """The view of one node."""
        primary, ips = node_ips(facts, self._config)
        families = usable_families(facts, primary)
        _refuse_foreign_cidrs(facts, self._config, families, primary)
        return NodeView(
            facts=facts,
            config=self._config,
            families=tuple(self._family_view(facts, family, ips) for family in families),
        )

    def _family_view(self, facts: NodeFacts, family: Family, ips: dict[Family, str]) -> FamilyView:
        views = self._views[family]
        node_ports = node_port_addresses(family, self._config, ips, facts.interface_addresses)
        ports = tuple(each.shared if each.shared is not None else each.view(facts.name, facts.zone) for each in views)
        return FamilyView(
            family=family,
            node_ip=ips[family],
            detect_local=detect_local(family, facts, self._config),
            node_ports=node_ports,
            localhost_node_ports=self._config.localhost_node_ports and node_ports.contains_ipv4_loopback,
            ports=ports,
            local_ports=tuple(ports[index] for index in self._located[family].get(facts.name, ())),
            total_endpoints=self._totals[family],
            service_cidrs=tuple(
                sorted({c for each in self._snapshot.service_cidrs for c in each.cidrs if family_of(c) is family})
            ),
            health_checks=tuple(
                HealthCheck(port.namespace, port.name, port.health_check_node_port, len(ready.get(facts.name, ())))
                for port, ready in self._health[family]
            ),
        )


def _services_of_changed_slices(
    before: tuple[EndpointSlice, ...], after: tuple[EndpointSlice, ...]
) -> set[tuple[str, str]]:
    """Namespace and name of the Services whose EndpointSlices are not the same objects as before."""
    if before is after:
        return set()
    old, new = {id(each): each for each in before}, {id(each): each for each in after}
    differing = [old[each] for each in old.keys() - new.keys()] + [new[each] for each in new.keys() - old.keys()]
    return {(each.namespace, each.service) for each in differing}


def _sorted_ports(service: Service, family: Family, config: ProxyConfig) -> tuple[ServicePort, ...]:
    return tuple(sorted(service_ports(service, family, config), key=lambda port: (port.port_name, port.protocol)))


def _contested(ports: Iterable[ServicePort]) -> set[int]:
    """The positions of service ports that share a destination with another one."""
    first: dict[tuple[str, str, int], int] = {}
    found: set[int] = set()
    for index, port in enumerate(ports):
        for destination in port.destinations:
            claimed = first.setdefault(destination, index)
            if claimed != index:
                found |= {claimed, index}
    return found


def _located(views: Iterable[_PortViews]) -> dict[str, list[int]]:
    """Node name -> the positions of service ports with an endpoint there."""
    found: dict[str, list[int]] = {}
    for index, each in enumerate(views):
        for name in each.node_names:
            found.setdefault(name, []).append(index)
    return found


def usable_families(facts: NodeFacts, primary: Family) -> tuple[Family, ...]:
    """Both families where the node can do both, else the primary one."""
    if all(family in facts.families for family in FAMILIES):
        return FAMILIES
    if primary not in facts.families:
        raise UnusableNode(f"node {facts.name}: its primary family {primary.value} is not usable there")
    return (primary,)


def _refuse_foreign_cidrs(facts: NodeFacts, config: ProxyConfig, families: Iterable[Family], primary: Family) -> None:
    """CIDRs that are all of a family that is not programmed are a mistake, where kube-proxy says so too."""
    if config.detect_local_mode == "ClusterCIDR":
        cidrs, wanted, field = config.cluster_cidrs, tuple(families), "clusterCIDR"
    elif config.detect_local_mode == "NodeCIDR":
        cidrs, wanted, field = facts.pod_cidrs, (primary,), "spec.podCIDRs of the Node"
    else:
        return
    if cidrs and not any(family_of(cidr) in wanted for cidr in cidrs):
        raise UnusableNode(f"node {facts.name}: {field} has no CIDR of family {wanted[0].value}")
