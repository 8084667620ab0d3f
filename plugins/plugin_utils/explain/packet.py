# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A packet, the host it meets, and what became of it."""

from __future__ import annotations

import dataclasses
import enum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from ..addresses import endpoint_text, is_loopback


class UnknownRule(Exception):
    """A rule that cannot be followed; the message holds the part that is not known."""


class Origin(enum.Enum):
    """Where a packet starts, seen from the node."""

    OUTSIDE = "outside"  # it comes in by an interface
    POD = "pod"  # it comes in by the interface of a pod of this node
    NODE = "node"  # a process of the node sends it


class Packet(NamedTuple):
    """The first packet of a connection, with what rules have done to it so far.

    A tuple, which is made several times as fast as a frozen dataclass: a proof makes millions.
    """

    source: str
    destination: str
    port: int
    protocol: str  # tcp, udp or sctp
    origin: Origin
    interface: str = ""  # by which it came in; empty if the node sends it
    mark: int = 0
    translated: bool = False  # its destination was replaced
    masqueraded: bool = False  # its source is replaced
    virtual: tuple[str, int] | None = None  # address and port of the virtual server that took it

    @property
    def target(self) -> str:
        """Where it goes now."""
        return endpoint_text(self.destination, self.port)

    def sent_to(self, address: str, port: int) -> Packet:
        """With another destination."""
        return self._replace(destination=address, port=port or self.port, translated=True)

    def marked(self, mark: int) -> Packet:
        """With another mark."""
        return self._replace(mark=mark)

    def masked(self) -> Packet:
        """With another source."""
        return self._replace(masqueraded=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """What rules ask of the host itself."""

    addresses: frozenset[str]  # of all its interfaces

    def is_local(self, address: str) -> bool:
        """Whether packets for an address are for the host itself."""
        return address in self.addresses or is_loopback(address)


class End(enum.Enum):
    """What became of a packet."""

    DELIVERED = "endpoints"  # its destination became an endpoint
    DROPPED = "dropped"
    REFUSED = "refused"  # and its sender is told
    PASSED = "passed"  # the rules leave its destination as it is


class Step(NamedTuple):
    """A rule that a packet met and that did something with it."""

    place: str  # "nat KUBE-SERVICES", "chain services", "ipvs"
    text: str
    depth: int = 0


class Path(NamedTuple):
    """One way that a packet can take, and how likely it is."""

    end: End
    share: Fraction
    packet: Packet
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All ways that a packet can take; their shares add up to one."""

    paths: tuple[Path, ...]
    skipped: tuple[str, ...] = ()  # rules that could not be followed

    @cached_property
    def end(self) -> End:
        """What becomes of most of such packets; delivery is named if there is any."""
        ends = {each.end for each in self.paths}
        if End.DELIVERED in ends:
            return End.DELIVERED
        return max(ends, key=lambda end: sum(each.share for each in self.paths if each.end is end))

    @cached_property
    def shares(self) -> dict[str, Fraction]:
        """Endpoint -> its share."""
        found: dict[str, Fraction] = {}
        for each in self.paths:
            if each.end is End.DELIVERED:
                to = each.packet.target
                found[to] = found[to] + each.share if to in found else each.share
        return found

    @cached_property
    def masquerades(self) -> dict[str, bool]:
        """Endpoint -> whether the source is replaced on the way there."""
        return {each.packet.target: each.packet.masqueraded for each in self.paths if each.end is End.DELIVERED}

    @cached_property
    def lost(self) -> Fraction:
        """The share that is not delivered, where some is."""
        if self.end is not End.DELIVERED or all(each.end is End.DELIVERED for each in self.paths):
            return Fraction(0)
        return 1 - sum(self.shares.values(), Fraction(0))
