# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Sets of addresses and ports, as `ipset save` prints them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..addresses import contains
from .packet import Packet, UnknownRule


@dataclasses.dataclass(frozen=True, slots=True)
class IpSet:
    """A set: what an entry is made of, and the entries."""

    kind: tuple[str, ...]  # of "hash:ip,port,net": ip, port, net
    entries: frozenset[str]
    networks: tuple[tuple[str, str], ...] = ()  # of sets that end in net: what comes before it, and the network

    def has(self, packet: Packet, flags: str) -> bool:
        """Whether the packet is in the set; flags say of each part if source or destination counts."""
        sides = flags.split(",")
        if len(sides) != len(self.kind):
            raise UnknownRule(f"--match-set with the flags {flags} on a set of {','.join(self.kind)}")
        parts = [
            _part(sort, side, packet, alone=len(self.kind) == 1) for sort, side in zip(self.kind, sides, strict=True)
        ]
        if self.kind[-1] == "net":
            before = ",".join(parts[:-1])
            return any(known == before and contains(cidr, parts[-1]) for known, cidr in self.networks)
        return ",".join(parts) in self.entries


def _part(sort: str, side: str, packet: Packet, *, alone: bool) -> str:
    if sort == "port":
        if side != "dst":
            raise UnknownRule("a set of source ports")
        return f"{packet.port}" if alone else f"{packet.protocol}:{packet.port}"
    return packet.source if side == "src" else packet.destination


def read_sets(lines: Iterable[str]) -> dict[str, IpSet]:
    """The sets of a text, by name."""
    kinds: dict[str, tuple[str, ...]] = {}
    entries: dict[str, set[str]] = {}
    for line in lines:
        words = line.split()
        if words[:1] == ["create"] and len(words) > 2:
            kinds[words[1]] = tuple(words[2].partition(":")[2].split(","))
            entries[words[1]] = set()
        elif words[:1] == ["add"] and len(words) > 2:
            entries.setdefault(words[1], set()).add(words[2])
        elif words[:1] == ["del"] and len(words) > 2:
            entries.setdefault(words[1], set()).discard(words[2])
    return {name: _made(kind, entries[name]) for name, kind in kinds.items()}


def _made(kind: tuple[str, ...], entries: set[str]) -> IpSet:
    if kind[-1] != "net":
        return IpSet(kind, frozenset(entries))
    networks = []
    for entry in sorted(entries):
        before, _comma, cidr = entry.rpartition(",")
        networks.append((before, cidr if "/" in cidr else f"{cidr}/{128 if ':' in cidr else 32}"))
    return IpSet(kind, frozenset(entries), tuple(networks))
