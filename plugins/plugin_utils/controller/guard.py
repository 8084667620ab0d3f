# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a change would mean for all nodes, looked at before the first of them is touched.

For every generation that was computed here, the frontends that it serves are kept: which Services, under which
addresses and ports. Most generations of a cluster share them, so there are few such files. A node that says which
generation it has can then be compared with what it shall have, without asking it for more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..bundle.compare import Change, Records, compare_records, parse_records

if TYPE_CHECKING:
    from ..backends.state import Fragment, State

# A frame holds what belongs to no Service; this much of it follows from endpoints.
_OF_ENDPOINTS = ("file", "health.conf")
_ENDPOINTS = ("endpoints", "localEndpoints")
_FRAME = "frame"
_MOST_NAMES = 20

Ports: TypeAlias = frozenset[str]  # service ports, as people know them


class Shrunken(Exception):
    """Nodes would lose more service ports than is allowed; the message names them, and the way to insist."""


class Frontends:
    """The frontends of generations, in a directory: one file for each that is different, a link for each generation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fragments: dict[bytes, tuple[bytes, str]] = {}
        self._records: dict[str, Records] = {}
        self._ports: dict[str, Ports] = {}

    def learn(self, state: State, settings: str) -> None:
        """Remember what a state serves, and the settings that it came of."""
        link = self._folder / f"g-{state.generation}"
        if link.exists():
            return
        frame = self._frame(state, settings)
        parts = [self._frontend(each) for each in state.fragments]
        name = hashlib.sha256(frame.encode() + b"".join([digest for digest, _text in parts])).hexdigest()
        file = self._folder / f"{name}.jsonl"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            staged = self._folder / f".{name}.{os.getpid()}"
            staged.write_text("".join([frame, *(text for _digest, text in parts)]), encoding="utf-8")
            staged.replace(file)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(file.name)

    def _frontend(self, fragment: Fragment) -> tuple[bytes, str]:
        known = self._fragments.get(fragment.digest)
        if known is None:
            text = "".join(_without_endpoints(text) for obj, text in fragment.open if obj == ("file", "services.jsonl"))
            known = self._fragments[fragment.digest] = (hashlib.sha256(text.encode()).digest(), text)
        return known

    @staticmethod
    def _frame(state: State, settings: str) -> str:
        digest = hashlib.sha256(f"{state.mode} {state.compat} {settings}\n".encode())
        for obj, text in state.frame.items():
            if obj != _OF_ENDPOINTS:
                digest.update(f"{' '.join(obj)}\0{text.head}\0{text.tail}\0".encode())
        return json.dumps({_FRAME: digest.hexdigest(), "mode": state.mode}, separators=(",", ":")) + "\n"

    def name(self, generation: str) -> str:
        """Names the frontends of a generation: equal names, equal frontends. Empty if they are not known."""
        try:
            return str((self._folder / f"g-{generation}").readlink()) if generation else ""
        except OSError:
            return ""

    def records(self, name: str) -> Records:
        """The service ports of a name, without endpoints."""
        known = self._records.get(name)
        if known is None:
            lines = (self._folder / name).read_text(encoding="utf-8").splitlines()
            known = self._records[name] = parse_records(lines[1:])
        return known

    def ports(self, name: str) -> Ports:
        """Those as people know them."""
        known = self._ports.get(name)
        if known is None:
            known = self._ports[name] = frozenset(map(_title, self.records(name)))
        return known

    def changes(self, before: str, after: str) -> list[Change]:
        """What differs between two names."""
        found = list(compare_records(self.records(before) if before else {}, self.records(after)))
        if before and not found and before != after:
            return [Change("changed", "node", "", "", "", ("~ rules or settings that belong to no Service",))]
        return found

    def forget(self, needed: Iterable[str]) -> None:
        """Keep the generations that are needed, as many others of the latest, and the files of those."""
        self._fragments.clear()
        self._records.clear()
        self._ports.clear()
        kept = set(needed)
        links = sorted(self._folder.glob("g-*"), key=lambda each: each.lstat().st_mtime, reverse=True)
        spare = len(kept) + 100
        others = [each for each in links if each.name[2:] not in kept]
        for each in others[spare:]:
            each.unlink(missing_ok=True)
        if len(others) > spare:
            used = {str(each.readlink()) for each in self._folder.glob("g-*")}
            for file in self._folder.glob("*.jsonl"):
                if file.name not in used:
                    file.unlink(missing_ok=True)


def _without_endpoints(text: str) -> str:
    record = json.loads(text)
    for key in _ENDPOINTS:
        record.pop(key, None)
    return json.dumps(record, separators=(",", ":")) + "\n"


def refuse_shrinkage(frontends: Frontends, steps: Mapping[str, tuple[str, str]], percent: int) -> None:
    """Stop if a host would lose more than a share of its service ports. Steps: host -> generation now, generation then.

    A host whose generation was not computed here is not judged here; it judges itself when it gets its bundle.
    """
    judged = {}
    for host, generations in steps.items():
        before, after = map(frontends.name, generations)
        if before and after and before != after:
            judged[host] = (frontends.ports(before), frontends.ports(after), percent)
    told = losses(judged)
    if told:
        raise Shrunken(
            f"refused, and no node was touched: {told}. If that is meant, allow it for one run with "
            "kube_proxy_max_removed_percent=100"
        )


def losses(steps: Mapping[str, tuple[Ports, Ports, int]]) -> str:
    """What hosts would lose beyond what each may, in words. Steps: host -> ports now, ports then, allowed percent."""
    groups: dict[tuple[Ports, Ports, int], list[str]] = {}
    for host, step in steps.items():
        groups.setdefault(step, []).append(host)
    told = []
    for (before, after, percent), hosts in groups.items():
        gone = sorted(before - after)
        if len(gone) * 100 > percent * len(before):
            told.append(
                f"on {shown(sorted(hosts), 5)}, {len(gone)} of {len(before)} service ports would be removed, more than "
                f"{percent} %: {shown(gone, _MOST_NAMES)}"
            )
    return "; ".join(told)


@lru_cache(maxsize=16)
def service_ports(fragments: tuple[Fragment, ...]) -> Ports:
    """The service ports of a state; most nodes have the same."""
    return frozenset(f"{each.name} {each.family}" for each in fragments)


def _title(key: tuple[str, str, str, str]) -> str:
    service, port, protocol, family = key
    return f"{service}{':' if port else ''}{port} {protocol} {family}"


def shown(names: Sequence[str], most: int) -> str:
    """A list that a person will read."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
