# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How fresh nodes were: a line of history.jsonl for each change of a node's state, kept for 30 days.

    {"at":1794882600.0,"node":"n2","state":"failed"}

States are those that a run can tell: `current`, `old` (not confirmed for a while), `failed`, `unreached`, `drift`
(something else has changed its rules), and `held`: it was taken back, and keeps what it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..files import write_atomic

FILE = "history.jsonl"
UNREACHABLE = "unreachable: "  # how the reason begins if a host was not reached
# As long as the alert ServiceRulesOld waits.
OLD_SECONDS = 900.0
_KEPT_SECONDS = 30 * 86400.0
_MOST_LINES = 50_000


class Moment(NamedTuple):
    """From now on a node is in this state."""

    at: float
    node: str
    state: str


class Segment(NamedTuple):
    """A node was in a state from one moment to another."""

    began: float
    ended: float
    state: str


def state_of(record: Mapping[str, Any]) -> str:
    """The state that a record of freshness.json tells; its age apart."""
    if record.get("failed"):
        return "unreached" if str(record.get("why", "")).startswith(UNREACHABLE) else "failed"
    if record.get("drifted"):
        return "drift"
    if record.get("held"):
        return "held"
    if record.get("confirmed"):
        return "current"
    return "unknown" if "drifted" in record else ""


def changes(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[Moment]:
    """What is new between two contents of freshness.json."""
    found = []
    for host, now in after.items():
        then = before.get(host) or {}
        if then == now:
            continue
        node, at = str(now.get("node")), float(now.get("at") or 0.0)
        was, state = state_of(then), state_of(now)
        old = float(then.get("confirmed") or at) + OLD_SECONDS
        if was == "current" and old < at:
            found.append(Moment(old, node, "old"))
            was = "old"
        if state and state != was:
            found.append(Moment(at, node, state))
    return sorted(found)


def add(file: Path, moments: Sequence[Moment], now: float) -> None:
    """Write down what is new, and forget what is too old."""
    if not moments:
        return
    kept = [each for each in _read(file) if each.at > now - _KEPT_SECONDS]
    lines = [json.dumps(each._asdict(), separators=(",", ":")) for each in (*kept, *moments)]
    write_atomic(file, (f"{line}\n" for line in lines[-_MOST_LINES:]))


def segments(file: Path, nodes: Sequence[str], since: float, until: float) -> dict[str, list[Segment]]:
    """The states of nodes between two moments; before its first line a node was what nothing is known of: `unknown`."""
    found: dict[str, list[Segment]] = {name: [] for name in nodes}
    open_: dict[str, tuple[float, str]] = dict.fromkeys(nodes, (since, "unknown"))
    for each in sorted(_read(file)):
        if each.node not in found or each.at >= until:
            continue
        began, state = open_[each.node]
        at = max(since, each.at)
        if at > began and state != each.state:
            found[each.node].append(Segment(began, at, state))
            began = at
        open_[each.node] = (began if at > since else since, each.state)
    for name, (began, state) in open_.items():
        found[name].append(Segment(began, until, state))
    return found


def _read(file: Path) -> Iterator[Moment]:
    """The lines that are ones; a file that is not there has none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        try:
            each = json.loads(line)
            yield Moment(float(each["at"]), str(each["node"]), str(each["state"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
