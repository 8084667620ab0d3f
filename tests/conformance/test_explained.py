"""For drawn clusters, `akp explain` says how connections end: who answers, which source is seen, who refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .draw import cluster
from .explained import case, standing
from .namespaces import Node

MODES = ("iptables", "nftables")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with standing(f"akpx{os.getpid()}") as made:
        yield made


# Local policies and hints; addresses that are written in odd ways; pods that only an interface tells.
@pytest.mark.parametrize(("mode", "seed"), [("iptables", 4), ("nftables", 4), ("nftables", 8)])
def test_connections_end_as_is_explained(mode: str, seed: int, node: Node, tmp_path: Path) -> None:
    count, found = case(cluster(seed, mode), node, tmp_path)
    assert count
    assert not found, "\n".join(map(str, found))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(100, 115))
def test_many_connections_end_as_is_explained(mode: str, seed: int, node: Node, tmp_path: Path) -> None:
    _count, found = case(cluster(seed, mode), node, tmp_path)
    assert not found, "\n".join(map(str, found))
