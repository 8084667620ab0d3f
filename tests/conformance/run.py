"""A conformance run: many clusters, each through the twins, and what to do when one of them differs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import yaml

from tests.controlplane import ApiError, ControlPlane, binaries

from . import goldens
from .draw import Cluster
from .history import History, Step, changes
from .namespaces import WORLD4, WORLD6, Node, World
from .ours import Refused
from .report import Case
from .shrink import Shrinker, shrink_step
from .side import Side
from .twin import Twin
from .uml import UmlPlace

# Leading zeros, host bits and the like are no longer accepted in new objects, but live on in old clusters.
FEATURE_GATES = {"StrictIPCIDRValidation": False}


@dataclass(frozen=True)
class Settings:
    steps: int = 3
    packets: bool = True
    shrink_seconds: float = 120
    output: Path = Path("build/conformance")
    record: Path | None = None
    changes: Step | None = None
    given: bool = False  # a cluster of somebody else's, which may leave out what the API server fills in


@contextmanager
def twins(minor: str, compat: str | None = None, uml: bool = False) -> Iterator[Twin]:
    """A control plane and a pair of nodes, gone afterwards; with uml, inside a kernel that has ip_vs."""
    binaries(minor)  # a first build takes minutes: before anything else exists
    prefix = f"akpc{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="akp-conformance-", dir="/tmp") as folder, ExitStack() as stack:
        real: Side
        ours: Side
        if uml:
            place = stack.enter_context(UmlPlace(f"{prefix}-uml"))
            namespace, addresses, real, ours = place.namespace, place.addresses, place.side("real"), place.side("ours")
        else:
            worlds = World(f"{prefix}-real-w"), World(f"{prefix}-ours-w")
            for world in worlds:
                stack.callback(world.remove)
                world.build()
            namespace, addresses = worlds[0].name, (WORLD4, WORLD6)
            real, ours = Node(f"{prefix}-real", worlds[0]), Node(f"{prefix}-ours", worlds[1])
        plane = stack.enter_context(ControlPlane(namespace, addresses, minor, feature_gates=FEATURE_GATES))
        twin = Twin(plane, Path(folder), real, ours, compat or minor)
        stack.callback(twin.close)
        yield twin


def run(clusters: Sequence[Cluster], settings: Settings, minor: str, compat: str | None) -> list[Case]:
    """All clusters; those that need a kernel of their own beside the others, since each has but one processor."""
    groups = [[c for c in clusters if (c.mode == "ipvs") == uml] for uml in (False, True)]
    found: list[Case] = []
    if groups[1] and groups[0]:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        left = _Left(groups[1])
        aside = multiprocessing.Process(target=_aside, args=(sender, left, settings, minor, compat))
        aside.start()
        sender.close()
        try:
            found += _run_group(groups[0], settings, minor, compat, uml=False)
            found += _run_group(left, settings, minor, compat, uml=True)
            found += receiver.recv()
        except EOFError:
            raise RuntimeError("the comparison in the user-mode kernel ended without a result") from None
        finally:
            aside.terminate()
            aside.join()
        return found
    return _run_group(groups[0] or groups[1], settings, minor, compat, uml=bool(groups[1]))


class _Left:
    """Clusters for several processes, each for the one that asks first."""

    def __init__(self, clusters: Sequence[Cluster]) -> None:
        self._clusters, self._taken = clusters, multiprocessing.Value("i", 0)

    def __iter__(self) -> Iterator[Cluster]:
        while True:
            with self._taken.get_lock():
                number = self._taken.value
                self._taken.value += 1
            if number >= len(self._clusters):
                return
            yield self._clusters[number]


def _aside(sender: Connection, clusters: Iterable[Cluster], settings: Settings, minor: str, compat: str | None) -> None:
    stop_on_term()
    sender.send(_run_group(clusters, settings, minor, compat, uml=True))


def _run_group(
    clusters: Iterable[Cluster], settings: Settings, minor: str, compat: str | None, *, uml: bool
) -> list[Case]:
    rest = iter(clusters)
    first = next(rest, None)
    if first is None:
        return []
    with twins(minor, compat, uml) as twin:
        return list(Runner(twin, settings).run(chain([first], rest)))


def stop_on_term() -> None:
    """Being told to stop is no reason to leave namespaces and processes behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Runner:
    def __init__(self, twin: Twin, settings: Settings) -> None:
        self.twin, self.settings = twin, settings

    def run(self, clusters: Iterable[Cluster]) -> Iterator[Case]:
        for cluster in clusters:
            case = self.case(cluster)
            verdict = "differs" if case.failures else "equal"
            print(
                f"{cluster.mode:9} seed {cluster.seed:<5} {len(cluster.objects):4} objects {case.comparisons:3} states "
                f"{case.lines:7} lines {case.probes:4} probes {case.seconds:6.1f} s  {verdict}",
                flush=True,
            )
            for failure in case.failures:
                print(failure, flush=True)
            yield case

    def case(self, cluster: Cluster) -> Case:
        """One cluster: first state, packets, history; ends at the first difference."""
        case, started = Case(cluster), time.monotonic()
        self._last = (cluster, cluster)
        try:
            self._live(cluster, case)
        except (Refused, RuntimeError, ApiError) as error:
            case.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self.twin.stop()
        if case.failures and self.settings.shrink_seconds:
            case.failures.append(self._shrunk(*self._last))
        case.seconds = time.monotonic() - started
        return case

    def _live(self, cluster: Cluster, case: Case) -> None:
        self.twin.start(cluster)
        if self.settings.given:
            case.cluster = cluster = self.twin.stored(cluster)
            self._last = (cluster, cluster)
        if not self._compare(cluster, case, "at first"):
            return
        if self.settings.record:
            goldens.record(self.settings.record, self.twin, cluster)
        if self.settings.packets:
            case.probes, discords = self.twin.packets(cluster)
            if discords:
                # A busy machine can lose packets for seconds; a kernel of other rules disagrees every time.
                _count, again = self.twin.packets(cluster)
                discords = [each for each in again if each.probe in {discord.probe for discord in discords}]
            case.failures += [str(discord) for discord in discords]
        for number, step in enumerate(self._steps(cluster), 1):
            self._last = (self._last[1], step.after)
            self.twin.change(step.changes)
            self.twin.catch_up(step.after)
            what = ", ".join(str(change) for change in step.changes)
            if not self._compare(step.after, case, f"after step {number} ({what})"):
                return

    def _steps(self, cluster: Cluster) -> Iterator[Step]:
        """The changes that were given, or a drawn history."""
        if self.settings.changes is not None:
            yield self.settings.changes
            return
        steps = self.settings.steps
        if cluster.mode == "ipvs":  # where a step takes a minute
            steps = min(1, steps) if cluster.seed % 5 == 0 else 0
        history = History(cluster)
        for _ in range(steps):
            yield history.step()

    def _compare(self, cluster: Cluster, case: Case, when: str) -> bool:
        result = self.twin.compare(cluster)
        case.comparisons += 1
        case.lines += result.lines
        if result.differences:
            case.failures.append("\n".join([f"{when}:", *(str(d) for d in result.differences[:20])]))
        return not result.differences

    # When something differs

    def _shrunk(self, before: Cluster, after: Cluster) -> str:
        """The smallest cluster that still differs, or the smallest change of one, as manifests."""
        seconds = self.settings.shrink_seconds
        name = f"{after.mode}-{after.seed}"
        if self._differs(after):
            shrinker = Shrinker(self._differs, seconds)
            folder = self._keep(shrinker.shrink(after), name)
            manifests = (folder / "cluster.yaml").read_text() + "---\n" + (folder / "config.yaml").read_text()
            return f"The smallest cluster that differs, again with\n  {_again(folder, after)}\n\n{manifests}"
        if before is after or not self._differs(before, after):
            return "This did not happen again."
        first, second = shrink_step(before, after, self._differs, seconds)
        folder = self._keep(first, name)
        told = "\n".join(json.dumps({"action": c.action, **c.object}) for c in changes(first.objects, second.objects))
        (folder / "changes.json").write_text(told + "\n")
        return (
            f"Only the way there differs. The smallest cluster, again with\n  {_again(folder, after)} "
            f"--changes {folder}/changes.json\n\n{(folder / 'cluster.yaml').read_text()}\nand its changes:\n{told}"
        )

    def _differs(self, before: Cluster, after: Cluster | None = None) -> bool:
        """Whether a cluster, or the way from one to the next, ends in a difference; what is refused does not count."""
        try:
            self.twin.start(before)
            if after is None:
                return bool(self.twin.compare(before, patience=1).differences)
            self.twin.apply(before)
            self.twin.change(changes(before.objects, after.objects))
            self.twin.catch_up(after)
            return bool(self.twin.compare(after, patience=1).differences)
        except Refused:
            return True
        except (RuntimeError, ApiError):
            return False
        finally:
            self.twin.stop()

    def _keep(self, cluster: Cluster, name: str) -> Path:
        folder = self.settings.output / "failures" / name
        folder.mkdir(parents=True, exist_ok=True)
        content = {"apiVersion": "v1", "kind": "List", "items": json.loads(json.dumps(cluster.objects))}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        (folder / "config.yaml").write_text(yaml.safe_dump(cluster.config, sort_keys=False))
        return folder


def _again(folder: Path, cluster: Cluster) -> str:
    options = f"--cluster {folder}/cluster.yaml --config {folder}/config.yaml --node {cluster.node}"
    return f"python -m tests.conformance {options} --kubernetes {cluster.minor}"
