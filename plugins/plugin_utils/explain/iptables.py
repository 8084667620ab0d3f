# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Text of iptables-save, or input of iptables-restore, as chains of rules.

A rule is taken apart when the first packet meets it: most packets meet few.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from ..addresses import contains
from .ipset import IpSet
from .packet import Host, Packet, UnknownRule

BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")

_COMMENT = re.compile(r'(?:-m comment )?--comment (?:"(?:[^"\\]|\\.)*"|\S+) ?')
_COUNTERS = re.compile(r"^\[\d+:\d+\] ")
_EXACT_DESTINATION = re.compile(r"(?<!! )-d ([0-9a-f:.]+)/(?:32|128)\b")
DISPATCH = re.compile(
    r"(?:-d (?P<address>[0-9a-f:.]+)/(?:32|128) )?-p (?P<protocol>\w+) .*--dport (?P<port>\d+) .*-j KUBE-"
)
_CERTAIN = Fraction(1)
_INDEXED = 24  # a chain with more rules than these is looked up by destination
_OURS = re.compile(r"KUBE-(?!ROUTER)")

# A test of a packet on a host, with the sets that there are; the chance that it holds.
Test: TypeAlias = Callable[[Packet, Host, Mapping[str, IpSet]], bool]


class Rule:
    """A rule, taken apart. A proof makes and asks so many that a plain class, asked once for each answer, pays off."""

    __slots__ = ("certain", "chance", "leaves", "place", "remark", "target", "tests")

    def __init__(
        self,
        tests: list[Test],
        chance: Fraction,
        target: str = "",
        options: Mapping[str, str] = MappingProxyType({}),
        *,
        leaves: bool = False,
    ) -> None:
        self.tests = tests
        self.chance = chance  # that it holds where its tests do
        self.certain = chance == 1
        self.target = target
        self.leaves = leaves  # goto: the target returns to where this chain was called
        self.place = (
            _place(options["--to-destination"]) if target == "DNAT" else ("", int(options.get("--to-ports", 0)))
        )
        self.remark = _masked(options["--set-xmark"]) if target == "MARK" else (0, 0)


