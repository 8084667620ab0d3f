# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Why a node uses an endpoint of a service port, or does not: the choice of `topology`, told endpoint by endpoint."""

from __future__ import annotations

import dataclasses
import enum

from .endpoints import Endpoint
from .port_view import PortView
from .topology import topology_of


class Reason(enum.Enum):
    """Why an endpoint is in or out."""

    READY = "ready"
    LAST_TERMINATING = "terminatingFallback"  # in: it terminates, and no ready endpoint is left
    NOT_READY = "notReady"
    TERMINATING = "terminating"  # out: ready ones are left
    NOT_SERVING = "notServing"  # out: it terminates and does not serve any more
    OTHER_NODE = "otherNode"  # out: the policy is Local
    OTHER_ZONE = "otherZone"  # out: hints count, and its are for other zones
    NODE_HINT = "nodeHint"  # out: hints count, and its are for other nodes


_IN = (Reason.READY, Reason.LAST_TERMINATING)


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """An endpoint and what became of it."""

    endpoint: Endpoint
    reason: Reason
    hints: tuple[str, ...] = ()  # the zones or nodes that it is meant for, where that is the reason

    @property
    def used(self) -> bool:
        """Whether the node sends traffic there."""
        return self.reason in _IN


def judge(view: PortView, *, local: bool, node_name: str, zone: str) -> tuple[Judged, ...]:
    """Every endpoint of a service port, for traffic of policy Local or Cluster."""
    chosen = {each.text for each in (view.selection.local if local else view.selection.cluster)}
    close = None if local else topology_of(view.endpoints, node_name, zone)
    return tuple(_judged(each, each.text in chosen, local, node_name, close) for each in view.endpoints)


def _judged(endpoint: Endpoint, used: bool, local: bool, node_name: str, close: str | None) -> Judged:
    if used:
        return Judged(endpoint, Reason.READY if endpoint.ready else Reason.LAST_TERMINATING)
    if local and endpoint.node_name != node_name:
        return Judged(endpoint, Reason.OTHER_NODE)
    if not endpoint.ready:
        if not endpoint.terminating:
            return Judged(endpoint, Reason.NOT_READY)
        return Judged(endpoint, Reason.TERMINATING if endpoint.serving else Reason.NOT_SERVING)
    if close == "node":
        return Judged(endpoint, Reason.NODE_HINT, tuple(sorted(endpoint.node_hints)))
    return Judged(endpoint, Reason.OTHER_ZONE, tuple(sorted(endpoint.zone_hints)))
