"""What a node refuses as shrunken: fewer service ports than it may lose, or no endpoints left."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.plan.removal_limit import losses, service_ports

from tests.node.host import Host
from tests.node.nftables import NO_SYSCTLS
from tests.unit.build import dual_stack, node, port, render, service, slice_of

API_SERVER = (
    service("kubernetes", "default", clusterIP="10.96.0.1", ports=[port(443, "https")]),
    slice_of("kubernetes", "192.0.2.5", namespace="default", ports=[port(6443, "https")]),
)


def state(services: int, live: int) -> State:
    """So many Services beside the API server's, of which the first few have endpoints."""
    objects = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, services + 1)]
    slices = [slice_of(f"s{i}", f"10.244.1.{i}") for i in range(1, live + 1)]
    return render(node("n1", "172.18.0.11"), *API_SERVER, *objects, *slices, conntrack=NO_SYSCTLS)


def families(*wanted: str) -> State:
    ips = {"IPv4": "10.96.1.{}", "IPv6": "fd00:10:96::{}"}
    made = [
        dual_stack(f"s{i}", ipFamilies=list(wanted), clusterIPs=[ips[each].format(i) for each in wanted])
        for i in range(1, 4)
    ]
    return render(node("n1", "172.18.0.11", "fd00:18::11"), *made, conntrack=NO_SYSCTLS)


PAIRS = {
    "as before": (state(4, 4), state(4, 4)),
    "some scaled down to nothing": (state(4, 4), state(4, 1)),
    "none with endpoints any more": (state(4, 4), state(4, 0)),
    "none with endpoints any more, and some gone": (state(4, 4), state(2, 0)),
    "two that had endpoints among many that had none": (state(9, 2), state(9, 0)),
    "more endpoints": (state(4, 0), state(4, 4)),
    "half of them gone": (state(5, 5), state(2, 2)),
    "most of them gone": (state(4, 4), state(1, 1)),
    "all gone but the API server": (state(4, 4), state(0, 0)),
    "a family gone": (families("IPv4", "IPv6"), families("IPv4")),
    "a family more": (families("IPv4"), families("IPv4", "IPv6")),
}


# The node knows two numbers, and not whose they are: here it lets pass what its control host refuses, or refuses more.
COARSER = {"a family gone"}
STRICTER = {"all gone but the API server"}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_node_refuses_by_the_numbers_of_a_manifest(nft_host: Host, tmp_path: Path, pair: str) -> None:
    before, after = PAIRS[pair]
    for name, made in (("before", before), ("after", after)):
        write_bundle(made, tmp_path / name)
    nft_host.apply(tmp_path / "before")
    for percent in (0, 50, 99):
        told = losses({"n1": (service_ports(before.fragments), service_ports(after.fragments), percent)})
        result = nft_host.akp("check", "--max-removed", str(percent), tmp_path / "after")
        assert result.code in (0, 2), result.stdout
        assert told or result.code == 0 or pair in STRICTER, result.stdout
        assert result.code == 2 or not told or pair in COARSER, told
    assert nft_host.akp("check", "--max-removed", "100", tmp_path / "after").code == 0
