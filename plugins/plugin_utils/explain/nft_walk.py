# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The hooks of the kernel with the chains of nft: at each hook, its chains in the order of their priorities."""

from __future__ import annotations

from collections.abc import Iterator

from . import nft_rule
from .nft_text import NftTable
from .packet import End, Host, UnknownRule
from .walk import Walker, World


class NftWalker(Walker):
    """Through the table of nft."""

    def __init__(self, host: Host, table: NftTable) -> None:
        super().__init__(host)
        self.table = table
        self._context = nft_rule.Context(table, host)
        self._base_chains = table.base_chains()

    def _at(self, hook: str, world: World) -> Iterator[World]:
        # A packet that the host sends to itself passes input behind postrouting, when its addresses are settled.
        chains = self._base_chains.get(hook, [])
        if hook == "input":
            chains = [name for name in chains if self.table.chains[name].kind == "filter"]
        yield from self._through(chains, world)

    def _named_addresses(self) -> Iterator[str]:
        for each in self.table.containers.values():
            yield from (part for key in each.all_keys() for part in key)

    def destinations(self) -> Iterator[tuple[str, str, int]]:
        """Address, protocol and port of all that maps lead to endpoints; of node ports without address."""
        for name in ("service-ips", "service-nodeports"):
            for key in self.table.containers[name].all_keys() if name in self.table.containers else ():
                address, protocol, port = key if len(key) == 3 else ("", *key)
                yield address, protocol, int(port)

    def _through(self, chains: list[str], world: World) -> Iterator[World]:
        if world.end is not None or not chains:
            yield world
            return
        for after, _returned in self._chain(chains[0], 0, 0, world):
            yield from self._through(chains[1:], after)

    def _chain(self, name: str, start: int, depth: int, world: World) -> Iterator[tuple[World, bool]]:
        """Every way through a chain, and whether it returns to where the chain was called."""
        chain = self.table.chains.get(name)
        if chain is None or depth > 32:
            yield world, True
            return
        for position in range(start, len(chain.rules)):
            text = chain.rules[position]
            try:
                said = list(nft_rule.run(text, world.packet, self._context))
            except UnknownRule:
                self.skipped[f"{name} {text}"] = None
                continue
            if len(said) == 1 and said[0][2] == nft_rule.GO_ON:
                if said[0][1] is not world.packet:
                    world = world.met(f"chain {name}", text, depth).having(said[0][1])
                continue
            for share, packet, verdict in said:
                after = world.having(packet)
                if share is not nft_rule.ONE:
                    after = after.shared(world.share * share)
                if verdict == nft_rule.GO_ON:
                    yield from self._chain(name, position + 1, depth, after)
                else:
                    met = after.met(f"chain {name}", text, depth)
                    yield from self._decided(name, position, depth, met, verdict)
            return
        yield world, True

    def _decided(
        self, name: str, position: int, depth: int, world: World, verdict: str
    ) -> Iterator[tuple[World, bool]]:
        word, _space, target = verdict.partition(" ")
        if word == "jump":
            for after, returned in self._chain(target, 0, depth + 1, world):
                if returned:
                    yield from self._chain(name, position + 1, depth, after)
                else:
                    yield after, False
        elif word == "goto":
            yield from self._chain(target, 0, depth + 1, world)
        elif word == "return":
            yield world, True
        elif word == "masquerade":
            yield world.having(world.packet.masked()), False
        else:
            end = {"drop": End.DROPPED, "reject": End.REFUSED}.get(word)
            yield (world.ended(end) if end else world), False