class Chain:
    """Rules in order; long chains are looked up by destination."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._by_destination: dict[str, list[int]] | None = None
        self._others: list[int] = []

    def positions(self, destination: str) -> Iterable[int]:
        """The positions of rules that a packet for a destination can match, in order."""
        if len(self.texts) <= _INDEXED:
            return range(len(self.texts))
        return sorted([*self._index().get(destination, ()), *self._others])

    def destinations(self) -> Iterable[str]:
        """The addresses that rules name as destinations, one by one."""
        return self._index()

    def _index(self) -> dict[str, list[int]]:
        if self._by_destination is None:
            self._by_destination = {}
            for position, text in enumerate(self.texts):
                exact = _EXACT_DESTINATION.search(text)
                if exact:
                    self._by_destination.setdefault(exact[1], []).append(position)
                else:
                    self._others.append(position)
        return self._by_destination


Tables: TypeAlias = dict[tuple[str, str], Chain]


def read_tables(lines: Iterable[str]) -> Tables:
    """Table and chain -> its rules. Of built-in chains, only what leads to chains of kube-proxy is kept."""
    tables: Tables = {}
    table = ""
    for line in lines:
        sort = line[:1]
        if sort == "-":
            _add(tables, table, line.rstrip())
        elif sort == ":":
            chain = (table, line.split(None, 1)[0][1:])
            if chain[1] not in BUILT_IN or chain not in tables:
                tables[chain] = Chain()
        elif sort == "*":
            table = line[1:].strip()
        elif sort == "[":
            _add(tables, table, _COUNTERS.sub("", line.rstrip()))
    return tables


def _add(tables: Tables, table: str, line: str) -> None:
    verb, name, rest = f"{line} ".split(" ", 2)
    if verb not in ("-A", "-I"):
        return
    chain = tables.setdefault((table, name), Chain())
    rest = rest.strip()
    if name in BUILT_IN and not is_ours(rest):
        return
    if verb == "-A":
        chain.texts.append(rest)
    else:
        chain.texts.insert(0, rest)


def is_ours(rest: str) -> bool:
    """Whether a rule of a built-in chain leads to a chain of kube-proxy."""
    _before, jump, target = rest.rpartition("-j ")
    return bool(jump and _OURS.match(target))


@lru_cache(maxsize=65536)
def parse(text: str) -> Rule:
    """A rule without its chain; UnknownRule if a part of it is not known."""
    # Nothing but comments is ever quoted, and they decide nothing.
    words = _COMMENT.sub("", text).split()
    try:
        return _Parser(words, text).rule()
    except (LookupError, ValueError) as error:
        raise UnknownRule(text) from error


class _Parser:
    """Goes through the words of a rule."""

    def __init__(self, words: list[str], text: str) -> None:
        self._words = words
        self._at = 0
        self._text = text
        self._tests: list[Test] = []
        self._chance = _CERTAIN

    def rule(self) -> Rule:
        negated = False
        while self._at < len(self._words):
            word = self._next()
            if word == "!":
                negated = True
                continue
            if word in ("-j", "-g"):
                target, options = self._next(), dict(self._target_options())
                return Rule(self._tests, self._chance, target, options, leaves=word == "-g")
            take = _OPTIONS.get(word)
            if take is None:
                raise UnknownRule(word)
            test = take(self)
            if test is not None:
                self._tests.append(_not(test) if negated else test)
            negated = False
        return Rule(self._tests, self._chance)

    def _next(self) -> str:
        if self._at >= len(self._words):
            raise UnknownRule(f"{self._text}: ends early")
        self._at += 1
        return self._words[self._at - 1]

    def _target_options(self) -> Iterator[tuple[str, str]]:
        """Options of the target; those without a value have none."""
        while self._at < len(self._words):
            name = self._next()
            has_value = self._at < len(self._words) and not self._words[self._at].startswith("--")
            yield name, self._next() if has_value else ""

    # Each of these reads the value of an option, and answers the test that it means, if it is one.

    def module(self) -> None:
        self._next()

    def source(self) -> Test:
        address, cidr = _network(self._next())
        if address:
            return lambda packet, _host, _sets: packet.source == address
        return lambda packet, _host, _sets: contains(cidr, packet.source)

    def destination(self) -> Test:
        address, cidr = _network(self._next())
        if address:
            return lambda packet, _host, _sets: packet.destination == address
        return lambda packet, _host, _sets: contains(cidr, packet.destination)

    def protocol(self) -> Test:
        name = self._next()
        return lambda packet, _host, _sets: name in (packet.protocol, "all")

    def port(self) -> Test:
        first, last = _ports(self._next())
        return lambda packet, _host, _sets: first <= packet.port <= last

    def interface(self) -> Test:
        name = self._next()
        if name.endswith("+"):
            return lambda packet, _host, _sets: packet.interface.startswith(name[:-1]) and bool(packet.interface)
        return lambda packet, _host, _sets: packet.interface == name

    def states(self) -> Test:
        names = self._next().split(",")
        # The packet is the first of its connection, and the connection is valid.
        return lambda packet, _host, _sets: "NEW" in names or ("DNAT" in names and packet.translated)

    def source_type(self) -> Test:
        self._local()
        return lambda packet, host, _sets: host.is_local(packet.source)

    def destination_type(self) -> Test:
        self._local()
        return lambda packet, host, _sets: host.is_local(packet.destination)

    def _local(self) -> None:
        if (name := self._next()) != "LOCAL":
            raise UnknownRule(f"addrtype {name}")

    def mark(self) -> Test:
        value, mask = _masked(self._next())
        return lambda packet, _host, _sets: packet.mark & mask == value

    def member(self) -> Test:
        name, flags = self._next(), self._next()
        return lambda packet, _host, sets: _set(sets, name).has(packet, flags)

    def chance(self) -> None:
        self._chance = probability(self._next())

    def mode(self) -> None:
        if (name := self._next()) != "random":
            raise UnknownRule(f"statistic --mode {name}")

    def seen_before(self) -> Test:
        # A client that is not known yet: affinity begins with this packet.
        return lambda _packet, _host, _sets: False

    def nothing(self) -> None:
        """An option without a value that decides nothing."""

    def value(self) -> None:
        """An option whose value decides nothing."""
        self._next()

    def bridged(self) -> Test:
        # Packets of pods are routed here, not bridged.
        return lambda _packet, _host, _sets: False

    def virtual_protocol(self) -> Test:
        number = self._next()
        names = {"6": "tcp", "17": "udp", "132": "sctp"}
        return lambda packet, _host, _sets: packet.virtual is not None and names.get(number, number) == packet.protocol

    def virtual_address(self) -> Test:
        address = self._next().partition("/")[0]
        return lambda packet, _host, _sets: packet.virtual is not None and packet.virtual[0] == address

    def virtual_port(self) -> Test:
        number = int(self._next())
        return lambda packet, _host, _sets: packet.virtual is not None and packet.virtual[1] == number


_OPTIONS: dict[str, Callable[[_Parser], Test | None]] = {
    "-m": _Parser.module,
    "-s": _Parser.source,
    "-d": _Parser.destination,
    "-p": _Parser.protocol,
    "-i": _Parser.interface,
    "--dport": _Parser.port,
    "--ctstate": _Parser.states,
    "--state": _Parser.states,
    "--src-type": _Parser.source_type,
    "--dst-type": _Parser.destination_type,
    "--mark": _Parser.mark,
    "--match-set": _Parser.member,
    "--mode": _Parser.mode,
    "--probability": _Parser.chance,
    "--rcheck": _Parser.seen_before,
    "--physdev-is-in": _Parser.bridged,
    "--vproto": _Parser.virtual_protocol,
    "--vaddr": _Parser.virtual_address,
    "--vport": _Parser.virtual_port,
    "--nfacct-name": _Parser.value,
    "--seconds": _Parser.value,
    "--name": _Parser.value,
    "--mask": _Parser.value,
    "--set": _Parser.nothing,
    "--reap": _Parser.nothing,
    "--rsource": _Parser.nothing,
}


def _set(sets: Mapping[str, IpSet], name: str) -> IpSet:
    """The kernel takes no rule that names a set which is not there."""
    if name not in sets:
        raise UnknownRule(f"there is no set {name}")
    return sets[name]


def _not(test: Test) -> Test:
    return lambda packet, host, sets: not test(packet, host, sets)


def _network(text: str) -> tuple[str, str]:
    """The address, if it is a single one, and the network."""
    address, _slash, length = text.partition("/")
    if length in ("", "128" if ":" in address else "32"):
        return address, ""
    return "", text


def _ports(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    return int(first or 0), int(last or 65535) if colon else int(first)


def _masked(text: str) -> tuple[int, int]:
    value, slash, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if slash else 0xFFFFFFFF


def probability(text: str) -> Fraction:
    """The chance of a rule. The kernel holds 31 bits of it; one of n choices is meant where that is the nearest."""
    value = Fraction(text)
    if not value:
        return value
    choices = round(1 / value)
    near = abs(value - Fraction(1, choices)) <= Fraction(1, 2**31)
    return Fraction(1, choices) if near else value


def _place(text: str) -> tuple[str, int]:
    """Address and port of --to-destination."""
    address, _colon, port = text.rpartition(":")
    return address.strip("[]"), int(port)
