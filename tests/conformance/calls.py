"""userspace mode under load: a kube-proxy 1.25 and our proxies, each in a namespace with the same pods.

Both sides have the same Services and Endpoints, from the start. Pods and clients are addresses of the namespace; a pod
that is dark is behind a link that leads nowhere, and one that refuses is an address where nothing listens.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentless_kube_proxy.bundle.write import write_bundle

from tests.controlplane import DEFAULT_MINOR, netns
from tests.node.host import Host
from tests.unit.build import node, render, service

from . import talk
from .draw import Cluster
from .userspace import MODE, Oracle, twins

Object = dict[str, Any]

NODE = "192.168.77.11"
PODS = ("10.244.1.1", "10.244.1.2", "10.244.1.3")
REFUSING = "10.244.1.8"
DARK = ("10.244.9.1", "10.244.9.2", "10.244.9.3")
CLIENTS = tuple(f"172.16.8.{i}" for i in range(1, 11))
EXPIRY = 2  # seconds until a client that was away is forgotten


@dataclass(frozen=True)
class Case:
    """Calls to a Service with these endpoints."""

    name: str
    endpoints: tuple[str, ...]
    calls: int
    at_once: int = 10
    clients: tuple[str, ...] = ()
    affinity: bool = False

    @property
    def live(self) -> bool:
        return any(pod in PODS for pod in self.endpoints)


CASES = (
    # Right after the start no check has found out about a pod yet.
    Case("a dark pod", (PODS[0], PODS[1], DARK[0]), 60),
    Case("a refusing pod", (PODS[0], PODS[1], REFUSING), 300),
    Case("one live pod, one refusing, one dark", (PODS[0], REFUSING, DARK[0]), 60),
    Case("all dark", DARK, 6, 2),
    Case("none", (), 40),
    Case("round robin", PODS, 300),
    Case("affinity", PODS, 300, 10, CLIENTS, affinity=True),
)


def address(index: int) -> str:
    return f"10.96.7.{index + 1}"


def objects_of(cases: Sequence[Case]) -> list[Object]:
    """Services, the first at the first address and so on, and their Endpoints, which either side reads."""
    made = []
    for index, case in enumerate(cases):
        sticky: Object = {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": EXPIRY}},
        }
        made.append(service(f"case-{index}", clusterIP=address(index), **(sticky if case.affinity else {})))
        made.append(endpoints(f"case-{index}", case.endpoints))
    return made


def endpoints(name: str, addresses: Sequence[str]) -> Object:
    subset = {"addresses": [{"ip": ip} for ip in addresses], "ports": [{"name": "http", "port": talk.PORT}]}
    meta = {"namespace": "shop", "name": name}
    return {"apiVersion": "v1", "kind": "Endpoints", "metadata": meta, "subsets": [subset] if addresses else []}


class Side(ABC):
    """A namespace with pods, clients and one of the two proxies."""

    @abstractmethod
    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command that runs argv in the namespace."""

    def furnish(self, stack: ExitStack) -> None:
        """Pods and clients."""
        own = [f"ip addr add {ip}/32 dev lo" for ip in (*PODS, REFUSING, *CLIENTS)]
        link = ["ip link add dark type veth peer name void", "ip link set void up", "ip link set dark up"]
        # At the other end there is no such neighbour.
        dark = [f"ip route add {ip} dev dark; ip neigh add {ip} lladdr 02:00:00:00:00:09 dev dark" for ip in DARK]
        script = "; ".join([*link, *own, *dark])
        subprocess.run(self.enter(["sh", "-euc", script]), check=True)
        pods = self.start("serve", *PODS)
        stack.callback(pods.wait)
        stack.callback(pods.terminate)
        assert pods.stdout is not None
        assert pods.stdout.readline() == "ready\n"

    def start(self, *words: object) -> subprocess.Popen[str]:
        argv = [sys.executable, talk.__file__, *map(str, words)]
        return subprocess.Popen(self.enter(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> Any:
        """What a client prints."""
        process = self.start(*words)
        said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{words}: exit {process.returncode}")
        return json.loads(said)


@dataclass
class Theirs(Side):
    """kube-proxy 1.25."""

    oracle: Oracle

    def enter(self, argv: Sequence[str]) -> list[str]:
        return self.oracle.node.command(argv)


@dataclass
class Ours(Side):
    """Bundles and akp-node, with HAProxy."""

    host: Host
    applied: int = 0
    said: Counter[str] = field(default_factory=Counter)  # what became of HAProxy, and how often

    def enter(self, argv: Sequence[str]) -> list[str]:
        return netns.command(self.host.name, argv)

    def become(self, objects: Sequence[Object]) -> None:
        """Apply a bundle of these objects."""
        conntrack = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
        self.applied += 1
        path = self.host.directory / f"bundle-{self.applied}"
        write_bundle(render(*objects, node("n1", NODE), mode=MODE, conntrack=conntrack), path)
        answer = self.host.apply(path)
        self.said[answer["proxies"].get("haproxy", "left alone")] += 1


@contextmanager
def ours(cases: Sequence[Case] = CASES) -> Iterator[Ours]:
    """Our side, which has these cases."""
    with tempfile.TemporaryDirectory(prefix="akp-calls-", dir="/tmp") as folder, ExitStack() as stack:
        host = Host(Path(folder), mode=MODE)
        stack.callback(host.close)
        host.sh(f"ip addr add {NODE}/32 dev lo; ip route add 10.96.0.0/12 dev lo")
        side = Ours(host)
        stack.callback(host.akp, "cleanup")
        side.furnish(stack)
        side.become(objects_of(cases))
        yield side


@contextmanager
def theirs(cases: Sequence[Case] = CASES) -> Iterator[Theirs]:
    """kube-proxy's side, which has these cases."""
    config = {
        "mode": MODE,
        "hostnameOverride": "n1",
        "bindAddress": "0.0.0.0",
        "portRange": "20000-27999",
    }
    made = objects_of(cases)
    objects = (*(each for each in made if each["kind"] == "Service"), node("n1", NODE))
    with twins() as twin, ExitStack() as stack:
        stack.callback(twin.stop)
        twin.plane.make_namespaces(made)
        twin.plane.client.create_all([each for each in made if each["kind"] == "Endpoints"])
        twin.start(Cluster(0, MODE, "n1", config, objects, DEFAULT_MINOR))
        side = Theirs(twin.oracle)
        side.furnish(stack)
        yield side


@dataclass(frozen=True)
class Outcome:
    """What became of the calls of a case."""

    case: Case
    answers: tuple[tuple[str, float], ...]

    @property
    def failed(self) -> int:
        return sum(1 for pod, _seconds in self.answers if not pod)

    @property
    def slowest(self) -> float:
        return max(seconds for _pod, seconds in self.answers)

    @property
    def pods(self) -> Counter[str]:
        return Counter(pod for pod, _seconds in self.answers if pod)


def outcomes(side: Side, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """Every case in turn."""
    return [
        Outcome(case, tuple(map(tuple, side.ask("call", address(index), 80, case.calls, case.at_once, *case.clients))))
        for index, case in enumerate(cases)
    ]


def followed(side: Side, index: int) -> tuple[int, int]:
    """Of clients of a case with affinity: pods of each while it calls, at most; and those that change after the expiry.

    A client that calls more often than the expiry is remembered, however long that goes on.
    """
    most = moved = 0
    for client in CLIENTS[:4]:
        pods = {side.ask("call", address(index), 80, 1, 1, client)[0][0] for _ in range(4)}
        at_once = {pod for pod, _seconds in side.ask("call", address(index), 80, 20, 20, client)}
        most = max(most, len(pods | at_once))
        subprocess.run(["sleep", str(EXPIRY + 0.5)], check=True)
        moved += side.ask("call", address(index), 80, 1, 1, client)[0][0] not in pods
    return most, moved


def broken(side: Ours, connections: int, changes: int, reloads: int) -> int:
    """Held connections that endpoint changes and reloads break; the pod that they are at goes and comes as well."""
    cases = [Case("held", PODS, 0)]
    side.become(objects_of(cases))
    holder = side.start("hold", address(0), 80, connections)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    for number in range(changes):
        fewer = tuple(pod for i, pod in enumerate(PODS) if i != number // 2 % 3) if number % 2 == 0 else PODS
        side.become(objects_of([Case("held", fewer, 0)]))
    for number in range(reloads):
        side.become(objects_of([*cases, *(Case("more", PODS, 0) for _ in range(number + 1))]))
    said, _ = holder.communicate("now\n")
    return int(said)


def per_second(sides: Sequence[Side], index: int, rounds: int, seconds: float) -> list[float]:
    """Calls that each side answers in a second: the median of rounds, in which the sides take turns."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, counts in zip(sides, found, strict=True):
            counts.append(side.ask("count", address(index), 80, seconds, 32) / seconds)
    return [statistics.median(counts) for counts in found]
