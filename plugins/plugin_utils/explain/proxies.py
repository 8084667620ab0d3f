# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""userspace mode: rules lead to a port of the host, and the files of HAProxy and nginx say who is behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TypeAlias

from . import iptables
from .iptables_walk import IptablesWalker
from .packet import End, Host, Origin, Packet
from .walk import World


@dataclasses.dataclass(frozen=True, slots=True)
class Proxy:
    """A port of the host, and the endpoints behind it."""

    text: str  # the line that names it
    servers: tuple[tuple[str, int, str], ...]  # address, port, and the line


Proxies: TypeAlias = dict[tuple[str, int], Proxy]  # by protocol and port


def read_proxies(haproxy: Iterable[str], nginx: Iterable[str]) -> Proxies:
    """The proxies of both files."""
    return dict([*_read_haproxy(haproxy), *_read_nginx(nginx)])


def _read_haproxy(lines: Iterable[str]) -> Iterator[tuple[tuple[str, int], Proxy]]:
    title, port = "", 0
    servers: list[tuple[str, int, str]] = []
    for line in [*lines, "listen"]:
        words = line.split()
        if words[:1] == ["listen"]:
            if port:
                yield ("tcp", port), Proxy(title, tuple(servers))
            title, port, servers = line.strip(), 0, []
        elif words[:1] == ["bind"]:
            port = int(words[1].rpartition(":")[2])
        elif words[:1] == ["server"]:
            servers.append(_server(words[2], line))


def _read_nginx(lines: Iterable[str]) -> Iterator[tuple[tuple[str, int], Proxy]]:
    upstreams: dict[str, list[tuple[str, int, str]]] = {}
    name, port = "", 0
    for line in lines:
        words = line.replace(";", "").split()
        if words[:1] == ["upstream"]:
            name = words[1]
        elif words[:1] == ["server"] and words[1:] != ["{"]:
            upstreams.setdefault(name, []).append(_server(words[1], line))
        elif words[:1] == ["listen"]:
            port = int(words[1].rpartition(":")[2])
        elif words[:1] == ["proxy_pass"]:
            yield ("udp", port), Proxy(line.strip(), tuple(upstreams.get(words[1], ())))


def _server(text: str, line: str) -> tuple[str, int, str]:
    address, _colon, port = text.rpartition(":")
    return address.strip("[]"), int(port), line.strip()


class UserspaceWalker(IptablesWalker):
    """Through tables of iptables to a proxy, which takes endpoints in turn. The source is the host's from there on."""

    def __init__(self, host: Host, tables: iptables.Tables, proxies: Mapping[tuple[str, int], Proxy]) -> None:
        super().__init__(host, tables)
        self.proxies = proxies

    def _choice(self, world: World) -> Iterator[World]:
        for led in super()._choice(world):
            if led.end is not None or not led.packet.translated:
                yield led
                continue
            admitted = (led,) if led.packet.origin is Origin.NODE else self._through(("filter INPUT",), led)
            for each in admitted:
                yield from self._proxied(each)

    def _proxied(self, world: World) -> Iterator[World]:
        packet = world.packet
        proxy = self.proxies.get((packet.protocol, packet.port))
        if world.end is not None:
            yield world
        elif proxy is None or not proxy.servers:
            yield world.ended(End.REFUSED)
        else:
            met = world.met("proxy", proxy.text, 0)
            share = world.share * Fraction(1, len(proxy.servers))
            for address, port, line in proxy.servers:
                yield met.having(packet.sent_to(address, port).masked()).shared(share).met("proxy", line, 1)

    def _rest(self, world: World) -> Iterator[World]:
        if world.packet.translated:
            yield world  # a connection of the proxy's own
        else:
            yield from super()._rest(world)

    def destinations(self) -> Iterator[tuple[str, str, int]]:
        """Address, protocol and port of all that rules single out; of node ports without address."""
        for name in ("KUBE-PORTALS-CONTAINER", "KUBE-NODEPORT-CONTAINER"):
            chain = self.tables.get(("nat", name))
            for text in chain.texts if chain else ():
                words = text.split()
                address = words[words.index("-d") + 1].partition("/")[0] if "-d" in words else ""
                yield address, words[words.index("-p") + 1], int(words[words.index("--dport") + 1])

    @staticmethod
    def _target(rule: iptables.Rule, world: World) -> tuple[World, bool] | None:
        if rule.target == "REDIRECT":
            packet: Packet = world.packet
            local = "::1" if ":" in packet.destination else "127.0.0.1"
            return world.having(packet.sent_to(local, rule.place[1])), True
        return IptablesWalker._target(rule, world)
