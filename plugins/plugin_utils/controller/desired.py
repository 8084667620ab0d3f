# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What nodes shall have, kept current while the cluster changes: only what changed is computed anew.

desired = Desired(choices)
desired.update(snapshot)                 # of a Watch, which shares what did not change with the one before
desired.state("n1", facts)               # the State of a node, as `akp render` and the bundle module write it
desired.affected()                       # the Nodes whose state is not what it was when this was asked before
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from .. import backends
from ..backends.compat import DEFAULT_COMPAT
from ..backends.state import State
from ..cluster.snapshot import Node, Service, Snapshot
from ..proxy.config import ProxyConfig, parse_config, with_schedulers
from ..proxy.facts import InvalidFacts, UnusableNode, node_facts
from ..proxy.policy import NOTHING, Known, VipPolicy, api_servers, under_policy, vip_policy
from ..proxy.view import ClusterView
from ..proxy.warned import Warned


@dataclasses.dataclass(frozen=True)
class Choices:
    """Everything beside the cluster and the node that rules depend on."""

    config: ProxyConfig
    compat: str = DEFAULT_COMPAT
    policy: VipPolicy = dataclasses.field(default_factory=VipPolicy)
    text: str = ""  # configuration and schedulers as they were given, for whoever compares what came of them

    @classmethod
    def of(cls, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Choices:
        """From a KubeProxyConfiguration and the kube_proxy_* variables, named without that prefix."""
        annotations = bool(settings.get("scheduler_annotations"))
        schedulers = settings.get("schedulers") or {}
        parsed = with_schedulers(parse_config(config), schedulers, annotations=annotations)
        text = json.dumps([config, {"annotations": annotations, "services": schedulers}], sort_keys=True)
        cidrs = [_words(settings.get(name)) for name in ("external_ip_cidrs", "load_balancer_cidrs")]
        policy = vip_policy(str(settings.get("vip_policy") or "warn"), *cidrs)
        return cls(parsed, str(settings.get("compat") or DEFAULT_COMPAT), policy, text)


def _words(value: str | Sequence[str] | None) -> Sequence[str] | None:
    """A list that may be written with commas; an empty text is none, an empty list is one that allows nothing."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",")] if value else None
    return value


class Desired:
    """The states of all nodes of a cluster."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._renderer = backends.renderer(choices.config, choices.compat)
        self._view: ClusterView | None = None
        self._nodes: dict[str, Node] = {}
        self._generations: dict[str, str] = {}
        self._given: tuple[object, ...] = ()
        self._known: tuple[object, ...] = ()
        self._services: tuple[Service, ...] = ()
        self._allowed: tuple[Service, ...] = ()
        self.warnings: tuple[Warned, ...] = ()  # addresses that Services claim and should not

    def update(self, snapshot: Snapshot, known: Known = NOTHING) -> None:
        """The cluster as it is now. With RefusedVips nothing has changed: what was desired is still desired."""
        self._services = snapshot.services
        snapshot = self._under_policy(snapshot, known)
        view = ClusterView(snapshot, self._choices.config, self._view)
        if self._view is not None:
            self._renderer.forget(self._view.dropped(view))
        self._view = view
        self._nodes = {node.name: node for node in snapshot.nodes}

    def _under_policy(self, snapshot: Snapshot, known: Known) -> Snapshot:
        """The cluster as the policy lets it be; endpoints, which change most, have no say, but for the API server's."""
        given = (snapshot.services, snapshot.nodes, snapshot.service_cidrs)
        told = (api_servers(snapshot), known)
        same = len(given) == len(self._given) and all(a is b for a, b in zip(given, self._given, strict=True))
        if not same or told != self._known:
            allowed, self.warnings = under_policy(snapshot, self._choices.config, self._choices.policy, known)
            self._given, self._known, self._allowed = given, told, allowed.services
        return dataclasses.replace(snapshot, services=self._allowed)

    def claimed(self, addresses: Set[str]) -> bool:
        """Whether a Service claims one of them, be that allowed or not."""
        return any(not addresses.isdisjoint(each.external_ips) for each in self._services)

    def state(self, name: str, facts: Mapping[str, Any] | None = None) -> State:
        """What a node shall have; UnusableNode or InvalidFacts if that cannot be told."""
        node = self._nodes.get(name)
        if node is None or self._view is None:
            shown = ", ".join(list(self._nodes)[:10]) + (", …" if len(self._nodes) > 10 else "")
            raise UnusableNode(
                f"the cluster has no Node {name}; it has {shown or 'none'}. If host and Node have different names, "
                "set kube_proxy_node_name for the host"
            )
        return self._renderer.state(self._view.node_view(node_facts(node, facts)))

    def affected(self) -> tuple[str, ...]:
        """The Nodes whose state is not what it was when this was asked before, as their Node objects tell; sorted.

        A Node that is gone is not among them: nobody will sync it. One that cannot be rendered is: a sync says why.
        """
        now: dict[str, str] = {}
        for name in self._nodes:
            try:
                now[name] = self.state(name).generation
            except (UnusableNode, InvalidFacts) as error:
                now[name] = str(error)
        found = tuple(sorted(name for name in now if self._generations.get(name) != now[name]))
        self._generations = now
        return found
