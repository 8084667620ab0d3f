"""The last mile beside kube-proxy: from a write to the API server to the kernel, and what that costs.

A kube-proxy in a network namespace of its own and akp watch, with a node over ssh, follow the same API server, and one
write reaches both: whatever else this machine does at that moment slows both down. See kernels.py for how the end of
the way is seen. CPU time of processes is what the kernel counted for them and for those they waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentless_kube_proxy.backends.names import hash16
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.archive import archive
from agentless_kube_proxy.bundle.write import delta_parts, sealed, write_bundle
from agentless_kube_proxy.carry.protocol import Command, Way

from tests.controlplane import ControlPlane, binaries, netns
from tests.lab import Lab

from . import AKP, ROOT, Measure, namespace, timed
from .cluster import write_cluster, write_config
from .collection import ENVIRONMENT
from .kernels import Kernel, kernel, quiet, when_changed
from .nftables import SYNCED, changed_cluster, duration, state_of
from .watch import cluster_objects, node_object, wait_for

ENDPOINTS = 10
CHANGES = 8
REPEATS = 9  # of what takes milliseconds
SMALL, LARGE = 1_000, 10_000
ADDRESS, PROXY_ADDRESS = "192.168.78.1", "192.168.78.2"
# Both sides take changes at most once in this time, the first at once; so each change is a first one.
MIN_SYNC_SECONDS = 1.0
PROCESSES = 12
LOOK_MS = 50.0
CONTROL_MS = 35.0
ALL_SECONDS = 2.5
HERTZ = os.sysconf("SC_CLK_TCK")

# mode and flavour of iptables -> times kube-proxy's time for a change, by size, and for the first load
NFTABLES, IPTABLES_NFT, IPTABLES_LEGACY = ("nftables", ""), ("iptables", "nft"), ("iptables", "legacy")
CHANGE_BARS = {SMALL: {NFTABLES: 1.5, IPTABLES_NFT: 1.0}, LARGE: {NFTABLES: 0.9, IPTABLES_LEGACY: 0.85}}
FIRST_BARS = {NFTABLES: 0.7, IPTABLES_LEGACY: 1.1}

Kind = tuple[str, str]


def measures(tmp: Path, *, large: bool = False, nodes: int = 0) -> Iterator[Measure]:
    """Every bar; those of large clusters, and of many nodes, if they are asked for."""
    yield from _on_a_node(tmp / "node")
    yield from _followed(tmp / "small", SMALL, nodes)
    if large:
        yield from _followed(tmp / "large", LARGE, 0)


def _named(kind: Kind) -> str:
    return "-".join(filter(None, kind))


def _prepare(tmp: Path, services: int, kind: Kind) -> None:
    write_cluster(tmp / "cluster", services, ENDPOINTS)
    file = tmp / "cluster/services.json"
    # The first addresses of the range are the API server's own.
    file.write_text(file.read_text(encoding="utf-8").replace('"10.96.', '"10.97.'), encoding="utf-8")
    write_config(tmp / "config.json", kind[0])


# ------------------------------------------------------------------ on a node


def _on_a_node(tmp: Path) -> Iterator[Measure]:
    """What a delta starts, and what a look costs, in a namespace, by the commands that carriers send."""
    for kind in (NFTABLES, IPTABLES_NFT, IPTABLES_LEGACY):
        folder = tmp / _named(kind)
        _prepare(folder, SMALL, kind)
        with namespace("node") as ns:
            node = _Node(folder, ns, kind)
            node.run(["sh", str(node.bundle / "akp-node"), "apply", str(node.bundle)])
            size = f"{SMALL:,} x {ENDPOINTS}, {_named(kind)}"
            what = f"processes that a delta of one endpoint starts, {size}"
            yield Measure(what, node.processes(), "the bar", PROCESSES, 1.0, "processes")
            what = f"CPU of a look at an unchanged node, {size}"
            yield Measure(what, node.look(), "the bar", LOOK_MS, 1.0, "ms")


class _Node:
    """A node as far as its program knows: a network namespace and a state directory."""

    def __init__(self, tmp: Path, netns_name: str, kind: Kind) -> None:
        self._netns = netns_name
        self._env = {"AKP_RUN": str(tmp / "run"), "AKP_STATE": str(tmp / "state"), "AKP_ETC": str(tmp / "etc")}
        self._env |= {"AKP_IPTABLES": kind[1]} if kind[1] else {}
        self._way = Way(installed=str(tmp / "none"), state_dir=str(tmp / "state"), mode=kind[0])
        self._trace = tmp / "trace"
        self._ready, self._unready = state_of(tmp, tmp / "cluster"), state_of(tmp, changed_cluster(tmp))
        self.bundle = tmp / "bundle"
        write_bundle(self._ready, self.bundle)

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> dict[str, Any]:
        """What a command answers."""
        # A child begins in the namespace of the thread that starts it: nothing but the command is measured.
        with netns.entered(self._netns):
            done = subprocess.run(argv, env=os.environ | self._env, input=stdin, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit((done.stdout + done.stderr).decode())
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def processes(self) -> int:
        """Processes that become another program while a delta is taken; not the shell that sshd starts anyway."""
        counts = []
        for has, wanted in ((self._ready, self._unready), (self._unready, self._ready)):
            command = self._way.give(["apply"], _delta(has, wanted))
            trace = ["strace", "-f", "-q", "-e", "trace=execve", "-e", "signal=none", "-o", str(self._trace)]
            answer = self.run([*trace, "sh", "-c", command.text], command.stdin)
            assert answer["generation"] == wanted.generation, answer
            lines = [line.split() for line in self._trace.read_text().splitlines()]
            counts.append(len({pid for pid, *_call, result in lines if result == "0"}) - 1)
        return max(counts)

    def look(self) -> float:
        """Milliseconds of CPU of a question, the median."""
        key = self._ask(self._way.ask(["ask"]))["key"]
        command = self._way.ask(["ask", "--known", key])
        found = []
        for _ in range(REPEATS):
            before = _children_ms()
            answer = self._ask(command)
            found.append(_children_ms() - before)
            assert answer["status"]["state"] == "applied", answer
        return statistics.median(found)

    def _ask(self, command: Command) -> dict[str, Any]:
        return self.run(["sh", "-c", command.text], command.stdin)


def _children_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1000


def _delta(has: State, wanted: State) -> bytes:
    """A delta as akp watch sends it."""
    data: bytes = archive(sealed(delta_parts(delta(has, wanted), wanted))[1])
    return data


# ------------------------------------------------------------------ from the API server to kernels


def _followed(tmp: Path, services: int, nodes: int) -> Iterator[Measure]:
    """One endpoint of a cluster that both follow, in every mode that has a bar at this size."""
    kinds = list(CHANGE_BARS[services])
    _prepare(tmp, services, kinds[0])
    objects = [*cluster_objects(tmp / "cluster"), *(node_object(i) for i in range(1, max(nodes, 1) + 1))]
    changed = next(each for each in objects if each["kind"] == "EndpointSlice")
    with namespace("plane") as ns, namespace("proxy") as proxy:
        _link(ns, proxy)
        with ControlPlane(ns, [ADDRESS]) as plane:
            plane.load(objects)
            for kind in kinds:
                with _Proxy(plane, proxy, tmp / f"proxy-{_named(kind)}", kind) as theirs:
                    size = f"{services:,} x {ENDPOINTS}, {_named(kind)}"
                    if services == LARGE:
                        ours = _first_load(tmp / f"first-{_named(kind)}", services, kind)
                        what = f"first load of {size}, start of the program to kernel"
                        yield Measure(what, ours, "kube-proxy's first sync", theirs.first, FIRST_BARS[kind])
                    with Watch(plane, tmp / f"watch-{_named(kind)}", kind, 1) as watch:
                        found = watch.changes(changed, [*watch.namespaces, proxy])
                    what = f"one endpoint of {size}, API write to kernel, one node over ssh"
                    ours, reference = (statistics.median(column) for column in zip(*found.seconds, strict=True))
                    yield Measure(what, ours, "kube-proxy", reference, CHANGE_BARS[services][kind])
                    if services == SMALL:
                        what = f"CPU of the control side per node and change, {size}"
                        yield Measure(what, found.control_ms, "the bar", CONTROL_MS, 1.0, "ms")
            if nodes:
                with Watch(plane, tmp / "many", NFTABLES, nodes) as watch:
                    found = watch.changes(changed, watch.namespaces)
                size = f"{services:,} x {ENDPOINTS}, nftables, {nodes} nodes over ssh"
                what = f"one endpoint of {size}, API write to the last kernel"
                yield Measure(what, statistics.median(map(max, found.seconds)), "the bar", ALL_SECONDS, 1.0)
                yield Measure(
                    f"CPU of the control side per node and change, {size}",
                    found.control_ms,
                    "the bar",
                    CONTROL_MS,
                    1.0,
                    "ms",
                )


def _link(plane: str, proxy: str) -> None:
    """A way from kube-proxy to the API server."""
    netns.ip("link", "add", "proxy0", "netns", plane, "type", "veth", "peer", "name", "eth0", "netns", proxy)
    for ns, device, address in ((plane, "proxy0", ADDRESS), (proxy, "eth0", PROXY_ADDRESS)):
        netns.ip("-n", ns, "addr", "add", f"{address}/24", "dev", device)
        netns.ip("-n", ns, "link", "set", device, "up")


class _Proxy:
    """A kube-proxy that has its rules in place; first is how long the first sync took, by its own log."""

    def __init__(self, plane: ControlPlane, ns: str, tmp: Path, kind: Kind) -> None:
        tmp.mkdir()
        self._ns, self._tools, self._log = ns, tmp / "tools", tmp / "log"
        write_config(tmp / "config.json", kind[0])
        config = json.loads((tmp / "config.json").read_text())
        config |= {
            "hostnameOverride": "n1",
            "clientConnection": {"kubeconfig": str(plane.kubeconfig(tmp / "kubeconfig"))},
        }
        (tmp / "config.json").write_text(json.dumps(config))
        self._argv = [str(binaries() / "kube-proxy"), f"--config={tmp / 'config.json'}", "--v=2"]
        self._tools.mkdir()
        for tool in ("iptables", "ip6tables") if kind[1] else ():
            for end in ("", "-save", "-restore"):
                (self._tools / f"{tool}{end}").symlink_to(str(shutil.which(f"{tool}-{kind[1]}{end}")))
        self.first = 0.0

    def __enter__(self) -> _Proxy:
        env = {**os.environ, "PATH": f"{self._tools}:{os.environ['PATH']}"}
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(netns.command(self._ns, self._argv), stdout=out, stderr=out, env=env)
        try:
            said = "SyncProxyRules complete"
            wait_for(lambda: self._log.read_text(errors="replace").count(said) >= 2, self._process, self._log)
            self.first = duration(SYNCED.findall(self._log.read_text(errors="replace"))[0])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        cleanup = [self._argv[0], "--cleanup"]
        subprocess.run(netns.command(self._ns, cleanup), capture_output=True, check=False)


def _first_load(tmp: Path, services: int, kind: Kind) -> float:
    """Seconds of the first apply of a node's bundle."""
    _prepare(tmp, services, kind)
    write_bundle(state_of(tmp, tmp / "cluster"), tmp / "bundle")
    env = {"AKP_STATE": str(tmp / "state"), "AKP_RUN": str(tmp / "run")} | (
        {"AKP_IPTABLES": kind[1]} if kind[1] else {}
    )
    with namespace("first") as ns:
        return timed(["sh", str(tmp / "bundle/akp-node"), "apply", str(tmp / "bundle")], netns=ns, env=env)


