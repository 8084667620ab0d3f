"""Pull: five hundred nodes without news, against one nginx."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab.program import PROGRAM, PULL, VERIFY
from tests.lab.publisher import Publisher
from tests.lab.web import WebServer

from . import Measure, namespace

CLIENTS = 500
AT_ONCE = 2 * (os.cpu_count() or 1)


def measures(tmp: Path) -> list[Measure]:
    """What a poll without news costs server and node, and what publishing without news costs."""
    with namespace("pull") as name, WebServer(["ip", "netns", "exec", name]) as web:
        cluster = _cluster(tmp / "cluster")
        publisher = Publisher(tmp / "publisher", web.www)
        first = _seconds(lambda: publisher.publish(cluster))
        again = _seconds(lambda: publisher.publish(cluster))
        clients = [Client(tmp / f"c{i}", f"n{i}", name, web.url, publisher) for i in range(CLIENTS)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            # The others begin with the disk of the first, as nodes made of one image do: five hundred times the same
            # rules in the kernel would tell nothing about pulling.
            fetched = [clients[0].pull()["fetched"]]
            for client in clients[1:]:
                client.begin_as(clients[0])
            fetched += [answer["fetched"] for answer in pool.map(Client.pull, clients[1:])]
            assert fetched == ["new"] * CLIENTS, fetched
            web.requests()
            began = time.perf_counter()
            polls = list(pool.map(Client.timed_pull, clients))
            wall = time.perf_counter() - began
            requests = web.requests()
            bare = list(pool.map(Client.timed_request, clients))
            web.requests()
    assert {answer["fetched"] for _time, answer in polls} == {"unchanged"}
    unchanged = [line for line in requests if line.split()[3:] == ["304", "0"]]
    assert len(unchanged) == len(requests), requests
    nodes = {line.split()[2] for line in requests}
    assert len(nodes) == CLIENTS
    ours, theirs = statistics.median(seconds for seconds, _answer in polls), statistics.median(bare)
    print(f"{CLIENTS} polls, {AT_ONCE} at a time: {wall:.1f} s, {CLIENTS / wall:.0f} polls a second")
    return [
        Measure("requests of an unchanged poll", len(requests) / CLIENTS, "one", 1.0, 1.0, "requests"),
        Measure(f"akp-pull without news, {CLIENTS} clients", ours, "the same request by curl alone", theirs, 20.0),
        Measure(f"akp publish of {CLIENTS} nodes without news", again, "its first run", first, 1.0),
    ]


class Client:
    """A node that pulls. All have the same rules, so one kernel serves them all."""

    def __init__(self, directory: Path, node: str, netns: str, url: str, publisher: Publisher) -> None:
        self._url = f"{url}/{node}.release"
        self._state = directory / "state"
        etc = directory / "etc"
        etc.mkdir(parents=True)
        (etc / "allowed_signers").write_text(publisher.allowed_signers)
        (etc / "node.conf").write_text(f"cluster {publisher.cluster}\nnode {node}\nurl {url}\n")
        self._prefix = ["ip", "netns", "exec", netns]
        self._environment = os.environ | {"AKP_STATE": str(self._state), "AKP_ETC": str(etc), "AKP_IPTABLES": "nft"}
        self._environment |= {"AKP_NODE_PROGRAM": str(PROGRAM), "AKP_VERIFY": str(VERIFY)}

    def begin_as(self, other: Client) -> None:
        """With what another has applied, but nothing pulled."""
        shutil.copytree(other._state, self._state)
        shutil.rmtree(self._state / "pull")

    def pull(self) -> dict[str, object]:
        """What a poll answers."""
        done = subprocess.run(
            [*self._prefix, "sh", PULL], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def timed_pull(self) -> tuple[float, dict[str, object]]:
        """How long a poll takes, and what it answers."""
        began = time.perf_counter()
        answer = self.pull()
        return time.perf_counter() - began, answer

    def timed_request(self) -> float:
        """How long its request takes by itself."""
        header = (self._state / "pull" / "validator").read_text().splitlines()[1]
        argv = [*self._prefix, str(shutil.which("curl")), "-s", "-o", "/dev/null", "-H", header, self._url]
        began = time.perf_counter()
        subprocess.run(argv, check=True)
        return time.perf_counter() - began


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cluster(folder: Path) -> Path:
    """Ten Services with three endpoints, the same to every node."""
    folder.mkdir()
    items: list[dict[str, object]] = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"n{i}"},
            "status": {"addresses": [{"type": "InternalIP", "address": f"192.168.{i // 250}.{i % 250 + 1}"}]},
        }
        for i in range(CLIENTS)
    ]
    for i in range(10):
        name = {"namespace": "shop", "name": f"s{i}"}
        spec = {"clusterIP": f"10.96.1.{i + 1}", "ports": [{"name": "http", "port": 80}]}
        items.append({"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": spec})
        addresses = [{"addresses": [f"10.244.{k}.{i + 1}"], "conditions": {"ready": True}} for k in range(3)]
        items.append(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**name, "labels": {"kubernetes.io/service-name": f"s{i}"}},
                "addressType": "IPv4",
                "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
                "endpoints": addresses,
            }
        )
    (folder / "all.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    (folder / "kube-proxy.yaml").write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
        "mode: iptables\nclusterCIDR: 10.244.0.0/16\n"
    )
    return folder
