# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bundles for many hosts at once, and none for those that are up to date.

A bundle is a function of the cluster, the configuration, the node's facts and the engine. The index remembers which
generation came out of which of these, so a run without news computes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..bundle.manifest import FILE
from ..bundle.program import MODES, PROGRAM
from ..carry.answers import settled
from ..carry.protocol import program_digest
from ..choices import Choices
from ..cluster.files import UnreadableFile
from ..cluster.record import peek, peek_source
from ..proxy.warned import Warned
from ..tasks.directory import WorkDirectory, read_json, write_json
from ..texts import visible

# What of a node's answer can change its rules.
_FACTS = ("addresses", "capabilities", "cpus", "kernel", "tcpBeLiberal")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A host of the play, and what is known about it."""

    host: str
    node: str
    facts: Mapping[str, Any] | None  # of `akp-node facts`; None if the host was not asked
    current: str  # the generation that is there to stay; empty if there is none or that is not known
    recorded: str = ""  # the generation that was applied last, intact or not


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of the targets, by host."""

    generations: dict[str, str] = dataclasses.field(default_factory=dict)
    nodes: dict[str, str] = dataclasses.field(default_factory=dict)  # names of Nodes
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    stale: list[str] = dataclasses.field(default_factory=list)  # hosts that need their bundle
    written: list[str] = dataclasses.field(default_factory=list)  # nodes whose bundle was written
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()  # what was left out of the cluster
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    members: tuple[str, ...] = ()  # all Nodes of the cluster
    rendered: int = 0
    warnings: tuple[Warned, ...] = ()  # Services that claim or ask for too much

    def include(self, other: Outcome) -> None:
        """Add what became of other targets."""
        self.generations |= other.generations
        self.nodes |= other.nodes
        self.counts |= other.counts
        self.stale = sorted(self.stale + other.stale)
        self.written += other.written
        self.errors |= other.errors
        self.problems = tuple(dict.fromkeys(self.problems + other.problems))
        self.ignored = {**other.ignored, **self.ignored}
        self.members = tuple(dict.fromkeys(self.members + other.members))
        self.rendered += other.rendered
        self.warnings = tuple(dict.fromkeys(self.warnings + other.warnings))


def target(directory: WorkDirectory, host: str, name: str) -> Target:
    """A host with what it answered last."""
    answer = directory.answer(host)
    if answer is None:
        return Target(host, name or host, None, "")
    status = answer.get("status") or {}
    recorded = str(status.get("generation") or "")
    current = recorded if settled(status) and not answer.get("oldProgram") else ""
    return Target(host, name or answer.get("node") or host, answer.get("facts"), current, recorded)


def render(
    directory: WorkDirectory, snapshot_file: Path, choices: Choices, targets: Sequence[Target] | None
) -> Outcome:
    """Bring the bundles of all targets that need one up to date; without targets, those of all nodes."""
    digest = peek(snapshot_file)
    if not digest:
        raise UnreadableFile(f"{snapshot_file}: is not a snapshot")
    index = _Index(directory.index, [engine_digest(), digest, choices.document, peek_source(snapshot_file)])
    outcome = Outcome(problems=index.problems, ignored=index.ignored, members=index.members, warnings=index.warnings)
    work: list[Target] = []
    for each in targets or ():
        known = index.generation(each)
        if known is None or (known != each.current and _written(directory.bundles / each.node) != known):
            work.append(each)
        else:
            _conclude(outcome, each, known, index.counts(each), index.warnings_of(each))
    if work or targets is None or not index.complete:
        wanted = work if targets is not None else None
        _render(directory, snapshot_file, choices, wanted, index, outcome)
    outcome.stale.sort()
    index.write()
    return outcome


