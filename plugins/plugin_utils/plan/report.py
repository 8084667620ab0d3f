# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What changed, in words: on one node, and over a whole run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bundle.compare import Change, compare_records, parse_records
from ..ledger import Head
from ..proxy.warned import Warned
from ..tasks.notes import Asked, Configured, Entered, Note, Pushed, Rendered, SnapshotRead, Span, Stopped
from ..texts import visible
from .groups import Group, change_lines, grouped

# A result of a task, and what Ansible prints of it, is read by people. The plan has all changes, or the file that the
# summary names.
MOST_CHANGES = 1000
_MOST_LINES = 20


def service_changes(before: Iterable[str], after: Iterable[str]) -> list[Change]:
    """The service ports that differ between lines of two services.jsonl."""
    found = compare_records(parse_records(before), parse_records(after))
    return [_shown(each) for each in found]


def _shown(change: Change) -> Change:
    """A change as people may see it: a node told of it."""
    service, port, protocol, family = map(visible, (change.service, change.port, change.protocol, change.family))
    return Change(change.action, service, port, protocol, family, tuple(map(visible, change.details)))


def first(changes: Sequence[Change]) -> Sequence[Change]:
    """As many as a person reads in one place."""
    return changes[:MOST_CHANGES]


def more(count: int) -> str:
    """What is said in place of the others."""
    rest = count - MOST_CHANGES
    return f"and {rest:,} more, all in the file that the summary names\n" if rest > 0 else ""


