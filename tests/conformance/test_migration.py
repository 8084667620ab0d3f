"""docs/migration.md for real: nodes move from a running kube-proxy and back, one by one, under load."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.collection.play import SHOP, Run, playbook
from tests.conftest import unused_prefix
from tests.controlplane import ControlPlane, binaries, netns
from tests.lab import Lab
from tests.lab.node import Node
from tests.lab.place import Connection
from tests.unit.build import Object, endpoint, node, port, service, slice_of

from .kubeproxy import KubeProxy, Sentinel
from .side import Network, Side

ADDRESS, GATEWAY = "192.168.81.1", "192.168.81.2"
TCP, UDP = ("tcp", "10.96.70.1", 80), ("udp", "10.96.70.2", 53)
ALL = ("n1", "n2", "n3")
HELD, NEW = 500, 10_000  # connections

pytestmark = pytest.mark.controlplane


@dataclass
class LabSide(Side):
    """A node of a lab, for kube-proxy to run on."""

    node: Node

    def command(self, argv: Sequence[str]) -> list[str]:
        return self.node.enter(argv)

    def build(self, network: Network) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError


@contextmanager
def plane_of(lab: Lab) -> Iterator[ControlPlane]:
    """A control plane that the nodes of the lab reach."""
    name = f"akpm{os.getpid()}"
    agent = (lab.state / "agent.pid").read_text().strip()
    netns.add(name)
    try:
        netns.ip("-n", name, "link", "add", "lab", "type", "veth", "peer", "name", "plane", "netns", agent)
        lab.sh(f"ip addr add {GATEWAY}/24 dev plane\nip link set plane up\n")
        for words in (f"addr add {ADDRESS}/24 dev lab", "link set lab up", f"route add default via {GATEWAY}"):
            netns.ip("-n", name, *words.split())
        with ControlPlane(name, (ADDRESS,)) as plane:
            yield plane
    finally:
        netns.delete(name)


def cluster(lab: Lab) -> list[Object]:
    """Two Services with an endpoint on each node."""
    here = [endpoint(lab.pod(f"web-{name}").addresses[0], node=name, ready=True) for name in ALL]
    dns = [port(53, "dns", "UDP")]
    return [
        *(node(each.name, each.addresses[0]) for each in lab.nodes),
        service("web", "shop", clusterIP=TCP[1], ports=[port(80)]),
        slice_of("web", *here, ports=[port(8080)]),
        service("dns", "shop", clusterIP=UDP[1], ports=dns),
        slice_of("dns", *here, ports=[port(5353, "dns", "UDP")]),
    ]


@dataclass
class Load:
    """Connections that are held on all nodes, and new ones all the time until it is left."""

    lab: Lab
    held: int
    made: int = 0
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._end = threading.Event()
        ways = [(place, to) for place in self.lab.nodes for to in (TCP, UDP)]
        chosen = [ways[i % len(ways)] for i in range(self.held)]
        self._open: list[Connection] = [place.open(*to, timeout=5) for place, to in chosen]
        self._thread = threading.Thread(target=self._call, args=(ways,))
        self._thread.start()
        return self

    def _call(self, ways: Sequence[tuple[Node, tuple[str, str, int]]]) -> None:
        while not self._end.wait(0.25):
            for place, to in ways:
                replies = place.calls(*to, 8, timeout=5)
                self.made += len(replies)
                self.failed += [f"{place.name} {to}: {reply}" for reply in replies if reply.outcome != "answered"]

    def broken(self) -> int:
        return sum(each.ask(timeout=5).outcome != "answered" for each in self._open)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for each in self._open:
            each.close()


@dataclass
class Keeper:
    """Starts and stops each kube-proxy a moment after it is asked to, by a file: what a label does to a DaemonSet."""

    folder: Path
    proxies: dict[str, KubeProxy]

    def __enter__(self) -> Keeper:
        self.folder.mkdir()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()
        return self

    def _keep(self) -> None:
        while not self._end.wait(0.1):
            for asked in self.folder.iterdir():
                what, _dash, name = asked.name.partition("-")
                asked.unlink()
                proxy = self.proxies[name]
                (proxy.start if what == "start" else proxy.stop)()

    def ask(self, what: str) -> str:
        """The command for the host that a play is at."""
        return f"touch {self.folder}/{what}-{{{{ inventory_hostname }}}}"

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for proxy in self.proxies.values():
            proxy.stop()


@dataclass
class Rig:
    """Three nodes with a kube-proxy each, and an operator."""

    lab: Lab
    plane: ControlPlane
    work: Path
    mode: str

    def __post_init__(self) -> None:
        config = {**yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()), "mode": self.mode}
        self.config = self.work / "kube-proxy.yaml"
        self.config.write_text(yaml.safe_dump(config))
        kubeconfig = self.plane.kubeconfig(self.work / "proxy.kubeconfig", "kube-proxy", ADDRESS)
        self.inventory = self.lab.inventory(self.work / "hosts.yml")
        # A node sees the machine's /tmp, and no home directory.
        binary = Path(shutil.copy(binaries() / "kube-proxy", self.work))
        proxies = {
            each.name: KubeProxy(
                LabSide(each.name, each), binary, self.work / each.name,
                {**config, "hostnameOverride": each.name}, kubeconfig,
            )
            for each in self.lab.nodes
        }  # fmt: skip
        self.keeper = Keeper(self.work / "asked", proxies)

    def play(self, name: str, *arguments: str, **variables: object) -> Run:
        known: dict[str, object] = {
            "kube_proxy_cluster_dir": "",
            "kube_proxy_kubeconfig": str(self.plane.kubeconfig(self.work / "akp.kubeconfig", "akp", ADDRESS)),
            "kube_proxy_config": str(self.config),
            "kube_proxy_batches": [1],
            "kube_proxy_migrate_wait": 60,
            "kube_proxy_stop_command": self.keeper.ask("stop"),
            "kube_proxy_start_command": self.keeper.ask("start"),
        }
        prefix = netns.command(self.plane.namespace, [])
        return playbook(
            name, self.inventory, self.work, *arguments, variables={**known, **variables}, prefix=prefix
        )  # fmt: skip

    def running(self) -> list[str]:
        """The nodes where kube-proxy runs."""
        asked = ((each.name, each.run(["pgrep", "-x", "kube-proxy"], check=False)) for each in self.lab.nodes)
        return [name for name, done in asked if done.returncode == 0]

    def holding(self, path: str) -> list[str]:
        """The nodes that have this file, or something in this folder."""
        script = f"[ ! -d {path} ] && [ -e {path} ] || ls -A {path}/* >/dev/null 2>&1"
        asked = ((each.name, each.run(["sh", "-c", script], check=False)) for each in self.lab.nodes)
        return [name for name, done in asked if done.returncode == 0]


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Lab, ControlPlane]]:
    """Nodes with a pod each, and a cluster of them."""
    with Lab(unused_prefix(), len(ALL)) as lab, plane_of(lab) as plane:
        for name in ALL:
            lab.add_pod(f"web-{name}", name, serve=[("tcp", 8080), ("udp", 5353)])
        plane.load(cluster(lab))
        yield lab, plane


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_nodes_move_one_by_one_and_back_under_load(site: tuple[Lab, ControlPlane], tmp_path: Path, mode: str) -> None:
    lab, plane = site
    began = time.monotonic()
    sentinel = Sentinel(plane)
    plane.load(sentinel.objects())
    rig = Rig(lab, plane, tmp_path, mode)
    with rig.keeper:
        for proxy in rig.keeper.proxies.values():
            proxy.start()
        for proxy in rig.keeper.proxies.values():
            proxy.wait(sentinel, mode)
        with Load(lab, HELD) as load:
            looked = rig.play("migrate_nodes", "--check", "--limit", "n1")
            assert [each.result["lines"] for each in looked.of("node", differing=0)] == [[]]
            assert not rig.holding("/var/lib/akp")
            assert rig.running() == [*ALL]

            moved = rig.play("migrate_nodes")
            assert [each.host for each in moved.of("node", differing=0)] == [*ALL]
            assert moved.summary[0] == "3 nodes: 3 changed, 0 unchanged, 0 failed"
            assert rig.running() == []
            assert rig.holding("/var/lib/akp") == rig.holding("/etc/cron.d/akp-restore") == [*ALL]
            after_moving = load.broken()

            back = rig.play("migrate_nodes", kube_proxy_migrate_state="back")
            assert [each.host for each in back.of("node", differing=0)] == [*ALL]
            assert rig.running() == [*ALL]
            assert rig.holding("/var/lib/akp") == rig.holding("/etc/cron.d/akp-restore") == []
            # kube-proxy follows the cluster again.
            sentinel.poke()
            for proxy in rig.keeper.proxies.values():
                proxy.wait(sentinel, mode)
            while load.made < NEW:
                time.sleep(0.1)
            broken = load.broken()
    seconds = time.monotonic() - began
    plane.client.delete_all(sentinel.objects())
    print(
        f"\n{mode}: 3 nodes to us and back in {seconds:.0f} s; {HELD} held connections, {broken} broken; "
        f"{load.made} new ones, {len(load.failed)} failed"
    )
    assert (after_moving, broken, load.failed) == (0, 0, [])
