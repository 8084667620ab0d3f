# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""From a cluster to a publication: render all nodes, and deltas from what they were offered before.

What was offered is not kept but computed again: a state is a function of the cluster, the configuration and the facts,
so the last few of these, the history, are all that deltas need. A state that does not come out as it was offered (the
engine was replaced meanwhile) gives no delta.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ..backends.state import State
from ..bundle.archive import UnreadableArchive
from ..choices import Choices
from ..cluster.files import UnreadableFile
from ..cluster.record import Record, read_record, snapshot_of
from ..cluster.snapshot import Snapshot
from ..engine import Engine
from ..errors import UserError
from ..plan.removal_limit import Ports, losses, recorded_ports, service_ports
from ..proxy.facts import InvalidFacts, UnusableNode
from ..proxy.policy import Known
from ..tasks.directory import read_json, write_json
from ..texts import visible
from .store import Publication, Published, PublishRefused


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that states are a function of."""

    record: Record
    choices: Choices
    facts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # by node

    @property
    def settings(self) -> dict[str, Any]:
        """All but the cluster."""
        return {
            "choices": self.choices.document,
            "facts": {node: dict(facts) for node, facts in self.facts.items()},
        }

    @cached_property
    def snapshot(self) -> Snapshot:
        """The cluster, read."""
        return snapshot_of(self.record)

    @cached_property
    def engine(self) -> Engine:
        """What computes the states; RefusedVips, InvalidConfig or UnknownBackend if no node can have one."""
        engine = Engine(self.choices)
        engine.update(self.snapshot, Known(url=self.record.source))
        return engine

    @property
    def warnings(self) -> tuple[str, ...]:
        """Services that claim or ask too much."""
        of_nodes = (each for name, facts in self.facts.items() for each in self.engine.warnings_of(name, facts))
        return tuple(dict.fromkeys(str(each) for each in (*self.engine.warnings, *of_nodes)))

    def state(self, name: str) -> State:
        """The state of a node; UnusableNode or InvalidFacts if that cannot be told."""
        return self.engine.state(name, self.facts.get(name))


class History:
    """The last few inputs, each a directory with a number for a name, and which generations came of them."""

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._keep = keep
        self._loaded: dict[Path, Inputs | None] = {}

    def bases(self, node: str, generation: str) -> Iterator[State]:
        """States that the node was offered before this generation, the youngest first."""
        seen = {generation}
        for entry in reversed(self._entries()):
            offered = (read_json(entry / "generations.json") or {}).get(node)
            if offered is None or offered in seen:
                continue
            seen.add(offered)
            state = self._state(entry, node)
            if state is not None and state.generation == offered:
                yield state

    def add(self, inputs: Inputs, generations: Mapping[str, str]) -> None:
        """Remember inputs and what came of them; the oldest go."""
        entries = self._entries()
        last = entries[-1] if entries else None
        if self._keep and not (last and (read_json(last / "generations.json") or {}) == dict(generations)):
            number = int(last.name) + 1 if last else 1
            staged = self._path / ".new"
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(mode=0o700, parents=True)
            inputs.record.write(staged / "snapshot.json")
            settings = inputs.settings
            write_json(staged / "settings.json", {**settings, "digest": _digest(inputs.record, settings)})
            write_json(staged / "generations.json", dict(generations))
            staged.rename(self._path / str(number))
        for old in self._entries()[: -self._keep or None]:
            shutil.rmtree(old)

    def _entries(self) -> list[Path]:
        if not self._path.is_dir():
            return []
        return sorted((each for each in self._path.iterdir() if each.name.isdigit()), key=lambda each: int(each.name))

    def _state(self, entry: Path, node: str) -> State | None:
        if entry not in self._loaded:
            self._loaded[entry] = _read_inputs(entry)
        inputs = self._loaded[entry]
        try:
            return inputs.state(node) if inputs else None
        except UserError:
            # Also where this version refuses what an earlier one took.
            return None


def _digest(record: Record, settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([record.digest, settings], sort_keys=True).encode()).hexdigest()


def _read_inputs(entry: Path) -> Inputs | None:
    """Inputs of an earlier run; None if another version wrote them, or they were changed."""
    settings = read_json(entry / "settings.json") or {}
    digest = settings.pop("digest", None)
    try:
        record = read_record(entry / "snapshot.json")
    except UnreadableFile:
        return None
    if digest != _digest(record, settings) or settings.keys() != {"choices", "facts"}:
        return None
    return Inputs(record, Choices.of(settings["choices"]), settings["facts"])


# Writes what becomes of nodes into the ledger: how far it is, and generations before and after by node.
Audit: TypeAlias = Callable[[str, Mapping[str, Any]], object]


def _nowhere(_result: str, _nodes: Mapping[str, Any]) -> None:
    """For those who keep no ledger."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run did."""

    nodes: tuple[Published, ...]
    errors: Mapping[str, str]  # nodes whose state cannot be told, and why; they keep what they are offered
    withdrawn: tuple[str, ...]  # releases of nodes that the cluster has no more
    pruned: int


