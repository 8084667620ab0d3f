"""Drawn clusters with a Windows node: what kube-proxy.exe has told the Host Networking Service against what we tell it.

python -m tests.conformance kernelspace --clusters 5

One cluster and its history are shown to several Windows nodes at once, which differ in the type of their network and
the version of their service. On each, kube-proxy.exe fills one store, and akp-node.cs another: from facts that it told
itself, and the bundle that was made of them.

A kube-proxy.exe that has been running for a while leaves endpoints and load balancers behind that one that starts now
would not make, and loses some that it would. So where the stores differ after a step, another kube-proxy.exe is started
on a service of its own: what counts is whether that one is equal to ours. What differed before is told as leftovers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import load
from agentless_kube_proxy.engine import Engine

from tests.conformance.history import Change, History
from tests.conformance.kubeproxy import ADDRESSES, Sentinel
from tests.conformance.namespaces import WORLD4, WORLD6, Node, World
from tests.conformance.run import FEATURE_GATES
from tests.conformance.side import Network
from tests.controlplane import ControlPlane

from . import goldens, mono
from .draw import ROOT, Drawn, HostNetworking, draw_case
from .oracle import Documents, KubeProxyExe, Store, Wine, binaries

Object = dict[str, Any]


@dataclass
class Pair:
    """A Windows node twice: with kube-proxy.exe, and with akp-node.cs."""

    hns: HostNetworking
    folder: Path
    proxy: KubeProxyExe
    ours: mono.AkpNode
    store: Store
    told: Object = field(default_factory=dict)  # the last facts

    def follow(self, engine: Engine) -> None:
        """Facts, a bundle, and its application, as a run of ours does it."""
        bundle = self.folder / "bundle"
        shutil.rmtree(bundle, ignore_errors=True)
        self.told = self.ours.facts()
        write_bundle(engine.state(self.hns.drawn.cluster.node, self.told), bundle)
        answer = self.ours.apply(bundle)
        assert answer["missing"] == [], answer

    def differences(self) -> list[str]:
        return differences(self.proxy.store.documents(), self.store.documents())


@dataclass(frozen=True)
class Found:
    """What one moment of a cluster has shown."""

    when: str
    differ: dict[str, list[str]]  # by node
    leftovers: dict[str, list[str]]  # what a kube-proxy.exe that starts now would not have


@dataclass
class Rig:
    """A control plane, a namespace, and Windows in it."""

    plane: ControlPlane
    node: Node
    wine: Wine
    built: Path
    folder: Path
    keep: bool = False  # record what is seen at first

    def live(self, nodes: Sequence[HostNetworking], steps: int) -> Iterator[Found]:
        """What differs at first, and after each step of a history."""
        cluster, sentinel = nodes[0].drawn.cluster, Sentinel(self.plane)
        self.plane.load([*cluster.objects, *sentinel.objects()])
        self.node.build(Network(cluster.addresses, cluster.others, cluster.pod_cidrs, "veth0"))
        # Wine cannot tell interfaces where an IPv4 route leads through an IPv6 address, and only the world is needed.
        for argv in ("link del veth0", "link del veth1", "route del default", "-6 route del default"):
            self.node.run("ip", *argv.split())
        try:
            pairs = [self._pair(each) for each in nodes]
            first = self._look("at first", pairs, sentinel)
            if self.keep and not first.differ:
                goldens.record(self.plane, self.folder, pairs)
            yield first
            history = History(cluster)
            for number in range(1, steps + 1):
                step = history.step()
                self._change(step.changes)
                sentinel.poke()
                told = ", ".join(map(str, step.changes))
                yield self._look(f"after step {number} ({told})", pairs, sentinel)
        finally:
            self.wine.stop()
            self.node.remove()
            self.plane.clear()

    def _pair(self, hns: HostNetworking) -> Pair:
        folder = self.folder / str(hns)
        shutil.rmtree(folder, ignore_errors=True)
        store = Store.of(folder / "ours", hns)
        ours = mono.AkpNode(self.built, store.file, folder / "state", tuple(self.node.command([])))
        return Pair(hns, folder, self._proxy(hns, folder / "real"), ours, store)

    def _proxy(self, hns: HostNetworking, folder: Path) -> KubeProxyExe:
        cluster = hns.drawn.cluster
        proxy = KubeProxyExe(self.node, self.wine, folder, Store.of(folder, hns))
        server = next(each for each in self.plane.addresses if (":" in each) == (":" in cluster.addresses[0]))
        proxy.start(cluster.config, self.plane.kubeconfig(folder / "kubeconfig", "kube-proxy", server))
        return proxy

    def _look(self, when: str, pairs: Sequence[Pair], sentinel: Sentinel) -> Found:
        engine = self._engine(pairs[0].hns.drawn)
        for each in pairs:
            each.proxy.wait(partial(shows, sentinel, each.hns.served))
            each.follow(engine)
        unequal = {str(each.hns): (each, found) for each in pairs if (found := each.differences())}
        if when == "at first":
            return Found(when, {name: found for name, (_pair, found) in unequal.items()}, {})
        fresh = [(each, self._proxy(each.hns, each.folder / "fresh")) for each, _found in unequal.values()]
        differ = {}
        for each, proxy in fresh:
            proxy.wait(partial(shows, sentinel, each.hns.served))
            proxy.stop()
            if found := differences(proxy.store.documents(), each.store.documents()):
                differ[str(each.hns)] = found
            shutil.rmtree(proxy.folder)
        return Found(when, differ, {name: found for name, (_pair, found) in unequal.items()})

    def _engine(self, drawn: Drawn) -> Engine:
        config = self.folder / "config.json"
        config.write_text(json.dumps(drawn.cluster.config))
        engine = Engine(Choices.of({"config": str(config)}), preview=True)
        engine.update(load(self.plane.export(self.folder / "cluster")))
        return engine

    def _change(self, changes: Sequence[Change]) -> None:
        client = self.plane.client
        self.plane.make_namespaces(change.object for change in changes)
        actions = {"create": client.create, "replace": client.replace, "delete": client.delete}
        for change in changes:
            actions[change.action](change.object)


def shows(sentinel: Sentinel, families: Sequence[str], made: Documents) -> bool:
    """Whether the last poke is there, its Service and its endpoints, in the families that a node serves."""
    frontends = {
        (vip, each["PortMappings"][0]["ExternalPort"], each["PortMappings"][0]["InternalPort"])
        for each in made.balancers
        for vip in each.get("FrontendVIPs", [])
    }
    return all((ADDRESSES[family], sentinel.number, sentinel.number) in frontends for family in families)


def differences(real: Documents, ours: Documents) -> list[str]:
    """What one side has and the other has not, a line each."""
    lines = _without_chance(real).lines(), _without_chance(ours).lines()
    found = [f"only kube-proxy.exe: {each}" for each in sorted(lines[0].keys() - lines[1].keys())]
    found += [f"only ours: {each}" for each in sorted(lines[1].keys() - lines[0].keys())]
    often = [each for each in sorted(lines[0].keys() & lines[1].keys()) if lines[0][each] != lines[1][each]]
    return found + [f"kube-proxy.exe has {lines[0][each]}, we have {lines[1][each]}: {each}" for each in often]


def _without_chance(made: Documents) -> Documents:
    """Without the source of balancers for health checks.

    Service ports with one ingress address share such a balancer. It has the source of the port that kube-proxy comes
    to first, and its hash map decides which one that is. Unit tests hold ours.
    """
    balancers = [
        {k: v for k, v in each.items() if k != "SourceVIP" or each["HostComputeEndpoints"] != [ROOT]}
        for each in made.balancers
    ]
    return Documents(made.endpoints, balancers)


@contextmanager
def rig() -> Iterator[Rig]:
    """All that is needed, gone afterwards."""
    binaries()
    prefix = f"akpw{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="akp-windows-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        world = World(f"{prefix}-w")
        stack.callback(world.remove)
        world.build()
        plane = stack.enter_context(ControlPlane(world.name, (WORLD4, WORLD6), feature_gates=FEATURE_GATES))
        wine = Wine(folder / "wine")
        stack.callback(wine.stop)
        wine.build()
        yield Rig(plane, Node(f"{prefix}-n", world), wine, mono.build(folder / "mono"), folder)


def record(network_types: Sequence[str], versions: Sequence[str]) -> int:
    """Goldens anew; the number of nodes that differ, which are not kept."""
    return run(goldens.SEEDS, 0, network_types, versions, keep=True)


def run(
    seeds: Sequence[int], steps: int, network_types: Sequence[str], versions: Sequence[str], *, keep: bool = False
) -> int:
    """Compare; the number of nodes of a cluster that differ."""
    failed = states = left = 0
    with rig() as made:
        made.keep = keep
        for seed in seeds:
            drawn, began = draw_case(seed), time.monotonic()
            nodes = [HostNetworking(drawn, kind, version) for kind in network_types for version in versions]
            wrong: set[str] = set()
            for found in made.live(nodes, steps):
                states += len(nodes)
                left += len(found.leftovers)
                wrong |= found.differ.keys()
                _tell(found)
            failed += len(wrong)
            what = f"kernelspace seed {seed:<5} {len(nodes)} nodes {len(drawn.cluster.objects):4} objects"
            verdict = f"differs: {', '.join(sorted(wrong))}" if wrong else "equal"
            print(f"{what} {time.monotonic() - began:6.1f} s  {verdict}", flush=True)
    nodes_of = len(network_types) * len(versions)
    print(
        f"kernelspace: {len(seeds)} clusters on {nodes_of} nodes each, {states} states compared, "
        f"{left} of them with leftovers of a running kube-proxy.exe, {failed} nodes differ"
    )
    return failed


def _tell(found: Found) -> None:
    for kind, by_node in (("differs", found.differ), ("leftovers", found.leftovers)):
        for name, lines in by_node.items():
            print(f"  {name} {kind} {found.when}", *(f"    {each}" for each in lines[:20]), sep="\n")
