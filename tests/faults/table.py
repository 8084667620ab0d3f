"""The fault table of docs/reliability.md, from what the runs found."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from tests.faults.walk import Finding

DOC = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- written by tests/faults -->\n", "<!-- end -->\n"
KINDS = {
    "kill-before": "program killed (-9) before a step",
    "kill-after": "program killed (-9) after a step",
    "hangup": "connection lost: SIGHUP at a step",
    "failed": "a tool fails: out of memory",
    "killed": "a tool is killed",
    "killed-after": "a tool is killed once it has done its work",
    "kill-sshd on the node": "connection lost: sshd's session killed",
    "kill-ssh on the control host": "carrier's ssh killed on the control host",
    "kill-ansible-playbook": "control process killed (-9) at a command",
    "kill-control host": "control host lost at a command",
}


def table(findings: list[Finding]) -> str:
    """Per kind of fault and mode: how many, half states, lost Services, and how long the next run took."""
    rows = ["| fault | mode | injected | half states | lost Services | not healed | seconds to heal: median, max |",
            "|---|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        groups.setdefault((KINDS.get(each.kind, each.kind), each.mode), []).append(each)
    for (kind, mode), found in sorted(groups.items()):
        rows.append(_row(kind, mode, found))
    rows.append(_row("**all**", "", findings))
    return "\n".join(rows) + "\n"


def _row(kind: str, mode: str, found: list[Finding]) -> str:
    half, lost, unhealed = (sum(1 for each in found if getattr(each, name)) for name in ("half", "lost", "unhealed"))
    seconds = [each.seconds for each in found]
    times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
    return f"| {kind} | {mode} | {len(found)} | {half} | {lost} | {unhealed} | {times} |"


def write(findings: list[Finding], seconds: float, thin: int) -> None:
    """Put the table of one run into the page; it took one of so many steps."""
    before, _begin, rest = DOC.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    told = f"One run of {seconds / 60:.0f} minutes with `AKP_THIN={thin}`: {len(findings)} faults, "
    told += f"Linux {os.uname().release.partition('-')[0]}, {os.cpu_count()} processors.\n\n"
    DOC.write_text(before + BEGIN + told + table(findings) + END + after, encoding="utf-8")
