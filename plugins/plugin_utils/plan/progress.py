# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A plan on its way to its hosts.

Its Services are the approved ones once all of its hosts have them. Until then, and if it stops half way, hosts that
took it keep its Services, the others keep those of the plan before, and all of them get the endpoints of now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import write_atomic
from ..tasks.directory import WorkDirectory, goes_on, read_json, run_id, write_json
from .removal_limit import Frontends
from .report import plan_snapshot


@dataclasses.dataclass(frozen=True, slots=True)
class Following:
    """A plan, and what it comes to."""

    plan: str  # its digest
    run: str  # the run that follows it, or did
    frontends: Mapping[str, str]  # host -> what the plan gives it, as Frontends names it; empty if that is not known

    def took(self, host: str, frontends: str) -> bool:
        """Whether a host with these frontends has what the plan gives it, endpoints apart."""
        return bool(frontends) and self.frontends.get(host) == frontends

    @property
    def goes_on(self) -> bool:
        """Whether it is being followed right now."""
        return goes_on(self.run)


def _read(file: Path) -> Following | None:
    content = read_json(file)
    return Following(content["plan"], content["run"], content["frontends"]) if content else None


def followed_now(directory: WorkDirectory) -> Following | None:
    """The plan that not all of its hosts have yet, if there is one."""
    return _read(directory.following)


def approved_frontends(directory: WorkDirectory) -> frozenset[str]:
    """What the hosts of the last plan that was carried out were given."""
    last = _read(directory.followed)
    return frozenset(last.frontends.values()) - {""} if last else frozenset()


def begin(directory: WorkDirectory, plan: Mapping[str, Any], snapshot: Path, frontends: Frontends) -> None:
    """From now on this plan is followed."""
    names = {host: frontends.name(entry["generation"]) for host, entry in plan["hosts"].items()}
    before = followed_now(directory)
    if before and before.plan == plan["digest"]:
        # What was not computed in this run may have been in an earlier one.
        names = {host: name or before.frontends.get(host, "") for host, name in names.items()}
    # The cluster is written first, so that a reader of the plan finds its cluster.
    _copy(snapshot, plan_snapshot(directory.following))
    write_json(directory.following, dataclasses.asdict(Following(plan["digest"], run_id(), names)))


def conclude(directory: WorkDirectory, frontends: Frontends) -> list[str]:
    """Promote the plan that is followed once all of its hosts have it; return the hosts that lack it."""
    plan = followed_now(directory)
    if plan is None:
        return []
    missing = []
    for host in plan.frontends:
        status = (directory.answer(host) or {}).get("status") or {}
        if not plan.took(host, frontends.name(str(status.get("generation") or ""))):
            missing.append(host)
    if not missing:
        # In this order: if it ends in between, it is done again.
        _copy(plan_snapshot(directory.following), directory.approved)
        directory.following.replace(directory.followed)
    return missing if plan.run == run_id() else []


def _copy(snapshot: Path, file: Path) -> None:
    write_atomic(file, snapshot.read_bytes())
