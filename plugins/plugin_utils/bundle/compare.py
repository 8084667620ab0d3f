# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What changes between two bundles or two clusters, told per Service and endpoint."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import UserError
from .explained import Explained
from .manifest import FILE, SERVICES_FILE

# (service, port name, protocol, family) -> the service port's record
Records: TypeAlias = dict[tuple[str, str, str, str], dict[str, Any]]

_ENDPOINTS = {"endpoints": "endpoint", "localEndpoints": "local endpoint"}
_SETTINGS = (".conf", "nfacct.rules", "health.counts")
_RULES = (".rules", ".nft", "ip.batch", "haproxy.cfg")
_MARKER = re.compile("KUBE-PROXY-GEN-|kube-proxy gen-")


class UnreadableBundle(UserError):
    """A directory that is no bundle, or whose files are damaged; the message names the file."""


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


def bundle_records(directory: Path) -> Records:
    """The service ports of a bundle."""
    file = directory / SERVICES_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return parse_records(lines)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UnreadableBundle(f"{file}: {error}") from error


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
        if not isinstance(record.get(field, []), list):
            raise ValueError(f"{field} of {str(record)[:60]} is no list")
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


def bundles(path: Path) -> dict[str, Path]:
    """The bundles of a directory: itself, or one per node below it. Node name -> directory."""
    if (path / FILE).is_file():
        return {str(_manifest(path).get("node")): path}
    below = sorted(each.parent for each in path.glob(f"[!.]*/{FILE}"))
    return {str(_manifest(each).get("node")): each for each in below}


def _manifest(directory: Path) -> dict[str, Any]:
    file = directory / FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableBundle(f"{file}: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UnreadableBundle(f"{file}: is no manifest of a bundle")
    return manifest


def compare_bundles(old: Path | None, new: Path | None) -> list[Change]:
    """What changes on a node between two bundles; None stands for no bundle at all."""
    before = bundle_records(old) if old else {}
    after = bundle_records(new) if new else {}
    changes = list(compare_records(before, after))
    if old and new:
        touched = {(each.service, each.port, each.protocol, each.family) for each in changes}
        records = [side[key] for side in (before, after) for key in touched if key in side]
        changes.extend(_other_changes(old, new, Explained.by(records)))
    return changes


def _other_changes(old: Path, new: Path, explained: Explained) -> Iterator[Change]:
    """What no Service that changed explains: mode, sysctls, rules that every node has, and those of other Services."""
    before, after = _manifest(old), _manifest(new)
    details = [
        f"~ {field} {before.get(field)} -> {after.get(field)}"
        for field in ("mode", "compat")
        if before.get(field) != after.get(field)
    ]
    same_mode = before.get("mode") == after.get("mode")
    names = dict.fromkeys((*before["files"], *after["files"]))
    for name in names:
        if before["files"].get(name) == after["files"].get(name):
            continue
        # Of another mode, all rules are others.
        if name.endswith(_SETTINGS) or (same_mode and name.endswith(_RULES)):
            was, is_ = (list(explained.others(name, _content(each / name))) for each in (old, new))
            details += line_changes(was, is_, prefix=f"{name}: ")
    if details:
        yield Change("changed", "node", "", "", "", tuple(details))


def line_changes(before: Sequence[str], after: Sequence[str], prefix: str = "") -> list[str]:
    """The lines that go and come; or that they are in another order, which matters to rules."""
    old, new = dict.fromkeys(before), dict.fromkeys(after)
    gone = [f"- {prefix}{line}" for line in old if line not in new]
    come = [f"+ {prefix}{line}" for line in new if line not in old]
    moved = not gone and not come and list(before) != list(after)
    return gone + come + ([f"~ {prefix}the same lines in another order"] if moved else [])


def _content(file: Path) -> list[str]:
    """The lines that say something: headings as well, the generation not."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("# node ") and not _MARKER.search(line)]
