# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Fields of API objects, read with their type and range checked; a wrong one is named by its path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_PROTOCOLS = {"TCP": "tcp", "UDP": "udp", "SCTP": "sctp"}
_FAMILIES = ("IPv4", "IPv6")

T = TypeVar("T")
Object = dict[str, Any]


class InvalidObject(Exception):
    """An object that cannot be used: which field, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Skipped(Exception):
    """An object that kube-proxy would not have been given; the message names the sort."""


def typed(parent: Object, field: str, key: str, kind: type[T], default: T) -> T:
    """The value of a key, or the default where it is null or missing."""
    value = parent.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidObject(f"{field}.{key}" if field else key, f"must be {_type_name(kind)}, not {shown(value)}")
    return value


def _type_name(kind: type) -> str:
    return {dict: "a mapping", list: "a list", str: "a string", int: "an integer", bool: "true or false"}[kind]


def shown(value: object) -> str:
    """A value for a message, not too long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested without end, or a number of more digits than Python prints
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 60 else text[:57] + "..."


def plain(value: object) -> str:
    """Text for a message, which must be one line whatever the input calls its objects."""
    text = value if isinstance(value, str) else "" if value is None else shown(value)
    return text if text.isprintable() and len(text) <= 253 else shown(text)


def object_name(metadata: Object, pattern: re.Pattern[str], what: str) -> str:
    """metadata.name."""
    name = typed(metadata, "metadata", "name", str, "")
    if not name:
        raise InvalidObject("metadata.name", "is missing")
    if not pattern.fullmatch(name):
        raise InvalidObject("metadata.name", f"{shown(name)} is no {what}")
    return name


def namespace(metadata: Object) -> str:
    """metadata.namespace; an object in a file may leave it out, as kubectl allows."""
    name = typed(metadata, "metadata", "namespace", str, "") or "default"
    if not DNS_LABEL.fullmatch(name):
        raise InvalidObject("metadata.namespace", f"{shown(name)} is no DNS label")
    return name


def port_number(entry: Object, field: str, key: str, *, zero: bool) -> int:
    """A port; zero, where it is allowed, means none."""
    number = typed(entry, field, key, int, 0)
    if not (0 if zero else 1) <= number <= 65535:
        raise InvalidObject(f"{field}.{key}", f"{number} is not between 1 and 65535")
    return number


def protocol(entry: Object, field: str) -> str:
    """The protocol in lower case, as rules write it; the API's default is TCP."""
    name = entry.get("protocol")
    if name is None or name == "":
        return "tcp"
    known = _PROTOCOLS.get(name) if isinstance(name, str) else None
    if known is None:
        raise InvalidObject(f"{field}.protocol", f"{shown(name)} is not TCP, UDP or SCTP")
    return known


def port_name(entry: Object, field: str) -> str:
    """The name of a port, which may be empty."""
    name = typed(entry, field, "name", str, "")
    if name and not DNS_LABEL.fullmatch(name):
        raise InvalidObject(f"{field}.name", f"{shown(name)} is no DNS label")
    return name


def one_of(parent: Object, field: str, key: str, allowed: tuple[str, ...]) -> str:
    """One of the words that are allowed, or the first of them where the key is missing."""
    value = typed(parent, field, key, str, "")
    if value and value not in allowed:
        raise InvalidObject(f"{field}.{key}", f"{shown(value)} is not one of {', '.join(allowed)}")
    return value or allowed[0]


def ip_families(spec: Object) -> Iterator[str]:
    """spec.ipFamilies."""
    for index, family in enumerate(typed(spec, "spec", "ipFamilies", list, [])):
        if family not in _FAMILIES:
            raise InvalidObject(f"spec.ipFamilies[{index}]", f"{shown(family)} is not one of {', '.join(_FAMILIES)}")
        yield family


def mappings(parent: Object, field: str, key: str) -> Iterator[tuple[str, Object]]:
    """The mappings of a list, each with its path."""
    for index, entry in enumerate(typed(parent, field, key, list, [])):
        path = f"{field}.{key}[{index}]" if field else f"{key}[{index}]"
        if not isinstance(entry, dict):
            raise InvalidObject(path, f"must be a mapping, not {shown(entry)}")
        yield path, entry
