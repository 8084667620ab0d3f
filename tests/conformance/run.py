"""A conformance run: many clusters, each through the twins, and what to do when one of them differs."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.controlplane import ApiError, ControlPlane, binaries

from . import goldens
from .draw import Cluster
from .history import History
from .namespaces import WORLD4, WORLD6, World
from .ours import Refused
from .report import Case, Report
from .shrink import Shrinker
from .twin import Twin

# Leading zeros, host bits and the like are no longer accepted in new objects, but live on in old clusters.
FEATURE_GATES = {"StrictIPCIDRValidation": False}


@dataclass(frozen=True)
class Settings:
    minor: str = "1.37"
    steps: int = 3
    packets: bool = True
    shrink_seconds: float = 120
    output: Path = Path("build/conformance")
    record: Path | None = None


@contextmanager
def twins(minor: str) -> Iterator[Twin]:
    """A control plane and a pair of namespaces, gone afterwards."""
    prefix = f"akpc{os.getpid()}"
    world = World(f"{prefix}-real-w")
    folder = Path(tempfile.mkdtemp(prefix="akp-conformance-"))
    binaries(minor)  # a first build takes minutes: before anything else exists
    world.build()
    try:
        with ControlPlane(world.name, (WORLD4, WORLD6), minor, feature_gates=FEATURE_GATES) as plane:
            twin = Twin(plane, folder, prefix)
            try:
                yield twin
            finally:
                twin.close()
    finally:
        world.remove()
        shutil.rmtree(folder, ignore_errors=True)


class Runner:
    def __init__(self, twin: Twin, settings: Settings) -> None:
        self.twin, self.settings = twin, settings
        self.report = Report(twin.binary.parent.name, twin.plane.minor)

    def run(self, clusters: Iterable[Cluster]) -> Report:
        for cluster in clusters:
            case = self.case(cluster)
            self.report.cases.append(case)
            verdict = "differs" if case.failures else "equal"
            print(
                f"{cluster.mode:9} seed {cluster.seed:<5} {len(cluster.objects):4} objects {case.comparisons:3} states "
                f"{case.lines:7} lines {case.probes:4} probes {case.seconds:6.1f} s  {verdict}",
                flush=True,
            )
            for failure in case.failures:
                print(failure, flush=True)
        return self.report

    def case(self, cluster: Cluster) -> Case:
        """One cluster: first state, packets, history; ends at the first difference."""
        case, started = Case(cluster), time.monotonic()
        try:
            self._live(cluster, case)
        except (Refused, RuntimeError, ApiError) as error:
            case.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self.twin.stop()
        if case.failures and self.settings.shrink_seconds:
            case.failures.append(self._shrunk(cluster))
        case.seconds = time.monotonic() - started
        return case

    def _live(self, cluster: Cluster, case: Case) -> None:
        self.twin.start(cluster)
        if not self._compare(cluster, case, "at first"):
            return
        if self.settings.record:
            goldens.record(self.settings.record, self.twin, cluster)
        if self.settings.packets:
            case.probes, discords = self.twin.packets(cluster)
            case.failures += [str(discord) for discord in discords]
        history = History(cluster)
        for number in range(1, self.settings.steps + 1):
            step = history.step()
            self.twin.change(step.changes)
            self.twin.catch_up(step.after)
            what = ", ".join(str(change) for change in step.changes)
            if not self._compare(step.after, case, f"after step {number} ({what})"):
                self._keep(step.after, f"{cluster.mode}-{cluster.seed}-step{number}")
                return

    def _compare(self, cluster: Cluster, case: Case, when: str) -> bool:
        result = self.twin.compare(cluster)
        case.comparisons += 1
        case.lines += result.lines
        if result.differences:
            case.failures.append("\n".join([f"{when}:", *(str(d) for d in result.differences[:20])]))
        return not result.differences

    # When something differs

    def _shrunk(self, cluster: Cluster) -> str:
        """The smallest cluster that still differs, as manifests, or the words that only the history differs."""

        def differs(candidate: Cluster) -> bool:
            try:
                self.twin.start(candidate)
                return bool(self.twin.compare(candidate, patience=1).differences)
            except Refused:
                return True
            except (RuntimeError, ApiError):
                return False
            finally:
                self.twin.stop()

        if not differs(cluster):
            return "The cluster as drawn does not differ; its history does (see the changes above)."
        shrinker = Shrinker(differs, self.settings.shrink_seconds)
        smallest = shrinker.shrink(cluster)
        folder = self._keep(smallest, f"{cluster.mode}-{cluster.seed}")
        manifests = (folder / "cluster.yaml").read_text() + "---\n" + (folder / "config.yaml").read_text()
        options = f"--cluster {folder}/cluster.yaml --config {folder}/config.yaml --node {cluster.node}"
        again = f"python -m tests.conformance {options}"
        return f"The smallest cluster that differs ({shrinker.tries} tries), again with\n  {again}\n\n{manifests}"

    def _keep(self, cluster: Cluster, name: str) -> Path:
        folder = self.settings.output / "failures" / name
        folder.mkdir(parents=True, exist_ok=True)
        content = {"apiVersion": "v1", "kind": "List", "items": json.loads(json.dumps(cluster.objects))}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        (folder / "config.yaml").write_text(yaml.safe_dump(cluster.config, sort_keys=False))
        return folder
