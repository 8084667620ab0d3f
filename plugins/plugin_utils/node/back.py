# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""States `restored`, `rolled_back`, `absent` and `released`: what was applied last, or before, or nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from ..bundle.manifest import FILE
from ..carry.protocol import Command
from ..plan.held import replayed
from ..plan.metrics import note_drift
from ..plan.past import NotKnown, generation_at, parse_time
from ..tasks.directory import read_json
from .apply import apply
from .confirm import send
from .errors import AsBefore, NotDone
from .gather import gather
from .outcome import outcome
from .visit import Visit


def restore(visit: Visit) -> dict[str, Any]:
    """Apply again what was applied last, whatever has changed on the node since; the cluster is not asked."""
    known, status = visit.known, visit.status
    if visit.check:
        intact = gather(visit)["intact"]
        return {"changed": not intact, "node": visit.name, "generation": status.get("generation")}
    if known.get("recorded") and not status.get("generation"):
        return _give_again(visit, known["recorded"])
    visit.tried = True
    answer = visit.ask(["restore", "--verify"])
    visit.remember(answer)
    note_drift(visit.work, visit.host, visit.name, found=False)
    return outcome(visit, answer, (), (), status.get("differences") or ())


def _give_again(visit: Visit, generation: str) -> dict[str, Any]:
    """A node that lost its own copy gets the one of the control host, if that is still the same."""
    manifest = read_json(visit.work.bundles / visit.name / FILE) or {}
    if manifest.get("generation") != generation:
        raise NotDone(
            f"{visit.host} has lost generation {generation}, and the bundle of it is not here any more either: "
            "a run of sync_services gives it the present one"
        )
    return apply(visit)


def roll_back(visit: Visit) -> dict[str, Any]:
    """Go back to the bundle before, or to a kept one."""
    arguments = ["rollback", *(["--dry-run"] if visit.check else [])]
    status = visit.status
    wanted = visit.request.generation or _at(visit, status)
    operand = [wanted] if wanted else []
    there = status.get("generation")
    before = visit.held(there) if there else replayed(visit.ask(["show"]).lines)
    answer = send(visit, arguments, lambda all_: visit.way.ask([*all_, *operand]))
    if answer.needs_program:
        answer = send(visit, arguments, lambda all_: visit.carrying.carry([*all_, *operand]))
    visit.remember(answer)
    goal = str(answer.required("generation"))
    after = replayed(visit.ask(["show", goal]).lines) if visit.check else visit.held(goal)
    return outcome(visit, answer, before, after, ())


def _at(visit: Visit, status: Mapping[str, Any]) -> str:
    """The generation that the host had at the time that is asked for, if one is, and if the node keeps it."""
    if not visit.request.time:
        return ""
    try:
        when = parse_time(visit.request.time)
        wanted = generation_at(visit.ledger, visit.host, when)
    except NotKnown as error:
        raise AsBefore(f"{error}; nothing was changed") from None
    kept = status.get("kept") or []
    if wanted not in (*kept, status.get("generation")):
        had = f"generation {wanted}" if wanted else "nothing applied"
        raise AsBefore(
            f"at {when:%Y-%m-%d %H:%M:%SZ}, {visit.host} had {had}, and it keeps {', '.join(kept) or 'nothing'}: "
            "kube_proxy_keep says how many states a node keeps. Nothing was changed"
        )
    return wanted


def clean_up(visit: Visit) -> dict[str, Any]:
    """Take away everything that was ever applied."""
    there = visit.status.get("generation")
    before = visit.held(there)
    visit.tried = True
    told = outcome(visit, visit.ask(["cleanup", *(["--dry-run"] if visit.check else [])]), before, (), ())
    told["previous"] = told["previous"] or there
    if visit.request.install and not visit.way.restricted:
        told["changed"] |= bool(visit.answer(visit.way.uninstall(dry_run=visit.check)).required("removed"))
    if not visit.check:
        visit.work.answer_file(visit.host).unlink(missing_ok=True)
    return told


def release(visit: Visit) -> dict[str, Any]:
    """The rules stay, and are kube-proxy's, which runs there: the node forgets that they were applied from here."""
    there = gather(visit)
    if not there["generation"]:
        return visit.unchanged("")
    if not there["kube_proxy_runs"]:
        raise AsBefore(f"kube-proxy does not run on {visit.host}, so its rules would be left to nothing")
    if there["mode"] == "userspace" or visit.way.restricted:
        why = "its connections pass proxies" if there["mode"] == "userspace" else "its account may run akp-node only"
        raise AsBefore(f"{visit.host} cannot be given back in place, as {why}; cleanup_services removes what it has")
    told = {"changed": True, "node": visit.name, "generation": None, "previous": there["generation"]}
    if not visit.check:
        visit.tried = True
        visit.answer(_elsewhere(visit.carrying.carry(["cleanup"]), visit.carrying.state_dir))
        visit.work.answer_file(visit.host).unlink(missing_ok=True)
    return told


def _elsewhere(command: Command, state_dir: str) -> Command:
    """A cleanup in an empty network namespace, which finds no rules there: only the record goes.

    Some settings are the same in all namespaces. They are kube-proxy's now, so the cleanup is shown none to put back.
    """
    settings = shlex.quote(f"{state_dir}/before/sysctls")
    text = (
        # A copy of a run that was killed is the only one: it is not written over.
        f"kept={settings}.kept; "
        f"[ ! -f {settings} ] || [ -f $kept ] || {{ cp {settings} $kept.new && mv $kept.new $kept; }} || exit 3; "
        f"[ ! -f $kept ] || : >{settings} || exit 3; "
        f"unshare -n sh -c {shlex.quote(command.text)}; code=$?; [ ! -f $kept ] || mv $kept {settings}; exit $code"
    )
    return dataclasses.replace(command, text=text)
