"""The names of Pods are kept for people; no generation, no rule and no digest depends on them."""

from __future__ import annotations

import copy

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.cluster.record import record_of, snapshot_of
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.unit.build import Object, config, snapshot

from .test_question import OBJECTS


def renamed() -> list[Object]:
    """The cluster with other Pods behind the same addresses."""
    objects = copy.deepcopy(OBJECTS)
    for each in objects:
        for endpoint in each.get("endpoints", ()):
            endpoint["targetRef"]["name"] += "-again"
    return objects


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
def test_no_rule_depends_on_the_name_of_a_pod(mode: str) -> None:
    states = []
    for objects in (OBJECTS, renamed()):
        read, settings = snapshot(*objects), config(mode=mode)
        states.append(
            backends.renderer(settings).state(ClusterView(read, settings).node_view(node_facts(read.nodes[0])))
        )
    assert states[0].generation == states[1].generation
    assert dict(backends.files(states[0])) == dict(backends.files(states[1]))


def test_a_record_keeps_the_names_and_its_digest_does_not_depend_on_them() -> None:
    one, other = record_of(OBJECTS, "here"), record_of(renamed(), "here")
    assert one.digest == other.digest
    assert one.lists != other.lists
    pods = {endpoint.pod for each in snapshot_of(one).slices for endpoint in each.endpoints}
    assert pods == {"web-1", "web-2", "web-3"}


@pytest.mark.parametrize(
    "reference", [{"kind": "Node", "name": "n1"}, {"kind": "Pod", "name": 'x"y'}, {"kind": "Pod"}, [], None]
)
def test_what_is_no_pod_is_left_out(reference: object) -> None:
    objects = copy.deepcopy(OBJECTS)
    plain = copy.deepcopy(OBJECTS)
    for each, without in zip(objects, plain, strict=True):
        for endpoint, bare in zip(each.get("endpoints", ()), without.get("endpoints", ()), strict=True):
            endpoint["targetRef"] = reference
            del bare["targetRef"]
    assert not snapshot(*objects).problems
    assert {endpoint.pod for each in snapshot(*objects).slices for endpoint in each.endpoints} == {""}
    assert record_of(objects, "").digest == record_of(plain, "").digest
