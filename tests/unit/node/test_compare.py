"""What of a comparison with kube-proxy's rules a packet could notice."""

from __future__ import annotations

import pytest
from agentless_kube_proxy.node.compare import noticeable


@pytest.mark.parametrize(
    "unnoticed",
    [
        {"kind": "missing-chain", "table": "nat", "chain": "KUBE-PROXY-GEN-0123456789ABC"},
        {"kind": "missing-chain", "table": "kube-proxy", "chain": "gen-" + "0" * 64},
        {"kind": "order", "table": "nat", "chain": "KUBE-SERVICES"},
        {"kind": "stale-chain", "table": "nat", "chain": "KUBE-SEP-AAAAAAAAAAAAAAAA"},
    ],
)
def test_markers_the_order_of_services_and_chains_that_nothing_leads_to_go_unnoticed(
    unnoticed: dict[str, str],
) -> None:
    assert noticeable([unnoticed]) == []


@pytest.mark.parametrize(
    "noticed",
    [
        {"kind": "order", "table": "nat", "chain": "KUBE-SVC-AAAAAAAAAAAAAAAA"},
        {"kind": "missing-rule", "table": "nat", "chain": "KUBE-SERVICES", "rule": "-A KUBE-SERVICES"},
        {"kind": "extra-rule", "table": "nat", "chain": "KUBE-SERVICES", "rule": "-A KUBE-SERVICES"},
        {"kind": "missing-chain", "table": "nat", "chain": "KUBE-SVC-AAAAAAAAAAAAAAAA"},
        {"kind": "stale-chain", "table": "kube-proxy", "chain": "nat-prerouting"},
        {"kind": "missing-jump", "table": "nat", "rule": "-A PREROUTING -j KUBE-SERVICES"},
        {"kind": "extra-element", "table": "kube-proxy", "chain": "service-ips", "rule": "10.96.0.1 . tcp . 80"},
        {"kind": "missing-endpoint", "table": "ipvs", "name": "-t 10.96.0.1:80", "value": "10.1.0.1:80"},
    ],
)
def test_rules_elements_and_servers_are_noticed(noticed: dict[str, str]) -> None:
    assert noticeable([noticed]) == [noticed]
