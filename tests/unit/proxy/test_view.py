"""The node's view: which chains a service port needs and what happens to traffic that finds no endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView, PortView

from tests.unit.build import Object, config, endpoint, node, port, service, slice_of, snapshot, view

HERE = endpoint("10.244.1.1", node="n1")
AWAY = endpoint("10.244.2.1", node="n2")
GOING: Object = {"ready": False, "serving": True, "terminating": True}
LOCAL_IN: Object = {"internalTrafficPolicy": "Local"}
LOCAL_OUT: Object = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
OUTSIDE: Object = {"ports": [port(nodePort=30080)]}


def port_view(*endpoints: Any, **spec: Any) -> PortView:
    slices = [slice_of("web", *endpoints)] if endpoints else []
    return view(service(**spec), *slices).families[0].ports[0]


def chains(seen: PortView) -> str:
    used = {"SVC": seen.uses_cluster_chain, "SVL": seen.uses_local_chain, "EXT": seen.uses_external_chain}
    return " ".join(name for name, wanted in used.items() if wanted)


@pytest.mark.parametrize(
    ("spec", "endpoints", "expected_chains", "internal", "external"),
    [
        ({}, [HERE, AWAY], "SVC", True, True),
        ({}, [], "", False, False),
        (OUTSIDE, [AWAY], "SVC EXT", True, True),
        (OUTSIDE, [], "", False, False),
        # internal traffic stays on the node
        (LOCAL_IN, [HERE, AWAY], "SVL", True, True),
        (LOCAL_IN, [AWAY], "", False, True),
        (LOCAL_IN, [], "", False, False),
        (LOCAL_IN | OUTSIDE, [HERE, AWAY], "SVC SVL EXT", True, True),
        (LOCAL_IN | OUTSIDE, [AWAY], "SVC EXT", False, True),
        # external traffic stays on the node
        (LOCAL_OUT | OUTSIDE, [HERE, AWAY], "SVC SVL EXT", True, True),
        (LOCAL_OUT | OUTSIDE, [AWAY], "SVC EXT", True, False),
        (LOCAL_OUT | OUTSIDE, [], "", False, False),
        # the policy of a Service that nobody outside can reach is without effect
        (LOCAL_OUT, [AWAY], "SVC", True, False),
        # both stay
        (LOCAL_IN | LOCAL_OUT | OUTSIDE, [HERE, AWAY], "SVC SVL EXT", True, True),
        (LOCAL_IN | LOCAL_OUT | OUTSIDE, [AWAY], "SVC EXT", False, False),
        # endpoints that go out of service are better than none
        (LOCAL_OUT | OUTSIDE, [HERE | {"conditions": GOING}, AWAY], "SVC SVL EXT", True, True),
        (LOCAL_IN, [HERE | {"conditions": GOING}], "SVL", True, True),
    ],
)
def test_which_chains_a_service_port_needs(
    spec: Any, endpoints: list[Any], expected_chains: str, internal: bool, external: bool
) -> None:
    seen = port_view(*endpoints, **spec)
    assert (chains(seen), seen.has_internal, seen.has_external) == (expected_chains, internal, external)


def test_external_ips_of_the_other_family_switch_the_policy_but_reach_nothing() -> None:
    seen = port_view(AWAY, externalTrafficPolicy="Local", externalIPs=["2001:db8::1"])
    assert seen.port.external_policy_local
    assert chains(seen) == "SVC"


def test_service_ports_are_sorted_by_namespace_name_port_and_protocol() -> None:
    ports = [port(1, "b"), port(2, "a", "UDP"), port(3, "a", "TCP"), port(4, "", "SCTP")]
    names = (("a", "b"), ("a-b", "a"), ("a", "a"))
    others = [service(*each, clusterIP=f"10.96.0.{number}") for number, each in enumerate(names, 1)]
    seen = view(service("b", "a", ports=ports), *others)
    assert [each.port.key for each in seen.families[0].ports] == [
        "a/a:http tcp",
        "a/a-b:http tcp",
        "a/b sctp",
        "a/b:a tcp",
        "a/b:a udp",
        "a/b:b tcp",
        "b/a:http tcp",
    ]


def test_endpoints_are_counted_whatever_their_condition_once_per_port() -> None:
    slow = endpoint("10.244.1.3", ready=False)
    both = [port(80), port(81, "admin")]
    seen = view(service(ports=both), slice_of("web", HERE, slow, ports=both), slice_of("ghost", AWAY))
    assert seen.families[0].total_endpoints == 4
    assert seen.families[1].total_endpoints == 0


def test_node_names_are_compared_in_lower_case() -> None:
    seen = view(service(**LOCAL_IN), slice_of("web", endpoint("10.244.1.1", node="N1")))
    assert seen.families[0].ports[0].selection.local == ()


@pytest.mark.parametrize(
    ("ranges", "allowed"),
    [
        (["172.18.0.0/16"], True),
        (["10.0.0.0/8"], False),
        (["fd00::/8"], False),
        (["10.0.0.0/8", "172.18.0.11/32"], True),
    ],
)
def test_whether_source_ranges_contain_the_node(ranges: list[str], allowed: bool) -> None:
    seen = view(service(loadBalancerSourceRanges=ranges), node("n1", "172.18.0.11")).families[0]
    assert seen.allows_node_ip(seen.ports[0].port) is allowed


def test_service_cidrs_are_sorted_into_families() -> None:
    cidrs = {"kind": "ServiceCIDR", "metadata": {"name": "a"}, "spec": {"cidrs": ["10.96.0.0/12", "fd00::/112"]}}
    more = {"kind": "ServiceCIDR", "metadata": {"name": "b"}, "spec": {"cidrs": ["10.95.0.0/16", "10.96.0.0/12"]}}
    seen = view(cidrs, more)
    assert [each.service_cidrs for each in seen.families] == [("10.95.0.0/16", "10.96.0.0/12"), ("fd00::/112",)]


# ------------------------------------------------------------------ what nodes share


def cluster() -> Snapshot:
    return snapshot(
        service("plain", clusterIP="10.96.0.1"),
        slice_of("plain", HERE, AWAY),
        service("local", clusterIP="10.96.0.2", **LOCAL_IN),
        slice_of("local", HERE, AWAY),
        service("zoned", clusterIP="10.96.0.3"),
        slice_of("zoned", endpoint("10.244.1.1", zones=("a",)), endpoint("10.244.2.1", node="n2", zones=("b",))),
        *(node(f"n{i}", f"172.18.0.{10 + i}", zone=zone) for i, zone in enumerate("abcc", 1)),
    )


def test_nodes_share_the_view_of_a_service_port_that_looks_the_same_to_them() -> None:
    seen = ClusterView(cluster(), config())
    n1, n2, n3, n4 = (seen.node_view(node_facts(each)).families[0] for each in cluster().nodes)
    local, plain, zoned = range(3)
    assert n1.ports[plain] is n2.ports[plain] is n3.ports[plain]
    # n3 and n4 hold no endpoint, and no hint is for their zone
    assert n3.ports[local] is n4.ports[local]
    assert n3.ports[zoned] is n4.ports[zoned]
    assert len({id(each.ports[local]) for each in (n1, n2, n3)}) == 3
    assert len({id(each.ports[zoned]) for each in (n1, n2, n3)}) == 3


def test_a_node_knows_the_service_ports_with_an_endpoint_of_its_own() -> None:
    seen = ClusterView(cluster(), config())
    names = [
        [each.port.name for each in seen.node_view(node_facts(known)).families[0].local_ports]
        for known in cluster().nodes
    ]
    assert names == [["local", "plain", "zoned"], ["local", "plain", "zoned"], [], []]
