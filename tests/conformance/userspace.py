"""python -m tests.conformance userspace: the last kube-proxy with userspace mode against us, rule by rule.

kube-proxy 1.25 runs unmodified against a current API server, in one family as its Node has it. It wants more open files
than a test may have, and forgives that in a user namespace, so it gets one. Ours goes the whole way from the API server
to a bundle, whose rules are loaded into a namespace of their own and read back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.controlplane import DEFAULT_MINOR, ControlPlane, binaries, netns

from . import goldens, kernel, portals
from .draw import NODES, Cluster, Drawer
from .history import Change, History
from .kubeproxy import SENTINEL_NAMESPACE
from .namespaces import WORLD4, WORLD6, Node, World, quieten
from .ours import Renderer
from .plan import IPV4, IPV6, internal_addresses, node_address
from .run import FEATURE_GATES, stop_on_term
from .side import Network
from .undefined import undefined

Object = dict[str, Any]

MODE = "userspace"
MINOR = "1.25"
SENTINEL = {IPV4: "10.96.0.250", IPV6: "fd00:10:96::fa"}
TOOLS = {IPV4: "iptables", IPV6: "ip6tables"}
CATCH_UP_SECONDS = 120.0


def draw(seed: int) -> Cluster:
    """A drawn cluster, and a configuration of this mode; every third node is one of IPv6."""
    rng = random.Random(f"{MODE}/{seed}")
    drawer = Drawer(rng, MODE, DEFAULT_MINOR)
    # On a node of both families it takes the address of IPv4 for its own, and ip6tables refuses that.
    families = (IPV6,) if seed % 3 == 0 else (IPV4, IPV6)
    family = families[0]
    nodes = [drawer.node(index) for index in range(1, NODES + 1)]
    own = rng.randrange(NODES)
    nodes[own]["status"]["addresses"] = [
        {"type": "InternalIP", "address": node_address(own + 1, each)} for each in families
    ]
    objects: list[Object] = [*drawer.service_cidrs(), *nodes]
    for _ in range(rng.choice((6, 10, 16, 24))):
        service = drawer.service()
        objects += [service, *drawer.slices(service)]
    anywhere = "::" if family == IPV6 else "0.0.0.0"
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": MODE,
        "hostnameOverride": nodes[own]["metadata"]["name"],
        "bindAddress": node_address(own + 1, family) if rng.random() < 0.2 else anywhere,
        "portRange": "20000-27999",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    drawn = Cluster(seed, MODE, nodes[own]["metadata"]["name"], config, tuple(objects), DEFAULT_MINOR)
    if why := undefined(drawn.objects):
        raise AssertionError(f"seed {seed} drew a cluster that kube-proxy itself treats in no fixed way: {why}")
    return drawn


def family_of(cluster: Cluster) -> str:
    return IPV6 if ":" in internal_addresses(cluster.own_node())[0] else IPV4


@dataclass
class HeldNode(Node):
    """A node whose namespace belongs to a user namespace of its own, for as long as a process holds it."""

    holder: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        # It says so once it is in its namespaces.
        argv = ["unshare", "-U", "-r", "-n", "sh", "-c", "echo in; exec sleep 100000"]
        self.holder = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self.holder.stdout is not None
        self.holder.stdout.readline()
        netns.ip("netns", "attach", self.name, str(self.holder.pid))
        netns.ip("-n", self.name, "link", "set", "lo", "up")
        quieten(self.name)

    def remove(self) -> None:
        super().remove()
        if self.holder is not None:
            _end(self.holder)
            self.holder = None


@dataclass
class Oracle:
    """kube-proxy 1.25 on a node in a user namespace of its own, linked to the world of the control plane."""

    node: HeldNode
    folder: Path
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    _command: list[str] = field(default_factory=list)

    def start(self, cluster: Cluster, kubeconfig: Path) -> None:
        self.node.build(Network(cluster.addresses, cluster.others, cluster.pod_cidrs, "veth0"))
        assert self.node.holder is not None
        self._log = (self.folder / "kube-proxy.log").open("wb")
        self._command = [
            "nsenter", "-t", str(self.node.holder.pid), "-U", "-n", "--preserve-credentials",
            *self._argv(cluster, kubeconfig),
        ]  # fmt: skip
        self._run_proxy()

    def restart(self) -> None:
        """From scratch: it empties its chains when it starts."""
        assert self._process is not None
        _end(self._process)
        self._run_proxy()

    def _run_proxy(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    @staticmethod
    def _argv(cluster: Cluster, kubeconfig: Path) -> list[str]:
        config = cluster.config
        return [
            str(binaries(MINOR) / "kube-proxy"),
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={config['hostnameOverride']}",
            f"--proxy-mode={MODE}",
            f"--bind-address={config['bindAddress']}",
            f"--proxy-port-range={config['portRange']}",
            "--iptables-min-sync-period=100ms",
            "--iptables-sync-period=1s",
            "--feature-gates=KubeletInUserNamespace=true",
            "--conntrack-max-per-core=0",
            "--conntrack-min=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
            "--v=1",
        ]

    def stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None
        self.node.remove()
        if self._log is not None:
            self._log.close()

    def save(self, family: str) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"kube-proxy exited {self._process.returncode}:\n{self.log()}")
        return self.node.run(f"{TOOLS[family]}-save")

    def log(self) -> str:
        return "\n".join((self.folder / "kube-proxy.log").read_text(errors="replace").splitlines()[-25:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Twin:
    """The oracle and us, on one control plane; good for one cluster after the other."""

    plane: ControlPlane
    folder: Path
    oracle: Oracle
    scratch: str  # the namespace that our rules are loaded into
    renderer: Renderer
    restarts: int = 0  # of kube-proxy, because of what it had left
    _poked: int = 20000

    def start(self, cluster: Cluster) -> None:
        self._poked += 1
        self.plane.load([*cluster.objects, self._sentinel(cluster)])
        server = WORLD6 if family_of(cluster) == IPV6 else WORLD4
        self.oracle.start(cluster, self.plane.kubeconfig(self.folder / "kubeconfig", "kube-proxy", server))
        self._wait(cluster)

    def stop(self) -> None:
        self.oracle.stop()
        self.plane.clear()

    def change(self, cluster: Cluster, changes: tuple[Change, ...]) -> None:
        client = self.plane.client
        self.plane.make_namespaces(change.object for change in changes)
        actions = {"create": client.create, "replace": client.replace, "delete": client.delete}
        for each in changes:
            actions[each.action](each.object)
        self._poked += 1
        client.replace(self._sentinel(cluster))
        self._wait(cluster)

    def _sentinel(self, cluster: Cluster) -> Object:
        """A Service whose port changes: once its rules show, kube-proxy has heard of all that was written before."""
        family = family_of(cluster)
        ip = SENTINEL[family]
        port = {"name": "sentinel", "protocol": "TCP", "port": self._poked}
        return {
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": SENTINEL_NAMESPACE, "name": "sentinel"},
            "spec": {"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": [family], "ports": [port], "type": "ClusterIP"},
        }  # fmt: skip

    def _wait(self, cluster: Cluster) -> None:
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while f"--dport {self._poked} -j DNAT" not in self.oracle.save(family_of(cluster)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"kube-proxy has not caught up:\n{self.oracle.log()}")
            time.sleep(0.1)

    def compare(self, cluster: Cluster) -> tuple[kernel.State, list[kernel.Difference]]:
        """What kube-proxy has, and where ours differs.

        It may still be at work on the last changes. A service port that it cannot close wholly, because one of its
        addresses is of the other family, it opens again at every sync: what is left of those goes when it starts anew.
        """
        state, found = self._compare(cluster)
        if found:
            self.restarts += 1
            self.oracle.restart()
            self._poked += 1
            self.plane.client.replace(self._sentinel(cluster))
            self._wait(cluster)
            state, found = self._compare(cluster)
        return state, found

    def _compare(self, cluster: Cluster) -> tuple[kernel.State, list[kernel.Difference]]:
        family = family_of(cluster)
        tool = TOOLS[family]
        ours = portals.canonical(self._ours(cluster, tool), tool)
        for pause in (0.3, 1.0, 3.0, 6.0, 0.0):
            real = portals.canonical(self.oracle.save(family), tool)
            found = kernel.differences(real, ours)
            if not found or not pause:
                return real, found
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _ours(self, cluster: Cluster, tool: str) -> str:
        """API server -> snapshot -> bundle -> kernel, as iptables-save prints it."""
        config, facts, bundle = self.folder / "config.json", self.folder / "facts.json", self.folder / "bundle"
        config.write_text(json.dumps(cluster.config, indent=1))
        facts.write_text("{}")
        self.renderer.render(
            kind="full", snapshot=str(self.folder / "snapshot.json"), config=str(config), facts=str(facts),
            node=cluster.node, compat=DEFAULT_MINOR, output=str(bundle),
        )  # fmt: skip
        return loaded((bundle / f"{tool}.rules").read_text(), tool, self.scratch)


def loaded(rules: str, tool: str, namespace: str) -> str:
    """Rules as a virgin kernel holds them."""
    netns.delete(namespace)
    netns.add(namespace)
    netns.run(namespace, f"{tool}-restore", "--noflush", stdin=rules)
    return netns.run(namespace, f"{tool}-save")


@contextmanager
def twins() -> Iterator[Twin]:
    """A control plane and both sides, gone afterwards."""
    binaries(DEFAULT_MINOR), binaries(MINOR)
    prefix = f"akpu{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="akp-userspace-", dir="/tmp") as name, ExitStack() as stack:
        folder, world, scratch = Path(name), World(f"{prefix}-w"), f"{prefix}-s"
        stack.callback(world.remove)
        stack.callback(netns.delete, scratch)
        world.build()
        plane = stack.enter_context(ControlPlane(world.name, (WORLD4, WORLD6), feature_gates=FEATURE_GATES))
        renderer = Renderer(world.name, plane.kubeconfig(folder / "akp.kubeconfig", "akp"))
        stack.callback(renderer.close)
        oracle = Oracle(HeldNode(f"{prefix}-n", world), folder)
        stack.callback(oracle.stop)
        yield Twin(plane, folder, oracle, scratch, renderer)


def record(twin: Twin, cluster: Cluster, state: kernel.State) -> None:
    """Keep what kube-proxy has programmed, which was found equal to ours."""
    target = goldens.FOLDER / f"{MODE}-{cluster.seed}"
    shutil.rmtree(target, ignore_errors=True)
    (target / "cluster").mkdir(parents=True)
    goldens.keep_cluster(twin.plane, twin.folder, target)
    (target / "config.json").write_text(json.dumps(cluster.config, indent=1) + "\n")
    (target / "facts.json").write_text("{}\n")
    (target / "kernel.txt").write_text(goldens.dump(state))
    (target / "kube-proxy").write_text(f"{binaries(MINOR).name} {MODE} {cluster.node}\n")


def case(twin: Twin, cluster: Cluster, steps: int, *, recorded: bool) -> tuple[int, int, list[str]]:
    """States and rules that were compared, and what differs, up to the first state that does."""
    states = rules = 0
    history, what = History(cluster), "at first"
    try:
        twin.start(cluster)
        for number in range(steps + 1):
            if number:
                step = history.step()

                cluster = step.after
                what = f"after step {number} ({', '.join(map(str, step.changes))})"
                twin.change(cluster, step.changes)
            state, found = twin.compare(cluster)
            states, rules = states + 1, rules + sum(map(len, state.values()))
            if found:
                return states, rules, [what, *map(str, found[:20])]
            if recorded:
                record(twin, cluster, state)
    except RuntimeError as error:
        return states, rules, [what, str(error)]
    finally:
        twin.stop()
    return states, rules, []


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance userspace", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the clusters after it have the next ones")
    parser.add_argument("--clusters", type=int, default=25, help="how many clusters")
    parser.add_argument("--steps", type=int, default=3, help="changes in the life of each cluster")
    parser.add_argument("--record", action="store_true", help="record the goldens anew, and nothing else")
    args = parser.parse_args(argv)
    stop_on_term()
    seeds = goldens.SEEDS[MODE] if args.record else range(args.seed, args.seed + args.clusters)
    failed = 0
    with twins() as twin:
        for seed in seeds:
            cluster, began = draw(seed), time.monotonic()
            steps = 0 if args.record else args.steps
            states, rules, failures = case(twin, cluster, steps, recorded=args.record)
            verdict = "differs" if failures else "equal"
            print(
                f"{MODE:9} seed {seed:<5} {family_of(cluster)} {len(cluster.objects):4} objects {states:3} states "
                f"{rules:6} rules {time.monotonic() - began:6.1f} s  {verdict}",
                *failures, sep="\n", flush=True,
            )  # fmt: skip
            failed += bool(failures)
        restarts = twin.restarts
    print(f"{len(seeds) - failed} of {len(seeds)} clusters equal; kube-proxy was started anew {restarts} times")
    return 1 if failed else 0
