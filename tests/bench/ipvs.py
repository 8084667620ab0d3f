"""Applying in ipvs mode, in a kernel that has ip_vs: a user-mode Linux, slow but the same for both sides.

Such a kernel is a handful of processes that wait for each other at every system call, so its clock says more about what
else runs on the machine than about the work. Seconds are therefore those of the processor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import load
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.lab import Lab, Node

from . import Measure
from .cluster import write_cluster, write_config

NODE = "node-1"
RUNS = 2
SETS = ("ip_set_hash_ip", "ip_set_hash_ipport", "ip_set_hash_ipportip", "ip_set_hash_ipportnet", "ip_set_bitmap_port")


def measures(tmp: Path) -> Iterator[Measure]:
    """Every bar of this mode, at 2,000 Services of 10 endpoints."""
    write_cluster(tmp / "cluster", 2_000, 10)
    write_config(tmp / "config.json", "ipvs")
    states = [_state(tmp)]
    for run in range(1, RUNS + 1):
        slices = tmp / "cluster/endpointslices.json"
        before = f'"10.128.{run}.7"'
        slices.write_text(slices.read_text(encoding="utf-8").replace(before, f'"10.200.0.{run}"', 1), encoding="utf-8")
        states.append(_state(tmp))
    write_bundle(states[0], tmp / "bundle")
    with Lab(f"bench-{os.getpid()}", 0, uml=1) as lab:
        node = lab.nodes[0]
        program = f"{tmp}/bundle/akp-node"
        plain, first = [], []
        # In turn, and the best of each: a busy machine slows down now the one and now the other.
        node.run(["modprobe", "-a", "ip_vs", "ip_vs_rr", *SETS])
        for _ in range(RUNS):
            plain.append(_plain(node, tmp / "bundle"))
            node.run(["sh", program, "cleanup"])
            first.append(_seconds(node, ["sh", program, "apply", f"{tmp}/bundle"]))
            if len(first) < RUNS:
                node.run(["sh", program, "cleanup"])
        yield Measure(
            "first load in ipvs mode, 2,000 x 10", min(first), "the same by the plain tools", min(plain), 1.2, "s CPU"
        )
        update = []
        for old, new in itertools.pairwise(states):
            change = tmp / f"delta-{len(update)}"
            write_delta(delta(old, new), new, change)
            update.append(_seconds(node, ["sh", program, "apply", str(change)]))
        yield Measure("an endpoint replaced", min(update), "that first load", min(first), 0.05, "s CPU")


def _state(tmp: Path) -> State:
    config = Choices.of({"config": str(tmp / "config.json")}).proxy
    snapshot = load(tmp / "cluster", lambda _name: None)
    node = snapshot.node(NODE)
    assert node is not None
    return backends.renderer(config).state(ClusterView(snapshot, config).node_view(node_facts(node)))


def _plain(node: Node, bundle: Path) -> float:
    """The same state, loaded by hand and removed again."""
    load = """
        cd "$0"; cat ipset-* | ipset restore; cat ipvs-* | ipvsadm -R; ip -batch ip.batch
        iptables-restore --noflush <iptables.rules; ip6tables-restore --noflush <ip6tables.rules
    """
    seconds = _seconds(node, ["sh", "-ec", load, str(bundle)])
    clear = "for t in filter nat; do iptables -t $t -F; iptables -t $t -X; ip6tables -t $t -F; ip6tables -t $t -X; done"
    node.run(["sh", "-ec", f"{clear}; ip link del kube-ipvs0; ipvsadm -C; ipset destroy"])
    return seconds


def _seconds(node: Node, argv: list[str]) -> float:
    """Processor time of the node's kernel and all that runs on it."""
    started = _processor_time(node.pid)
    node.run(argv)
    return _processor_time(node.pid) - started


def _processor_time(group: int) -> float:
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group:
            # Those that have ended count with the one that waited for them.
            ticks += sum(map(int, fields[11:15] if stat.parent.name == str(group) else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
