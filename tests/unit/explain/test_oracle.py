"""For every cluster that can be drawn, what the rules do with a packet is what was decided about it, in every mode."""

from __future__ import annotations

import pytest
from agentless_kube_proxy.proxy.config_document import parse_config
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.policy import VipPolicy, under_policy
from agentless_kube_proxy.proxy.view import ClusterView
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.draw import cluster
from tests.unit.build import Object, config, snapshot
from tests.unit.clusters import CONFIGS, clusters

from .oracle import cases

DETECT = st.sampled_from(
    (
        {},
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "br0"}},
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "cali"}},
    )
)


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
@given(objects=clusters(), fields=CONFIGS, detect=DETECT, on=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_rules_do_what_was_decided(mode: str, objects: list[Object], fields: Object, detect: Object, on: int) -> None:
    settings_ = config(**{**fields, **detect, "mode": mode})
    read, _said = under_policy(snapshot(*objects), settings_, VipPolicy())
    view = ClusterView(read, settings_).node_view(node_facts(read.nodes[on]))
    for case in cases(view):
        assert case.agrees, str(case)


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
@pytest.mark.parametrize("seed", range(10))
def test_rules_of_clusters_as_the_twins_draw_them(mode: str, seed: int) -> None:
    drawn = cluster(seed, mode)
    settings_ = parse_config(drawn.config)
    read, _said = under_policy(snapshot(*drawn.objects), settings_, VipPolicy())
    known = read.node(drawn.node)
    assert known is not None
    facts = {"addresses": [{"address": ip} for ip in ("127.0.0.1", "::1", *drawn.addresses)]}
    view = ClusterView(read, settings_).node_view(node_facts(known, facts))
    for case in cases(view):
        assert case.agrees, str(case)
