"""userspace mode beside kube-proxy 1.25, the last that has it: failed calls, broken connections, speed and size."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentless_kube_proxy.bundle.write import write_bundle

from tests.conformance import calls
from tests.controlplane import ControlPlane, netns

from . import Measure, namespace, timed
from .cluster import write_cluster, write_config
from .last_mile import ADDRESS, MIN_SYNC_SECONDS, Watch
from .nftables import state_of
from .watch import cluster_objects, node_object, wait_for

MODE = "userspace"
SERVICES, ENDPOINTS = 1_000, 10
CHANGES = 8
START_SECONDS, CHANGE_SECONDS, MEMORY_MB = 1.0, 0.3, 120.0
HELD, HELD_CHANGES, HELD_RELOADS = 500, 50, 5
ROUND_ROBIN = next(i for i, case in enumerate(calls.CASES) if case.name == "round robin")
AFFINITY = next(i for i, case in enumerate(calls.CASES) if case.affinity)
KUBE_PROXY = "kube-proxy 1.25"


def measures(tmp: Path) -> Iterator[Measure]:
    """Every bar, in one run."""
    yield from _size(tmp / "size")
    yield from _change(tmp / "change")
    yield from _calls()


def _calls() -> Iterator[Measure]:
    with calls.ours() as ours:
        mine = calls.outcomes(ours)
        with calls.theirs() as theirs:
            for own, other in zip(mine, calls.outcomes(theirs), strict=True):
                what = f"failed calls of {own.case.calls}: {own.case.name}"
                yield Measure(what, own.failed, KUBE_PROXY, other.failed, 1.0, "calls")
                yield Measure(f"slowest call: {own.case.name}", own.slowest, KUBE_PROXY, other.slowest, float("inf"))
            what = "pods that a client with affinity meets within the expiry, at most"
            yield Measure(what, calls.followed(ours, AFFINITY)[0], KUBE_PROXY, calls.followed(theirs, AFFINITY)[0], 1.0)
            speeds = calls.per_second([ours, theirs], ROUND_ROBIN, rounds=5, seconds=3)
        own_ms, other_ms = (1000 / each for each in speeds)
        yield Measure("time per new connection, 32 at once", own_ms, KUBE_PROXY, other_ms, 1.0, "ms")
        broken = calls.broken(ours, HELD, HELD_CHANGES, HELD_RELOADS)
        what = f"of {HELD} held connections broken by {HELD_CHANGES} endpoint changes and {HELD_RELOADS} reloads"
        yield Measure(what, broken, "the bar", 0, 1.0, "connections")


def _prepare(tmp: Path) -> None:
    write_cluster(tmp / "cluster", SERVICES, ENDPOINTS)
    file = tmp / "cluster/services.json"
    # The first addresses of the range are the API server's own.
    file.write_text(file.read_text(encoding="utf-8").replace('"10.96.', '"10.97.'), encoding="utf-8")
    write_config(tmp / "config.json", MODE)


def _size(tmp: Path) -> Iterator[Measure]:
    """A large cluster in a namespace: the start of its proxy, and its memory after endpoints changed."""
    _prepare(tmp)
    write_bundle(state_of(tmp, tmp / "cluster"), tmp / "bundle")
    # The name of a socket must be short.
    proxies = Path("/run") / f"akp-bench-{os.getpid()}"
    env = {"AKP_RUN": tmp / "run", "AKP_STATE": tmp / "state", "AKP_ETC": tmp / "etc", "AKP_PROXY": proxies}
    program = ["sh", str(tmp / "bundle/akp-node")]
    size = f"{SERVICES:,} x {ENDPOINTS}"
    with namespace("proxies") as ns:
        run = {"netns": ns, "env": {key: str(value) for key, value in env.items()}}
        first = timed([*program, "apply", str(tmp / "bundle")], **run)  # type: ignore[arg-type]
        yield Measure(f"first apply of {size}, start of the program to its end", first, "a second", 1.0, float("inf"))
        try:
            os.kill(int((proxies / "run/haproxy.pid").read_text()), 9)
            time.sleep(1)
            yield Measure(f"start of HAProxy with {size}, until its last port answers", _start(ns, proxies),
                          "the bar", START_SECONDS, 1.0)  # fmt: skip
            yield Measure(f"memory of the proxies with {size}", _memory(ns), "the bar", MEMORY_MB, 1.0, "MB")
        finally:
            timed([*program, "cleanup"], **run)  # type: ignore[arg-type]


def _start(ns: str, proxies: Path) -> float:
    file, pid = proxies / "haproxy.cfg", proxies / "run/haproxy.pid"
    ports = [int(line.rpartition(":")[2]) for line in file.read_text().splitlines() if line.startswith("    bind ")]
    began = time.perf_counter()
    with netns.entered(ns):
        subprocess.run(["haproxy", "-W", "-D", "-f", file, "-p", pid], check=True, capture_output=True)
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", ports[-1])):
                return time.perf_counter() - began
            time.sleep(0.01)


def _memory(ns: str) -> float:
    """What all processes of the namespace hold, what they share counted once."""
    pids = subprocess.run(["ip", "netns", "pids", ns], check=True, capture_output=True, text=True).stdout.split()
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    kilobytes = [int(line.split()[1]) for text in rollups for line in text.splitlines() if line.startswith("Pss:")]
    return sum(kilobytes) / 1024


def _change(tmp: Path) -> Iterator[Measure]:
    """One endpoint of a large cluster, from a write to the API server to the proxy of a node over ssh."""
    _prepare(tmp)
    objects = [*cluster_objects(tmp / "cluster"), node_object(1)]
    changed = next(each for each in objects if each["kind"] == "EndpointSlice")
    with namespace("plane") as ns:
        netns.run(ns, "ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
        with ControlPlane(ns, [ADDRESS]) as plane:
            plane.load(objects)
            with Watch(plane, tmp / "watch", (MODE, ""), 1) as watch:
                # The first does not count: connections are made, and programs read.
                seconds = [_changed(plane, watch, changed, number) for number in range(CHANGES + 1)][1:]
    what = f"one endpoint of {SERVICES:,} x {ENDPOINTS}, API write to HAProxy, one node over ssh"
    yield Measure(what, statistics.median(seconds), "the bar", CHANGE_SECONDS, 1.0)


def _changed(plane: ControlPlane, watch: Watch, changed: dict[str, Any], number: int) -> float:
    """Seconds until HAProxy has an endpoint no longer, or again."""
    time.sleep(MIN_SYNC_SECONDS + 0.5)
    goes = number % 2 == 0
    service = f"{changed['metadata']['namespace']}.{changed['metadata']['labels']['kubernetes.io/service-name']}:http"
    name = f" {changed['endpoints'][0]['addresses'][0]}:8080 "
    told, ask = watch.told(), _asker(watch.root(0), f"show servers state {service}\n")
    began = time.perf_counter()
    plane.client.patch(changed, {"endpoints": changed["endpoints"][goes:]})
    while (name in ask()) is goes:
        if time.perf_counter() - began > 60:
            raise SystemExit("HAProxy was not told in a minute")
        time.sleep(0.002)
    seconds = time.perf_counter() - began
    wait_for(lambda: watch.told() > told, watch.process, watch.log)
    return seconds


def _asker(root: Path, question: str) -> Callable[[], str]:
    """Asks the HAProxy of a node."""

    def ask() -> str:
        with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(ConnectionError, FileNotFoundError):
            one.connect(str(root / "run/akp-userspace/run/haproxy.sock"))
            one.sendall(question.encode())
            return b"".join(iter(lambda: one.recv(1 << 16), b"")).decode()
        return ""

    return ask
