"""The source address that a node's kernel gives to what the node itself sends."""

from __future__ import annotations

import pytest
from agentless_kube_proxy.explain.links import links_of, source_among

FACTS = {
    "addresses": [
        {"interface": "lo", "address": "127.0.0.1", "prefix": 8},
        {"interface": "eth0", "address": "192.168.77.11", "prefix": 24},
        {"interface": "eth0", "address": "203.0.113.31", "prefix": 24},
        {"interface": "cni0", "address": "10.244.1.1", "prefix": 24},
        {"interface": "eth0", "address": "fd77::11", "prefix": 64},
        {"interface": "eth0", "address": "2001:db8:203::31", "prefix": 64},
        {"interface": "eth0", "address": "fe80::1", "prefix": 64},
        {"interface": "cni0", "address": "fd00:10:244:1::1", "prefix": 64},
    ]
}


@pytest.mark.parametrize(
    ("destination", "source"),
    [
        ("10.96.0.10", "192.168.77.11"),
        ("192.168.77.12", "192.168.77.11"),
        ("203.0.113.78", "203.0.113.31"),  # on the link of the other address
        ("10.244.1.7", "10.244.1.1"),
        ("fd00:10:96::77", "fd77::11"),  # private as it is
        ("2001:db8:51::9", "2001:db8:203::31"),
        ("fd00:10:244:1::7", "fd00:10:244:1::1"),
    ],
)
def test_the_nearest_address_is_the_source(destination: str, source: str) -> None:
    node_ip = "fd77::11" if ":" in destination else "192.168.77.11"
    assert source_among(links_of(FACTS), node_ip, destination) == source


def test_without_prefixes_nothing_is_known() -> None:
    assert links_of(None) == links_of({}) == links_of({"addresses": [{"address": "192.168.77.11"}]}) == ()
