# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One rule of nft as statements, each of which looks at a packet, changes it, or decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from .nft_text import Container, Key, NftTable, elements, same, tokens
from .packet import Host, Packet, UnknownRule


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a rule can ask beside the packet."""

    table: NftTable
    host: Host


# What a statement says: go on, the rule does not apply, or a verdict such as "drop" or "goto services".
GO_ON, BREAK = "", "break"
Said: TypeAlias = tuple[Fraction, Packet, str]
Statement: TypeAlias = Callable[[Packet, Context], Iterable[Said]]
Selector: TypeAlias = Callable[[Packet, Context], str]

ONE = Fraction(1)
_PLAIN_VERDICTS = ("accept", "drop", "return", "continue")
_OPERATORS = {"or": "|", "|": "|", "and": "&", "&": "&", "xor": "^", "^": "^"}
_MASQUERADE_FLAGS = ("fully-random", "random", "persistent")


def run(text: str, packet: Packet, context: Context) -> Iterator[Said]:
    """The ways that a packet can leave a rule: the share of each, the packet then, and the verdict, if there is one."""
    yield from _from(compiled(text), 0, ONE, packet, context)


def _from(
    statements: tuple[Statement, ...], at: int, share: Fraction, packet: Packet, context: Context
) -> Iterator[Said]:
    if at == len(statements):
        yield share, packet, GO_ON
        return
    for chance, after, said in statements[at](packet, context):
        both = share if chance is ONE else chance if share is ONE else share * chance
        if said == GO_ON:
            yield from _from(statements, at + 1, both, after, context)
        else:
            yield both, after, GO_ON if said in (BREAK, "continue") else said


@lru_cache(maxsize=65536)
def compiled(text: str) -> tuple[Statement, ...]:
    """The statements of a rule; UnknownRule if one is not known."""
    return tuple(_Parser(tokens(text)).statements())


class _Parser:
    """Goes through the words of a rule."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0

    def _peek(self, ahead: int = 0) -> str:
        return self._words[self._at + ahead] if self._at + ahead < len(self._words) else ""

    def _next(self) -> str:
        word = self._peek()
        if not word:
            raise UnknownRule(f"{' '.join(self._words)}: ends early")
        self._at += 1
        return word

    def _take(self, *words: str) -> bool:
        """Whether these words come next; then they are passed."""
        if self._words[self._at : self._at + len(words)] != list(words):
            return False
        self._at += len(words)
        return True

    def _braced(self) -> str:
        """What stands between the braces that come next."""
        start, depth = self._at, 0
        while True:
            word = self._next()
            depth += (word == "{") - (word == "}")
            if not depth:
                return " ".join(self._words[start + 1 : self._at - 1])

    def statements(self) -> Iterator[Statement]:
        while self._peek():
            made = self._statement()
            if made is not None:
                yield made

    def _statement(self) -> Statement | None:
        word = self._peek()
        if word in _PLAIN_VERDICTS:
            return _verdict(self._next())
        if word in ("jump", "goto"):
            return _verdict(f"{self._next()} {self._next()}")
        if word == "reject":
            self._next()
            while self._peek() not in ("", "comment"):
                self._next()
            return _verdict("reject")
        if word == "masquerade":
            self._next()
            while self._peek() in (*_MASQUERADE_FLAGS, ","):
                self._next()
            return _verdict("masquerade")
        if word == "dnat":
            return self._dnat()
        if word in ("comment", "counter", "update", "add"):
            self._pass_over()
            return None
        if self._take("meta", "mark") or self._take("mark"):
            return self._mark()
        return self._test()

    def _pass_over(self) -> None:
        """What decides nothing for the first packet of a connection."""
        word = self._next()
        if word == "comment" or (word == "counter" and self._peek() == "name"):
            self._at += 1 if word == "comment" else 2
        elif word == "counter" and self._peek() == "packets":
            self._at += 4
        elif word in ("update", "add"):
            self._next()
            self._braced()

    def _mark(self) -> Statement:
        if self._take("set"):
            if not (self._take("meta", "mark") or self._take("mark")):
                value = int(self._next(), 0)
                return lambda packet, _context: ((ONE, packet.marked(value), GO_ON),)
            change = self._operation()
            return lambda packet, _context: ((ONE, packet.marked(change(packet.mark)), GO_ON),)
        change = self._operation() if self._peek() in _OPERATORS else lambda mark: mark
        equal = not self._take("!=")
        self._take("==")
        value = int(self._next(), 0)
        return lambda packet, _context: ((ONE, packet, GO_ON if (change(packet.mark) == value) is equal else BREAK),)

    def _operation(self) -> Callable[[int], int]:
        operator, value = _OPERATORS[self._next()], int(self._next(), 0)
        return {"|": lambda mark: mark | value, "&": lambda mark: mark & value, "^": lambda mark: mark ^ value}[
            operator
        ]

    def _dnat(self) -> Statement:
        self._next()
        _family = self._take("ip") or self._take("ip6")
        self._take("addr", ".", "port")
        if not self._take("to"):
            raise UnknownRule(" ".join(self._words))
        if self._peek() != "numgen":
            address, port = _place(self._next())
            return lambda packet, _context: ((ONE, packet.sent_to(address, port), "dnat"),)
        count = self._numgen()
        if not self._take("map"):
            raise UnknownRule(" ".join(self._words))
        choices = {key[0]: value for key, value in elements(self._braced())}
        places = [_concatenated(choices[str(index)]) if str(index) in choices else None for index in range(count)]

        share = Fraction(1, count)

        def one_of(packet: Packet, _context: Context) -> Iterator[Said]:
            for place in places:
                after = packet.sent_to(*place) if place else packet
                yield share, after, "dnat" if place else BREAK

        return one_of

    def _numgen(self) -> int:
        if not (self._take("numgen", "random", "mod") or self._take("numgen", "inc", "mod")):
            raise UnknownRule(" ".join(self._words))
        return int(self._next())

    def _test(self) -> Statement:
        if self._peek() == "numgen":
            return self._random_verdict(self._numgen())
        selectors = [self._selector()]
        while self._take("."):
            selectors.append(self._selector())

        def key(packet: Packet, context: Context) -> Key:
            return tuple(select(packet, context) for select in selectors)

        if self._take("vmap"):
            find = self._container()

            def by_map(packet: Packet, context: Context) -> Iterable[Said]:
                return ((ONE, packet, find(context).find(key(packet, context)) or BREAK),)

            return by_map
        equal = not self._take("!=")
        self._take("==")
        if self._peek() == "{" or self._peek().startswith("@"):
            held = self._container()

            def in_set(packet: Packet, context: Context) -> Iterable[Said]:
                return (
                    (ONE, packet, GO_ON if (held(context).find(key(packet, context)) is not None) is equal else BREAK),
                )

            return in_set
        wanted = self._values(len(selectors))

        def compared(packet: Packet, context: Context) -> Iterable[Said]:
            found = key(packet, context)
            holds = any(all(map(same, each, found)) for each in wanted)
            return ((ONE, packet, GO_ON if holds is equal else BREAK),)

        return compared

    def _values(self, length: int) -> list[Key]:
        """A concatenated value, or single ones with commas between them."""
        if length > 1:
            values = [self._next().strip('"')]
            while self._take("."):
                values.append(self._next().strip('"'))
            return [tuple(values)]
        found: list[Key] = [(self._next().strip('"'),)]
        while self._take(","):
            found.append((self._next().strip('"'),))
        return found

    def _random_verdict(self, count: int) -> Statement:
        if not self._take("vmap"):
            raise UnknownRule(" ".join(self._words))
        find = self._container()

        def one_of(packet: Packet, context: Context) -> Iterator[Said]:
            for index in range(count):
                yield Fraction(1, count), packet, find(context).find((str(index),)) or BREAK

        return one_of

    def _container(self) -> Callable[[Context], Container]:
        if self._peek() == "{":
            made = Container()
            for key, value in elements(self._braced()):
                made.add(key, value)
            return lambda _context: made
        name = self._next().removeprefix("@")
        return lambda context: context.table.containers.get(name) or Container()

    def _selector(self) -> Selector:
        for words, select in _SELECTORS.items():
            if self._take(*words):
                return select
        raise UnknownRule(" ".join(self._words[self._at :]))


