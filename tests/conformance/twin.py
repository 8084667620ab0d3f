"""Twins: a real kube-proxy in one namespace, our whole path in the other, the same cluster for both.

After the first sync and after every step of a history both kernels are read and compared. kube-proxy programs in its
own time, so a difference counts only when it is still there after kube-proxy has synced again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.controlplane import OWN, ControlPlane, binaries
from tests.lab.program import PROGRAM, PROGRAMS

from . import kernel, packets
from .draw import Cluster
from .foretold import Asked
from .history import Change
from .kubeproxy import SENTINEL_NAMESPACE, KubeProxy, Sentinel
from .namespaces import Node
from .ours import Refused, Renderer
from .side import Network, Side

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Comparison:
    """Both kernels at one moment."""

    differences: list[kernel.Difference]
    lines: int


@dataclass
class Twin:
    """Two namespaces and what is needed to fill them; good for one cluster after the other."""

    plane: ControlPlane
    folder: Path
    real: Side
    ours: Side
    compat: str  # the minor whose rules we write; the control plane's, unless differences are wanted

    def __post_init__(self) -> None:
        self.sentinel = Sentinel(self.plane)
        self.version = binaries(self.plane.minor).name
        # In the twins' folder, which is also seen from a kernel of its own.
        self.binary = Path(shutil.copy(binaries(self.plane.minor) / "kube-proxy", self.folder))
        self._renderer = Renderer(self.plane.namespace, self.plane.kubeconfig(self.folder / "akp.kubeconfig", "akp"))
        self._proxy: KubeProxy | None = None
        self._applied = 0
        self._large = False  # whether a cluster since the last full sync was
        # A kube-proxy that begins before it knows its node's zone keeps to that until all is synced again.
        self._first = True

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self._renderer.close()

    # One cluster

    def start(self, cluster: Cluster) -> None:
        """Load the cluster, start kube-proxy in a virgin namespace, wait until it is done."""
        self._applied, self._first, self._large = 0, True, False
        self.plane.load([*cluster.objects, *self.sentinel.objects()])
        interface = cluster.config.get("detectLocal", {}).get("bridgeInterface", "veth0")
        for side in (self.real, self.ours):
            side.build(Network(cluster.addresses, cluster.others, cluster.pod_cidrs, interface))
        ipv4 = any(":" not in address for address in cluster.addresses)
        server = next(address for address in self.plane.addresses if (":" not in address) == ipv4)
        kubeconfig = self.plane.kubeconfig(self.folder / "kubeconfig", "kube-proxy", server)
        self._proxy = KubeProxy(self.real, self.binary, self.folder, cluster.config, kubeconfig)
        self._proxy.start()
        self._proxy.wait(self.sentinel, cluster.mode)

    def stored(self, cluster: Cluster) -> Cluster:
        """The cluster as the API server has it, with all defaults: for one that somebody else has written."""
        found = []
        for obj in self.plane.objects():
            meta = {k: v for k, v in obj["metadata"].items() if k in ("name", "namespace", "labels", "annotations")}
            own = (obj["kind"], meta["name"]) in OWN or meta.get("namespace") == SENTINEL_NAMESPACE
            lists = {k: obj.get(k) or [] for k in ("endpoints", "ports")} if obj["kind"] == "EndpointSlice" else {}
            if not own:
                found.append({**obj, **lists, "metadata": meta})
        return replace(cluster, objects=tuple(found))

    def stop(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
            self._proxy = None
        for side in (self.real, self.ours):
            side.remove()
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        self.plane.clear()

    def restart_proxy(self, cluster: Cluster) -> None:
        """A full sync from scratch, which some of kube-proxy's own state needs."""
        assert self._proxy is not None
        self._proxy.stop()
        self._proxy.start()
        self.catch_up(cluster)

    def catch_up(self, cluster: Cluster) -> None:
        assert self._proxy is not None
        self.sentinel.poke()
        self._proxy.wait(self.sentinel, cluster.mode)

    def change(self, changes: Sequence[Change]) -> None:
        client = self.plane.client
        self.plane.make_namespaces(change.object for change in changes)
        actions = {"create": client.create, "replace": client.replace, "delete": client.delete}
        for change in changes:
            actions[change.action](change.object)
        if any(change.object["kind"] == "Node" for change in changes):
            # Nodes come on a watch of their own; nothing in the kernel tells that it was heard.
            time.sleep(0.3)

    # Our side

    def apply(self, cluster: Cluster) -> None:
        """API server -> snapshot -> bundle -> kernel; every second time after the first as a delta."""
        kind = "delta" if self._applied % 2 else "full"
        self._applied += 1
        config, facts = self.folder / "config.json", self.folder / "facts.json"
        config.write_text(json.dumps(cluster.config, indent=1))
        facts.write_text(self._run(self.ours.command(["sh", str(PROGRAM), "facts"])).splitlines()[-1])
        bundle = self.folder / "bundle"
        self._renderer.render(
            kind=kind,
            snapshot=str(self.folder / "snapshot.json"), config=str(config), facts=str(facts), node=cluster.node,
            compat=self.compat, output=str(bundle),
        )  # fmt: skip
        state = f"AKP_STATE={self.folder}/state"
        mode = json.loads((bundle / "manifest.json").read_text())["mode"]
        apply = ["env", state, "sh", str(PROGRAMS[mode]), "apply", str(bundle)]
        self._run(self.ours.command(apply))

    def _run(self, argv: Sequence[str]) -> str:
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused(f"{' '.join(argv)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    # Both

    def compare(self, cluster: Cluster, patience: int = 3) -> Comparison:
        """Apply our side and compare; kube-proxy gets a few more syncs to catch up with us."""
        self._large = self._large or cluster.large
        result = self._compare_now(cluster)
        for attempt in range(patience):
            if not result.differences:
                break
            time.sleep(0.4 * (attempt + 1))
            self.catch_up(cluster)
            result = self._compare_now(cluster)
        if result.differences and (self._first or _needs_full_sync(cluster, result.differences, large=self._large)):
            self.restart_proxy(cluster)
            self._large = cluster.large
            result = self._compare_now(cluster)
        self._first = False
        return result

    def _compare_now(self, cluster: Cluster) -> Comparison:
        self.apply(cluster)
        texts = (kernel.read(side, cluster.mode) for side in (self.real, self.ours))
        real, ours = (kernel.canonical(text, cluster.mode) for text in texts)
        return Comparison(self._differences(cluster, real, ours), kernel.rules(real))

    def packets(self, cluster: Cluster) -> tuple[int, list[packets.Discord]]:
        """The same connections through both, and as explained; only after both kernels were found alike."""
        real, ours = self.real, self.ours
        if not (isinstance(real, Node) and isinstance(ours, Node)):
            return 0, []
        for side in (real, ours):
            side.forward()
        asked = Asked.of(cluster, real, self.folder / "asked", self.folder / "snapshot.json")
        return asyncio.run(packets.compare(cluster, real, ours, lambda probe: asked.about(probe).objection))

    def _differences(self, cluster: Cluster, real: kernel.State, ours: kernel.State) -> list[kernel.Difference]:
        found = kernel.differences(real, ours)
        if found and (cluster.mode == "nftables" or self._large):
            leftovers = kernel.leftovers(real)
            found = [each for each in found if each.ours is not None or each.name not in leftovers]
        return found


def _needs_full_sync(cluster: Cluster, found: Sequence[kernel.Difference], *, large: bool) -> bool:
    """Whether kube-proxy may be right only after a full sync, which it does an hour later or never.

    Crossing 1,000 endpoints, up or down, changes the comments of all rules, but only those of changed Services are
    rewritten: until the next full sync the others are those of a cluster that was large, or was not.
    In nftables mode ServiceCIDRs that arrive after the first sync wait for the next full one.
    """
    late_cidrs = cluster.mode == "nftables" and all(each.name.endswith(" cluster-ips-check") for each in found)
    return large or late_cidrs
