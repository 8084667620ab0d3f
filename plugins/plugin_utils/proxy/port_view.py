# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A service port as nodes see it: which endpoints they use, decided once for all nodes that see the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .budget import bytes_of
from .endpoints import Endpoint
from .limits import ENDPOINTS_PER_PORT, ENTRIES_PER_SERVICE
from .services import ServicePort
from .topology import Selection, select_endpoints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PortView:
    """A service port and the endpoints that a node uses for it."""

    port: ServicePort
    endpoints: tuple[Endpoint, ...]  # all of them, whatever their conditions
    selection: Selection

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

    @property
    def proxied(self) -> tuple[Endpoint, ...]:
        """The endpoints that a proxy of userspace mode takes in turn.

        It cannot tell traffic of the cluster from other traffic, so it keeps to the node's own endpoints only where
        all traffic has to.
        """
        external_local = self.port.external_policy_local or not self.port.externally_accessible
        only_local = self.port.internal_policy_local and external_local
        return self.selection.local if only_local else self.selection.cluster


class PortViews:
    """The views of one service port from all nodes, each made once."""

    def __init__(self, port: ServicePort, endpoints: tuple[Endpoint, ...], mode: str) -> None:
        self.port = port
        self.endpoints = endpoints
        frontends = 1 + len(port.external_ips) + len(port.load_balancer_vips) + bool(port.node_port)
        self.entries = frontends * (1 + len(endpoints)) + len(port.load_balancer_vips) * len(port.source_ranges)
        self.bytes = bytes_of(port, frontends, len(endpoints), mode)
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
            known = self._views[key] = PortView(self.port, self.endpoints, selection)
        return known

    def views(self) -> Iterable[PortView]:
        """Those that were made so far."""
        return self._views.values()


def too_much(views: Iterable[PortViews], entries: int) -> str:
    """What one Service has in one family that is more than a node takes; empty if it is not."""
    largest = max(views, key=lambda each: len(each.endpoints))
    for count, most, what in (
        (len(largest.endpoints), ENDPOINTS_PER_PORT, f"endpoints of port {largest.port.port}"),
        (entries, ENTRIES_PER_SERVICE, "entries, which are its frontends times their endpoints, and its source ranges"),
    ):
        if count > most:
            return f"has {count:,} {what}, more than {most:,}"
    return ""
