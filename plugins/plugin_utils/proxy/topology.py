# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which endpoints of a service port a node uses: traffic policies, topology hints, terminating fall-back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .endpoints import Endpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The endpoints a node uses for a service port."""

    cluster: tuple[Endpoint, ...] = ()  # for traffic of policy Cluster
    local: tuple[Endpoint, ...] = ()  # for traffic of policy Local
    all: tuple[Endpoint, ...] = ()  # reachable one way or the other
    has_any: bool = False  # some endpoint of the cluster could serve, even if not from this node


def select_endpoints(
    endpoints: Sequence[Endpoint], *, uses_cluster: bool, uses_local: bool, node_name: str | None, zone: str | None
) -> Selection:
    """kube-proxy's choice for one service port on one node; endpoints come sorted and stay so.

    None stands for a node, or a zone, that no endpoint and no hint names. The empty zone can be named by a hint.
    """
    if not endpoints:
        return Selection()
    cluster: tuple[Endpoint, ...] = ()
    close: Callable[[Endpoint], bool] | None = None
    if uses_cluster:
        ready = [endpoint for endpoint in endpoints if endpoint.ready]
        close = _narrowed(ready, node_name, zone)
        cluster = tuple(ready) if close is None else tuple(filter(close, ready))
        cluster = cluster or _serving_terminating(endpoints)
    if not uses_local:
        return Selection(cluster=cluster, all=cluster, has_any=bool(cluster))

    own = [endpoint for endpoint in endpoints if node_name and endpoint.node_name == node_name]
    local = tuple(endpoint for endpoint in own if endpoint.ready)
    fell_back = not local
    if fell_back:
        local = _serving_terminating(own)
    has_any = bool(cluster) or any(e.ready or (e.serving and e.terminating) for e in endpoints)
    if not uses_cluster:
        reachable = local
    elif close is None and not (fell_back and local):
        reachable = cluster
    else:
        both = {endpoint.text: endpoint for endpoint in (*cluster, *local)}
        reachable = tuple(both[text] for text in sorted(both))
    return Selection(cluster=cluster, local=local, all=reachable, has_any=has_any)


def topology_of(endpoints: Sequence[Endpoint], node_name: str | None, zone: str | None) -> str | None:
    """By what hints narrow the ready endpoints for a node: "node", "zone" or not at all."""
    ready = [endpoint for endpoint in endpoints if endpoint.ready]
    if not ready:
        return None
    if all(e.node_hints for e in ready) and any(node_name in e.node_hints for e in ready):
        return "node"
    if all(e.zone_hints for e in ready) and any(zone in e.zone_hints for e in ready):
        return "zone"
    return None


def _serving_terminating(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    return tuple(endpoint for endpoint in endpoints if endpoint.serving and endpoint.terminating)


def _narrowed(ready: Sequence[Endpoint], node_name: str | None, zone: str | None) -> Callable[[Endpoint], bool] | None:
    """The test of the topology mode in force, or None.

    Hints count only if every ready endpoint has one, and at least one of them is for this node or its zone.
    """
    by = topology_of(ready, node_name, zone)
    if by is None:
        return None
    if by == "node":
        return lambda endpoint: node_name in endpoint.node_hints
    return lambda endpoint: zone in endpoint.zone_hints