class _Found:
    """What changes took: of each, seconds by kernel; and CPU per change and node, in milliseconds."""

    def __init__(self, seconds: list[list[float]], control_ms: float) -> None:
        self.seconds, self.control_ms = seconds, control_ms


class Watch:
    """akp watch and the nodes of a lab, which have what they shall have."""

    def __init__(self, plane: ControlPlane, tmp: Path, kind: Kind, nodes: int) -> None:
        tmp.mkdir()
        self._plane, self._tmp, self._kind, self._nodes = plane, tmp, kind, nodes
        self.log = tmp / "watch.log"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        try:
            self._lab = self._stack.enter_context(Lab(f"bench-mile-{os.getpid()}", self._nodes, iptables=self._kind[1]))
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        write_config(self._tmp / "config.json", self._kind[0])
        argv = [AKP, "watch", "--log-json", "-i", str(self._lab.inventory(self._tmp / "hosts.yml"))]
        argv += ["--kubeconfig", str(self._plane.kubeconfig(self._tmp / "kubeconfig", "akp"))]
        argv += ["--dir", str(self._tmp / "akp"), "--config", str(self._tmp / "config.json"), "--forks", "20"]
        env = {**os.environ, **ENVIRONMENT}
        with self.log.open("wb") as out:
            argv = netns.command(self._plane.namespace, argv)
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, cwd=ROOT, env=env)
        self._stack.callback(self._stop)
        wait_for(lambda: '"settled"' in self.log.read_text(), self.process, self.log)

    def _stop(self) -> None:
        self.process.terminate()
        if self.process.wait(60):
            raise SystemExit(f"akp watch: exit {self.process.returncode}\n{self.log.read_text()[-3000:]}")

    @property
    def namespaces(self) -> list[str]:
        """The network namespaces of the nodes."""
        return [f"/proc/{node.pid}/ns/net" for node in self._lab.nodes]

    def changes(self, changed: dict[str, Any], namespaces: Sequence[str]) -> _Found:
        """An endpoint goes, comes back, and so on; each change once all have the one before."""
        service = changed["metadata"]["labels"]["kubernetes.io/service-name"]
        name, port = f"{changed['metadata']['namespace']}/{service}", changed["ports"][0]["name"]
        words = f"{name}/tcp" if self._kind[0] == "nftables" else f"KUBE-SVC-{hash16(f'{name}:{port}tcp')}"
        with contextlib.ExitStack() as stack:
            kernels = [kernel(each, self._kind[1], words.encode()) for each in namespaces]
            for each in kernels:
                stack.callback(each.close)
            # One that does not count: what all processes of a side need is loaded, and connections are open.
            self._change(changed, 1, kernels)
            self._change(changed, 0, kernels)
            before = self._cpu_ms()
            found = [self._change(changed, i, kernels) for i in range(1, CHANGES + 1)]
            return _Found(found, (self._cpu_ms() - before) / CHANGES / self._nodes)

    def _change(self, changed: dict[str, Any], number: int, kernels: Sequence[Kernel]) -> list[float]:
        """Seconds until each kernel had the change."""
        told = self.told()
        quiet(kernels, MIN_SYNC_SECONDS + 0.5)
        endpoints = changed["endpoints"][number % 2 :]
        began = time.perf_counter()
        self._plane.client.patch(changed, {"endpoints": endpoints})
        seconds = [each - began for each in when_changed(kernels, 120)]
        wait_for(lambda: self.told() > told, self.process, self.log)
        return seconds

    def root(self, node: int) -> Path:
        """The files of a node."""
        return Path(f"/proc/{self._lab.nodes[node].pid}/root")

    def told(self) -> int:
        """Changes that it has told of so far."""
        return self.log.read_text().count('"event": "change"')

    def _cpu_ms(self) -> float:
        """CPU time so far of akp watch, of all that it started, and of the ssh processes that keep connections open."""
        ticks = 0
        parents: dict[int, int] = {}
        used: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                pid = int(folder.name)
                parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15]))
                if str(self._lab.state / "cp").encode() in (folder / "cmdline").read_bytes():
                    parents[pid] = self.process.pid
        for pid in used:
            above = pid
            while above in parents and above != self.process.pid:
                above = parents[above]
            ticks += used[pid] if above == self.process.pid else 0
        return ticks * 1000 / HERTZ