def publish(
    publication: Publication,
    history: History,
    inputs: Inputs,
    nodes: Sequence[str] | None = None,
    max_removed_percent: int = 100,
    audit: Audit = _nowhere,
    *,
    check: bool = False,
) -> Report:
    """Offer these nodes, or all, their rules; what changes for them is audited before and after.

    A check ends before anything is written, and tells the same.
    """
    names = [node.name for node in inputs.snapshot.nodes] if nodes is None else list(nodes)
    if not names:
        raise PublishRefused("the cluster has no Node, so there is nothing to publish")
    engine = inputs.engine
    done: list[Published] = []
    errors: dict[str, str] = {}
    with contextlib.nullcontext() if check else publication.locked():
        offered = publication.offered()
        for name in names:
            try:
                state = engine.state(name, inputs.facts.get(name))
            except Exception as error:
                # Whatever a node said of itself, the others are published.
                known = isinstance(error, InvalidFacts | UnusableNode)
                errors[name] = visible(error if known else f"{type(error).__name__}: {error}")
                continue
            if publication.holds(name, state.generation):
                done.append(publication.keep(name))
                continue
            bases = list(history.bases(name, state.generation))
            _guard(state, _ports_now(publication, name, offered.get(name), bases), max_removed_percent)
            done.append(Published(name, state.generation, "changed", 0, 0) if check else publication.add(state, bases))
        gone = sorted(offered.keys() - set(names)) if nodes is None else []
        if check:
            return Report(tuple(done), errors, tuple(gone), 0)
        then = {each.node: each.generation for each in done if each.action != "unchanged"} | dict.fromkeys(gone, "")
        steps = {node: _step(offered.get(node), after) for node, after in sorted(then.items())}
        if steps:
            audit("begun", steps)
        try:
            history.add(inputs, {each.node: each.generation for each in done})
            publication.switch()
            withdrawn = publication.withdraw(names) if nodes is None else []
        except Exception as error:
            now = publication.offered()
            failed = {"result": "failed", "error": str(error)}
            audit("failed", {node: {**_step(offered.get(node), now.get(node)), **failed} for node in steps})
            raise
        if steps:
            actions = dict.fromkeys(withdrawn, "withdrawn") | {each.node: each.action for each in done}
            audit("ok", {node: {**step, "result": actions[node]} for node, step in steps.items()})
        return Report(tuple(done), errors, tuple(withdrawn), publication.prune())


def _step(before: str | None, after: str | None) -> dict[str, Any]:
    return {"before": before or None, "after": after or None}


def _ports_now(publication: Publication, node: str, offered: str | None, bases: Sequence[State]) -> Ports | None:
    """The service ports that a node is offered; None if it is offered nothing, or nothing that can be read."""
    for base in bases:
        if base.generation == offered:
            return service_ports(base.fragments)
    # The history need not reach back to it, nor this version come to the same: then the bundle itself tells.
    try:
        return recorded_ports(publication.services(node))
    except (KeyError, UnreadableArchive, ValueError):
        return service_ports(bases[0].fragments) if bases else None


def _guard(state: State, before: Ports | None, percent: int) -> None:
    """A cluster that lost most of its Services overnight is more likely half an answer than the truth."""
    told = losses({state.node: (before, service_ports(state.fragments), percent)}) if before else ""
    if told:
        raise PublishRefused(f"{told}; nothing was published. If that is meant, allow it for this run")
