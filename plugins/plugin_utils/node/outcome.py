# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a change did to a node, as the result of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..carry.answers import Answer, NoAnswer
from ..plan import report
from ..plan.removal_limit import Frontends
from .confirm import seconds_left
from .visit import Visit


def outcome(
    visit: Visit,
    answer: Answer,
    before: Iterable[str],
    after: Iterable[str],
    differences: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The node's answer as a result; before and after are lines of services.jsonl."""
    result = answer.result
    try:
        changes = report.service_changes(before, after)
    except (KeyError, RecursionError, ValueError) as error:
        raise NoAnswer(f"the service ports that the node program printed cannot be read: {error}") from None
    node_changed = bool(answer.required("changed"))
    previous, generation = str(result.get("previous") or ""), str(result.get("generation") or "")
    frame = Frontends(visit.work.frontends).frame_changes(previous, generation) if generation else []
    counted = report.tally(changes)
    # A result is read by people, and has the first of many changes; summary and plan have all.
    visit.told = {"changes": changes, "frame": frame}
    told: dict[str, Any] = {
        "changed": node_changed or answer.installed,
        "node": visit.name,
        "generation": result.get("generation"),
        "previous": result.get("previous"),
        "mode": result.get("mode"),
        "chains": result.get("chains") or {},
        "sysctls": result.get("sysctls", 0),
        "flows": result.get("flows", 0),
        "services": counted["services"],
        "endpoints": counted["endpoints"],
        "changes": report.as_data(report.first(changes)),
        "frame": report.as_data(report.first(frame)),
        "differences": list(differences),
        "seconds": result.get("seconds"),
    }
    if result.get("confirm") and not visit.request.confirm:
        told |= {"confirm": result["confirm"], "confirm_within": seconds_left(visit, answer)}
    if result.get("warnings"):
        told["warnings"] = [f"{visit.host}: {warning}" for warning in result["warnings"]]
    if told["changed"] and visit.diff:
        other = _other_changes(visit, answer)
        if node_changed and not changes and not frame and not differences and not other:
            other.append("rules or files that belong to no Service")
        all_ = [*frame, *changes]
        text = report.diff_text(report.first(all_), differences, other) + report.more(len(all_))
        told["diff"] = {"prepared": text}
    return told


def _other_changes(visit: Visit, answer: Answer) -> list[str]:
    """What changed beside rules."""
    other = []
    if answer.result.get("sysctls"):
        other.append(f"sysctls: {answer.result['sysctls']}")
    if answer.installed:
        other.append(f"node program: {visit.way.installed}")
    return other
