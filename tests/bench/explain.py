"""How long a question takes, from files to the answer, and a proof of all frontends of a hundred nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from . import AKP, Measure, timed
from .cluster import write_cluster, write_config

MODES = ("iptables", "nftables", "ipvs")
SECONDS = {1_000: 0.3, 10_000: 2.0}
PROOF_SECONDS = 60.0


def measures(directory: Path) -> Iterator[Measure]:
    """Each is measured against the seconds that are promised; of three questions the quickest counts."""
    for mode in MODES:
        write_config(directory / f"{mode}.json", mode)
    for services in SECONDS:
        write_cluster(directory / f"{services}", services, 10)
    for (services, seconds), mode in itertools.product(SECONDS.items(), MODES):
        options = ["--cluster", str(directory / f"{services}"), "--config", str(directory / f"{mode}.json")]
        question = ["--node", "node-3", "--from", "10.131.0.5", "--to", "10.96.1.7:80", "--json"]
        took = min(timed([AKP, "explain", *options, *question]) for _ in range(3))
        yield Measure(f"explain, {services:,} Services, {mode}", took, "promised", seconds, 1.0)
    options = ["--cluster", str(directory / "10000"), "--config", str(directory / "iptables.json")]
    yield Measure("prove, 10,000 Services x 100 nodes", timed([AKP, "prove", *options]), "promised", PROOF_SECONDS, 1.0)
