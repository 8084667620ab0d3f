# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The hooks of the kernel, in the order in which the first packet of a connection passes them.

A packet that comes in by an interface passes prerouting, then input if it is for the host and forward if it is not, and
postrouting when it leaves. One that the host sends passes output and postrouting, and input if it is for the host
itself. Where rules choose by chance, every choice is followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TypeAlias

from .packet import End, Host, Origin, Packet, Path, Step, Verdict

_ONE = Fraction(1)


class World:
    """A packet on one of its ways. Never changed once made, and made often: a plain class is several times as fast."""

    __slots__ = ("end", "packet", "share", "steps")

    def __init__(
        self, packet: Packet, share: Fraction = _ONE, steps: tuple[Step, ...] = (), end: End | None = None
    ) -> None:
        self.packet = packet
        self.share = share
        self.steps = steps
        self.end = end

    def met(self, place: str, text: str, depth: int) -> World:
        return World(self.packet, self.share, (*self.steps, Step(place, text, depth)), self.end)

    def ended(self, end: End) -> World:
        return World(self.packet, self.share, self.steps, end)

    def having(self, packet: Packet) -> World:
        return World(packet, self.share, self.steps, self.end)

    def shared(self, share: Fraction) -> World:
        return World(self.packet, share, self.steps, self.end)


# How a packet leaves the hooks behind the one that chose its endpoint: its end, and whether its source is replaced.
_Tail: TypeAlias = tuple[tuple[Fraction, End | None, bool], ...]


class Walker:
    """Follows packets through the rules of one family on one host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.skipped: dict[str, None] = {}
        # Of packets for destinations that no rule names, the same becomes: once known, it need not be followed again.
        self._tails: dict[tuple[object, ...], _Tail] = {}
        self._named: frozenset[str] | None = None

    def walk(self, packet: Packet) -> Verdict:
        """Where the packet ends, with every rule on its way."""
        self.skipped = {}
        paths = tuple(_path(each) for world in self._choice(World(packet)) for each in self._rest(world))
        return Verdict(paths, tuple(self.skipped))

    def ends(self, packet: Packet) -> Verdict:
        """Where the packet ends; the rules behind the choice of an endpoint are left out where they are known."""
        self.skipped = {}
        found: list[Path] = []
        for world in self._choice(World(packet)):
            after = world.packet
            if world.end is not None or not after.translated or self.is_named(after.destination):
                found += [_path(each) for each in self._rest(world)]
                continue
            known = self._tails.get(key := self._tail_key(after))
            if known is None:
                # Shares behind the choice are of one, whatever the share of the choice.
                known = self._tails[key] = tuple(
                    (each.share, each.end, each.packet.masqueraded) for each in self._rest(world.shared(_ONE))
                )
            found += [
                Path(
                    end or End.DELIVERED,
                    world.share if share is _ONE else world.share * share,
                    after.masked() if masked else after,
                    world.steps,
                )
                for share, end, masked in known
            ]
        return Verdict(tuple(found), tuple(self.skipped))

    def _tail_key(self, packet: Packet) -> tuple[object, ...]:
        return packet.origin, packet.source, packet.interface, packet.mark, packet.port, packet.protocol

    def _choice(self, world: World) -> Iterator[World]:
        """Up to where an endpoint is chosen."""
        return self._hook("output" if world.packet.origin is Origin.NODE else "prerouting", world)

    def _rest(self, world: World) -> Iterator[World]:
        """From there on."""
        return self._left(world) if world.packet.origin is Origin.NODE else self._routed(world)

    def is_named(self, address: str) -> bool:
        """Whether a rule behind the choice of an endpoint may look at an address."""
        if self._named is None:
            self._named = frozenset(self._named_addresses())
        return address in self._named or self.host.is_local(address)

    def _named_addresses(self) -> Iterable[str]:
        raise NotImplementedError

    def _routed(self, entered: World) -> Iterator[World]:
        if self.host.is_local(entered.packet.destination):
            yield from self._hook("input", entered)
        else:
            for forwarded in self._hook("forward", entered):
                yield from self._hook("postrouting", forwarded)

    def _left(self, sent: World) -> Iterator[World]:
        for left in self._hook("postrouting", sent):
            if self.host.is_local(left.packet.destination):
                yield from self._hook("input", left)
            else:
                yield left

    def _hook(self, hook: str, world: World) -> Iterator[World]:
        if world.end is not None:
            yield world
            return
        yield from self._at(hook, world)

    def _at(self, hook: str, world: World) -> Iterator[World]:
        raise NotImplementedError


def _path(world: World) -> Path:
    end = world.end or (End.DELIVERED if world.packet.translated else End.PASSED)
    return Path(end, world.share, world.packet, world.steps)
