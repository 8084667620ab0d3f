# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The engine: the states of nodes, from the choices of a user, a cluster and what nodes say of themselves.

    engine = Engine(choices)
    engine.update(snapshot)                  # RefusedVips, InvalidConfig and the like: what concerns all nodes
    engine.state("n1", facts)                # the State of a node
    engine.affected()                        # the Nodes whose state is not what it was when this was asked before

All that computes states does it here: `akp render`, `akp diff` and `akp publish`, the modules bundle and publish,
`akp watch` and the event source. After an update with a snapshot that shares objects with the one before (that of a
Watch does), only what changed is computed anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from . import backends
from .backends.common import record_line
from .backends.state import State
from .choices import Choices
from .cluster.snapshot import Node, Service, Snapshot
from .proxy.facts import InvalidFacts, NodeFacts, UnusableNode, node_facts
from .proxy.hns import health_checks_lost
from .proxy.own import OwnAddresses
from .proxy.policy import NOTHING, Known, RefusedVips, api_servers, under_policy
from .proxy.view import ClusterView, NodeView
from .proxy.warned import Warned


class Engine:
    """The states of all nodes of a cluster."""

    def __init__(self, choices: Choices, *, preview: bool = False) -> None:
        """`preview`: also write the states of Windows nodes, which no carrier brings there yet."""
        self.choices = choices
        self._config, self._policy = choices.proxy, choices.policy
        self.renderer = backends.renderer(self._config, choices.compat, preview=preview)
        self._view: ClusterView | None = None
        self._own: OwnAddresses | None = None
        self._nodes: dict[str, Node] = {}
        self._generations: dict[str, str] = {}
        self._given: tuple[object, ...] = ()
        self._known: tuple[object, ...] = ()
        self._allowed: tuple[Service, ...] = ()
        self._claimed: tuple[Warned, ...] = ()
        self.snapshot = Snapshot((), (), (), ())  # the cluster as the policy lets it be
        self.warnings: tuple[Warned, ...] = ()  # what Services claim and should not, and those that ask for too much

    def update(self, snapshot: Snapshot, known: Known = NOTHING) -> None:
        """The cluster as it is now. With RefusedVips nothing has changed: what was desired is still desired."""
        snapshot = self._under_policy(snapshot, known)
        view = ClusterView(snapshot, self._config, self._view)
        for gone in (self._view, *(self._own.views if self._own else ())):
            if gone is not None:
                self.renderer.forget(gone.dropped(view))
        self.snapshot, self._view = snapshot, view
        self._own = OwnAddresses(snapshot, self._config, self._policy, view)
        self.warnings = self._claimed + view.left_out
        self._nodes = {node.name: node for node in snapshot.nodes}

    def _under_policy(self, snapshot: Snapshot, known: Known) -> Snapshot:
        """The cluster as the policy lets it be; endpoints, which change most, have no say, but for the API server's."""
        given = (snapshot.services, snapshot.nodes, snapshot.service_cidrs)
        told = (api_servers(snapshot), known)
        same = len(given) == len(self._given) and all(a is b for a, b in zip(given, self._given, strict=True))
        if not same or told != self._known:
            allowed, self._claimed = under_policy(snapshot, self._config, self._policy, known)
            self._given, self._known, self._allowed = given, told, allowed.services
        return dataclasses.replace(snapshot, services=self._allowed)

    def service_lines(self) -> Iterator[str]:
        """The service ports as lines of JSON, seen from no node in particular: with every endpoint that may serve."""
        if self._view is None:
            return
        for family in self._view.node_view(NodeFacts(name="")).families:
            for each in family.ports:
                usable = [e for e in each.endpoints if e.ready or (e.serving and e.terminating)]
                yield record_line(each.port, usable, ())

    def warnings_of(self, name: str, facts: Mapping[str, Any] | None) -> tuple[Warned, ...]:
        """What there is to say about the addresses that a node says it has, and about what it cannot do."""
        own = self._own.warnings(name, facts) if self._own is not None else ()
        node = self._nodes.get(name)
        return (*own, *health_checks_lost(name, self.snapshot)) if node is not None and node.windows else own

    def state(self, name: str, facts: Mapping[str, Any] | None = None) -> State:
        """The state of a node; UnusableNode or InvalidFacts if that cannot be told."""
        return self.renderer.state(self.view(name, facts))

    def view(self, name: str, facts: Mapping[str, Any] | None = None) -> NodeView:
        """What was decided for a node; UnusableNode or InvalidFacts if that cannot be told."""
        node = self._nodes.get(name)
        if node is None or self._own is None:
            shown = ", ".join(list(self._nodes)[:10]) + (", …" if len(self._nodes) > 10 else "")
            raise UnusableNode(
                f"the cluster has no Node {name}; it has {shown or 'none'}. If host and Node have different names, "
                "set kube_proxy_node_name for the host"
            )
        try:
            view = self._own.view(name, facts)
        except RefusedVips as error:
            # Of addresses that this node says it has; what all nodes have to do with is refused in `update`.
            raise UnusableNode(f"refused: {'; '.join(str(error).splitlines())}") from None
        return view.node_view(node_facts(node, facts))

    def affected(self) -> tuple[str, ...]:
        """The Nodes whose state is not what it was when this was asked before, as their Node objects tell; sorted.

        A Node that is gone is not among them: no run can reach it. One that cannot be rendered is: a run says why.
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
