"""Rendering and applying in iptables mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import load
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.node.bundles import grouped

from . import AKP, Measure, namespace, peak_memory, timed
from .cluster import write_cluster, write_config

COUNTERS = ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts")


def measures(tmp: Path) -> Iterator[Measure]:
    """Every bar of this mode."""
    yield from _rendering(tmp / "10k")
    yield from _applying(tmp / "2k")


def _rendering(tmp: Path) -> Iterator[Measure]:
    write_cluster(tmp / "cluster", 10_000, 10, local_share=0.1)
    write_config(tmp / "config.json", "iptables")
    render = [AKP, "render", "--cluster", str(tmp / "cluster"), "--config", str(tmp / "config.json")]
    one = [*render, "--node", "node-1", "--output", str(tmp / "out")]
    seconds = timed(one)
    yield Measure(
        "render one node, 10,000 x 10",
        seconds,
        "iptables-legacy-restore of it",
        _legacy_restore(tmp / "out/node-1"),
        0.5,
    )
    yield Measure("memory of that", peak_memory(one), "1 GiB", 1024, 1.5, "MiB")
    first, all_nodes = _hundred_nodes(tmp)
    yield Measure("generations and deltas of 100 nodes", all_nodes, "the same of one node", first, 5)


def _legacy_restore(bundle: Path) -> float:
    with namespace("legacy") as ns:
        for counter in COUNTERS:
            timed(["nfacct", "add", counter], netns=ns)
        return timed(["iptables-legacy-restore", "--noflush"], netns=ns, stdin=_batch(bundle))


def _batch(bundle: Path) -> Path:
    """All rules of IPv4 as one input of iptables-restore."""
    batch = bundle.with_suffix(".batch")
    batch.write_text(grouped(file.read_text() for file in sorted(bundle.glob("iptables-*.rules"))))
    return batch


def _hundred_nodes(tmp: Path) -> tuple[float, float]:
    """Seconds from files to the generation and delta of one node, and of a hundred; nothing is written."""
    before, after = tmp / "cluster", tmp / "changed"
    write_cluster(after, 10_000, 10, local_share=0.1)
    slices = after / "endpointslices.json"
    slices.write_text(
        slices.read_text(encoding="utf-8").replace('"ready": true', '"ready": false', 1), encoding="utf-8"
    )
    config = Choices.of({"config": str(tmp / "config.json")}).proxy
    seconds = []
    for count in (1, 100):
        started = time.perf_counter()
        renderer = backends.renderer(config)
        states: list[list[State]] = []
        for directory in (before, after):
            snapshot = load(directory)
            cluster = ClusterView(snapshot, config)
            states.append([renderer.state(cluster.node_view(node_facts(node))) for node in snapshot.nodes[:count]])
        deltas = [delta(old, new) for old, new in zip(*states, strict=True)]
        assert all(each.generation != each.base for each in deltas)
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]


def _applying(tmp: Path) -> Iterator[Measure]:
    write_cluster(tmp / "cluster", 2_000, 10)
    write_config(tmp / "config.json", "iptables")
    timed(
        [
            AKP,
            "render",
            "--cluster",
            str(tmp / "cluster"),
            "--config",
            str(tmp / "config.json"),
            "--node",
            "node-1",
            "--output",
            str(tmp / "out"),
        ]
    )
    bundle = tmp / "out/node-1"
    apply = ["sh", str(bundle / "akp-node"), "apply", str(bundle)]
    with namespace("apply") as ns:
        first = timed(apply, netns=ns, env={"AKP_STATE": str(tmp / "state")})
        second = timed(apply, netns=ns, env={"AKP_STATE": str(tmp / "state")})
    yield Measure("second apply of 2,000 x 10", second, "the first", first, 0.1)
    with namespace("batch") as ns:
        for counter in COUNTERS:
            timed(["nfacct", "add", counter], netns=ns)
        batch = timed(["iptables-nft-restore", "--noflush"], netns=ns, stdin=_batch(bundle))
    yield Measure("first apply of 2,000 x 10, nft back end", first, "iptables-nft-restore in one batch", batch, 1 / 3)
