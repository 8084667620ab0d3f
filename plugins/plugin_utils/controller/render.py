# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bundles for many hosts at once, and none for those that have what they shall have.

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
from ..bundle.program import PROGRAM
from ..cluster.files import UnreadableFile, documents
from ..cluster.record import peek, peek_source
from ..proxy.warned import Warned
from .directory import WorkDirectory, read_json, write_json
from .push import program_digest, settled

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
    rendered: int = 0
    warnings: tuple[Warned, ...] = ()  # addresses that Services claim and should not

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
        self.rendered += other.rendered
        self.warnings = tuple(dict.fromkeys(self.warnings + other.warnings))


def load_config(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """A KubeProxyConfiguration from a file, or given in place with its header left out."""
    if isinstance(config, str) and config:
        found = list(documents(Path(config).expanduser()))
        if len(found) != 1 or not isinstance(found[0], Mapping):
            raise UnreadableFile(f"{config}: must hold one KubeProxyConfiguration")
        return dict(found[0])
    head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    return {**head, **(config or {})}


def target(directory: WorkDirectory, host: str, name: str) -> Target:
    """A host with what it answered last."""
    answer = directory.answer(host)
    if answer is None:
        return Target(host, name or host, None, "")
    status = answer.get("status") or {}
    recorded = str(status.get("generation") or "")
    current = recorded if settled(status) and not answer.get("oldProgram") else ""
    return Target(host, name or answer.get("node") or host, answer.get("facts"), current, recorded)


@dataclasses.dataclass(frozen=True)
class Schedulers:
    """What ipvs mode has beyond kube-proxy: schedulers of single Services, by name and by annotation."""

    services: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: bool = False


NO_SCHEDULERS = Schedulers()


@dataclasses.dataclass(frozen=True)
class Vips:
    """What Services may claim, as proxy.policy has it; that is not imported where nothing is computed."""

    action: str = "warn"
    external_ips: Sequence[str] | None = None
    load_balancer_ips: Sequence[str] | None = None


ANY_VIPS = Vips()


def render(
    directory: WorkDirectory,
    snapshot_file: Path,
    config: Mapping[str, Any],
    targets: Sequence[Target] | None,
    compat: str,
    schedulers: Schedulers = NO_SCHEDULERS,
    vips: Vips = ANY_VIPS,
) -> Outcome:
    """Bring the bundles of all targets that need one up to date; without targets, those of all nodes."""
    digest = peek(snapshot_file)
    if not digest:
        raise UnreadableFile(f"{snapshot_file}: is not a snapshot")
    facts = directory.gathered()
    whose = [peek_source(snapshot_file), {node: each.get("addresses") for node, each in facts.items()}]
    index = _Index(directory.index, digest, config, compat, [schedulers, vips], whose)
    outcome = Outcome(problems=index.problems, ignored=index.ignored, warnings=index.warnings)
    work: list[Target] = []
    for each in targets or ():
        known = index.generation(each)
        if known is None or (known != each.current and _written(directory.bundles / each.node) != known):
            work.append(each)
        else:
            _conclude(outcome, each, known, index.counts(each))
    if work or targets is None or not index.complete:
        wanted = work if targets is not None else None
        _render(directory, snapshot_file, config, wanted, compat, schedulers, vips, facts, index, outcome)
    outcome.stale.sort()
    index.write()
    return outcome


def _render(
    directory: WorkDirectory,
    snapshot_file: Path,
    config: Mapping[str, Any],
    work: Sequence[Target] | None,
    compat: str,
    schedulers: Schedulers,
    vips: Vips,
    facts: Mapping[str, Mapping[str, Any]],
    index: _Index,
    outcome: Outcome,
) -> None:
    # Here and not above: a run without news never comes this far, and the engine takes a while to import.
    from ..bundle.write import write_bundle
    from ..cluster.record import read_record, snapshot_of
    from ..proxy.facts import InvalidFacts, UnusableNode
    from ..proxy.policy import Known
    from .desired import Choices, Desired
    from .guard import Frontends

    record = read_record(snapshot_file)
    snapshot = snapshot_of(record)
    settings = {
        "compat": compat,
        "schedulers": schedulers.services,
        "scheduler_annotations": schedulers.annotations,
        "vip_policy": vips.action,
        "external_ip_cidrs": vips.external_ips,
        "load_balancer_cidrs": vips.load_balancer_ips,
    }
    choices = Choices.of(config, settings)
    desired = Desired(choices)
    desired.update(snapshot, Known.of(facts, record.source))
    outcome.warnings = index.warnings = desired.warnings
    frontends = Frontends(directory.frontends)
    outcome.problems = index.problems = tuple(str(problem) for problem in snapshot.problems)
    outcome.ignored = index.ignored = dict(snapshot.ignored)
    index.complete = True
    if work is None:
        work = [Target(node.name, node.name, None, "") for node in snapshot.nodes]
    for each in work:
        try:
            state = desired.state(each.node, each.facts)
        except (UnusableNode, InvalidFacts) as error:
            outcome.errors[each.host] = str(error)
            outcome.stale.append(each.host)
            continue
        outcome.rendered += 1
        frontends.learn(state, choices.text)
        counts = {"service_ports": len(state.fragments)}
        index.learn(each, state.generation, counts)
        if state.generation != each.current and _written(directory.bundles / each.node) != state.generation:
            write_bundle(state, directory.bundles / each.node)
            outcome.written.append(each.node)
        _conclude(outcome, each, state.generation, counts)


def _conclude(outcome: Outcome, each: Target, generation: str, counts: dict[str, int]) -> None:
    outcome.generations[each.host] = generation
    outcome.nodes[each.host] = each.node
    outcome.counts[each.host] = counts
    if generation != each.current:
        outcome.stale.append(each.host)


def _written(directory: Path) -> str:
    """The generation of the bundle that lies there, if it was made with this node program."""
    manifest = read_json(directory / FILE) or {}
    files = manifest.get("files")
    if not isinstance(files, dict) or files.get(PROGRAM) != program_digest():
        return ""
    return str(manifest.get("generation") or "")


@cache
def engine_digest() -> str:
    """Names the code that renders: another version of it may give other rules."""
    digest = hashlib.sha256()
    for package in ("cluster", "proxy", "backends", "bundle"):
        for file in sorted((Path(__file__).parent.parent / package).rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class _Index:
    """Which inputs gave which generation."""

    def __init__(
        self,
        file: Path,
        snapshot: str,
        config: Mapping[str, Any],
        compat: str,
        choices: Sequence[Schedulers | Vips],
        whose: Sequence[Any],
    ) -> None:
        self._file = file
        inputs = [engine_digest(), snapshot, config, compat, *map(dataclasses.asdict, choices), *whose]
        shared = json.dumps(inputs, sort_keys=True)
        self._shared = hashlib.sha256(shared.encode()).hexdigest()
        content = read_json(file) or {}
        # Entries of another cluster state are of no use any more.
        self.complete = content.get("inputs") == self._shared
        known = content if self.complete else {}
        self._nodes: dict[str, dict[str, Any]] = known.get("nodes") or {}
        self.problems: tuple[str, ...] = tuple(known.get("problems") or ())
        self.ignored: Mapping[str, int] = known.get("ignored") or {}
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

    def learn(self, each: Target, generation: str, counts: Mapping[str, int]) -> None:
        """Remember what came out."""
        self._nodes[each.node] = {"facts": self._facts(each), "generation": generation, "counts": dict(counts)}

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
            "warnings": self.warnings,
        }
        if read_json(self._file) != json.loads(json.dumps(content)):
            write_json(self._file, content)
