# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The short way to a host: a delta of endpoints over the connection that ssh keeps open for Ansible.

Ansible finds out how a host is reached, how to become root there, and what its variables say; that costs more than all
the rest of a small change. A task that went well leaves what it found as a Line, and the next delta goes that way. Each
question to a host makes a new one. What does not go well on the short way is done again by a task, which knows what to
say about it: a node takes a delta once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle.archive import lines_of
from ..bundle.manifest import FILE
from ..plan.audit import TaskAuditor
from ..tasks.directory import WorkDirectory, write_json
from ..tasks.notes import About
from . import mux
from .answers import Answer, NoAnswer, parse_answer
from .time_limit import LateAnswer, time_limit


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """How a host is reached, and who it is; what a task found out."""

    socket: str  # where ssh listens that keeps the connection open
    commands: Mapping[str, str]  # mode -> what the host runs, with a delta as its input
    node: str
    directory: str
    seconds: float  # that the host may take
    ledger: Mapping[str, Any]  # options of the ledger
    variables: Mapping[str, Any]  # those that entries of the ledger tell of


def takes(arguments: Mapping[str, Any]) -> bool:
    """Whether a task is a delta that nothing has to be confirmed of."""
    return bool(arguments.get("delta")) and arguments.get("confirm_within") == 0


def give(line: Line, host: str, delta: Path, about: About) -> dict[str, Any] | None:
    """Give a host a delta. What came of it, as a task says it; None if a task has to do it.

    `about` is what the ledger says of the push beside what it did.
    """
    data = delta.read_bytes()
    command = line.commands.get(json.loads("".join(lines_of(data, FILE)))["mode"])
    if command is None:
        return None
    try:
        with time_limit(line.seconds, host), delta.open("rb") as stdin:
            code, stdout, stderr = mux.run(Path(line.socket), command, stdin)
        answer = parse_answer(code, *(each.decode("utf-8", "replace") for each in (stdout, stderr)))
        generation = str(answer.required("generation")) if answer.ok and not answer.result.get("need") else ""
    except LateAnswer as error:
        # Once more would take as long again.
        status = (WorkDirectory(Path(line.directory)).answer(host) or {}).get("status") or {}
        _audit(line, host, about, {"before": status.get("generation"), "result": "failed", "error": str(error)})
        return {"failed": True, "msg": str(error)}
    except (mux.NoSession, mux.LostSession, NoAnswer, OSError):
        return None
    if not generation:
        return None
    return _taken(line, host, answer, generation, about)


def _taken(line: Line, host: str, answer: Answer, generation: str, about: About) -> dict[str, Any]:
    directory, previous = WorkDirectory(Path(line.directory)), answer.result.get("previous")
    remember(directory, host, answer, recorded=True)
    changed = bool(answer.result.get("changed"))
    told = ""
    if changed:
        told = _audit(line, host, about, {"before": previous, "after": generation, "result": "changed"})
    return {
        "changed": changed,
        "node": line.node,
        "generation": generation,
        "previous": previous,
        "deltas": answer.result.get("deltas", 0),
        "ledger": told,
    }


def remember(directory: WorkDirectory, host: str, answer: Answer, *, recorded: bool) -> None:
    """What a node has now, so that nothing has to ask it again; recorded if it stays."""
    known = directory.answer(host)
    if known is None:
        return
    generation = str(answer.required("generation"))
    # A delta does not change the mode, and its answer may not name it.
    mode = answer.result.get("mode") or (known.get("status") or {}).get("mode")
    known |= {"status": {"state": "applied", "generation": generation, "mode": mode}, "oldProgram": False}
    if recorded:
        known["recorded"] = generation
    write_json(directory.answer_file(host), known)


def _audit(line: Line, host: str, about: About, fields: Mapping[str, Any]) -> str:
    auditor = TaskAuditor(WorkDirectory(Path(line.directory)), line.ledger, line.variables, about)
    result = "failed" if "error" in fields else "ok"
    auditor.write("sync", result, {host: {"node": line.node, **fields}})
    return auditor.told
