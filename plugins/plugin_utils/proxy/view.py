# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The node's view of the cluster: all decisions made, nothing written down yet.

Most of a cluster looks the same from every node. A service port whose endpoints do not depend on the node has one
PortView for all of them, so a backend can write it down once and remember it by identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ..addresses import FAMILIES, Family, any_contains, family_of
from ..cluster.snapshot import EndpointSlice, Service, Snapshot
from .budget import BUNDLE_BYTES, beyond
from .claims import age
from .config import ProxyConfig
from .endpoints import Endpoint, ServicePortKey, known_slices, merge_slices
from .facts import (
    DetectLocal,
    NodeFacts,
    NodePortAddresses,
    UnusableNode,
    detect_local,
    node_ips,
    node_port_addresses,
)
from .limits import ENDPOINTS_PER_PORT, MOST_TOLD
from .port_view import PortView, PortViews, too_much
from .portals import MODE
from .proxy_ports import ProxyPorts, proxy_ports
from .services import ServicePort, service_ports
from .warned import Warned

ServiceName: TypeAlias = tuple[str, str]  # namespace, name


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
    proxy_ports: Mapping[ServicePortKey, int] = dataclasses.field(default_factory=dict)  # of userspace mode


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
        self._endpoints = self._merged(before, changed)
        self._ports: dict[Family, list[tuple[ServicePort, ...]]] = {
            family: before._ports[family] if before and same_services else self._service_ports(family, before)
            for family in FAMILIES
        }
        self._proxy_ports = self._allotted(before if same_services else None)
        self._places: dict[Family, dict[ServiceName, tuple[int, tuple[ServicePort, ...]]]] = {}
        self._oversized: list[str] = []  # Services, and what of each is too much
        self._refused: dict[Family, list[PortViews]] = {family: [] for family in FAMILIES}  # those of such Services
        self._views: dict[Family, list[PortViews]] = {}
        for family in FAMILIES:
            stepped = self._stepped_views(family, before, changed) if before and same_services else None
            self._views[family] = self._port_views(family, before) if stepped is None else stepped
        self._keep_to_budget()
        self._located = {family: self._positions(family, before) for family in FAMILIES}
        self._totals = {family: sum([len(each.endpoints) for each in views]) for family, views in self._views.items()}
        self._health = {family: self._health_checks(family) for family in FAMILIES}

    def _allotted(self, before: ClusterView | None) -> ProxyPorts:
        """Where the proxies of userspace mode listen; in other modes there are none."""
        if before is not None:
            return before._proxy_ports
        return proxy_ports(self._snapshot.services, self._config) if self._config.mode == MODE else ProxyPorts()

    def _merged(
        self, before: ClusterView | None, changed: set[ServiceName]
    ) -> dict[Family, dict[ServicePortKey, tuple[Endpoint, ...]]]:
        """The endpoints of every service port."""
        if before is None:
            slices = known_slices(self._snapshot.slices, self._config)
            return {family: merge_slices(slices, family) for family in FAMILIES}
        if not changed:
            return before._endpoints
        then, now = (
            [each for each in slices if (each.namespace, each.service) in changed]
            for slices in (before._snapshot.slices, self._snapshot.slices)
        )
        gone = {(each.namespace, each.service, port.name, port.protocol) for each in then for port in each.ports}
        found = {}
        for family in FAMILIES:
            merged = found[family] = dict(before._endpoints[family])
            for key in gone:
                merged.pop(key, None)
            merged |= merge_slices(known_slices(now, self._config), family)
        return found

    def _service_ports(self, family: Family, before: ClusterView | None) -> list[tuple[ServicePort, ...]]:
        """The service ports of every Service, in order: Services are sorted, and so are the ports of each."""
        known = dict(zip(map(id, before._snapshot.services), before._ports[family], strict=True)) if before else {}
        return [
            known[id(service)] if id(service) in known else _sorted_ports(service, family, self._config)
            for service in self._snapshot.services
        ]

    def _port_views(self, family: Family, before: ClusterView | None) -> list[PortViews]:
        known = {id(each.port): each for each in (*before._views[family], *before._refused[family])} if before else {}
        merged = self._endpoints[family]
        made: list[PortViews] = []
        for ports in self._ports[family]:
            first, entries = len(made), 0
            for port in ports:
                endpoints = merged.get((port.namespace, port.name, port.port_name, port.protocol), ())
                views = known.get(id(port))
                if views is None or views.endpoints is not endpoints:
                    views = PortViews(port, endpoints, self._config.mode)
                made.append(views)
                entries += views.entries
            if entries > ENDPOINTS_PER_PORT and (reason := too_much(made[first:], entries)):
                name = f"Service/{ports[0].namespace}/{ports[0].name}"
                self._oversized.append(f"{name}: {reason}, in {family.value}; it is left out")
                self._refused[family] += made[first:]
                del made[first:]
        return made

    def _stepped_views(self, family: Family, before: ClusterView, changed: set[ServiceName]) -> list[PortViews] | None:
        """Those of before, but for Services with other endpoints; None if all have to be looked at."""
        if before._refused[family]:
            return None
        places = self._places[family] = before._places.get(family) or _places(self._ports[family])
        made, merged = list(before._views[family]), self._endpoints[family]
        for service in changed:
            first, ports = places.get(service, (0, ()))
            entries = 0
            for index, port in enumerate(ports, first):
                endpoints = merged.get((port.namespace, port.name, port.port_name, port.protocol), ())
                if made[index].endpoints is not endpoints:
                    made[index] = PortViews(port, endpoints, self._config.mode)
                entries += made[index].entries
            if entries > ENDPOINTS_PER_PORT:
                return None
        return made

    def _keep_to_budget(self) -> None:
        """Leave out Services until the others fit into a bundle."""
        every = [each for views in self._views.values() for each in views]
        if sum([each.bytes for each in every]) <= BUNDLE_BYTES:
            return
        sizes: dict[tuple[str, str], int] = {}
        for each in every:
            name = (each.port.namespace, each.port.name)
            sizes[name] = sizes.get(name, 0) + each.bytes
        oldest_first = [(each.namespace, each.name) for each in sorted(self._snapshot.services, key=age)]
        gone = beyond(sizes, oldest_first, BUNDLE_BYTES)
        for family, views in self._views.items():
            refused = [each for each in views if (each.port.namespace, each.port.name) in gone]
            self._refused[family] += refused
            left_out = set(map(id, refused))
            self._views[family] = [each for each in views if id(each) not in left_out]
        for index, ((namespace, service), share) in enumerate(sorted(gone.items())):
            if index == MOST_TOLD:
                self._oversized.append(f"{len(gone) - index:,} more Services, for want of room in a bundle")
                break
            self._oversized.append(
                f"Service/{namespace}/{service}: all Services together need more than the {BUNDLE_BYTES / 1e6:.0f} MB "
                f"of a bundle, and those of {namespace} more than its share of {share / 1e6:.1f} MB; it is left out"
            )

    def _positions(self, family: Family, before: ClusterView | None) -> dict[str, list[int]]:
        """Node name -> the positions of service ports with an endpoint there."""
        views = self._views[family]
        if before is None or len(before._views[family]) != len(views):
            return _located(views)
        found = dict(before._located[family])
        for index, (then, now) in enumerate(zip(before._views[family], views, strict=True)):
            if then is not now:
                for name in then.node_names - now.node_names:
                    found[name] = [each for each in found[name] if each != index]
                for name in now.node_names - then.node_names:
                    found[name] = sorted([*found.get(name, ()), index])
        return found

    @property
    def left_out(self) -> tuple[Warned, ...]:
        """The Services that no node would take, each with the reason, and fields of the configuration without meaning.

        All others are as they would be without them.
        """
        oversized = (Warned("left out", text) for text in self._oversized)
        return (*self._config.warnings, *self._proxy_ports.warnings, *oversized)

    def dropped(self, after: ClusterView) -> Iterable[PortView]:
        """The views of service ports that a later view of the cluster does not have any more."""
        for family in FAMILIES:
            then, now = self._views[family], after._views[family]
            if len(then) == len(now):
                # What stands in its place is alive, and most does.
                differing = [pair for pair in zip(then, now, strict=True) if pair[0] is not pair[1]]
                then, now = [each for each, _now in differing], [each for _then, each in differing]
            alive = {id(each) for each in now}
            for each in then:
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
        if facts.hns is None:  # Windows tells pods from others by itself
            _refuse_foreign_cidrs(facts, self._config, families, primary)
        return NodeView(
            facts=facts,
            config=self._config,
            families=tuple(self._family_view(facts, family, ips) for family in families),
            proxy_ports=self._proxy_ports.ports,
        )

    def _family_view(self, facts: NodeFacts, family: Family, ips: dict[Family, str]) -> FamilyView:
        views = self._views[family]
        node_ports = node_port_addresses(family, self._config, ips, facts.interface_addresses)
        ports = tuple([each.shared if each.shared is not None else each.view(facts.name, facts.zone) for each in views])
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
    if len(before) == len(after):
        differing = [pair for pair in zip(before, after, strict=True) if pair[0] is not pair[1]]
        before, after = tuple(each for each, _now in differing), tuple(each for _then, each in differing)
    old, new = {id(each): each for each in before}, {id(each): each for each in after}
    changed = [old[each] for each in old.keys() - new.keys()] + [new[each] for each in new.keys() - old.keys()]
    return {(each.namespace, each.service) for each in changed}


def _places(ports: Iterable[tuple[ServicePort, ...]]) -> dict[ServiceName, tuple[int, tuple[ServicePort, ...]]]:
    """Of each Service with ports, those, and where the first of them stands among all."""
    found, first = {}, 0
    for each in ports:
        if each:
            found[each[0].namespace, each[0].name] = (first, each)
        first += len(each)
    return found


def _sorted_ports(service: Service, family: Family, config: ProxyConfig) -> tuple[ServicePort, ...]:
    return tuple(sorted(service_ports(service, family, config), key=lambda port: (port.port_name, port.protocol)))


def _located(views: Iterable[PortViews]) -> dict[str, list[int]]:
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
    if config.detect_local.mode == "ClusterCIDR":
        cidrs, wanted, field = config.cluster_cidrs, tuple(families), "clusterCIDR"
    elif config.detect_local.mode == "NodeCIDR":
        cidrs, wanted, field = facts.pod_cidrs, (primary,), "spec.podCIDRs of the Node"
    else:
        return
    if cidrs and not any(family_of(cidr) in wanted for cidr in cidrs):
        raise UnusableNode(f"node {facts.name}: {field} has no CIDR of family {wanted[0].value}")
