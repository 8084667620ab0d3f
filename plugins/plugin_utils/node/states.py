# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The states of the module `node`, and what a task notes and enters into the ledger about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..carry.answers import NoAnswer
from ..carry.time_limit import time_limit
from ..errors import UserError
from ..plan.audit import TaskAuditor
from ..tasks.directory import Stopwatch
from ..tasks.notes import Asked, Pushed
from ..texts import visible_lines
from .apply import apply
from .back import clean_up, release, restore, roll_back
from .compare import compare
from .confirm import confirm
from .errors import AsBefore, NotDone, Unreachable
from .gather import gather
from .request import check_numbers
from .visit import Visit

_STATES: Mapping[str, Callable[[Visit], dict[str, Any]]] = {
    "gathered": gather,
    "compared": compare,
    "applied": apply,
    "confirmed": confirm,
    "restored": restore,
    "rolled_back": roll_back,
    "absent": clean_up,
    "released": release,
}
# What the ledger calls them.
_ACTIONS = {
    "applied": "sync",
    "confirmed": "sync",
    "restored": "heal",
    "rolled_back": "rollback",
    "absent": "cleanup",
    "released": "release",
}


class Failed(Exception):
    """The task failed, and that is noted; the message is for people."""

    def __init__(self, message: str, *, unreachable: bool, ledger: str) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self.ledger = ledger  # where the entry about it is


def reach(visit: Visit, auditor: Callable[[], TaskAuditor]) -> dict[str, Any]:
    """Bring the host to the state that the request names; the result of the task, or Failed.

    Either way a note for the summary is left, and an entry in the ledger if the node may have changed. UserError and
    OSError are no failures of the host and pass.
    """
    watch = Stopwatch()
    try:
        check_numbers(visit.request, visit.way)
        with time_limit(visit.request.seconds, visit.host):
            result = _STATES[visit.request.state](visit)
    except (UserError, OSError):
        raise
    except Exception as error:
        # A bug that an answer of this node brings to light hurts no other node.
        raise _failed(visit, auditor, watch, error) from None
    _note(visit, watch, result)
    # A change that another task confirms is entered by that task: until then the node may go back.
    told = ""
    if result["changed"] and not result.get("confirm"):
        told = _enter(visit, auditor, {"before": result.get("previous"), "after": result.get("generation")})
    return {**result, "ledger": told}


def _failed(visit: Visit, auditor: Callable[[], TaskAuditor], watch: Stopwatch, error: Exception) -> Failed:
    known = isinstance(error, NotDone | NoAnswer)
    message = visible_lines(str(error) if known else f"{type(error).__name__}: {error}")
    unreachable = isinstance(error, Unreachable)
    reason = f"unreachable: {message}" if unreachable else message
    _note(visit, watch, {"failed": reason})
    fields = {**visit.generations(same=isinstance(error, AsBefore)), "error": reason}
    return Failed(message, unreachable=unreachable, ledger=_enter(visit, auditor, fields))


def _note(visit: Visit, watch: Stopwatch, fields: Mapping[str, Any]) -> None:
    """For the summary of the run."""
    state = visit.request.state
    if state in ("gathered", "compared"):
        visit.work.note(Asked.of({**fields, **watch.fields()}), visit.host)
    else:
        noted = {**fields, **watch.fields(), "action": _ACTIONS[state], **visit.told}
        visit.work.note(Pushed.of(noted), visit.host)


def _enter(visit: Visit, auditor: Callable[[], TaskAuditor], fields: Mapping[str, Any]) -> str:
    """Enter what became of the node, and say where that is; questions and rehearsals get no entry."""
    if visit.check or not visit.tried:
        return ""
    failed = "error" in fields
    entry = {"node": visit.name, **fields, "result": "failed" if failed else "changed"}
    ledger = auditor()
    ledger.write(_ACTIONS[visit.request.state], "failed" if failed else "ok", {visit.host: entry})
    return ledger.told