def as_data(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Changes for JSON."""
    return [
        {
            "action": each.action,
            "service": each.service,
            "port": each.port,
            "protocol": each.protocol,
            "family": each.family,
            "details": list(each.details),
        }
        for each in changes
    ]


def tally(changes: Iterable[Change]) -> dict[str, dict[str, int]]:
    """How many Services and endpoints come, go or change. A Service with several ports or families counts once."""
    services: dict[str, set[str]] = {"added": set(), "changed": set(), "removed": set()}
    endpoints: dict[str, set[tuple[str, str]]] = {"added": set(), "removed": set()}
    for each in changes:
        services[each.action].add(each.service)
        for detail in each.details:
            sign, _blank, rest = detail.partition(" ")
            if rest.startswith("endpoint "):
                key = (f"{each.service}:{each.port}/{each.protocol}", rest.removeprefix("endpoint "))
                endpoints["added" if sign == "+" else "removed"].add(key)
    return {
        "services": {action: len(names) for action, names in services.items()},
        "endpoints": {action: len(found) for action, found in endpoints.items()},
    }


def diff_text(changes: Sequence[Change], differences: Sequence[Mapping[str, Any]], other: Sequence[str] = ()) -> str:
    """What a person reads before saying yes: per Service and endpoint, then what was changed on the node."""
    lines: list[str] = []
    for each in changes:
        lines += change_lines(each)
    lines += [f"~ {each}" for each in other]
    if differences:
        lines.append("! not as it was left:")
        lines += [f"    {difference_text(each)}" for each in differences[:_MOST_LINES]]
        if len(differences) > _MOST_LINES:
            lines.append(f"    and {len(differences) - _MOST_LINES} more")
    # Ansible prints it as it is.
    return "".join(f"{visible(line)}\n" for line in lines)


def difference_text(each: Mapping[str, Any]) -> str:
    """One difference between what was applied and what is there, as `akp-node status --verify` found it."""
    kind = str(each.get("kind", "difference")).replace("-", " ")
    where = " ".join(str(each[key]) for key in ("family", "table", "chain", "name") if each.get(key))
    text = f"{kind}: {where}"
    if each.get("service"):
        text += f" ({each['service']})"
    if each.get("wanted") is not None:
        text += f" is {each.get('actual')}, not {each['wanted']}"
    told = each.get("rule") or each.get("value")
    return f"{text}: {told}" if told else text


def drift_lines(host: str, status: Mapping[str, Any], recorded: str | None = None) -> list[str]:
    """What was changed on a node since a run applied it, for people; nothing if it is as it was left.

    Recorded is the generation that the host is known to have had. One with nothing on it is as it was left only if
    nothing was ever applied, or it was cleaned up from here.
    """
    state, differences = status.get("state"), status.get("differences") or []
    if state == "absent" and recorded:
        return [
            f"{host} has lost generation {recorded}: nothing of it is there any more, nor a record that it was",
            "  if that was meant, a run of cleanup_services has it forgotten here as well",
        ]
    if state in ("applied", "absent") and not status.get("drift"):
        return []
    applied = status.get("appliedAt")
    at = f" at {time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime(applied))}" if applied else ""
    if status.get("generation"):
        first = f"{host} is not as generation {status['generation']} left it{at}"
    else:
        first = f"{host} has rules in our chains, and nothing was applied there"
    said = {"flushed": "all of it is gone", "partial": "parts of it are gone", "foreign": "other rules are there"}
    told = [difference_text(each) for each in differences] or [said.get(str(state), str(state))]
    # What the node says of a rule may have line breaks in it.
    return [first, *(f"  {visible(each)}" for each in limited(told))]


def limited(lines: Sequence[str]) -> list[str]:
    """As many lines as a person reads."""
    rest = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"and {rest} more"] if rest > 0 else [])]


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A whole run."""

    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    failed: Mapping[str, str]  # host -> reason
    untried: tuple[str, ...]  # hosts whose turn never came, as the run ended before
    stopped: str  # why the run as a whole ended, if it did
    repaired: Mapping[str, int]  # host -> how many differences were found there
    services: Mapping[str, int]
    endpoints: Mapping[str, int]
    left_out: tuple[str, ...]
    warned: tuple[Warned, ...]  # what an operator should look at, though the run went on
    configured: str  # which configuration holds
    changes: tuple[Group, ...]  # all of them, by the hosts that they happen on
    ledger: str  # where this run stands in the ledger
    seconds: Mapping[str, float]
    check: bool

    @property
    def long(self) -> bool:
        """Whether there are more changes than a person reads on a screen."""
        return sum(len(each.changes) for each in self.changes) > MOST_CHANGES

    def lines(self) -> list[str]:
        """For people."""
        would = "would change" if self.check else "changed"
        total = len(self.changed) + len(self.unchanged) + len(self.failed) + len(self.untried)
        nodes = "1 node" if total == 1 else f"{total} nodes"
        untried = f", {len(self.untried)} not tried" if self.untried else ""
        lines = [
            f"{nodes}: {len(self.changed)} {would}, {len(self.unchanged)} unchanged, {len(self.failed)} failed{untried}"
        ]
        lines += [f"  {host} failed: {reason}" for host, reason in sorted(self.failed.items())]
        if self.untried:
            lines.append(f"not tried, they keep what they have: {', '.join(self.untried)}")
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        if self.changed:
            services, endpoints = self.services, self.endpoints
            lines.append(
                f"Services: {services['added']} added, {services['changed']} changed, {services['removed']} removed; "
                f"endpoints: {endpoints['added']} added, {endpoints['removed']} removed"
            )
        for host, count in sorted(self.repaired.items()):
            lines.append(f"  {host} was not as it was left, {count} {'difference' if count == 1 else 'differences'}")
        if self.left_out:
            lines.append(f"left out of the cluster: {len(self.left_out)}")
            lines += [f"  {each}" for each in limited(self.left_out)]
        headed: dict[str, list[str]] = {}
        for each in self.warned:
            headed.setdefault(each.heading, []).append(each.text)
        for heading, warnings in sorted(headed.items()):
            lines.append(f"{heading}: {len(warnings)}")
            lines += [f"  {each}" for each in limited(warnings)]
        if self.configured:
            lines.append(self.configured)
        if self.ledger:
            lines.append(self.ledger)
        lines.append("seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in self.seconds.items()))
        return [visible(line) for line in lines]


def summarise(notes: Sequence[tuple[str, Note]], hosts: Sequence[str], *, check: bool) -> Summary:
    """The notes of a run's tasks, put together. A host that left no note of a change was never tried."""
    pushes: dict[str, Pushed] = {}
    failed: dict[str, str] = {}
    left_out: dict[str, None] = {}
    warned: dict[Warned, None] = {}
    spans: dict[str, tuple[float, float]] = {}
    stopped = configured = ""
    for host, note in notes:
        if isinstance(note, Span):
            began, ended = spans.get(note.SORT, (note.began, note.ended))
            spans[note.SORT] = (min(began, note.began), max(ended, note.ended))
        if isinstance(note, SnapshotRead | Rendered):
            left_out.update(dict.fromkeys(note.problems))
        if isinstance(note, Rendered):
            warned.update(dict.fromkeys(note.warned))
        elif isinstance(note, Stopped):
            stopped = note.failed
        elif isinstance(note, Configured):
            configured = f"mode {note.mode}, by the configuration of {note.origin}"
        elif isinstance(note, Asked | Pushed) and note.failed:
            failed[host] = note.failed
        elif isinstance(note, Pushed):
            pushes[host] = note
    among = set(hosts)
    changing = {host: (push.frame, push.changes) for host, push in pushes.items() if host in among and push.changed}
    groups = grouped(changing)
    counted = tally(change for group in groups for change in group.changes if not _of_node(change))
    order = [each.SORT for each in (SnapshotRead, Asked, Rendered, Pushed)]
    done = {host: push.changed for host, push in pushes.items() if host in hosts and host not in failed}
    return Summary(
        changed=tuple(sorted(host for host, change in done.items() if change)),
        unchanged=tuple(sorted(host for host, change in done.items() if not change)),
        failed={host: reason for host, reason in failed.items() if host in hosts},
        untried=tuple(sorted(host for host in hosts if host not in pushes and host not in failed)),
        stopped=stopped,
        repaired={
            host: len(pushes[host].differences) for host in done if pushes[host].changed and pushes[host].differences
        },
        services=counted["services"],
        endpoints=counted["endpoints"],
        # What came from a file is told of twice, once with the name of the file.
        left_out=tuple(each for each in left_out if not any(other.endswith(f": {each}") for other in left_out)),
        warned=tuple(warned),
        configured=configured,
        changes=tuple(groups),
        ledger=ledger_line(notes),
        seconds={sort: round(spans[sort][1] - spans[sort][0], 2) for sort in order if sort in spans},
        check=check,
    )


def _of_node(change: Change) -> bool:
    """Whether it belongs to no Service."""
    return "/" not in change.service.partition(":")[0]


def ledger_line(notes: Iterable[tuple[str, Note]]) -> str:
    """Where a run stands in the ledger, by its last entry there; nothing if it has none."""
    entries = (note for _host, note in notes if isinstance(note, Entered))
    last = max(entries, key=lambda note: note.number, default=None)
    return "" if last is None else Head(last.number, last.hash).told(last.file)


def plan_of(notes: Iterable[tuple[str, Note]], snapshot: str) -> dict[str, Any]:
    """What a run in check mode would do, as something that can be approved: its digest covers all of it."""
    noted = list(notes)
    pushes = {host: note for host, note in noted if isinstance(note, Pushed) and not note.failed}
    configured = next((note for _host, note in noted if isinstance(note, Configured)), None)
    groups = grouped({host: (note.frame, note.changes) for host, note in pushes.items() if note.changed})
    plan: dict[str, Any] = {
        "apiVersion": "akp/v1",
        "kind": "Plan",
        "snapshot": snapshot,
        "configuration": dict(configured.kept) if configured else None,
        "hosts": {
            host: {
                "node": note.node,
                "previous": note.previous,
                "generation": note.generation,
                "digest": note.digest,
                "changed": note.changed,
            }
            for host, note in pushes.items()
        },
        "changes": [{"hosts": list(each.hosts), "changes": as_data(each.changes)} for each in groups],
    }
    return {**plan, "digest": plan_digest(plan)}


def plan_snapshot(plan: Path) -> Path:
    """The cluster that a plan was made for lies beside it."""
    return plan.with_name(f"{plan.stem}.snapshot.json")


def plan_digest(plan: Mapping[str, Any]) -> str:
    """Names a plan."""
    body = {key: value for key, value in plan.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
