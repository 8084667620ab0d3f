# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a change would mean for all nodes, looked at before the first of them is touched.

For every generation that was computed here, the frontends that it serves are kept: which Services, under which
addresses and ports. Most generations of a cluster share them, so there are few such files, and few of those that name
the service ports without endpoints, or that hold what belongs to no Service. A node that says which generation it has
can then be compared with its new state, without asking it for more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..backends.state import Part, part_of
from ..bundle.compare import Change, Records, compare_records, parse_records
from ..errors import UserError
from ..files import write_atomic
from ..tasks.directory import read_json
from .node_changes import NOT_KNOWN, frame_changes, frame_record, without_endpoints

if TYPE_CHECKING:
    from ..backends.state import Fragment, State

# This file of a frame may change without an approval: whether the node is fit, and where it says so.
_HEALTH = ("file", "health.conf")
_SERVICES = ("file", "services.jsonl")
_ENDPOINTS = ("endpoints", "localEndpoints")
_FRAME = "frame"
# What links of a generation lead to: service ports without endpoints, the frame, frontends.
_LINKS = (_IDLE := "i", "f", "g")
_MOST_NAMES = 20
# Services that go within this time go together.
ERODING_SECONDS = 300.0
_REMOVED = "service ports would be removed"
_API_SERVER = "default/kubernetes"


class Port(NamedTuple):
    """A service port in one family."""

    name: str  # "namespace/name:port protocol"
    family: str
    service: str  # "namespace/name"

    def __str__(self) -> str:
        return f"{self.name} {self.family}"


class Ports(NamedTuple):
    """The service ports of a node."""

    known: frozenset[Port]
    idle: frozenset[Port]  # those that have no endpoint


class Most:
    """The most service ports that a host had in the last minutes: a namespace is not deleted in one moment."""

    def __init__(self) -> None:
        self._past: list[tuple[float, Ports]] = []  # until when it had them; each time fewer

    def had(self, ports: Ports, now: float) -> None:
        """Until now it had these."""
        self._past = [each for each in self._past if len(each[1].known) > len(ports.known)] + [(now, ports)]

    def of(self, ports: Ports, now: float) -> Ports:
        """These, which it has, or what there was more of."""
        self._past = [each for each in self._past if now - each[0] < ERODING_SECONDS]
        return max([ports, *(each for _until, each in self._past)], key=lambda each: len(each.known))


class Shrunken(UserError):
    """Nodes would lose more service ports than is allowed; the message names them, and the way to insist."""


