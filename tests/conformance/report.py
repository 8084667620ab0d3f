"""What a conformance run found, as one Markdown page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import coverage
from .draw import Cluster


@dataclass
class Case:
    """One cluster in one mode: its comparisons, one per moment of its history, and its connections."""

    cluster: Cluster
    seconds: float = 0.0
    comparisons: int = 0
    lines: int = 0
    probes: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Report:
    version: str
    compat: str
    cases: list[Case] = field(default_factory=list)

    @property
    def failed(self) -> list[Case]:
        return [case for case in self.cases if case.failures]

    def summary(self) -> str:
        clusters, lines = len(self.cases), sum(case.lines for case in self.cases)
        comparisons, probes = sum(case.comparisons for case in self.cases), sum(case.probes for case in self.cases)
        return (
            f"{clusters} clusters, {comparisons} kernel states, {lines} lines and {probes} kinds of connections "
            f"compared: {len(self.failed)} clusters differ"
        )

    @staticmethod
    def brief(case: Case, lines: int = 12) -> str:
        found = [line for failure in case.failures for line in failure.splitlines()]
        more = [f"... and {len(found) - lines} lines more in the report"] if len(found) > lines else []
        head = f"{case.cluster.mode} seed {case.cluster.seed} differs:"
        return "\n  ".join([head, *found[:lines], *more])

    def markdown(self) -> str:
        parts = [
            "# Conformance",
            f"kube-proxy {self.version} and this engine (compat {self.compat}), side by side in twin namespaces: "
            f"{self.summary()}.",
            self._modes(),
            *(self._failure(case) for case in self.failed),
            self._clusters(),
            self._coverage(),
        ]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "conformance.md"
        path.write_text(self.markdown())
        return path

    def _modes(self) -> str:
        rows = ["| mode | clusters | kernel states | lines | kinds of connections | differing clusters | seconds |"]
        rows.append("|---|---:|---:|---:|---:|---:|---:|")
        for mode in dict.fromkeys(case.cluster.mode for case in self.cases):
            cases = [case for case in self.cases if case.cluster.mode == mode]
            rows.append(
                f"| {mode} | {len(cases)} | {sum(c.comparisons for c in cases)} | {sum(c.lines for c in cases)} "
                f"| {sum(c.probes for c in cases)} | {sum(bool(c.failures) for c in cases)} "
                f"| {sum(c.seconds for c in cases):.0f} |"
            )
        return "\n".join(["## Modes", "", *rows])

    def _failure(self, case: Case) -> str:
        text = "\n\n".join(case.failures)
        return f"## Different: {case.cluster.mode}, seed {case.cluster.seed}\n\n```\n{text}\n```"

    def _clusters(self) -> str:
        rows = [
            "| mode | seed | node | objects | kernel states | lines | kinds of connections | differences | seconds |"
        ]
        rows.append("|---|---:|---|---:|---:|---:|---:|---:|---:|")
        rows += [
            f"| {c.cluster.mode} | {c.cluster.seed} | {c.cluster.node} | {len(c.cluster.objects)} | {c.comparisons} "
            f"| {c.lines} | {c.probes} | {len(c.failures)} | {c.seconds:.1f} |"
            for c in self.cases
        ]
        return "\n".join(["## Clusters", "", *rows])

    def _coverage(self) -> str:
        total: Counter[str] = Counter()
        clusters: Counter[str] = Counter()
        for case in self.cases:
            found = coverage.features(case.cluster)
            total.update(found)
            clusters.update(found.keys())
        rows = ["| object | field or option | times | clusters |", "|---|---|---:|---:|"]
        for feature in sorted(total):
            kind, _, what = feature.partition(": ")
            rows.append(f"| {kind} | {what.replace('|', '/')} | {total[feature]} | {clusters[feature]} |")
        return "\n".join(["## What was exercised, and how often", "", *rows])
