# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The fleet as `akp status` prints it: a table, the worst first, and what waits. No node is asked."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..tasks.directory import WorkDirectory
from .changes import Plan, plan_of
from .freshness import Speed, speed_of
from .nodes import STATES, Known, NodeRow, Place, verdict
from .words import age, at_home, counted, moment, natural

_MARKS = {
    "current": ("●", "32"),
    "unknown": ("○", "2"),
    "held": ("○", "2"),
    "old": ("▲", "33"),
    "behind": ("▲", "33"),
    "unreached": ("○", "35"),
    "failed": ("◆", "31"),
    "drift": ("◆", "31"),
}
# Above so many good nodes, one line stands for all of them.
_MOST_GOOD = 20
_HEADS = ("state", "node", "mode", "generation", "behind", "confirmed", "drift", "what is known")


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """A moment."""

    cluster: str
    directory: str
    at: float
    rows: tuple[NodeRow, ...]  # the worst first
    known: bool
    plan: Plan | None
    speed: Speed | None

    @property
    def good(self) -> bool:
        """Whether every node is as intended."""
        return all(row.state == "current" for row in self.rows)

    @property
    def data(self) -> dict[str, Any]:
        """For programs."""
        waits = self.plan is not None and self.plan.waits
        return {
            "apiVersion": "akp/v1",
            "kind": "Status",
            "cluster": self.cluster,
            "at": _time(self.at),
            "nodes": [_node(row) for row in self.rows],
            "plan": {"digest": self.plan.digest, "expires": _time(self.plan.expires)} if self.plan and waits else None,
        }

    def lines(self, *, whole: bool, colour: bool, width: int = 0) -> Iterator[str]:
        """For people."""
        if not self.known:
            yield f"{self.cluster}: nothing is known yet"
            yield f"{self.directory} holds no node: the first run of sync_services, or akp watch, writes what it finds"
            return
        headline, _lead = verdict(self.rows)
        at = moment(self.at, "%Y-%m-%d %H:%M:%SZ")
        yield f"{self.cluster}: {headline.rstrip('.')}   known at {at}; no node was asked"
        yield ""
        good = [row for row in self.rows if row.state == "current"]
        shown = self.rows if whole or len(good) <= _MOST_GOOD else [row for row in self.rows if row.state != "current"]
        yield from _table(shown, self.at, colour, width or shutil.get_terminal_size((160, 40)).columns)
        if len(shown) < len(self.rows):
            oldest = max(self.at - (row.confirmed or self.at) for row in good)
            told = f"{counted(len(good), 'node')}, all confirmed within {age(oldest)}   (--all lists them)"
            yield f"{_mark('current', colour)}   {told}"
        yield from self._foot()

    def _foot(self) -> Iterator[str]:
        yield ""
        if self.plan and self.plan.waits:
            signed = counted(self.plan.signed.count, "signature")
            until = moment(self.plan.expires, "%Y-%m-%d %H:%MZ")
            yield f"plan    {self.plan.digest[:12]} waits for approval, {signed} so far; good until {until}"
        else:
            yield "plan    none waits"
        if self.speed:
            fast, slow = self.speed.median, self.speed.slowest
            yield f"speed   half of all changes came to a kernel within {fast:g} s, 99 % within {slow:g} s"
        drifted = [row.place.host for row in self.rows if row.state == "drift"]
        if drifted:
            limit = ",".join(drifted[:5])
            verify = "ansible-playbook agentless.kube_proxy.verify_services -e kube_proxy_heal=true"
            yield f"help    put it right: {verify} --limit {limit}"


def status_of(directory: WorkDirectory, cluster: str, places: Sequence[Place], now: float) -> Status:
    """What is known now; without places, of the nodes that the directory knows."""
    known = Known(directory, now)
    rows = [known.row(place) for place in places or known.places()]
    rows.sort(key=lambda row: (-row.rank, natural(row.place.name)))
    plan = plan_of(directory.plan, directory)
    return Status(cluster, at_home(directory.path), now, tuple(rows), known.anything, plan, speed_of(known.histograms))


def _table(rows: Sequence[NodeRow], now: float, colour: bool, width: int) -> Iterator[str]:
    cells = [_HEADS, *(_cells(row, now) for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(_HEADS) - 1)]
    left = sum(widths) + 3 * len(widths)
    for line, row in zip(cells, (None, *rows), strict=True):
        parts = [
            text.rjust(size) if 4 <= index <= 6 else text.ljust(size)
            for index, (text, size) in enumerate(zip(line, widths, strict=False))
        ]
        if row is not None:
            parts[0] = parts[0].replace(line[0], _mark(row.state, colour), 1)
        first, *more = textwrap.wrap(line[-1], max(24, width - left)) or [""]
        yield "   ".join([*parts, first]).rstrip()
        yield from (" " * left + each for each in more)


def _cells(row: NodeRow, now: float) -> tuple[str, ...]:
    confirmed = age(now - row.confirmed) if row.confirmed is not None else "never"
    return (
        f"{_MARKS[row.state][0]} {STATES[row.state].word}",
        row.place.name,
        row.mode or "-",
        row.generation[:12] or "nothing",
        age(row.behind) if row.behind else "-",
        confirmed,
        "?" if row.drift is None else str(row.drift),
        row.note or "the kernel holds what was computed",
    )


def _mark(state: str, colour: bool) -> str:
    sign, code = _MARKS[state]
    text = f"{sign} {STATES[state].word}"
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _node(row: NodeRow) -> dict[str, Any]:
    return {
        "node": row.place.name,
        "host": row.place.host,
        "state": row.state,
        "mode": row.mode or None,
        "generation": row.generation or None,
        "wanted": row.wanted or None,
        "behindSeconds": round(row.behind),
        "confirmedAt": None if row.confirmed is None else _time(row.confirmed),
        "drift": row.drift,
        "note": row.note,
    }


def _time(seconds: float) -> str:
    return moment(seconds, "%Y-%m-%dT%H:%M:%SZ")
