"""What nodes shall have while a cluster changes: claims are judged again when what they are judged by changes."""

from __future__ import annotations

import dataclasses

import pytest
from agentless_kube_proxy.controller.desired import Choices, Desired
from agentless_kube_proxy.proxy.policy import Known, RefusedVips

from .build import document, node, service, slice_of, snapshot

CLAIM = service(externalIPs=["192.0.2.5"])
KUBERNETES = service("kubernetes", "default", clusterIP="10.96.0.1")


@pytest.fixture
def desired() -> Desired:
    return Desired(Choices.of(document(), {"vip_policy": "refuse"}))


def test_an_api_server_that_moves_to_a_claimed_address_is_noticed(desired: Desired) -> None:
    before = snapshot(CLAIM, KUBERNETES, slice_of("kubernetes", "192.0.2.4", namespace="default"), node())
    moved = snapshot(CLAIM, KUBERNETES, slice_of("kubernetes", "192.0.2.5", namespace="default"), node())
    desired.update(before)
    with pytest.raises(RefusedVips, match=r"192\.0\.2\.5 is an address of the API server"):
        desired.update(dataclasses.replace(before, slices=moved.slices))


def test_an_address_that_a_node_gets_is_noticed(desired: Desired) -> None:
    cluster = snapshot(CLAIM, node())
    desired.update(cluster, Known({"n1": ("192.0.2.4",)}))
    assert desired.claimed({"192.0.2.5", "192.0.2.6"})
    assert not desired.claimed({"192.0.2.4"})
    with pytest.raises(RefusedVips, match=r"192\.0\.2\.5 is an address of an interface of the node n1"):
        desired.update(cluster, Known({"n1": ("192.0.2.4", "192.0.2.5")}))
