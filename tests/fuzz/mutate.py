# ruff: noqa: E501 -- values by the dozen.
"""Inputs near those that are right: texts with other bytes, documents with other values."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 80, 65535, 65536, 2**31, 2**63, 2**64, 10**40, 1.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", " ", "x", "a" * 300, "0", "-1", "true", "null", "None", "é", "\u2028", "\x00", "\ud800", "a\nb", "../x", "$(id)", "%s", "{}"),
    *("6.².0", "\x1b[2J", "\u009b1m\u202e", "{{ 7 * 7 }}", "-oProxyCommand=id", "9" * 5000, 10**4000, "a" * 30_000, "applied", "program", "full"),
    *("10.96.0.1", "10.96.0.256", "10.96.0.1/33", "010.0.0.1", "1.2.3", "::", "::ffff:1.2.3.4", "fe80::1%eth0", "0.0.0.0/0", "::/0"),
    *("TCP", "tcp", "IPv4", "IPv6", "IPv5", "Local", "Cluster", "LoadBalancer", "NodePort", "ExternalName", "ClientIP", "None"),
    *("1s", "1h1m", "-1s", "1e9h", "9" * 400 + "s", "nftables", "ipvs", "userspace", "primary", "all", "localhost"),
    *([], {}, [[]], [None], [{}], {"a": None}, ["x"], [1], {"": ""}, {"ip": None}, {"name": 1}),
)  # fmt: skip
BYTES = (b"\x00", b"\xff", b"\xc3(", b"\n", b"\r\n", b"\t", b"\\", b'"', b"'", b"{", b"}", b"[", b"]", b":", b"- ", b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"---\n", b"...\n", b"# ", b"|", b">", b"%", b"@", b"`")  # fmt: skip


class Mutator:
    """Changes content by chance; the chance is hypothesis', so that a finding is made smaller."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def mutated(self, content: bytes, other: bytes, suffix: str) -> bytes:
        for _ in range(self._chance.randint(1, 4)):
            content = self._chance.choice(self._ways(suffix))(content, other)
        return content[:200_000]

    def _ways(self, suffix: str) -> tuple[Callable[[bytes, bytes], bytes], ...]:
        texts = (self._bytes, self._lines, self._splice)
        if suffix in (".json", ".yaml"):
            return (*texts, *(self._document(suffix),) * 6)
        return (*texts, self._words, self._words, self._json_lines, self._json_lines)

    # ---- texts

    def _bytes(self, content: bytes, _other: bytes) -> bytes:
        at = self._chance.randint(0, len(content))
        gone = self._chance.choice((0, 0, 1, 1, 4, 64))
        come = self._chance.choice((b"", bytes([self._chance.randint(0, 255)]), *BYTES))
        return content[:at] + come * self._chance.choice((1, 1, 1, 50)) + content[at + gone :]

    def _lines(self, content: bytes, _other: bytes) -> bytes:
        lines = content.splitlines(keepends=True) or [b""]
        i, j = self._chance.randrange(len(lines)), self._chance.randrange(len(lines))
        kind = self._chance.randint(0, 3)
        if kind == 0:
            lines[i], lines[j] = lines[j], lines[i]
        elif kind == 1:
            lines.insert(j, lines[i])
        elif kind == 2:
            del lines[i]
        else:
            del lines[min(i, j) : max(i, j)]
        return b"".join(lines)

    def _splice(self, content: bytes, other: bytes) -> bytes:
        return content[: self._chance.randint(0, len(content))] + other[self._chance.randint(0, len(other)) :]

    def _words(self, content: bytes, _other: bytes) -> bytes:
        words = content.split(b" ")
        value = self._chance.choice(VALUES)
        words[self._chance.randrange(len(words))] = str(value).encode("utf-8", "surrogatepass")
        return b" ".join(words)

    # ---- documents

    def _document(self, suffix: str) -> Callable[[bytes, bytes], bytes]:
        def change(content: bytes, other: bytes) -> bytes:
            try:
                if suffix == ".json":
                    return json.dumps(self._value(json.loads(content))).encode("utf-8", "surrogatepass")
                loaded = list(yaml.load_all(content.decode(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
                return yaml.safe_dump_all([self._value(each) for each in loaded]).encode("utf-8", "surrogatepass")
            except (ValueError, RecursionError, yaml.YAMLError, UnicodeError):
                return self._bytes(content, other)

        return change

    def _json_lines(self, content: bytes, other: bytes) -> bytes:
        lines = content.splitlines()
        if not lines:
            return self._bytes(content, other)
        at = self._chance.randrange(len(lines))
        try:
            lines[at] = json.dumps(self._value(json.loads(lines[at]))).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return self._bytes(content, other)
        return b"\n".join(lines) + b"\n"

    def _value(self, value: Any) -> Any:
        """The value with one of those in it replaced, removed, doubled or wrapped."""
        places: list[tuple[Any, Any]] = []
        pending = [value]
        while pending:
            each = pending.pop()
            keys = list(each) if isinstance(each, dict) else list(range(len(each))) if isinstance(each, list) else []
            for key in keys:
                places.append((each, key))
                pending.append(each[key])
        if not places:
            return self._chance.choice(VALUES)
        parent, key = self._chance.choice(places)
        kind = self._chance.randint(0, 6)
        if kind <= 3:
            parent[key] = self._chance.choice(VALUES)
        elif kind == 4:
            del parent[key]
        elif kind == 5:
            parent[key] = self._chance.choice(([parent[key]], {"x": parent[key]}, [parent[key]] * 3))
        else:
            from_parent, from_key = self._chance.choice(places)
            parent[key] = json.loads(
                json.dumps(from_parent.get(from_key) if isinstance(from_parent, dict) else None, default=str)
            )
        return value
