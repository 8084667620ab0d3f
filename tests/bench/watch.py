"""From a write to the API server to the kernel of the last node: through akp watch, and by a kube-proxy itself."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.controlplane import ControlPlane, binaries, netns
from tests.lab import Lab
from tests.lab.addresses import node_addresses, pod_cidrs

from . import AKP, ROOT, Measure, namespace
from .cluster import write_cluster, write_config
from .collection import ENVIRONMENT

SERVICES = int(os.environ.get("AKP_BENCH_WATCHED", "1000"))
ENDPOINTS = 10
FEW, MANY = 3, 50
CHANGES = 8
ADDRESS = "192.168.78.1"
MODE = os.environ.get("AKP_BENCH_MODE", "nftables")


def measures(tmp: Path) -> Iterator[Measure]:
    """Both bars, in one run."""
    write_cluster(tmp / "cluster", SERVICES, ENDPOINTS)
    write_config(tmp / "config.json", MODE)
    objects = [*cluster_objects(tmp / "cluster"), *(node_object(i) for i in range(1, MANY + 1))]
    with namespace("watch") as ns:
        netns.run(ns, "ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
        with ControlPlane(ns, [ADDRESS]) as plane:
            plane.load(objects)
            changed = next(each for each in objects if each["kind"] == "EndpointSlice")
            with _kube_proxy(plane, tmp):
                theirs = _median(plane, changed, [netns.command(ns, ["nft", "monitor"])])
            few = _ours(plane, changed, tmp / "few", FEW)
            many = _ours(plane, changed, tmp / "many", MANY)
    size = f"{SERVICES:,} x {ENDPOINTS}, {MODE}, one endpoint, API write to kernel"
    yield Measure(f"{size}: akp watch, {FEW} nodes over ssh", few, "a second", 1.0, 1.0)
    yield Measure(f"{size}: akp watch, {MANY} nodes over ssh", many, "a second", 1.0, 8.0)
    # Not bars: all nodes share the cores of this machine, so more of them take longer here and not elsewhere; and one
    # resident process on one node is no match for ssh to all of them.
    yield Measure(f"{size}: akp watch, {MANY} nodes over ssh", many, f"akp watch, {FEW} nodes", few, float("inf"))
    yield Measure(f"{size}: akp watch, {FEW} nodes over ssh", few, "kube-proxy on one node", theirs, float("inf"))


def cluster_objects(folder: Path) -> Iterator[dict[str, Any]]:
    """The cluster, without Nodes and without what the API server gives objects itself."""
    for file in (folder / "services.json", folder / "endpointslices.json"):
        # The first addresses of the range are the API server's own.
        for obj in json.loads(file.read_text().replace('"10.96.', '"10.97.'))["items"]:
            for field in ("resourceVersion", "uid"):
                obj["metadata"].pop(field, None)
            obj.pop("status", None)
            yield obj


def node_object(number: int) -> dict[str, Any]:
    """The Node of a node of the lab."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"n{number}"},
        "spec": {"podCIDRs": list(pod_cidrs(number))},
        "status": {"addresses": [{"type": "InternalIP", "address": each} for each in node_addresses(number)]},
    }


@contextlib.contextmanager
def _kube_proxy(plane: ControlPlane, tmp: Path) -> Iterator[None]:
    """A kube-proxy in the namespace of the control plane, once its rules are there."""
    config = json.loads((tmp / "config.json").read_text())
    config |= {
        "hostnameOverride": "n1",
        "clientConnection": {"kubeconfig": str(plane.kubeconfig(tmp / "kubeconfig"))},
    }
    (tmp / "kube-proxy.json").write_text(json.dumps(config))
    argv = [str(binaries() / "kube-proxy"), f"--config={tmp / 'kube-proxy.json'}", "--v=2"]
    log = tmp / "kube-proxy.log"
    with log.open("wb") as out:
        process = subprocess.Popen(netns.command(plane.namespace, argv), stdout=out, stderr=out)
        try:
            wait_for(lambda: log.read_text(errors="replace").count("SyncProxyRules complete") >= 2, process, log)
            yield
        finally:
            process.terminate()
            process.wait()


def _ours(plane: ControlPlane, changed: dict[str, Any], tmp: Path, nodes: int) -> float:
    """The median for that many lab nodes."""
    tmp.mkdir()
    with Lab(f"bench-watch-{os.getpid()}", nodes) as lab:
        argv = [
            *netns.command(plane.namespace, [AKP, "watch", "--log-json", "-i", str(lab.inventory(tmp / "hosts.yml"))]),
            *("--kubeconfig", str(plane.kubeconfig(tmp / "kubeconfig", "akp")), "--dir", str(tmp / "akp")),
            *("--config", str(tmp.parent / "config.json"), "--forks", "20"),
        ]
        log = tmp / "watch.log"
        with log.open("wb") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **ENVIRONMENT})
            try:
                wait_for(lambda: '"settled"' in log.read_text(), process, log)
                return _median(plane, changed, [node.enter(["nft", "monitor"]) for node in lab.nodes], log)
            finally:
                process.terminate()
                if process.wait(60):
                    raise SystemExit(f"akp watch: exit {process.returncode}\n{log.read_text()[-3000:]}")


def wait_for(condition: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the condition is true; the process must live until then."""
    deadline = time.monotonic() + 600
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(log.read_text(errors="replace")[-3000:])
        time.sleep(0.2)


def _median(
    plane: ControlPlane, changed: dict[str, Any], monitors: Sequence[Sequence[str]], log: Path | None = None
) -> float:
    """Median of the seconds from before the write until the kernel has told every monitor of a change."""
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for argv in monitors]
    try:
        time.sleep(2)
        return statistics.median(_seconds(plane, changed, i, processes, log) for i in range(CHANGES))
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _seconds(
    plane: ControlPlane,
    changed: dict[str, Any],
    number: int,
    monitors: Sequence[subprocess.Popen[bytes]],
    log: Path | None = None,
) -> float:
    """One change, an endpoint goes or comes back; once all nodes have confirmed the one before, if there is a log."""
    while log is not None and log.read_text().count('"event": "change"') < number:
        time.sleep(0.1)
    _quiet(monitors, 1.5)
    endpoints = changed["endpoints"] if number % 2 else changed["endpoints"][1:]
    began = time.perf_counter()
    plane.client.patch(changed, {"endpoints": endpoints})
    waiting = {process.stdout.fileno() for process in monitors if process.stdout}
    deadline = time.monotonic() + 120
    while waiting:
        ready, _w, _x = select.select(list(waiting), [], [], 1.0)
        for each in ready:
            os.read(each, 1 << 20)
            waiting.discard(each)
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(waiting)} of {len(monitors)} kernels were not changed in two minutes")
    return time.perf_counter() - began


def _quiet(monitors: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until nothing was told for so long."""
    streams = [process.stdout.fileno() for process in monitors if process.stdout]
    while ready := select.select(streams, [], [], seconds)[0]:
        for each in ready:
            os.read(each, 1 << 20)
