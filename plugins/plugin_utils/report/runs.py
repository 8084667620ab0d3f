# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The ledger as a timeline: the entries of a run together, the newest run first, failures always spelled out."""

from __future__ import annotations

import calendar
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ledger import BrokenLedger, Head, entries
from ..texts import visible
from .words import counted, moment

MOST_RUNS = 100
_MOST_NODES = 8
_VERBS = {
    "sync": "changed",
    "heal": "repaired",
    "rollback": "took back",
    "cleanup": "cleaned up",
    "release": "gave back to kube-proxy",
    "publish": "published",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What became of a node."""

    node: str
    before: str
    after: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The entries of one run."""

    name: str
    at: float
    who: str
    what: str  # a sentence without its subject
    reason: str
    plan: str
    approvers: tuple[str, ...]
    entries: str
    failed: bool
    steps: tuple[Step, ...]
    more: int  # nodes that are not listed
    untouched: tuple[str, ...]  # nodes whose turn never came

    @property
    def day(self) -> str:
        """The heading that it stands under."""
        return moment(self.at, "%A, %d %B %Y")


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """All runs, and whether the record is whole."""

    head: Head
    runs: tuple[Run, ...]
    left: int  # older runs that are not shown
    broken: str = ""  # where it is not what was written


def ledger_of(file: Path) -> Ledger | None:
    """The ledger in a file; None if there is none."""
    if not file.is_file():
        return None
    runs: dict[str, list[Mapping[str, Any]]] = {}
    head, broken = Head(), ""
    try:
        for entry in entries(file):
            head = Head(entry["number"], entry["hash"])
            runs.setdefault(str(entry.get("run")), []).append(entry)
    except BrokenLedger as error:
        broken = visible(error)
    latest = sorted(runs.items(), key=lambda item: item[1][-1]["number"], reverse=True)
    shown = tuple(_run(name, found) for name, found in latest[:MOST_RUNS])
    return Ledger(head, shown, len(latest) - len(shown), broken)


def _run(name: str, found: Sequence[Mapping[str, Any]]) -> Run:
    first = found[0]
    steps = list(_steps(each for each in found if each.get("result") != "begun"))
    begun = [node for each in found if each.get("result") == "begun" for node in each.get("nodes") or ()]
    done = {each.node for each in steps}
    failed = [each for each in steps if each.error]
    # Failures come first: they are what a reader looks for.
    listed = [*failed, *(each for each in steps if not each.error)][: max(_MOST_NODES, len(failed))]
    who = first.get("who") or {}
    verb = _VERBS.get(str(first.get("action")), str(first.get("action")))
    total = len(done | set(begun))
    what = f"{verb} {counted(total, 'node')}" + (f", and failed on {len(failed)}" if failed else "")
    numbers = (first["number"], found[-1]["number"])
    return Run(
        name=name,
        at=_seconds(str(first.get("time") or "")),
        who=str(who.get("name") or who.get("user") or "?"),
        what=what,
        reason=str(first.get("reason") or ""),
        plan=str(first.get("plan") or ""),
        approvers=tuple(map(str, first.get("approvers") or ())),
        entries=f"entry {numbers[0]}" if numbers[0] == numbers[1] else f"entries {numbers[0]} to {numbers[1]}",
        failed=bool(failed),
        steps=tuple(listed),
        more=len(steps) - len(listed),
        untouched=tuple(dict.fromkeys(node for node in begun if node not in done)),
    )


def _steps(found: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
    for entry in found:
        for node, each in (entry.get("nodes") or {}).items():
            told = each if isinstance(each, Mapping) else {}
            yield Step(str(node), *(str(told.get(key) or "") for key in ("before", "after", "error")))


def _seconds(text: str) -> float:
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return 0.0
