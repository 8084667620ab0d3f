"""The files of bundles and deltas in real kernels, loaded as they are, without the node program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State, delta

from tests.node.bundles import grouped
from tests.node.host import Host
from tests.node.nftables import NO_SYSCTLS
from tests.unit.build import node, port, render, service, slice_of
from tests.unit.clusters import cluster

Files = dict[str, str]
WAYS = ["iptables-nft", "iptables-legacy", "nftables"]


def state(way: str, objects: Iterable[Any], **fields: Any) -> State:
    mode = way.partition("-")[0]
    facts = {"capabilities": {"nfacct": False}}
    return render(*objects, facts=facts, **{"mode": mode, "conntrack": NO_SYSCTLS, **fields})


def load(host: Host, way: str, files: Files) -> None:
    """Load files as a node does: one transaction per table and family, or one for all; what is dropped afterwards."""
    if way == "nftables":
        rules = [text for name, text in sorted(files.items()) if name.endswith(".nft") and "-4-" not in name]
        inputs = [("nft -f -", "".join(rules)), ("nft -f -", files.get("nftables-4-drop.nft", ""))]
    else:
        flavour = way.partition("-")[2]
        inputs = [
            (
                f"{tool}-{flavour}-restore --noflush",
                grouped([files[name] for name in sorted(files) if tool_of(name) == tool]),
            )
            for tool in ("iptables", "ip6tables")
        ]
    for number, (command, text) in enumerate(inputs):
        file = host.directory / f"input.{number}"
        file.write_text(text)
        host.sh(f"{command} <{file}")


def tool_of(name: str) -> str:
    return name.partition("-")[0]


def kernel(host: Host, way: str) -> list[str]:
    """All that is there, in an order that says nothing about how it came there."""
    if way == "nftables":
        # Elements come in the order of a hash, several on a line.
        text = (
            re.sub(r"\s+", " ", host.sh("nft list ruleset")).replace("elements = {", "\n").replace("chain ", "\nchain ")
        )
        return sorted(re.split(r"\n|, | \} ", text))
    return host.rules().splitlines()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(new_host: Callable[..., Host], way: str) -> Callable[[], Host]:
    return lambda: new_host("legacy" if way.endswith("legacy") else "nft")


def test_files_of_a_family_in_the_order_of_their_names_are_valid_input(make: Callable[[], Host], way: str) -> None:
    host = make()
    files = dict(backends.files(state(way, cluster(7, 3))))
    for tool in ("iptables", "ip6tables", "nftables"):
        names = [name for name in sorted(files) if re.fullmatch(rf"{tool}-\d-.*\.(rules|nft)", name)]
        if names:
            file = host.directory / tool
            file.write_text("".join(files[name] for name in names))
            host.sh(f"nft -f {file}" if tool == "nftables" else f"{tool}-{host.flavour}-restore --noflush <{file}")
    together = make()
    load(together, way, files)
    assert kernel(host, way) == kernel(together, way)


@pytest.mark.parametrize("seed", range(4))
def test_a_delta_leads_where_the_whole_bundle_leads(make: Callable[[], Host], way: str, seed: int) -> None:
    one, two = make(), make()
    states = [state(way, cluster(6, seed * 10 + i)) for i in range(3)]
    load(one, way, dict(backends.files(states[0])))
    for old, new in itertools.pairwise(states):
        change = delta(old, new)
        assert not change.needs_full
        load(one, way, dict(backends.delta_files(change, new)))
    load(two, way, dict(backends.files(states[-1])))
    assert kernel(one, way) == kernel(two, way)


def shop(way: str, *ips: str, **fields: Any) -> State:
    web = service(
        type="LoadBalancer",
        ports=[port(nodePort=31080), port(53, "dns", "UDP")],
        ingress=("198.51.100.9",),
        loadBalancerSourceRanges=["203.0.113.0/24"],
    )
    sticky = service("cart", clusterIP="10.96.7.8", sessionAffinity="ClientIP")
    slices = slice_of("web", *ips, ports=[port(8080), port(53, "dns", "UDP")]), slice_of("cart", *ips)
    return state(way, [node("n1", "172.18.0.11"), web, sticky, *slices], **fields)


def test_endpoints_that_come_and_go_lead_back_to_the_same_kernel(make: Callable[[], Host], way: str) -> None:
    host = make()
    first, none = shop(way, "10.244.1.1", "10.244.1.2"), shop(way)
    load(host, way, dict(backends.files(first)))
    before = kernel(host, way)
    for old, new in ((first, none), (none, first)):
        load(host, way, dict(backends.delta_files(delta(old, new), new)))
    assert kernel(host, way) == before


@pytest.mark.parametrize("missing", ["base", "jump"])
def test_the_kernel_refuses_a_delta_whose_base_or_jump_is_not_there(
    make: Callable[[], Host], way: str, missing: str
) -> None:
    host = make()
    first, second, third = (shop(way, ip) for ip in ("10.244.1.1", "10.244.1.2", "10.244.1.3"))
    load(host, way, dict(backends.files(first)))
    change = delta(first, second)
    if missing == "base":
        change = delta(third, second)
    elif way == "nftables":
        # Its base chains are its own: what can be missing is the marker of one family.
        host.sh(f"nft delete chain ip kube-proxy gen-{first.generation}")
    else:
        host.sh('$ipt -t nat -D OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES')
    before = kernel(host, way)
    with pytest.raises(AssertionError):
        load(host, way, dict(backends.delta_files(change, second)))
    assert kernel(host, way) == before
