# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The table kube-proxy of nft: its chains, sets and maps, from commands as well as from what `nft list` prints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from ..addresses import contains
from .packet import UnknownRule

TABLE = "kube-proxy"

_TOKEN = re.compile(r'"[^"]*"|[{},;]|[^\s{},;"]+')
_COMMAND = re.compile(
    r"(add|insert|flush|delete|destroy) (table|chain|rule|set|map|element) (ip6?) (\S+)(?: (\S+))?\s*(.*)"
)
_BLOCK = re.compile(r"(chain|set|map) (\S+) \{$")
_TABLE = re.compile(r"table (ip6?) (\S+) \{$")
_BASE = re.compile(r"type (\S+) hook (\S+)(?: device \S+)? priority ([^;]+?) ?;")
_PRIORITY = re.compile(r"(raw|mangle|dstnat|filter|security|srcnat)?\s*([-+])?\s*(\d+)?")
_PRIORITIES = {"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}
_END_OF_KEY = ("comment", "timeout", "expires", "counter", ":")

Key: TypeAlias = tuple[str, ...]


def tokens(text: str) -> list[str]:
    """Words, quoted words, braces, commas and semicolons."""
    return _TOKEN.findall(text)


class Container:
    """A set or a map: keys, and what each leads to, which is empty in a set."""

    def __init__(self, *, dynamic: bool = False) -> None:
        self.dynamic = dynamic  # packets add elements
        self.elements: dict[Key, str] = {}
        self._wide: list[tuple[Key, str]] = []  # keys with a network or a range in them

    def add(self, key: Key, value: str) -> None:
        """Take an element."""
        if any("/" in part for part in key):
            self._wide.append((key, value))
        else:
            self.elements[key] = value

    def find(self, key: Key) -> str | None:
        """What a key leads to; None if it is not there."""
        exact = self.elements.get(key)
        if exact is not None:
            return exact
        return next((value for wide, value in self._wide if _covers(wide, key)), None)

    def all_keys(self) -> Iterator[Key]:
        """All keys."""
        yield from self.elements
        yield from (key for key, _value in self._wide)


def _covers(wide: Key, key: Key) -> bool:
    return len(wide) == len(key) and all(map(same, wide, key))


def same(pattern: str, value: str) -> bool:
    """Whether a value is what a rule or an element names: itself, a network around it, or a name that ends in *."""
    if "/" in pattern and value:
        return contains(pattern, value)
    if pattern.endswith("*"):
        return bool(value) and value.startswith(pattern[:-1])
    return pattern == value


@dataclasses.dataclass(slots=True)
class NftChain:
    """Rules in order, and where the kernel calls them."""

    rules: list[str] = dataclasses.field(default_factory=list)
    kind: str = ""  # filter or nat, of a base chain
    hook: str = ""
    priority: int = 0


@dataclasses.dataclass(slots=True)
class NftTable:
    """The table of one family."""

    chains: dict[str, NftChain] = dataclasses.field(default_factory=dict)
    containers: dict[str, Container] = dataclasses.field(default_factory=dict)

    def base_chains(self) -> dict[str, list[str]]:
        """Hook -> the chains that the kernel calls there, in order."""
        found: dict[str, list[str]] = {}
        for _priority, name in sorted((each.priority, name) for name, each in self.chains.items() if each.hook):
            found.setdefault(self.chains[name].hook, []).append(name)
        return found


def read_nft(lines: Iterable[str]) -> dict[str, NftTable]:
    """ "ip" and "ip6" -> the table kube-proxy of that family."""
    found: dict[str, NftTable] = {}
    reader: Iterator[str] = iter(lines)
    for line in reader:
        text = line.strip()
        if not text or text[0] == "#":
            continue
        listed = _TABLE.match(text)
        if listed:
            table = NftTable()
            _read_block(reader, table)
            if listed[2] == TABLE:
                found[listed[1]] = table
            continue
        command = _COMMAND.match(text)
        if command and command[4] == TABLE:
            _run(found.setdefault(command[3], NftTable()), command[1], command[2], command[5] or "", command[6])
    return found


def _run(table: NftTable, verb: str, kind: str, name: str, rest: str) -> None:
    """One command."""
    if verb in ("delete", "destroy", "flush"):
        _remove(table, verb, kind, name, rest)
    elif kind == "chain":
        chain = table.chains.setdefault(name, NftChain())
        _make_base(chain, rest)
    elif kind in ("set", "map"):
        table.containers.setdefault(name, Container(dynamic="dynamic" in rest))
    elif kind == "rule":
        chain = table.chains.setdefault(name, NftChain())
        if verb == "insert":
            chain.rules.insert(0, rest)
        else:
            chain.rules.append(rest)
    elif kind == "element":
        container = table.containers.setdefault(name, Container())
        for key, value in elements(rest.strip()[1:-1]):
            container.add(key, value)


def _remove(table: NftTable, verb: str, kind: str, name: str, rest: str) -> None:
    if kind == "element":
        for key, _value in elements(rest.strip()[1:-1]):
            table.containers[name].elements.pop(key, None)
    elif kind == "chain" and name in table.chains:
        if verb == "flush":
            table.chains[name].rules.clear()
        else:
            del table.chains[name]
    elif kind in ("set", "map") and name in table.containers:
        dynamic = table.containers.pop(name).dynamic
        if verb == "flush":
            table.containers[name] = Container(dynamic=dynamic)


def _make_base(chain: NftChain, text: str) -> None:
    base = _BASE.search(text)
    if base:
        chain.kind, chain.hook, chain.priority = base[1], base[2], _priority(base[3])


def _priority(text: str) -> int:
    match = _PRIORITY.fullmatch(text.strip())
    if match is None:
        raise UnknownRule(f"priority {text}")
    name, sign, number = match.groups()
    offset = int(number or 0) * (-1 if sign == "-" else 1)
    return _PRIORITIES.get(name or "", 0) + offset


def elements(text: str) -> Iterator[tuple[Key, str]]:
    """The elements between braces: key, and what it leads to."""
    if '"' not in text and "," not in text:
        key, _colon, value = text.partition(" : ")
        yield _key(key.split()), value.strip()
        return
    words: list[str] = []
    for word in [*tokens(text), ","]:
        if word != ",":
            words.append(word)
        elif words:
            value = " ".join(words[words.index(":") + 1 :]) if ":" in words else ""
            yield _key(words), value
            words = []


def _key(words: list[str]) -> Key:
    key: list[str] = []
    for word in words:
        if word in _END_OF_KEY:
            break
        if word != ".":
            key.append(word.strip('"'))
    return tuple(key)


def _read_block(lines: Iterator[str], table: NftTable) -> None:
    """What stands between the braces of a listed table."""
    for line in lines:
        text = line.strip()
        if text == "}":
            return
        block = _BLOCK.match(text)
        if block and block[1] == "chain":
            table.chains[block[2]] = _read_chain(lines)
        elif block:
            table.containers[block[2]] = _read_container(lines)
        elif text.endswith("{"):
            for inner in lines:  # a counter, a flowtable: nothing that decides
                if inner.strip() == "}":
                    break


def _read_chain(lines: Iterator[str]) -> NftChain:
    chain = NftChain()
    for text in _statements(lines):
        if _BASE.match(text):
            _make_base(chain, text)
        elif not text.startswith("comment "):
            chain.rules.append(text)
    return chain


def _read_container(lines: Iterator[str]) -> Container:
    container = Container()
    for text in _statements(lines):
        if text.startswith("flags "):
            container.dynamic = "dynamic" in text
        elif text.startswith("elements = "):
            for key, value in elements(text.removeprefix("elements = ").strip()[1:-1]):
                container.add(key, value)
    return container


def _statements(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a block up to its end; one whose braces are open goes on in the next."""
    begun = ""
    for line in lines:
        text = line.strip()
        if not begun and text == "}":
            return
        begun = f"{begun} {text}" if begun else text
        plain = re.sub(r'"[^"]*"', "", begun)
        if plain.count("{") == plain.count("}"):
            if begun:
                yield begun
            begun = ""
