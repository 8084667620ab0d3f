# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A node as it is meant to be: its view of the cluster, and the texts of its rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from functools import cached_property
from typing import Any

from .. import backends
from ..addresses import FAMILIES, Family, family_of, is_loopback
from ..backends.state import State
from ..choices import Choices
from ..cluster.snapshot import Snapshot
from ..engine import Engine
from ..proxy.policy import NOTHING, Known
from ..proxy.traffic import Traffic
from ..proxy.view import FamilyView, NodeView
from .links import Link, links_of, source_among
from .packet import Origin, Packet
from .ruleset import Ruleset
from .walk import Walker


class Intent:
    """The views and states of the nodes of a cluster."""

    def __init__(
        self, snapshot: Snapshot, choices: Choices, facts: Mapping[str, Mapping[str, Any]], known: Known = NOTHING
    ) -> None:
        self._engine = Engine(choices, preview=True)
        self._engine.update(snapshot, known)
        self._facts = facts
        self.mode = choices.proxy.mode
        self.renderer = self._engine.renderer

    @property
    def snapshot(self) -> Snapshot:
        """The cluster as its policy lets it be."""
        return self._engine.snapshot

    def view(self, node: str) -> NodeView:
        """What a node sees; it must be one of the cluster."""
        return self._engine.view(node, self._facts.get(node))

    def windows(self, node: str) -> tuple[State, tuple[str, ...]]:
        """The documents of a Windows node, and the addresses that it has itself."""
        view = self.view(node)
        return self.renderer.state(view), view.facts.interface_addresses

    def place(self, node: str, only: Container[tuple[str, str]] | None = None) -> Place:
        """The node as it is meant to be, with the rules of all Services, or of some by namespace and name."""
        view = self.view(node)
        if only is not None:
            families = tuple(_narrowed(each, only) for each in view.families)
            view = dataclasses.replace(view, families=families)
        rules = Ruleset(dict(backends.files(self.renderer.state(view))), view.config.mode)
        return Place(view, rules, links_of(self._facts.get(node)))


def _narrowed(family: FamilyView, only: Container[tuple[str, str]]) -> FamilyView:
    """A view with some Services; what is counted over all of them stays."""
    ports, local = (
        tuple(each for each in views if (each.port.namespace, each.port.name) in only)
        for views in (family.ports, family.local_ports)
    )
    return dataclasses.replace(family, ports=ports, local_ports=local)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A node: what was decided for it, and texts of rules, whether written for it or found on it."""

    view: NodeView
    rules: Ruleset
    links: tuple[Link, ...] = ()  # with the networks around the node's addresses, where they are known

    @property
    def addresses(self) -> frozenset[str]:
        """Those of the node's interfaces, but not of Services."""
        return frozenset(self.view.facts.interface_addresses)

    @cached_property
    def families(self) -> dict[Family, FamilyView]:
        """The families that have rules here."""
        return {each.family: each for each in self.view.families}

    def traffic(self, family: Family) -> Traffic:
        """The decisions of a family."""
        return self._traffic[family]

    @cached_property
    def _traffic(self) -> dict[Family, Traffic]:
        return {family: Traffic(self.view, each) for family, each in self.families.items()}

    @cached_property
    def walkers(self) -> dict[Family, Walker]:
        """What follows packets of each family through the rules."""
        return {family: self.rules.walker(family, self.addresses) for family in FAMILIES if family in self.families}

    def source_of(self, family: Family, destination: str) -> str:
        """The source that the kernel gives to what the node itself sends."""
        if self.walkers[family].host.is_local(destination):
            return destination
        told = self.families[family].node_ip
        if told in self.addresses and (chosen := source_among(self.links, told, destination)):
            return chosen
        own = sorted(ip for ip in self.addresses if family_of(ip) is family and not is_loopback(ip))
        # What the Node object tells may be the address of a gateway in front of it.
        return told if told in self.addresses or not own else own[0]

    def packet(self, source: str, destination: tuple[str, int, str], origin: Origin) -> Packet:
        """A packet to address, port and protocol, coming in by the interface that its origin has."""
        config = self.view.config
        interface = {Origin.NODE: "", Origin.OUTSIDE: "eth0"}.get(origin)
        if interface is None:
            interface = (
                config.detect_local.bridge_interface or f"{config.detect_local.interface_name_prefix or 'veth'}0"
            )
        return Packet(source, *destination, origin=origin, interface=interface)

    def is_own(self, address: str) -> bool:
        """Whether an address is the node's."""
        return address in self.addresses or is_loopback(address)
