"""Whatever an API server accepts of a tenant, a node takes the bundle: no Service stops those of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.write import write_bundle

from tests.unit.build import Object
from tests.unit.proxy.test_tenants import LARGEST, MODES, OTHER, states
from tests.unit.tenants import drawn

from .guarding import guarded
from .host import Host

SEEDS = range(7000, 7005)


def bundle(folder: Path, objects: list[Object], mode: str) -> Path:
    """What the first node of a cluster is given."""
    found, _said = states(objects, mode)
    write_bundle(found[0], folder)
    return folder


def cluster(seed: int) -> list[Object]:
    """One with a tenant in it."""
    before, added = drawn(4, seed)
    return [*before, *added]


@pytest.mark.parametrize("awk", ["mawk", "busybox"])
def test_the_guard_of_a_node_lets_every_bundle_through(awk: str, tmp_path: Path) -> None:
    made = [bundle(tmp_path / f"{mode}-{seed}", cluster(seed), mode) for mode in MODES for seed in SEEDS]
    assert refused(made, awk) == {}


def refused(made: list[Path], awk: str) -> dict[str, str]:
    """The bundles that the guard does not let through, and what it says of each."""
    return {each.name: said.reason for each, said in zip(made, guarded(made, awk), strict=True) if said.code}


@pytest.mark.soak
def test_the_guard_lets_the_largest_service_through_in_the_mode_with_the_longest_lines(tmp_path: Path) -> None:
    assert refused([bundle(tmp_path / "largest", [*OTHER, *LARGEST], "nftables")], "mawk") == {}


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_the_kernel_of_a_node_takes_them(mode: str, nft_host: Host, tmp_path: Path) -> None:
    for seed in (7003, 7007):
        assert nft_host.akp("apply", bundle(tmp_path / f"{mode}-{seed}", cluster(seed), mode)).code == 0
