# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Changes that the node undoes unless they are confirmed over a new connection."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..carry.answers import Answer, NoAnswer
from ..carry.probes import InvalidProbe, Probe, ProbeFailed, node_script, parse_probes, run_probes
from ..carry.protocol import Command
from .errors import AsBefore, NotDone, Unreachable
from .request import TERM
from .visit import Visit


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A change that waits for its confirmation."""

    token: str
    seconds: int  # until the node goes back
    previous: str | None  # the generation that it goes back to

    @property
    def back(self) -> str:
        """What the node goes back to, for messages."""
        return f"generation {self.previous}" if self.previous else "having nothing applied"


def send(
    visit: Visit, arguments: Sequence[str], command: Callable[[Sequence[str]], Command], *, waiting: bool = False
) -> Answer:
    """Have the node change, and confirm the change where the user asks for it, or where an earlier run left one."""
    probes: list[Probe] = []
    term = visit.request.confirm_within or (TERM if waiting else 0)
    if term and not visit.check:
        probes = _probes(visit)
        arguments = [*arguments, "--confirm-within", str(term)]
    visit.tried = True
    answer = visit.answer(command(arguments))
    token = answer.result.get("confirm")
    if token and visit.request.confirm:
        _confirm(visit, Pending(token, seconds_left(visit, answer), answer.result.get("previous")), probes)
    return answer


def seconds_left(visit: Visit, answer: Answer) -> int:
    """Seconds for the confirmation: what is left of the term, and never more than it was given."""
    term, left = visit.request.confirm_within or TERM, answer.result.get("confirmWithin")
    return int(min(term, term if left is None else left))


def confirm(visit: Visit) -> dict[str, Any]:
    """State `confirmed`: make good a change that an earlier task applied and left unconfirmed."""
    request = visit.request
    if visit.check:
        return {"changed": True, "node": visit.name}
    visit.tried = True
    pending = Pending(str(request.token), request.confirm_within, request.generation)
    answer = _confirm(visit, pending, _probes(visit))
    return {
        "changed": bool(answer.required("changed")),
        "node": visit.name,
        "generation": answer.result.get("generation"),
        "previous": request.generation,
    }


def _probes(visit: Visit) -> list[Probe]:
    """What must answer before the change is confirmed."""
    try:
        probes = parse_probes(visit.request.probes, visit.connection.address())
    except InvalidProbe as error:
        raise NotDone(str(error)) from None
    if visit.way.restricted and any(each.place == "node" for each in probes):
        raise NotDone(
            "kube_proxy_probes: an account that may run nothing but the node program cannot probe from the node; "
            "use from: control"
        )
    return probes


def _confirm(visit: Visit, pending: Pending, probes: Sequence[Probe]) -> Answer:
    """Tell the node over a new connection to keep the change. If that fails, the node goes back by itself."""
    alone = f"the node goes back by itself to {pending.back}, {pending.seconds} s after the change"
    deadline = time.monotonic() + pending.seconds - 2
    try:
        run_probes(probes)
        return _tell(visit, ["confirm", pending.token], node_script(probes), deadline)
    except ProbeFailed as error:
        message = f"not confirmed: probe {error}"
        if _went_back(visit, pending):
            raise AsBefore(f"{message}; the node went back to {pending.back}") from None
        raise NotDone(f"{message}; {alone}") from None
    except (NotDone, NoAnswer) as error:
        raise NotDone(f"not confirmed over a new connection: {error}; {alone}") from None


def _tell(visit: Visit, arguments: Sequence[str], script: str, deadline: float) -> Answer:
    """The confirmation, tried again until the deadline as long as there is no connection."""
    while True:
        try:
            visit.connection.renew()
            answer = visit.exchange(visit.way.ask(arguments, before=script))
            break
        except Unreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1)
    if answer.needs_program:
        answer = visit.answer(visit.carrying.carry(arguments))
    if answer.result.get("probe"):
        raise ProbeFailed(answer.error)
    if not answer.ok:
        raise NotDone(answer.error)
    return answer


def _went_back(visit: Visit, pending: Pending) -> bool:
    """Have the node go back at once. If it cannot be reached, it does so when its own clock says so."""
    if not pending.previous:
        return False
    try:
        visit.answer(visit.way.ask(["rollback", pending.previous]))
    except (NotDone, NoAnswer):
        return False
    return True
