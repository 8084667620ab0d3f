# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""State `applied`: the node gets its bundle, or a delta to what it has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle.archive import lines_of
from ..bundle.manifest import FILE, SERVICES_FILE, manifest_digest
from ..carry.answers import settled
from ..plan.held import Held
from ..tasks.notes import Asked, Planned, Pushed, Refused
from .confirm import send
from .errors import AsBefore, NotDone
from .gather import gather
from .outcome import outcome
from .visit import Visit


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A bundle that the bundle module wrote, or another program."""

    directory: Path
    sealed: bytes  # its manifest, as it is
    manifest: Mapping[str, Any]


def apply(visit: Visit) -> dict[str, Any]:
    """Give the node what it is to have, unless it has it."""
    refuse(visit)
    if visit.request.delta and not visit.check:
        return _apply_delta(visit, Path(visit.request.delta).expanduser())
    return apply_bundle(visit)


def refuse(visit: Visit) -> None:
    """NotDone if the bundle module found that this host gets nothing."""
    refusal = visit.work.noted(Refused, visit.host)
    if refusal is not None:
        raise NotDone(refusal.error)


def read_bundle(visit: Visit) -> Given | None:
    """The bundle of the node. None if there is none because the node has it; NotDone if it was not computed."""
    directory = Path(visit.request.bundle or visit.work.bundles / visit.name).expanduser()
    try:
        sealed = (directory / FILE).read_bytes()
        return Given(directory, sealed, {**json.loads(sealed), "digest": manifest_digest(sealed.decode())})
    except (OSError, ValueError):
        # The bundle module writes none for a host that is up to date.
        if _up_to_date(visit) and not visit.request.bundle:
            return None
        raise NotDone(f"{directory}: there is no bundle for node {visit.name}; run the bundle module first") from None


def _up_to_date(visit: Visit) -> str:
    """The generation that the node has and is to have, as noted by an earlier task of this run; or nothing."""
    done = visit.work.noted(Pushed, visit.host)
    return done.generation or "" if done is not None and not done.changed else ""


def apply_bundle(visit: Visit) -> dict[str, Any]:
    """Give the node its whole bundle, unless it has it."""
    request = visit.request
    given = read_bundle(visit)
    if given is None:
        return visit.unchanged(_up_to_date(visit))
    directory, sealed, manifest = given.directory, given.sealed, given.manifest
    _require_planned(visit, directory, manifest)
    if visit.work.noted(Asked, visit.host) is None:
        gather(visit)
    status = visit.status
    wanted, there = manifest["generation"], status.get("generation")
    if settled(status) and there == wanted and not visit.known.get("oldProgram") and not request.snapshot:
        return visit.unchanged(wanted)
    arguments = [
        *(["check", "--unsigned"] if visit.check else ["apply"]),
        *([] if request.snapshot else ["--verify"]),
        *("--node", str(manifest["node"])),
        *("--max-removed", str(request.max_removed_percent)),
    ]
    before = visit.held(there)
    install = request.install and not visit.check
    answer = send(
        visit,
        arguments,
        lambda all_: visit.way.carry(all_, directory, manifest=sealed, install=install),
        waiting=bool(status.get("unconfirmed")),
    )
    visit.remember(answer)
    after = (directory / SERVICES_FILE).read_text(encoding="utf-8").splitlines()
    if not visit.check:
        Held(visit.work.held).keep(visit.host, wanted, after)
    told = outcome(visit, answer, before, after, status.get("differences") or ())
    return {**told, "digest": manifest["digest"]}


def _require_planned(visit: Visit, directory: Path, bundle: Mapping[str, Any]) -> None:
    """A node whose turn comes late still gets what was approved: another run may have written a bundle since."""
    planned = visit.work.noted(Planned, visit.host)
    if planned is None:
        return
    # A host that the plan leaves as it is has no bundle there, only a generation.
    wanted = {key: value for key, value in dataclasses.asdict(planned).items() if value}
    found = {key: bundle[key] for key in wanted}
    if found != wanted:
        raise AsBefore(
            f"{directory}: holds another bundle than the plan that is followed has for {visit.host}: "
            f"{_named(found)} and not {_named(wanted)}. Something else has written there since this run began, as "
            "akp watch or another run does; see that nothing does while a plan is followed, and follow it again"
        )


def _named(bundle: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in bundle.items())


def delta_arguments(visit: Visit) -> list[str]:
    """How the program is told to take a delta."""
    return ["apply", "--node", visit.name, "--max-removed", str(visit.request.max_removed_percent)]


def _apply_delta(visit: Visit, archive: Path) -> dict[str, Any]:
    """Give the node what changed, without a question before; if it needs a whole bundle, the result says so."""
    data = archive.read_bytes()
    way = dataclasses.replace(visit.way, mode=json.loads("".join(lines_of(data, FILE)))["mode"])
    answer = send(visit, delta_arguments(visit), lambda all_: way.give(all_, data))
    if answer.needs_program or answer.result.get("need"):
        reason = answer.result.get("reason") or "the node does not have the program"
        return {"changed": False, "node": visit.name, "need": "full", "reason": reason}
    visit.remember(answer)
    changed = lines_of(data, f"{SERVICES_FILE}.diff")
    before, after = ([line[1:] for line in changed if line.startswith(sign)] for sign in "-+")
    return {**outcome(visit, answer, before, after, ()), "deltas": answer.result.get("deltas", 0)}
