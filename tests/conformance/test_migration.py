"""docs/migration.md for real: nodes move from a running kube-proxy and back, one by one, under load."""

from __future__ import annotations

import os
import shutil
import threading
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
    pause: float  # seconds between new connections
    made: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._end = threading.Event()
        each = self.held // (2 * len(ALL))
        self._open: list[Connection] = [
            place.open(*to) for place in self.lab.nodes for to in (TCP, UDP) for _ in range(each)
        ]
        self._threads = [
            threading.Thread(target=self._call, args=(place, to)) for place in self.lab.nodes for to in (TCP, UDP)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _call(self, place: Node, to: tuple[str, str, int]) -> None:
        key = f"{place.name} {to[0]}"
        while not self._end.wait(self.pause):
            for reply in place.calls(*to, 4):
                self.made[key] = self.made.get(key, 0) + 1
                if reply.outcome != "answered":
                    self.failed.append(f"{key}: {reply}")

    def broken(self) -> int:
        return sum(each.ask().outcome != "answered" for each in self._open)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@dataclass
class Rig:
    """Three nodes with a kube-proxy each, and the commands that stop and start them."""

    lab: Lab
    plane: ControlPlane
    work: Path
    mode: str

    def __post_init__(self) -> None:
        config = {**yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()), "mode": self.mode}
        self.config = self.work / "kube-proxy.yaml"
        self.config.write_text(yaml.safe_dump(config))
        kubeconfig = self.plane.kubeconfig(self.work / "proxy.kubeconfig", "kube-proxy", ADDRESS)
        # A node sees the machine's /tmp, and no home directory.
        binary = Path(shutil.copy(binaries() / "kube-proxy", self.work))
        self.proxies = {
            each.name: KubeProxy(
                LabSide(each.name, each), binary, self.work / each.name,
                {**config, "hostnameOverride": each.name}, kubeconfig,
            )
            for each in self.lab.nodes
        }  # fmt: skip

    def migrate(self, name: str, state: str) -> Run:
        """One node, as an operator does it: the playbook waits until kube-proxy is gone or there."""
        proxy = self.proxies[name]
        timer = threading.Timer(2, proxy.stop if state == "moved" else proxy.start)
        timer.start()
        variables = {
            "kube_proxy_cluster_dir": "",
            "kube_proxy_kubeconfig": str(self.plane.kubeconfig(self.work / "akp.kubeconfig", "akp", ADDRESS)),
            "kube_proxy_config": str(self.config),
            "kube_proxy_migrate_state": state,
            "kube_proxy_migrate_wait": 60,
        }
        try:
            return playbook(
                "migrate_nodes", self.lab.inventory(self.work / "hosts.yml"), self.work, "--limit", name,
                variables=variables, prefix=netns.command(self.plane.namespace, []),
            )  # fmt: skip
        finally:
            timer.join()


def rounds(tmp_path: Path, mode: str, held: int, pause: float) -> Load:
    with Lab(unused_prefix(), len(ALL)) as lab, plane_of(lab) as plane:
        for name in ALL:
            lab.add_pod(f"web-{name}", name, serve=[("tcp", 8080), ("udp", 5353)])
        sentinel = Sentinel(plane)
        plane.load([*cluster(lab), *sentinel.objects()])
        rig = Rig(lab, plane, tmp_path, mode)
        try:
            for proxy in rig.proxies.values():
                proxy.start()
            for proxy in rig.proxies.values():
                proxy.wait(sentinel, mode)
            with Load(lab, held, pause) as load:
                for name in ALL:
                    run = rig.migrate(name, "moved")
                    rehearsed = next(each for each in run.of("node") if each.result.get("chains")).result["chains"]
                    print(name, rehearsed)
                    assert rehearsed["ipv4"]["same"] > 0, rehearsed
                    assert lab.node(name).run(["pgrep", "-x", "kube-proxy"], check=False).returncode == 1
                assert load.broken() == 0
                for name in ALL:
                    rig.migrate(name, "back")
                    assert not lab.node(name).run(["ls", "-A", "/var/lib/akp"], check=False).stdout
                # kube-proxy follows the cluster again.
                sentinel.poke()
                for proxy in rig.proxies.values():
                    proxy.wait(sentinel, mode)
                broken = load.broken()
        finally:
            for proxy in rig.proxies.values():
                proxy.stop()
    print(f"\n{mode}: {held} held, {broken} broken; {sum(load.made.values())} made, {len(load.failed)} failed")
    assert broken == 0
    assert load.failed == []
    return load


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_nodes_move_one_by_one_and_back(tmp_path: Path, mode: str) -> None:
    load = rounds(tmp_path, mode, held=30, pause=0.5)
    assert len(load.made) == 6


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_nodes_move_under_load(tmp_path: Path, mode: str) -> None:
    load = rounds(tmp_path, mode, held=498, pause=0.02)
    assert sum(load.made.values()) >= 10_000
