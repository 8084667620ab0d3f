# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How fresh the rules of each node are, for Prometheus.

    with Freshness(directory, "production") as fresh:
        fresh.confirmed("n1", "n1", generation, time.time())     # the node is up to date
        fresh.failed("n2", "n2")                                 # it has not; its last confirmation stays
        fresh.programmed(0.31)                                   # from a change of endpoints to one kernel
        fresh.ran(began, ended, complete=True)
        fresh.write(Path("/var/lib/node_exporter"))              # akp_production.prom

What was known is kept in freshness.json of the working directory, and how it changed in history.jsonl; runs at the same
time wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..files import write_atomic
from ..locks import Lock
from ..tasks.directory import WorkDirectory, read_json, write_json
from ..tasks.notes import Note, Pushed, SnapshotRead, Span
from ..texts import shortened, visible
from . import history

PROGRAMMING = "kubeproxy_network_programming_duration_seconds"
RUN = "akp_run_duration_seconds"
# The buckets of the metric of the same name in kube-proxy.
PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
_LONGEST_WHY = 300
_RUN_BUCKETS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Freshness:
    """What the control host knows about the nodes of a cluster, and since when."""

    def __init__(self, directory: WorkDirectory, cluster: str) -> None:
        self._directory = directory
        self._cluster = cluster
        self._file = directory.path / "freshness.json"
        self._lock = Lock(directory.path / "freshness.lock")
        self._nodes: dict[str, dict[str, Any]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._histograms: dict[str, dict[str, Any]] = {}
        self._runs: dict[str, float] = {}

    def knows_drift(self, host: str) -> bool:
        """Whether the host is known to have drifted; read without waiting for others."""
        known = (read_json(self._file) or {}).get("nodes") or {}
        return bool((known.get(host) or {}).get("drifted"))

    def __enter__(self) -> Freshness:
        self._lock.take(wait=True)
        known = read_json(self._file) or {}
        self._nodes = known.get("nodes") or {}
        self._before = dict(self._nodes)
        self._histograms = known.get("histograms") or {}
        self._runs = known.get("runs") or {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            content = {"nodes": self._nodes, "histograms": self._histograms, "runs": self._runs}
            write_json(self._file, content)
            moments = history.changes(self._before, self._nodes)
            history.add(self._directory.path / history.FILE, moments, time.time())
        self._lock.give_back()

    def confirmed(self, host: str, node: str, generation: str, when: float) -> None:
        """The node was made, or found, equal to its bundle."""
        told = {"node": node, "generation": generation, "confirmed": when, "at": when, "failed": False}
        self._nodes[host] = told

    def failed(self, host: str, node: str, why: str = "") -> None:
        """The node was not, and why; when it last was stays as it is."""
        told = {"node": node, "at": time.time(), "failed": True, "why": visible(shortened(why, _LONGEST_WHY))}
        self._nodes[host] = {**self._nodes.get(host, {}), **told}

    def drifted(self, host: str, node: str, *, found: bool) -> None:
        """The node's rules were compared with what was applied: something else has changed them, or not."""
        told = {"node": node, "at": time.time(), "drifted": found}
        self._nodes[host] = {"failed": False, **self._nodes.get(host, {}), **told}

    def holds(self, host: str, node: str, generation: str) -> None:
        """The node was rolled back on purpose and is not up to date: its last confirmation stays."""
        told = {"node": node, "generation": generation, "at": time.time(), "failed": False, "held": True}
        self._nodes[host] = {**self._nodes.get(host, {}), **told}

    def forget(self, hosts: Iterable[str]) -> None:
        """Of hosts that were given up nothing is told any more."""
        for host in hosts:
            self._nodes.pop(host, None)

    @property
    def hosts(self) -> Sequence[str]:
        """Those that something is known of."""
        return sorted(self._nodes)

    def programmed(self, seconds: float) -> None:
        """A change of endpoints came to a node's kernel after so long."""
        self._observe(PROGRAMMING, PROGRAMMING_BUCKETS, seconds)

    def ran(self, began: float, ended: float, *, complete: bool) -> None:
        """A run over nodes ended, and whether all of them are confirmed by it."""
        self._runs["began"] = began
        if complete:
            self._runs["ended"] = ended
        self._observe(RUN, _RUN_BUCKETS, ended - began)

    def _observe(self, name: str, buckets: Sequence[float], value: float) -> None:
        known = self._histograms.setdefault(name, {"buckets": [0] * len(buckets), "sum": 0.0, "count": 0})
        for index, bound in enumerate(buckets):
            known["buckets"][index] += value <= bound
        known["sum"] += value
        known["count"] += 1

    def write(self, folder: Path) -> Path:
        """Replace the textfile of the cluster in one step. Everybody may read it."""
        name = "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in self._cluster)
        file = folder.expanduser() / f"akp_{name}.prom"
        # Others may write this directory. The collector reads what ends in .prom, so nothing that is half written.
        write_atomic(file, (f"{line}\n" for line in self.lines()), 0o644)
        return file

    def lines(self) -> Iterator[str]:
        """The text format of Prometheus."""
        cluster = {"cluster": self._cluster}
        nodes = [({**cluster, "node": str(each["node"])}, each) for _host, each in sorted(self._nodes.items())]
        yield from _family(
            "akp_node_confirmed_timestamp_seconds",
            "When the node was last made, or found, equal to its bundle.",
            [(labels, each["confirmed"]) for labels, each in nodes if each.get("confirmed")],
        )
        yield from _family(
            "akp_node_generation_info",
            "What is applied here.",
            [
                ({**labels, "generation": str(each["generation"])}, 1)
                for labels, each in nodes
                if each.get("generation")
            ],
        )
        yield from _family(
            "akp_node_last_run_failed",
            "1 if the last sync of this host failed.",
            [(labels, int(each["failed"])) for labels, each in nodes],
        )
        yield from _family(
            "akp_run_last_queued_timestamp_seconds",
            "When the last run over the nodes of the cluster began.",
            [(cluster, self._runs["began"])] if "began" in self._runs else [],
        )
        yield from _family(
            "akp_run_last_timestamp_seconds",
            "When the last run ended that confirmed all of its nodes.",
            [(cluster, self._runs["ended"])] if "ended" in self._runs else [],
        )
        yield from self._histogram(RUN, _RUN_BUCKETS, "How long runs over the nodes of the cluster took.")
        yield from self._histogram(
            PROGRAMMING, PROGRAMMING_BUCKETS, "From a change of endpoints to the rules of a node, for each node."
        )

    def _histogram(self, name: str, buckets: Sequence[float], text: str) -> Iterator[str]:
        known = self._histograms.get(name)
        if known is None:
            return
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} histogram"
        cluster = {"cluster": self._cluster}
        for bound, count in zip(buckets, known["buckets"], strict=True):
            yield f"{name}_bucket{_labels({**cluster, 'le': str(bound)})} {count}"
        yield f"{name}_bucket{_labels({**cluster, 'le': '+Inf'})} {known['count']}"
        yield f"{name}_sum{_labels(cluster)} {known['sum']:.3f}"
        yield f"{name}_count{_labels(cluster)} {known['count']}"


def note_drift(directory: WorkDirectory, host: str, node: str, *, found: bool) -> None:
    """Write down, once, that another program has changed a node's rules, or that this is over."""
    fresh = Freshness(directory, "")
    if fresh.knows_drift(host) == found:
        return
    with fresh:
        fresh.drifted(host, node, found=found)


def note_run(
    fresh: Freshness,
    directory: WorkDirectory,
    notes: Iterable[tuple[str, Note]],
    hosts: Iterable[str],
    failed: Mapping[str, str],
) -> None:
    """What the notes of a run say about the freshness of its hosts; failed ones are given with the reason."""
    noted = list(notes)
    pushes = {host: note for host, note in noted if isinstance(note, Pushed)}
    triggered = [when for _host, note in noted if isinstance(note, SnapshotRead) for when in note.triggered]
    spans = [note for _host, note in noted if isinstance(note, Span)]
    for host in hosts:
        push = pushes.get(host)
        node = str((directory.answer(host) or {}).get("node") or host)
        if host in failed or push is None:
            fresh.failed(host, node, failed.get(host, ""))
            continue
        if push.action in ("cleanup", "release"):
            fresh.forget([host])
            continue
        if push.action == "rollback":
            fresh.holds(host, node, str(push.generation or ""))
            continue
        fresh.confirmed(host, node, str(push.generation or ""), push.ended)
        if push.changed:
            for when in triggered:
                fresh.programmed(max(0.0, push.ended - when))
    # A host whose rules were taken away has no answer on file any more.
    fresh.forget(host for host in fresh.hosts if host not in hosts and directory.answer(host) is None)
    if spans and not any(push.action in ("cleanup", "release", "rollback") for push in pushes.values()):
        began, ended = min(each.began for each in spans), max(each.ended for each in spans)
        fresh.ran(began, ended, complete=not failed)


def _family(name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    if samples:
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for labels, value in samples:
            yield f"{name}{_labels(labels)} {value}"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
