# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The plan that waits for approval, as those read it who are to sign it: one entry for each change, with its effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bundle.compare import Change
from ..bundle.release import InvalidRelease, parse_release
from ..plan.approval import NotApproved, plan_file, plan_release, read_plan, signatures, signers
from ..plan.groups import Group
from ..plan.removal_limit import shown
from ..plan.report import tally
from ..tasks.directory import WorkDirectory, read_json
from .words import at_home, counted

# A page is read to its end; `akp approve` prints all of them.
_MOST = 500
_ORDER = {"removed": 0, "changed": 1, "added": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Detail:
    """A field that comes, goes or is replaced."""

    field: str
    old: str = ""
    new: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A service port, or another part of nodes, that is not as it was, and on which hosts."""

    action: str
    title: str
    kind: str  # protocol and family
    effects: tuple[str, ...]  # in sentences
    details: tuple[Detail, ...]
    where: str
    endpoints_only: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """What a node has, and would get."""

    node: str
    before: str
    after: str
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Signed:
    """Who has signed."""

    count: int  # signatures beside the plan
    names: tuple[str, ...] | None  # whose they are; None if there is no file of allowed signers here


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A plan."""

    file: str
    digest: str
    release: str  # the SHA-256 of what is signed
    cluster: str
    made: float
    expires: float
    state: str  # waits, carried out or followed; or why it cannot be followed any more
    changing: int
    hosts: int
    services: Mapping[str, int]
    endpoints: Mapping[str, int]
    changes: tuple[Planned, ...]
    left: int  # changes that are not listed
    bundles: tuple[Bundle, ...]
    signed: Signed

    @property
    def waits(self) -> bool:
        """Whether it can still be signed and followed."""
        return self.state == "waits"

    @property
    def counts(self) -> str:
        """In words."""
        told = [counted(self.services[action], f"Service {action}", f"Services {action}") for action in _ORDER]
        return ", ".join(told)


def plan_of(file: Path, directory: WorkDirectory | None = None, allowed: Path | None = None) -> Plan | None:
    """The plan in a file; None if there is none that can be read."""
    try:
        content = read_plan(file)
    except NotApproved:
        return None
    text = plan_file(file, "release").read_text(encoding="utf-8") if plan_file(file, "release").exists() else ""
    try:
        release = parse_release(text)
    except InvalidRelease:
        return None
    found = signatures(file)
    hosts: Mapping[str, Mapping[str, Any]] = content["hosts"]
    every = list(_changes(content))
    counted_ = tally(change for change, _having in every if change.protocol)
    merged = sorted((_planned(*each, len(hosts)) for each in every), key=_order)
    return Plan(
        file=at_home(file),
        digest=str(content["digest"]),
        release=str(content.get("release") or ""),
        cluster=release.cluster,
        made=release.counter / 1000,
        expires=release.expires,
        state=_state(file, content, directory),
        changing=sum(bool(each.get("changed")) for each in hosts.values()),
        hosts=len(hosts),
        services=counted_["services"],
        endpoints=counted_["endpoints"],
        changes=tuple(merged[:_MOST]),
        left=max(0, len(merged) - _MOST),
        bundles=tuple(
            Bundle(str(each.get("node")), *(str(each.get(key) or "") for key in ("previous", "generation", "digest")))
            for _host, each in sorted(hosts.items())
            if each.get("changed")
        ),
        signed=Signed(len(found), tuple(signers(text, found, allowed)) if allowed else None),
    )


def _state(file: Path, content: Mapping[str, Any], directory: WorkDirectory | None) -> str:
    digest = content["digest"]
    if directory and (read_json(directory.followed) or {}).get("plan") == digest:
        return "carried out"
    if directory and (read_json(directory.following) or {}).get("plan") == digest:
        return "followed"
    try:
        plan_release(file, content)
    except NotApproved as error:
        return str(error).removeprefix(f"{file}: ")
    return "waits" if any(each.get("changed") for each in content["hosts"].values()) else "changes nothing"


def _changes(content: Mapping[str, Any]) -> Iterator[tuple[Change, Sequence[str]]]:
    """What happens on many hosts is told once, with those hosts."""
    groups = [Group.of(each) for each in content.get("changes") or ()]
    told = {host for each in groups for host in each.hosts}
    untold = sorted(host for host, each in content["hosts"].items() if each.get("changed") and host not in told)
    for group in (*groups, *([Group(tuple(untold), ())] if untold else [])):
        for change in group.changes or (Change("changed", "rules of no Service", "", "", "", ()),):
            yield change, group.hosts


def _planned(change: Change, having: Sequence[str], total: int) -> Planned:
    details = tuple(map(_detail, change.details))
    fields = {each.field for each in details}
    only = change.action == "changed" and bool(fields) and fields <= {"endpoint", "local endpoint"}
    return Planned(
        action=change.action,
        title=f"{change.service}:{change.port}" if change.port else change.service,
        kind=f"{change.protocol} {change.family}".strip(),
        effects=tuple(_effects(change, details)),
        details=details,
        where="every node" if len(having) == total else shown(having, 5),
        endpoints_only=only,
    )


def _detail(text: str) -> Detail:
    sign, _blank, rest = text.partition(" ")
    local = rest.startswith("local endpoint ")
    field, _blank, value = (
        ("local endpoint", "", rest.removeprefix("local endpoint ")) if local else rest.partition(" ")
    )
    if sign == "~":
        old, arrow, new = value.partition(" -> ")
        return Detail(field, old, new) if arrow else Detail(field, "", value)
    return Detail(field, new=value) if sign == "+" else Detail(field, old=value)


def _effects(change: Change, details: Iterable[Detail]) -> Iterator[str]:
    """What it comes to, where that is more than the fields say."""
    details = list(details)
    port = next((each.new or each.old for each in details if each.field == "nodePort"), "")
    served = sum(each.field == "endpoint" and bool(each.old) for each in details)
    added = sum(each.field == "endpoint" and bool(each.new) for each in details)
    if change.action == "added" and change.protocol:
        if port:
            yield f"Opens port {port}/{change.protocol} on nodes."
        if not added:
            yield "It has no endpoints yet: callers are refused."
    elif change.action == "removed" and change.protocol:
        if port:
            yield f"Closes port {port}/{change.protocol} on nodes."
        yield f"{counted(served, 'endpoint')} served it; afterwards nothing answers at its addresses."
    elif change.protocol and (served or added):
        both = ((added, "more"), (served, "fewer"))
        told = [counted(number, f"endpoint {word}", f"endpoints {word}") for number, word in both if number]
        yield f"{' and '.join(told)}."
    for each in details:
        if each.field == "sourceRanges" and change.action == "changed":
            yield f"Before, {_allowed(each.old)} could use its load balancer IP; then {_allowed(each.new)} can."


def _allowed(ranges: str) -> str:
    """How many addresses source ranges hold; without any, there is no limit."""
    cidrs = [each for each in ranges.split(", ") if "/" in each]
    total = sum(2 ** (_bits(each) - int(each.rpartition("/")[2])) for each in cidrs)
    return counted(total, "address", "addresses") if cidrs else "every address"


def _bits(cidr: str) -> int:
    return 128 if ":" in cidr else 32


def _order(each: Planned) -> tuple[bool, int, str]:
    return each.endpoints_only, _ORDER[each.action], each.title
