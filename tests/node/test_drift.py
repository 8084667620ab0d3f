"""Drift by content: whatever is edited among our rules is found; the control side tells which Service it belongs to."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.node import bundles
from tests.node.host import Host
from tests.node.nftables import NO_SYSCTLS
from tests.unit.build import node, render, service, slice_of


def test_a_rule_in_the_chain_of_an_endpoint_is_found(any_flavour: Host, tmp_path: Path) -> None:
    answer = any_flavour.apply(bundles.simple(tmp_path / "a"))
    chain = bundles.shop()[1].endpoint_chain("10.244.1.3:8080")
    any_flavour.sh(f"$ipt -t nat -R {chain} 2 -p tcp -j DNAT --to-destination 192.0.2.66:1")
    status = any_flavour.akp("status", "--verify").json
    assert (status["state"], status["drift"]) == ("applied", 2)
    assert status["since"] == {"generation": answer["generation"], "appliedAt": status["appliedAt"]}
    assert [(each["kind"], each["chain"]) for each in status["differences"]] == [
        ("missing-rule", chain),
        ("extra-rule", chain),
    ]
    assert "192.0.2.66" in status["differences"][1]["rule"]
    assert any_flavour.akp("restore", "--verify").json["changed"] is True
    status = any_flavour.akp("status", "--verify").json
    assert (status["drift"], "since" in status) == (0, False)


def test_chains_that_came_with_a_delta_are_compared_too(nft_host: Host, tmp_path: Path) -> None:
    many = [slice_of("web", *(f"10.244.{i}.{j}" for j in range(1, 11)), name=f"web-{i}") for i in range(101)]
    small = [node("n1", "172.18.0.11"), service("web"), *many]
    old = render(*small, mode="iptables", conntrack=NO_SYSCTLS)
    more = [service("cart", clusterIP="10.96.7.8"), slice_of("cart", "10.244.250.4")]
    new = render(*small, *more, mode="iptables", conntrack=NO_SYSCTLS)
    write_bundle(old, tmp_path / "a")
    write_delta(delta(old, new), new, tmp_path / "d")
    nft_host.apply(tmp_path / "a")
    assert nft_host.apply(tmp_path / "d")["changed"] is True
    chain = re.findall(r"-A (KUBE-SEP-\S+) -p tcp .*10\.244\.250\.4", nft_host.rules())[0]
    nft_host.sh(f"$ipt -t nat -F {chain}")
    status = nft_host.akp("status", "--verify").json
    assert {(each["kind"], each["chain"]) for each in status["differences"]} == {("missing-rule", chain)}


def test_an_element_is_found(nft_host: Host, tmp_path: Path) -> None:
    made = render(
        node("n1", "172.18.0.11"),
        service("web"),
        slice_of("web", "10.244.1.1"),
        service("cart", clusterIP="10.96.7.8"),
        slice_of("cart", "10.244.1.2"),
        mode="nftables",
        conntrack=NO_SYSCTLS,
    )
    write_bundle(made, tmp_path / "a")
    nft_host.apply(tmp_path / "a")
    nft_host.sh("nft delete element ip kube-proxy service-ips '{ 10.96.7.8 . tcp . 80 }'")
    found = nft_host.akp("status", "--verify").json["differences"]
    assert [(each["kind"], "10.96.7.8" in str(each)) for each in found] == [("missing-element", True)]


@pytest.mark.slow
def test_one_edited_rule_among_100000_is_found(nft_host: Host, tmp_path: Path) -> None:
    services = list(bundles.many(3500, 9))
    bundle = bundles.simple(tmp_path / "a", services)
    nft_host.apply(bundle)
    rules = int(nft_host.sh("$ipt-save | grep -c '^-A KUBE-'"))
    assert rules > 100_000
    assert nft_host.akp("status", "--verify").json["drift"] == 0
    victim = services[1234]
    chain = victim.endpoint_chain(victim.endpoints[4])
    nft_host.sh(f"$ipt -t nat -R {chain} 2 -p tcp -j DNAT --to-destination 192.0.2.66:1")
    started = time.monotonic()
    status = nft_host.akp("status", "--verify").json
    print(f"{rules} rules: found in {time.monotonic() - started:.1f} s")
    assert [(each["kind"], each["chain"]) for each in status["differences"]] == [
        ("missing-rule", chain),
        ("extra-rule", chain),
    ]
