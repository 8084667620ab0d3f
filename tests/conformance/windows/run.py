"""Drawn clusters with a Windows node: what kube-proxy.exe tells the Host Networking Service against what we write.

python -m tests.conformance kernelspace --clusters 5
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.history import History
from tests.conformance.kubeproxy import ADDRESSES, Sentinel
from tests.conformance.namespaces import WORLD4, WORLD6, Node, World
from tests.conformance.run import FEATURE_GATES
from tests.conformance.side import Network
from tests.controlplane import ControlPlane

from .draw import NETWORK_TYPES, VERSIONS, WindowsCase, case
from .oracle import KubeProxyExe, Store, Wine, binaries

Object = dict[str, Any]


@dataclass
class Rig:
    """A control plane, a namespace, and a Windows in it."""

    plane: ControlPlane
    node: Node
    wine: Wine
    folder: Path

    def live(self, drawn: WindowsCase, steps: int) -> Iterator[tuple[str, list[str]]]:
        """What differs at first, and after each step of a history."""
        sentinel = Sentinel(self.plane)
        self.plane.load([*drawn.cluster.objects, *sentinel.objects()])
        self.node.build(Network(drawn.cluster.addresses, drawn.cluster.others, drawn.cluster.pod_cidrs, "veth0"))
        store = Store(self.folder / "store")
        store.write(drawn.version, drawn.network, drawn.endpoints)
        proxy = KubeProxyExe(self.node, self.wine, self.folder, store)
        primary = drawn.cluster.addresses[0]
        server = next(each for each in self.plane.addresses if (":" in each) == (":" in primary))
        proxy.start(drawn.cluster.config, self.plane.kubeconfig(self.folder / "kubeconfig", "kube-proxy", server))
        try:
            proxy.wait(lambda made: self._shows(made, sentinel))
            yield "at first", self._differences(drawn, store)
            history = History(drawn.cluster)
            for number in range(1, steps + 1):
                step = history.step()
                self._change(step.changes)
                sentinel.poke()
                proxy.wait(lambda made: self._shows(made, sentinel))
                told = ", ".join(map(str, step.changes))
                yield f"after step {number} ({told})", self._differences(drawn.after(step.after), store)
        finally:
            proxy.stop()
            self.node.remove()
            self.plane.clear()

    def _change(self, changes: Any) -> None:
        client = self.plane.client
        self.plane.make_namespaces(change.object for change in changes)
        actions = {"create": client.create, "replace": client.replace, "delete": client.delete}
        for change in changes:
            actions[change.action](change.object)

    def _shows(self, made: list[Object], sentinel: Sentinel) -> bool:
        """Whether the last poke is there, in the families that the node serves."""
        frontends = {
            (vip, each["PortMappings"][0]["ExternalPort"]) for each in made for vip in each.get("FrontendVIPs", [])
        }
        own = [vip for vip in ADDRESSES.values() if any(vip == each for each, _port in frontends)]
        return bool(own) and all((vip, sentinel.number) in frontends for vip in own)

    def ours(self, drawn: WindowsCase) -> tuple[dict[str, Object], list[Object]]:
        """What `akp render` writes of the cluster as it is now."""
        cluster = self.plane.export(self.folder / "cluster")
        config, facts = self.folder / "config.json", self.folder / "facts.json"
        config.write_text(json.dumps(drawn.cluster.config))
        facts.write_text(json.dumps(drawn.facts))
        argv = ["akp", "render", "--cluster", str(cluster), "--config", str(config), "--facts", str(facts)]
        argv += ["--node", drawn.cluster.node, "--output", str(self.folder / "out")]
        subprocess.run(argv, check=True, capture_output=True, text=True)
        return documents(json.loads((self.folder / "out" / drawn.cluster.node / "hns.json").read_text()))

    def _differences(self, drawn: WindowsCase, store: Store) -> list[str]:
        return differences(store.documents(), self.ours(drawn))


def documents(made: Object) -> tuple[dict[str, Object], list[Object]]:
    """Endpoints by address, and load balancers, of an hns.json."""
    endpoints = {each["IpConfigurations"][0]["IpAddress"]: each for each in made["endpoints"]}
    balancers = [
        each | {"HostComputeEndpoints": sorted(each["HostComputeEndpoints"])} for each in made["loadBalancers"]
    ]
    return endpoints, balancers


def differences(
    real: tuple[dict[str, Object], list[Object]], ours: tuple[dict[str, Object], list[Object]]
) -> list[str]:
    """What one side has and the other has not, a line each."""
    sides = [
        {json.dumps(each, sort_keys=True) for each in (*endpoints.values(), *balancers)}
        for endpoints, balancers in (real, ours)
    ]
    found = [f"only kube-proxy.exe: {each}" for each in sorted(sides[0] - sides[1])]
    found += [f"only ours: {each}" for each in sorted(sides[1] - sides[0])]
    extra = len(real[1]) - len({json.dumps(each, sort_keys=True) for each in real[1]})
    return found + ([f"kube-proxy.exe has {extra} load balancers twice"] if extra else [])


@contextmanager
def rig() -> Iterator[Rig]:
    """All that is needed, gone afterwards."""
    binaries()
    prefix = f"akpw{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="akp-windows-", dir="/tmp") as folder, ExitStack() as stack:
        world = World(f"{prefix}-w")
        stack.callback(world.remove)
        world.build()
        plane = stack.enter_context(ControlPlane(world.name, (WORLD4, WORLD6), feature_gates=FEATURE_GATES))
        wine = Wine(Path(folder) / "wine")
        stack.callback(wine.stop)
        wine.build()
        yield Rig(plane, Node(f"{prefix}-n", world), wine, Path(folder))


def run(seed: int, clusters: int, steps: int) -> int:
    """Compare; the number of clusters that differ."""
    failed = 0
    with rig() as made:
        for number in range(seed, seed + clusters):
            for network_type in NETWORK_TYPES:
                version = VERSIONS[number % len(VERSIONS)]
                drawn, began = case(number, network_type, version), time.monotonic()
                problems = _compare(made, drawn, steps)
                failed += bool(problems)
                verdict = "differs" if problems else "equal"
                size = len(drawn.cluster.objects)
                seconds = time.monotonic() - began
                what = f"kernelspace seed {number:<5} {network_type:8} HNS {version:5} {size:4} objects"
                print(f"{what} {seconds:6.1f} s  {verdict}")
                print(*problems, sep="\n", end="\n" if problems else "", flush=True)
    print(f"kernelspace: {clusters * len(NETWORK_TYPES)} clusters, {failed} differ")
    return failed


def _compare(made: Rig, drawn: WindowsCase, steps: int) -> list[str]:
    """The first state that differs, and how."""
    for when, found in made.live(drawn, steps):
        if found:
            return [f"{when}:", *found[:20]]
    return []
