"""What kube-proxy minors do differently."""

from __future__ import annotations

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State

from tests.unit.build import config, endpoint, file, port, service, slice_of, view


def rendered(compat: str, *objects: object, mode: str) -> State:
    seen = view(*objects, mode=mode)
    return backends.renderer(seen.config, compat).state(seen)


@pytest.mark.parametrize(
    ("compat", "rule"),
    [
        ("1.36", "meta l4proto tcp dnat ip addr . port to numgen random mod 1 map { 0 : 10.244.1.5 . 8080 }"),
        ("1.37", "meta l4proto tcp dnat to 10.244.1.5:8080"),
    ],
)
def test_a_lone_endpoint_in_nftables_mode(compat: str, rule: str) -> None:
    state = rendered(compat, service(), slice_of("web", "10.244.1.5"), mode="nftables")
    assert f" {rule}\n" in file(state, "nftables.nft")


@pytest.mark.parametrize(("compat", "lines"), [("1.36", ""), ("1.37", "ipv4 10.96.7.7 53 -\n")])
def test_flows_of_a_udp_service_that_nobody_serves_any_more(compat: str, lines: str) -> None:
    dns = service(ports=[port(53, "dns", "UDP")])
    gone = slice_of(
        "web",
        endpoint("10.244.1.5", ready=False, serving=False),
        ports=[{"name": "dns", "port": 53, "protocol": "UDP"}],
    )
    assert file(rendered(compat, dns, gone, mode="iptables"), "conntrack.udp") == lines


def test_a_keyword_that_the_minor_does_not_know_is_refused() -> None:
    with pytest.raises(backends.UnknownBackend, match=r"kube-proxy 1\.36 does not know the keyword localhost"):
        backends.renderer(config(nodePortAddresses=["localhost"]), "1.36")
    assert backends.renderer(config(nodePortAddresses=["primary"]), "1.36")


def test_an_unknown_minor_is_refused_with_those_there_are() -> None:
    with pytest.raises(backends.UnknownBackend, match=r"1\.36, 1\.37"):
        backends.renderer(config(), "1.12")


def test_the_minor_is_part_of_the_generation() -> None:
    older, newer = (rendered(compat, service(), mode="iptables") for compat in ("1.36", "1.37"))
    assert older.generation != newer.generation
