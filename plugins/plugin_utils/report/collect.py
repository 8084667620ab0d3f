# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Everything that the page shows, from a cluster, the choices of a user, and the working directory of its runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..choices import Choices
from ..cluster.record import peek
from ..cluster.snapshot import Node, Snapshot
from ..engine import Engine
from ..proxy.warned import Warned
from ..tasks.directory import WorkDirectory
from .changes import Plan, plan_of
from .freshness import Freshness, freshness_of
from .nodes import Known, NodeRow, Place
from .runs import Ledger, ledger_of
from .services import Row, Table
from .words import at_home


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """What the caller knows of a report."""

    cluster: str  # its name
    source: str  # where the cluster was read, in words
    directory: WorkDirectory | None = None
    plan: Path | None = None  # if not that of the directory
    allowed_signers: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    about: About
    made: float
    mode: str
    compat: str
    rows: tuple[Row, ...]
    nodes: tuple[NodeRow, ...]
    unusable: Mapping[str, str]  # nodes that get no rules, and why
    plan: Plan | None
    ledger: Ledger | None
    freshness: Freshness
    problems: tuple[str, ...]  # objects that were left out
    ignored: Mapping[str, int]  # kinds of objects that need no rules, and how many
    warnings: tuple[Warned, ...]

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self.about.cluster

    @property
    def source(self) -> str:
        """Where the cluster was read."""
        return self.about.source

    @property
    def directory(self) -> str:
        """The working directory, if there is one."""
        return at_home(self.about.directory.path) if self.about.directory else ""

    @property
    def snapshot(self) -> str:
        """The digest of the cluster that the runs saw last."""
        return peek(self.about.directory.snapshot) if self.about.directory else ""


def collect(
    snapshot: Snapshot, choices: Choices, facts: Mapping[str, Mapping[str, Any]], about: About, now: float | None = None
) -> Report:
    """Decide, read what runs left behind, and put it together."""
    now = time.time() if now is None else now
    engine = Engine(choices)
    engine.update(snapshot)
    table = Table(engine, facts)
    directory = about.directory
    known = Known(directory, now)
    # A run that verifies does not read the cluster.
    rows = tuple(map(known.row, map(_place, snapshot.nodes) if snapshot.nodes else known.places()))
    plan = about.plan or (directory.plan if directory else None)
    return Report(
        about=about,
        made=now,
        mode=choices.proxy.mode,
        compat=choices.compat,
        rows=tuple(table.rows()),
        nodes=rows,
        unusable=table.unusable,
        plan=plan_of(plan, directory, about.allowed_signers) if plan else None,
        ledger=ledger_of(directory.ledger) if directory else None,
        freshness=freshness_of(directory.path if directory else None, rows, known.histograms, now),
        problems=tuple(map(str, snapshot.problems)),
        ignored=snapshot.ignored,
        warnings=engine.warnings,
    )


def _place(node: Node) -> Place:
    address = next((value for sort, value in node.addresses if sort == "InternalIP"), "")
    return Place(node.name, zone=node.zone, address=address)