def _type(address: str, context: Context) -> str:
    return "local" if context.host.is_local(address) else "unicast"


_SELECTORS: dict[tuple[str, ...], Selector] = {
    ("ip", "saddr"): lambda packet, _context: packet.source,
    ("ip6", "saddr"): lambda packet, _context: packet.source,
    ("ip", "daddr"): lambda packet, _context: packet.destination,
    ("ip6", "daddr"): lambda packet, _context: packet.destination,
    ("meta", "l4proto"): lambda packet, _context: packet.protocol,
    ("th", "dport"): lambda packet, _context: str(packet.port),
    ("meta", "iifname"): lambda packet, _context: packet.interface,
    ("iifname",): lambda packet, _context: packet.interface,
    ("ct", "state"): lambda _packet, _context: "new",
    ("ct", "status"): lambda packet, _context: "dnat" if packet.translated else "",
    ("fib", "saddr", "type"): lambda packet, context: _type(packet.source, context),
    ("fib", "daddr", "type"): lambda packet, context: _type(packet.destination, context),
}


def _verdict(text: str) -> Statement:
    return lambda packet, _context: ((ONE, packet, text),)


def _place(text: str) -> tuple[str, int]:
    """Address and port of "10.0.0.1:80" or "[fd00::1]:80"."""
    address, _colon, port = text.rpartition(":")
    return address.strip("[]"), int(port)


def _concatenated(text: str) -> tuple[str, int]:
    address, _dot, port = text.partition(" . ")
    return address, int(port)
