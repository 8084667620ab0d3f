# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What changes between the service ports of two states, told per Service and endpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

# (service, port name, protocol, family) -> the service port's record
Records: TypeAlias = dict[tuple[str, str, str, str], dict[str, Any]]

_ENDPOINTS = {"endpoints": "endpoint", "localEndpoints": "local endpoint"}


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One service port, or one other part of a node's state, that is not as it was."""

    action: str  # added, removed or changed
    service: str
    port: str
    protocol: str
    family: str
    details: tuple[str, ...]  # each starts with +, - or ~

    @property
    def title(self) -> str:
        """`namespace/name:port protocol family`."""
        name = f"{self.service}:{self.port}" if self.port else self.service
        return " ".join(part for part in (name, self.protocol, self.family) if part)


def parse_records(lines: Iterable[str]) -> Records:
    """The service ports of the lines of a services.jsonl."""
    records: Records = {}
    for line in lines:
        record = _checked(json.loads(line))
        records[record["service"], record.get("port", ""), record["protocol"], record["family"]] = record
    return records


def _checked(record: Any) -> dict[str, Any]:
    """A record that others can rely on; ValueError if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"{str(record)[:60]} is no service port")
    for field in ("service", "port", "protocol", "family"):
        if not isinstance(record.get(field, ""), str):
            raise ValueError(f"{field} of {str(record)[:60]} is no text")
    for field in (*_ENDPOINTS, "externalIPs", "loadBalancerIPs"):
        entries = record.get(field, [])
        if not isinstance(entries, list) or not all(isinstance(each, str) for each in entries):
            raise ValueError(f"{field} of {str(record)[:60]} is no list of texts")
    return record


def compare_records(old: Records, new: Records) -> Iterator[Change]:
    """Every service port that was added, removed or changed, in order of their names."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if before is None:
            yield Change("added", *key, tuple(_members("+", after or {})))
        elif after is None:
            yield Change("removed", *key, tuple(_members("-", before)))
        else:
            yield Change("changed", *key, tuple(_differences(before, after)))


def _members(sign: str, record: Mapping[str, Any]) -> Iterator[str]:
    for field, value in record.items():
        if field in ("service", "port", "protocol", "family"):
            continue
        if field in _ENDPOINTS:
            yield from (f"{sign} {_ENDPOINTS[field]} {endpoint}" for endpoint in value)
        else:
            yield f"{sign} {field} {_shown(value)}"


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for field in dict.fromkeys((*before, *after)):
        old, new = before.get(field), after.get(field)
        if old == new:
            continue
        if field in _ENDPOINTS:
            had, has = set(old or ()), set(new or ())
            yield from (f"- {_ENDPOINTS[field]} {e}" for e in old or () if e not in has)
            yield from (f"+ {_ENDPOINTS[field]} {e}" for e in new or () if e not in had)
        else:
            yield f"~ {field} {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if value is None:
        return "(none)"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def line_changes(before: Sequence[str], after: Sequence[str], prefix: str = "") -> list[str]:
    """The lines that go and come; or that they are in another order, which matters to rules."""
    old, new = dict.fromkeys(before), dict.fromkeys(after)
    gone = [f"- {prefix}{line}" for line in old if line not in new]
    come = [f"+ {prefix}{line}" for line in new if line not in old]
    moved = not gone and not come and list(before) != list(after)
    return gone + come + ([f"~ {prefix}the same lines in another order"] if moved else [])