class Frontends:
    """The frontends of generations, in a directory: one file for each that is different, a link for each generation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fragments: dict[bytes, tuple[bytes, str, Port | None]] = {}
        self._records: dict[str, Records] = {}
        self._frames: dict[str, str] = {}
        self._ports: dict[tuple[str, str], Ports] = {}

    def learn(self, state: State, settings: str) -> None:
        """Remember what a state serves, and the settings that it came of."""
        # Earlier versions kept less.
        if all((self._folder / f"{kind}-{state.generation}").exists() for kind in _LINKS):
            return
        frame = self._frame(state, settings)
        parts = [self._frontend(each) for each in state.fragments]
        name = hashlib.sha256(frame.encode() + b"".join([digest for digest, _text, _idle in parts])).hexdigest()
        file = self._folder / f"{name}.jsonl"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            write_atomic(file, "".join([frame, *(text for _digest, text, _idle in parts)]))
        idle = json.dumps(sorted([port for _digest, _text, port in parts if port]))
        idle_file = self._folder / f"{hashlib.sha256(idle.encode()).hexdigest()}.idle"
        if not idle_file.exists():
            write_atomic(idle_file, idle)
        framed = json.dumps(frame_record(state, settings), sort_keys=True)
        frame_file = self._folder / f"{hashlib.sha256(framed.encode()).hexdigest()}.frame"
        if not frame_file.exists():
            write_atomic(frame_file, framed)
        # The one that tells whether a generation is known comes last.
        for kind, target in zip(_LINKS, (idle_file, frame_file, file), strict=True):
            with contextlib.suppress(FileExistsError):
                (self._folder / f"{kind}-{state.generation}").symlink_to(target.name)

    def _frontend(self, fragment: Fragment) -> tuple[bytes, str, Port | None]:
        """A fragment without its endpoints, by digest and text, and its service port if it has none."""
        known = self._fragments.get(fragment.digest)
        if known is None:
            text = "".join(_without_endpoints(text) for obj, text in fragment.open if obj == _SERVICES)
            idle = _port_of(fragment) if fragment.idle else None
            known = self._fragments[fragment.digest] = (hashlib.sha256(text.encode()).digest(), text, idle)
        return known

    @staticmethod
    def _frame(state: State, settings: str) -> str:
        digest = hashlib.sha256(f"{state.mode} {state.compat} {settings}\n".encode())
        for obj, text in state.frame.items():
            if obj != _HEALTH and part_of(obj) is not Part.ENDPOINTS:
                head, tail = without_endpoints(text)
                digest.update(f"{' '.join(obj)}\0{head}\0{tail}\0".encode())
        return json.dumps({_FRAME: digest.hexdigest(), "mode": state.mode}, separators=(",", ":")) + "\n"

    def name(self, generation: str) -> str:
        """Names the frontends of a generation: equal names, equal frontends. Empty if they are not known."""
        return self._target("g", generation)

    def _target(self, kind: str, generation: str) -> str:
        try:
            return str((self._folder / f"{kind}-{generation}").readlink()) if generation else ""
        except OSError:
            return ""

    def records(self, name: str) -> Records:
        """The service ports of a name, without endpoints."""
        known = self._records.get(name)
        if known is None:
            lines = (self._folder / name).read_text(encoding="utf-8").splitlines()
            known = self._records[name] = parse_records(lines[1:])
            self._frames[name] = lines[0]
        return known

    def ports(self, generation: str) -> Ports | None:
        """The service ports of a generation, if they are known. Equal ones are the same object."""
        names = (self._target("g", generation), self._target(_IDLE, generation))
        if not names[0]:
            return None
        ports = self._ports.get(names)
        if ports is None:
            known = frozenset(map(_recorded, self.records(names[0])))
            # One of an earlier version has no word on endpoints, and none to lose.
            idle = (
                frozenset(Port(*each) for each in json.loads((self._folder / names[1]).read_bytes()))
                if names[1]
                else known
            )
            ports = self._ports[names] = Ports(known, idle)
        return ports

    def changes(self, before: str, after: str) -> list[Change]:
        """What differs between two names."""
        found = list(compare_records(self.records(before) if before else {}, self.records(after)))
        if before and self._frames[before] != self._frames[after]:
            found.insert(0, Change("changed", "node", "", "", "", ("~ rules or settings that belong to no Service",)))
        return found

    def frame_changes(self, before: str, after: str) -> list[Change]:
        """What differs between two generations and belongs to no Service; if the first is empty or not known, all."""
        names = (self._target("f", before), self._target("f", after))
        if before == after or (names[0] and names[0] == names[1]):
            return []
        new = read_json(self._folder / names[1]) if names[1] else None
        if new is None:
            return [NOT_KNOWN]
        return frame_changes(read_json(self._folder / names[0]) if names[0] else None, new, first=not before)

    def forget(self, needed: Iterable[str]) -> None:
        """Keep the generations that are needed, as many others of the latest, and the files of those."""
        self._fragments.clear()
        self._records.clear()
        self._frames.clear()
        self._ports.clear()
        kept = set(needed)
        links = sorted(self._folder.glob("g-*"), key=lambda each: each.lstat().st_mtime, reverse=True)
        spare = len(kept) + 100
        others = [each for each in links if each.name[2:] not in kept]
        for each in others[spare:]:
            for link in self._folder.glob(f"?-{each.name[2:]}"):
                link.unlink(missing_ok=True)
        if len(others) > spare:
            used = {str(each.readlink()) for each in self._folder.glob("?-*")}
            for file in (*self._folder.glob("*.jsonl"), *self._folder.glob("*.idle"), *self._folder.glob("*.frame")):
                if file.name not in used:
                    file.unlink(missing_ok=True)


def _without_endpoints(text: str) -> str:
    record = json.loads(text)
    for key in _ENDPOINTS:
        record.pop(key, None)
    return json.dumps(record, separators=(",", ":")) + "\n"


def refuse_shrinkage(frontends: Frontends, steps: Mapping[str, tuple[str, str]], percent: int) -> None:
    """Stop if a host would lose more than a share of its service ports. Steps: host -> generation now, generation then.

    If no Service has endpoints any more, those that had are lost: an answer without EndpointSlices is as empty as one
    without Services. A port is lost if one of its families is.
    A host whose generation was not computed here is not judged here; it judges itself when it gets its bundle.
    """
    judged = {}
    for host, generations in steps.items():
        before, after = map(frontends.ports, generations)
        if before and after and before is not after:
            judged[host] = (before, after, percent)
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
        if before.known <= after.known and after.idle <= before.idle:
            continue  # none is gone, and none has lost its endpoints: so it is with most changes
        gone = before.known - after.known
        served = _of_others(before.known - before.idle)
        # Some are scaled down to nothing every night; that all are is an answer without EndpointSlices.
        emptied = served & after.idle if not _of_others(after.known - after.idle) else frozenset()
        lost, had = (emptied | (gone & served), served) if emptied else (gone, before.known)
        count, most = len(_names(lost)), len(_names(had))
        if count * 100 > percent * most:
            what = "service ports that have endpoints would be removed or have none left" if emptied else _REMOVED
            names = sorted([*map(str, gone & lost), *(f"{each} (no endpoints left)" for each in emptied)])
            told.append(
                f"on {shown(sorted(hosts), 5)}, {count} of {most} {what}, more than {percent} %: "
                f"{shown(names, _MOST_NAMES)}"
            )
    return "; ".join(told)


def _of_others(ports: frozenset[Port]) -> frozenset[Port]:
    """Those that are not the API server's own: it writes their EndpointSlice itself, whatever becomes of all others."""
    return frozenset(each for each in ports if each.service != _API_SERVER)


