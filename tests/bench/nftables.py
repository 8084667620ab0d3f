"""nftables mode beside kube-proxy: the first load, and one endpoint that changes.

kube-proxy's figures are those of its own log, from the start of a sync to its end; ours are whole runs of the node
program, from the bundle on disk to the kernel.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import load
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.controlplane import ControlPlane, binaries, netns

from . import Measure, namespace, timed
from .cluster import write_cluster, write_config

SERVICES = int(os.environ.get("AKP_BENCH_SERVICES", "10000"))
ENDPOINTS = 10
NODE = "node-1"
CHANGES = 5
ADDRESS = "192.168.77.1"
SYNCED = re.compile(r'"SyncProxyRules complete".*ipFamily="IPv4".*elapsed="([^"]+)"')


def measures(tmp: Path) -> Iterator[Measure]:
    """Every bar of this mode."""
    write_cluster(tmp / "cluster", SERVICES, ENDPOINTS)
    services = tmp / "cluster/services.json"
    # The first addresses of the range are the API server's own.
    services.write_text(services.read_text(encoding="utf-8").replace('"10.96.', '"10.97.'), encoding="utf-8")
    write_config(tmp / "config.json", "nftables")
    first, change = _kube_proxy(tmp)
    ours_first, ours_change = _ours(tmp)
    size = f"{SERVICES:,} x {ENDPOINTS}"
    yield Measure(f"first apply of {size}, nftables", ours_first, "kube-proxy's first sync", first, 1.0)
    yield Measure(f"one endpoint of {size}, delta to kernel", ours_change, "kube-proxy's sync of it", change, 1.0)


# ------------------------------------------------------------------ kube-proxy


def _kube_proxy(tmp: Path) -> tuple[float, float]:
    """Seconds of the first sync, and of the sync of one changed endpoint."""
    objects = [
        _new(item) for file in sorted((tmp / "cluster").iterdir()) for item in json.loads(file.read_text())["items"]
    ]
    with namespace("plane") as ns:
        netns.run(ns, "ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
        with ControlPlane(ns, [ADDRESS]) as plane:
            plane.load(objects)
            config = json.loads((tmp / "config.json").read_text())
            config |= {
                "hostnameOverride": NODE,
                "clientConnection": {"kubeconfig": str(plane.kubeconfig(tmp / "kubeconfig"))},
            }
            (tmp / "kube-proxy.json").write_text(json.dumps(config))
            log = tmp / "kube-proxy.log"
            argv = [str(binaries() / "kube-proxy"), f"--config={tmp / 'kube-proxy.json'}", "--v=2"]
            with log.open("wb") as out:
                process = subprocess.Popen(netns.command(ns, argv), stdout=out, stderr=out)
                try:
                    first = _syncs(process, log, 1)[0]
                    changed = next(each for each in objects if each["kind"] == "EndpointSlice")
                    for i in range(CHANGES):
                        done = len(_syncs(process, log, 1))
                        changed["endpoints"][0]["conditions"]["ready"] = bool(i % 2)
                        plane.client.replace(changed)
                        _syncs(process, log, done + 1)
                    return first, statistics.median(_syncs(process, log, 1)[-CHANGES:])
                finally:
                    process.terminate()
                    process.wait()


def _new(obj: dict[str, Any]) -> dict[str, Any]:
    """An object without what only the API server writes."""
    meta = {key: value for key, value in obj["metadata"].items() if key not in ("resourceVersion", "uid")}
    return {key: value for key, value in obj.items() if key != "status" or obj["kind"] == "Node"} | {"metadata": meta}


def _syncs(process: subprocess.Popen[bytes], log: Path, count: int) -> list[float]:
    """Seconds of the IPv4 syncs so far; waits for at least that many."""
    deadline = time.monotonic() + 600
    while True:
        found = [duration(text) for text in SYNCED.findall(log.read_text(errors="replace"))]
        if len(found) >= count:
            return found
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        time.sleep(0.2)


def duration(text: str) -> float:
    """Seconds of a duration as Go writes it."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)(ms|µs|ns|[hms])", text))


# ------------------------------------------------------------------ ours


def _ours(tmp: Path) -> tuple[float, float]:
    """Seconds of the first apply, and of the apply of a delta of one changed endpoint."""
    ready, unready = state_of(tmp, tmp / "cluster"), state_of(tmp, changed_cluster(tmp))
    write_bundle(ready, tmp / "whole")
    write_delta(delta(ready, unready), unready, tmp / "there")
    write_delta(delta(unready, ready), ready, tmp / "back")
    program = str(tmp / "whole/akp-node")
    env = {"AKP_STATE": str(tmp / "state")}
    with namespace("ours") as ns:
        first = timed(["sh", program, "apply", str(tmp / "whole")], netns=ns, env=env)
        seconds = [
            timed(["sh", program, "apply", str(tmp / ("back" if i % 2 else "there"))], netns=ns, env=env)
            for i in range(CHANGES)
        ]
        # Fast is no good unless it is right.
        answer = netns.run(ns, "env", f"AKP_STATE={tmp / 'state'}", "sh", program, "status")
        assert json.loads(answer)["state"] == "applied", answer
    return first, statistics.median(seconds)


def changed_cluster(tmp: Path) -> Path:
    """The cluster in tmp/cluster, with one endpoint that is not ready."""
    directory = tmp / "changed"
    directory.mkdir()
    for file in (tmp / "cluster").iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name == "endpointslices.json":
            text = text.replace('"ready": true', '"ready": false', 1)
        (directory / file.name).write_text(text, encoding="utf-8")
    return directory


def state_of(tmp: Path, directory: Path) -> State:
    """What a node of the cluster in a directory shall have, by the configuration in tmp."""
    config = Choices.of({"config": str(tmp / "config.json")}).proxy
    snapshot = load(directory)
    node = snapshot.node(NODE)
    assert node is not None
    return backends.renderer(config).state(ClusterView(snapshot, config).node_view(node_facts(node)))
