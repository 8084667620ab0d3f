# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The hooks of the kernel with tables of iptables, and with the virtual servers of ip_vs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from ..addresses import endpoint_text
from . import iptables
from .ipset import IpSet
from .ipvs import VirtualServer
from .packet import End, Host, Origin, Packet, UnknownRule
from .walk import Walker, World

_TABLES = {
    "prerouting": ("nat PREROUTING",),
    "input": ("filter INPUT",),
    "forward": ("filter FORWARD",),
    "output": ("nat OUTPUT", "filter OUTPUT"),
    "postrouting": ("nat POSTROUTING",),
}


class IptablesWalker(Walker):
    """Through tables of iptables."""

    def __init__(self, host: Host, tables: iptables.Tables, sets: Mapping[str, IpSet] | None = None) -> None:
        super().__init__(host)
        self.tables = tables
        self.sets = sets or {}

    def _at(self, hook: str, world: World) -> Iterator[World]:
        yield from self._through(_TABLES[hook], world)

    def _named_addresses(self) -> Iterator[str]:
        for (table, _name), chain in self.tables.items():
            if table == "filter":
                yield from chain.destinations()

    def destinations(self) -> Iterator[tuple[str, str, int]]:
        """Address, protocol and port of all that rules of the nat table single out; of node ports without address."""
        for name in ("KUBE-SERVICES", "KUBE-NODEPORTS"):
            chain = self.tables.get(("nat", name))
            for text in chain.texts if chain else ():
                found = iptables.DISPATCH.search(text)
                if found:
                    yield found["address"] or "", found["protocol"], int(found["port"])

    def masks(self, place: str, address: str) -> bool:
        """Whether a packet that passes a chain of the nat table from an address is marked there."""
        table, _space, name = place.partition(" ")
        probe = Packet(address, address, 0, "tcp", Origin.POD)
        chain = self.tables.get((table, name))
        for text in chain.texts if chain else ():
            rule = iptables.parse(text)
            if rule.target not in ("DNAT", "") and self._holds(rule, probe):
                marked = [world for world, _back in self._chain(table, rule.target, 0, 1, World(probe))]
                if any(world.packet.mark for world in marked):
                    return True
        return False

    def _through(self, chains: tuple[str, ...], world: World) -> Iterator[World]:
        """Chains one after the other, as long as none ends the packet."""
        if world.end is not None or not chains:
            yield world
            return
        table, _space, chain = chains[0].partition(" ")
        for after, _returned in self._chain(table, chain, 0, 0, world):
            yield from self._through(chains[1:], after)

    def _chain(self, table: str, name: str, start: int, depth: int, world: World) -> Iterator[tuple[World, bool]]:
        """Every way through a chain, and whether it returns to where the chain was called."""
        chain = self.tables.get((table, name))
        if chain is None or depth > 32:
            yield world, True
            return
        for position in chain.positions(world.packet.destination):
            if position < start:
                continue
            text = chain.texts[position]
            try:
                rule = iptables.parse(text)
                if not self._holds(rule, world.packet):
                    continue
            except UnknownRule:
                self.skipped[f"{table} {name} {text}"] = None
                continue
            taken = world.met(f"{table} {name}", text, depth)
            if not rule.certain:
                taken = taken.shared(world.share * rule.chance)
                world = world.shared(world.share - taken.share)
            if not rule.target:
                continue
            outcome = self._target(rule, taken)
            if outcome is None and rule.target == "RETURN":
                yield taken, True
            elif outcome is None:
                for after, returned in self._chain(table, rule.target, 0, depth + 1, taken):
                    if returned and not rule.leaves:
                        yield from self._chain(table, name, position + 1, depth, after)
                    else:
                        yield after, returned
            elif outcome[1]:
                yield outcome[0], False
            elif not rule.certain:
                yield from self._chain(table, name, position + 1, depth, outcome[0])
            else:
                world = outcome[0]
                continue
            if rule.certain:
                return
        yield world, True

    def _holds(self, rule: iptables.Rule, packet: Packet) -> bool:
        for test in rule.tests:  # noqa: SIM110  # a generator takes twice as long, and this is asked most
            if not test(packet, self.host, self.sets):
                return False
        return True

    @staticmethod
    def _target(rule: iptables.Rule, world: World) -> tuple[World, bool] | None:
        """The packet after a target, and whether this hook's table is done; None if the target is a chain or RETURN."""
        packet = world.packet
        if rule.target == "ACCEPT":
            return world, True
        if rule.target == "DROP":
            return world.ended(End.DROPPED), True
        if rule.target == "REJECT":
            return world.ended(End.REFUSED), True
        if rule.target == "MARK":
            value, mask = rule.remark
            return world.having(packet.marked((packet.mark & ~mask) ^ value)), False
        if rule.target == "DNAT":
            return world.having(packet.sent_to(*rule.place)), True
        if rule.target == "MASQUERADE":
            return world.having(packet.masked()), True
        return None


class IpvsWalker(IptablesWalker):
    """Through tables of iptables that ask sets, and virtual servers."""

    def __init__(
        self,
        host: Host,
        tables: iptables.Tables,
        sets: Mapping[str, IpSet],
        servers: Mapping[tuple[str, str], VirtualServer],
    ) -> None:
        super().__init__(host, tables, sets)
        self.servers = servers

    def _choice(self, world: World) -> Iterator[World]:
        """ip_vs takes packets behind the filter of input, and those of the host before the filter of output."""
        if world.packet.origin is Origin.NODE:
            for sent in self._through(("nat OUTPUT",), world):
                yield from self._balanced(sent)
            return
        for entered in self._through(("nat PREROUTING",), world):
            if not self.host.is_local(entered.packet.destination):
                yield entered
                continue
            for admitted in self._through(("filter INPUT",), entered):
                yield from self._balanced(admitted)

    def _rest(self, world: World) -> Iterator[World]:
        """What a virtual server took leaves again, unless its endpoint is on the host itself."""
        is_local = self.host.is_local(world.packet.destination)
        if world.packet.origin is Origin.NODE:
            for sent in self._through(("filter OUTPUT",), world):
                yield from self._left(sent)
        elif is_local:
            yield world
        elif world.packet.virtual is None:
            yield from self._routed(world)
        else:
            yield from self._through(("filter OUTPUT", "nat POSTROUTING"), world)

    def _tail_key(self, packet: Packet) -> tuple[object, ...]:
        named = packet.virtual if packet.virtual and packet.virtual[0] in self._virtual_addresses else None
        return (*super()._tail_key(packet), packet.virtual is None, named)

    @cached_property
    def _virtual_addresses(self) -> frozenset[str]:
        """Those of virtual servers that rules name."""
        texts = (text for chain in self.tables.values() for text in chain.texts if "--vaddr" in text)
        return frozenset(text.split("--vaddr ")[1].split()[0].partition("/")[0] for text in texts)

    def _named_addresses(self) -> Iterator[str]:
        yield from super()._named_addresses()
        for each in self.sets.values():
            yield from (entry.partition(",")[0] for entry in each.entries)

    def _balanced(self, world: World) -> Iterator[World]:
        packet = world.packet
        server = self.servers.get((packet.protocol, endpoint_text(packet.destination, packet.port)))
        if world.end is not None or server is None or packet.virtual is not None:
            yield world
            return
        met = world.met("ipvs", server.text, 0)
        choices = server.shares()
        if not choices:
            yield met.ended(End.REFUSED)
        taken = packet._replace(virtual=(packet.destination, packet.port))
        for address, port, share, line in choices:
            yield met.having(taken.sent_to(address, port)).shared(world.share * share).met("ipvs", line, 1)