def _render(
    directory: WorkDirectory,
    snapshot_file: Path,
    choices: Choices,
    work: Sequence[Target] | None,
    index: _Index,
    outcome: Outcome,
) -> None:
    # Here and not above: a run without news never comes this far, and the engine takes a while to import.
    from ..bundle.write import write_bundle
    from ..cluster.record import read_record, snapshot_of
    from ..engine import Engine
    from ..proxy.facts import InvalidFacts, UnusableNode
    from ..proxy.policy import Known
    from .removal_limit import Frontends

    record = read_record(snapshot_file)
    snapshot = snapshot_of(record)
    engine = Engine(choices)
    engine.update(snapshot, Known(url=record.source))
    index.warnings = engine.warnings
    outcome.warnings = tuple(dict.fromkeys(outcome.warnings + engine.warnings))
    frontends = Frontends(directory.frontends)
    outcome.problems = index.problems = tuple(str(problem) for problem in snapshot.problems)
    outcome.ignored = index.ignored = dict(snapshot.ignored)
    outcome.members = index.members = tuple(node.name for node in snapshot.nodes)
    index.complete = True
    if work is None:
        work = [Target(node.name, node.name, None, "") for node in snapshot.nodes]
    for each in work:
        try:
            state = engine.state(each.node, each.facts)
            warnings = engine.warnings_of(each.node, each.facts)
        except Exception as error:
            # Whatever a node said of itself, the others get their bundles.
            known = isinstance(error, UnusableNode | InvalidFacts)
            outcome.errors[each.host] = visible(error if known else f"{type(error).__name__}: {error}")
            outcome.stale.append(each.host)
            continue
        outcome.rendered += 1
        frontends.learn(state, choices.frontends_text)
        counts = {"service_ports": len(state.fragments)}
        index.learn(each, state.generation, counts, warnings)
        if state.generation != each.current and _written(directory.bundles / each.node) != state.generation:
            write_bundle(state, directory.bundles / each.node)
            outcome.written.append(each.node)
        _conclude(outcome, each, state.generation, counts, warnings)


def _conclude(
    outcome: Outcome, each: Target, generation: str, counts: dict[str, int], warnings: tuple[Warned, ...]
) -> None:
    outcome.warnings = tuple(dict.fromkeys(outcome.warnings + warnings))
    outcome.generations[each.host] = generation
    outcome.nodes[each.host] = each.node
    outcome.counts[each.host] = counts
    if generation != each.current:
        outcome.stale.append(each.host)


def _written(directory: Path) -> str:
    """The generation of the bundle that lies there, if it was made with this node program."""
    manifest = read_json(directory / FILE) or {}
    files, mode = manifest.get("files"), manifest.get("mode")
    if not isinstance(files, dict) or mode not in MODES:
        return ""
    digest = str(files.get(PROGRAM)).partition(" ")[0]
    return str(manifest.get("generation") or "") if digest == program_digest(mode) else ""


@cache
def engine_digest() -> str:
    """Names the code that renders: another version of it may give other rules."""
    digest = hashlib.sha256()
    here = Path(__file__).parent.parent
    packages = (
        each for name in ("cluster", "proxy", "backends", "bundle") for each in sorted((here / name).rglob("*"))
    )
    for file in (here / "choices.py", here / "engine.py", *packages):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class _Index:
    """Which inputs gave which generation."""

    def __init__(self, file: Path, inputs: Sequence[Any]) -> None:
        self._file = file
        self._shared = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        content = read_json(file) or {}
        # Entries of another cluster state are of no use any more.
        self.complete = content.get("inputs") == self._shared
        known = content if self.complete else {}
        self._nodes: dict[str, dict[str, Any]] = known.get("nodes") or {}
        self.problems: tuple[str, ...] = tuple(known.get("problems") or ())
        self.ignored: Mapping[str, int] = known.get("ignored") or {}
        self.members: tuple[str, ...] = tuple(known.get("members") or ())
        self.warnings: tuple[Warned, ...] = tuple(Warned(*each) for each in known.get("warnings") or ())

    @staticmethod
    def _facts(each: Target) -> str:
        wanted = None if each.facts is None else {key: each.facts.get(key) for key in _FACTS}
        return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()

    def generation(self, each: Target) -> str | None:
        """What comes out for this target, if that is known."""
        entry = self._nodes.get(each.node) or {}
        return entry.get("generation") if entry.get("facts") == self._facts(each) else None

    def counts(self, each: Target) -> dict[str, int]:
        """The counts of its bundle."""
        return dict((self._nodes.get(each.node) or {}).get("counts") or {})

    def warnings_of(self, each: Target) -> tuple[Warned, ...]:
        """What there is to say about the addresses of this target."""
        return tuple(Warned(*text) for text in (self._nodes.get(each.node) or {}).get("warnings") or ())

    def learn(self, each: Target, generation: str, counts: Mapping[str, int], warnings: Sequence[Warned]) -> None:
        """Remember what came out."""
        self._nodes[each.node] = {
            "facts": self._facts(each),
            "generation": generation,
            "counts": dict(counts),
            "warnings": list(warnings),
        }

    def write(self) -> None:
        """For the next run; what another run learned meanwhile from the same inputs is kept."""
        there = read_json(self._file) or {}
        if there.get("inputs") == self._shared:
            self._nodes = {**(there.get("nodes") or {}), **self._nodes}
        content = {
            "inputs": self._shared,
            "nodes": self._nodes,
            "problems": self.problems,
            "ignored": self.ignored,
            "members": self.members,
            "warnings": self.warnings,
        }
        if read_json(self._file) != json.loads(json.dumps(content)):
            write_json(self._file, content)