def _names(ports: frozenset[Port]) -> frozenset[str]:
    """Each port once, whichever of its families they are: losing all of one is losing that of every Service."""
    return frozenset(each.name for each in ports)


@lru_cache(maxsize=16)
def service_ports(fragments: tuple[Fragment, ...]) -> Ports:
    """The service ports of a state; most nodes have the same."""
    ports = [_port(each) for each in fragments]
    return Ports(frozenset([port for port, _idle in ports]), frozenset([port for port, idle in ports if idle]))


# Of fragments, by their digests: from one state to the next most stay.
_ports: dict[bytes, tuple[Port, bool]] = {}
_MOST_PORTS = 200_000


def _port(fragment: Fragment) -> tuple[Port, bool]:
    """A service port, and whether it has no endpoint."""
    known = _ports.get(fragment.digest)
    if known is None:
        if len(_ports) > _MOST_PORTS:
            _ports.clear()
        known = _ports[fragment.digest] = (_port_of(fragment), fragment.idle)
    return known


def recorded_ports(lines: Iterable[str]) -> Ports:
    """The same, of the lines of a services.jsonl; ValueError or KeyError if they are none."""
    records = parse_records(lines)
    idle = (key for key, record in records.items() if not record.get("endpoints"))
    return Ports(frozenset(map(_recorded, records)), frozenset(map(_recorded, idle)))


def _port_of(fragment: Fragment) -> Port:
    return Port(fragment.name, fragment.family, fragment.service)


def _recorded(key: tuple[str, str, str, str]) -> Port:
    service, port, protocol, family = key
    return Port(f"{service}{':' if port else ''}{port} {protocol}", family, service)


def shown(names: Sequence[str], most: int) -> str:
    """A list that a person will read."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
