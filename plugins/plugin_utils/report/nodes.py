# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What the control host knows of each node, from its working directory. No node is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..plan.history import OLD_SECONDS, UNREACHABLE, state_of
from ..plan.report import difference_text
from ..tasks.directory import WorkDirectory, read_json
from ..texts import visible
from .words import age, counted


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What a node can be, the worst last."""

    word: str
    means: str


STATES = {
    "current": State("as intended", "The kernel holds what was computed for the node, and that was checked lately."),
    "unknown": State("not known", "No run has told anything of the node yet."),
    "held": State("held back", "The node was taken back, and keeps what it has until the next run."),
    "old": State("not confirmed lately", f"As intended when it was last checked, more than {age(OLD_SECONDS)} ago."),
    "behind": State("behind", "The node has an older generation than the one that was computed for it."),
    "unreached": State("not reached", "The control host cannot reach the node. It serves with the rules that it has."),
    "failed": State("failed", "The last change did not succeed. The node keeps what it had."),
    "drift": State("drift", "Rules of the node were changed by something else."),
}
_MOST_DIFFERENCES = 3
RANKS = {name: rank for rank, name in enumerate(STATES)}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A node as the cluster or the inventory names it."""

    name: str
    host: str = ""  # what the inventory calls it
    zone: str = ""
    address: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRow:
    """A node, and what is known of it."""

    place: Place
    state: str  # a key of STATES
    note: str  # what there is to say about that
    mode: str = ""
    generation: str = ""
    wanted: str = ""  # the generation that was computed for it
    confirmed: float | None = None  # when it was last made, or found, equal to its bundle
    behind: float = 0.0  # seconds since something else was computed for it
    drift: int | None = None  # differences; None if they were not looked for

    @property
    def rank(self) -> int:
        """The worse, the higher."""
        return RANKS[self.state]


class Known:
    """What lies in a working directory about nodes."""

    def __init__(self, directory: WorkDirectory | None, now: float) -> None:
        self.now = now
        path = directory.path if directory else None
        fresh = (read_json(path / "freshness.json") if path else None) or {}
        self._fresh: Mapping[str, Mapping[str, Any]] = fresh.get("nodes") or {}
        self.histograms: Mapping[str, Mapping[str, Any]] = fresh.get("histograms") or {}
        self.runs: Mapping[str, float] = fresh.get("runs") or {}
        self._answers = _answers(path) if path else {}
        index = (read_json(directory.index) if directory else None) or {}
        self._wanted = {name: str(each.get("generation")) for name, each in (index.get("nodes") or {}).items()}
        self._computed = directory.index.stat().st_mtime if directory and index else 0.0
        self._hosts = {str(each.get("node")): host for host, each in (*self._answers.items(), *self._fresh.items())}

    @property
    def anything(self) -> bool:
        """Whether a run has told anything of any node."""
        return bool(self._hosts)

    def places(self) -> list[Place]:
        """The nodes that something is known of."""
        return [Place(node, host) for node, host in sorted(self._hosts.items())]

    def row(self, place: Place) -> NodeRow:
        """What is known of a node."""
        host = place.host or self._hosts.get(place.name, place.name)
        place = dataclasses.replace(place, host=host)
        fresh, answer = self._fresh.get(host) or {}, self._answers.get(host) or {}
        status = answer.get("status") or {}
        confirmed = fresh.get("confirmed")
        has = str(status.get("generation") or fresh.get("generation") or "")
        # What was computed before the last confirmation is not what is wanted any more.
        computed = self._wanted.get(place.name, "") if self._computed > (confirmed or 0) else ""
        wanted = computed or (str(fresh.get("generation") or "") if confirmed else "")
        differences = status.get("differences") or []
        row = NodeRow(
            place=place,
            state="",
            note="",
            mode=str(status.get("mode") or ""),
            generation=has,
            wanted=wanted,
            confirmed=confirmed,
            behind=self.now - self._computed if computed and computed != has else 0.0,
            drift=max(int(status["drift"]), len(differences)) if status.get("drift") is not None else None,
        )
        state, note = self._judged(row, fresh, status)
        return dataclasses.replace(row, state=state, note=visible(note))

    def _judged(self, row: NodeRow, fresh: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str]:
        """The state of a node, and why it is in it."""
        if not fresh and not status:
            return "unknown", "no run has told anything of it"
        if row.drift or status.get("state") in ("flushed", "partial", "foreign"):
            return "drift", _drift(status)
        if fresh.get("failed"):
            why = str(fresh.get("why") or "the last run did not succeed here")
            return state_of(fresh), why.removeprefix(UNREACHABLE)
        if row.behind:
            undone = (status.get("undone") or {}).get("reason")
            told = f"{row.wanted[:12]} was computed {age(row.behind)} ago, and is not there"
            return "behind", f"{told}; it went back by itself: {undone}" if undone else told
        if status.get("unconfirmed"):
            return "behind", "what it was given waits for confirmation, and goes back without it"
        if state_of(fresh) == "held":
            return "held", "it was taken back; the next run gives it the present state"
        if row.confirmed is None:
            return "unknown", "it answered, and no run has given it anything yet"
        if self.now - row.confirmed > OLD_SECONDS:
            return "old", f"last confirmed {age(self.now - row.confirmed)} ago"
        return "current", ""


def _answers(path: Path) -> dict[str, dict[str, Any]]:
    """What hosts said last, by host."""
    found = (read_json(file) for file in sorted((path / "nodes").glob("*.json")))
    return {str(each["host"]): each for each in found if each and each.get("host")}


def _drift(status: Mapping[str, Any]) -> str:
    differences = status.get("differences") or []
    if not differences:
        said = {"flushed": "all of it is gone", "partial": "parts of it are gone", "foreign": "other rules are there"}
        return said.get(str(status.get("state")), "its rules are not as they were left")
    told = "; ".join(map(difference_text, differences[:_MOST_DIFFERENCES]))
    more = len(differences) - _MOST_DIFFERENCES
    return f"{told}; and {more:,} more" if more > 0 else told


def verdict(rows: Iterable[NodeRow]) -> tuple[str, str]:
    """How the fleet is, as a headline and a sentence."""
    rows = list(rows)
    counts = {state: sum(row.state == state for row in rows) for state in reversed(STATES)}
    good, total = counts["current"], len(rows)
    if not rows:
        return "The cluster has no nodes.", "Without a Node object there are no rules to compute."
    if counts["unknown"] == total:
        return (
            f"The states of {counted(total, 'node')}.",
            "What nodes have is not known here: no run has told it.",
        )
    if good == total:
        return f"All {counted(total, 'node')} as intended.", "Each kernel holds what was computed for it."
    told = [
        f"{count:,} {'with drift' if state == 'drift' else STATES[state].word}"
        for state, count in counts.items()
        if count and state != "current"
    ]
    return (
        f"{good:,} of {counted(total, 'node')} as intended.",
        f"{', '.join(told)}. Nodes go on serving with the rules that they have.",
    )
