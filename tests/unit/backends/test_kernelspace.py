"""Windows nodes: which load balancers and endpoints the Host Networking Service is given for a Service."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.engine import Engine
from agentless_kube_proxy.proxy.facts import InvalidFacts, UnusableNode

from tests.unit.build import document, dual_stack, endpoint, file, node, port, service, slice_of, snapshot

Object = dict[str, Any]

HERE, THERE = "10.244.1.5", "10.244.2.5"
OVERLAY: Object = {
    "networkType": "Overlay",
    "hostMac": "00-15-5D-00-00-01",
    "remoteSubnets": [{"destinationPrefix": "10.244.2.0/24", "providerAddress": "172.18.0.12"}],
}


def windows(name: str = "w1", *addresses: str) -> Object:
    made = node(name, *addresses)
    made["metadata"]["labels"]["kubernetes.io/os"] = "windows"
    return made


def hns(*objects: Object, facts: Object | None = None, **winkernel: Any) -> Object:
    """hns.json of the Windows node w1."""
    settings = {"networkName": "pods", **winkernel}
    engine = Engine(Choices.of({"config": document(mode="kernelspace", winkernel=settings)}), preview=True)
    nodes = [] if any(each["kind"] == "Node" for each in objects) else [windows()]
    engine.update(snapshot(*nodes, *objects))
    made: Object = json.loads(file(engine.state("w1", {"hns": facts or {}}), "hns.json"))
    return made


def two_endpoints(**conditions: Any) -> Object:
    return slice_of("web", endpoint(HERE, node="w1", **conditions), endpoint(THERE, node="n2", **conditions))


def by_frontend(made: Object) -> dict[tuple[str, int], Object]:
    """Load balancers by address, which a node port has none of, and port."""
    return {
        ("".join(each.get("FrontendVIPs", [])), each["PortMappings"][0]["ExternalPort"]): each
        for each in made["loadBalancers"]
    }


FULL: Object = {
    "type": "LoadBalancer",
    "ports": [port(80, nodePort=30080)],
    "externalIPs": ["192.0.2.7"],
    "ingress": ("192.0.2.8",),
}


def test_a_service_has_a_load_balancer_for_each_way_to_reach_it() -> None:
    found = by_frontend(hns(service(**FULL), two_endpoints()))
    shown = {
        key: (each["HostComputeEndpoints"], each.get("Flags", 0), each["PortMappings"][0].get("Flags", 0))
        for key, each in found.items()
    }
    assert shown == {
        ("10.96.7.7", 80): ([HERE, THERE], 0, 0),
        ("", 30080): ([HERE, THERE], 0, 18),
        ("192.0.2.7", 80): ([HERE, THERE], 0, 16),
        ("192.0.2.8", 80): ([HERE, THERE], 0, 16),
    }
    assert {each["PortMappings"][0]["InternalPort"] for each in found.values()} == {8080}


def test_only_pods_elsewhere_are_endpoints_that_have_to_be_made() -> None:
    (made,) = hns(service(), two_endpoints())["endpoints"]
    assert made == {
        "IpConfigurations": [{"IpAddress": THERE}],
        "MacAddress": "02-11-0a-f4-02-05",
        "Flags": 1,
        "Dns": {},
        "Health": {"Extra": {}},
        "SchemaVersion": {"Major": 2, "Minor": 0},
    }


def test_an_external_policy_local_keeps_to_the_node_and_answers_directly() -> None:
    found = by_frontend(hns(service(externalTrafficPolicy="Local", **FULL), two_endpoints()))
    assert found.pop(("10.96.7.7", 80))["HostComputeEndpoints"] == [HERE, THERE]
    assert {(tuple(each["HostComputeEndpoints"]), each["Flags"]) for each in found.values()} == {((HERE,), 1)}


def test_with_both_policies_local_no_endpoint_elsewhere_is_made() -> None:
    policies: Object = {"externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"}
    made = hns(service(**policies, **FULL), two_endpoints())
    assert made["endpoints"] == []
    assert {tuple(each["HostComputeEndpoints"]) for each in made["loadBalancers"]} == {(HERE,)}


def test_before_direct_server_return_a_local_policy_is_none() -> None:
    old = {"version": "9.2"}
    found = by_frontend(hns(service(externalTrafficPolicy="Local", **FULL), two_endpoints(), facts=old))
    assert found["", 30080]["HostComputeEndpoints"] == [HERE, THERE]
    with pytest.raises(UnusableNode, match=r"HNS 9\.2 has no direct server return"):
        hns(service(), facts=old, enableDSR=True)


def test_preserve_destination_sends_packets_for_the_load_balancer_on_as_they_are() -> None:
    kept = service(annotations={"preserve-destination": "true"}, **FULL)
    found = by_frontend(hns(kept, two_endpoints()))
    assert found["192.0.2.8", 80]["PortMappings"][0]["Flags"] == 28
    assert (found["192.0.2.8", 80]["Flags"], found["192.0.2.8", 80]["HostComputeEndpoints"]) == (1, [HERE])
    assert found["", 30080]["HostComputeEndpoints"] == [HERE]
    assert found["192.0.2.7", 80]["HostComputeEndpoints"] == [HERE, THERE]


def test_affinity_and_direct_server_return_are_flags() -> None:
    (made,) = hns(service(sessionAffinity="ClientIP"), two_endpoints(), enableDSR=True)["loadBalancers"]
    assert made["PortMappings"][0]["DistributionType"] == 2
    assert made["Flags"] == 1


def test_endpoints_that_are_not_ready_do_not_count_and_without_any_there_is_nothing() -> None:
    assert hns(service(), two_endpoints(ready=False))["loadBalancers"] == []
    assert hns(service())["loadBalancers"] == []


def test_terminating_endpoints_serve_a_load_balancer_until_the_last_is_gone() -> None:
    leaving = two_endpoints(ready=False, serving=True, terminating=True)
    found = by_frontend(hns(service(**FULL), leaving))
    assert set(found) == {("10.96.7.7", 80), ("192.0.2.8", 80)}
    assert hns(service(), leaving)["loadBalancers"] == []


def test_the_health_check_of_a_load_balancer_goes_to_the_node_once_for_all_ports() -> None:
    ports = [port(80, nodePort=30080), port(443, "https", nodePort=30443)]
    both = slice_of("web", endpoint(HERE, node="w1"), ports=[port(8080), port(8443, "https")])
    made = hns(
        service(type="LoadBalancer", ports=ports, ingress=("192.0.2.8",)),
        both,
        facts={"rootEndpoint": "10.244.1.2"},
        forwardHealthCheckVip=True,
    )
    (check,) = [each for each in made["loadBalancers"] if each["HostComputeEndpoints"] == ["10.244.1.2"]]
    assert check["PortMappings"] == [{"Protocol": 6, "InternalPort": 10256, "ExternalPort": 10256}]


def test_overlay_networks_have_endpoints_for_addresses_of_services_and_for_the_source() -> None:
    made = hns(service(), two_endpoints(), facts=OVERLAY, sourceVip="10.244.1.254")
    endpoints = {each["IpConfigurations"][0]["IpAddress"]: each for each in made["endpoints"]}
    assert endpoints["10.244.1.254"]["MacAddress"] == "00:15:5d:00:00:01"
    assert "Flags" not in endpoints["10.244.1.254"]
    provider = {"Type": "ProviderAddress", "Settings": {"ProviderAddress": "172.18.0.11"}}
    assert endpoints["10.96.7.7"]["Policies"] == [provider]
    assert endpoints[THERE]["Policies"][0]["Settings"] == {"ProviderAddress": "172.18.0.12"}
    (balancer,) = made["loadBalancers"]
    assert balancer["SourceVIP"] == "10.244.1.254"


def test_the_first_port_decides_for_the_health_check_that_ports_share_whose_address_it_has_on_overlay_networks() -> (
    None
):
    slices = [
        slice_of("inside", endpoint(HERE, node="w1")),
        slice_of("outside", endpoint("203.0.113.9", node=None)),
    ]
    services = [service(name, type="LoadBalancer", ingress=("192.0.2.8",)) for name in ("inside", "outside")]
    facts = {**OVERLAY, "rootEndpoint": "10.244.1.2"}
    made = hns(*services, *slices, facts=facts, sourceVip="10.244.1.254", forwardHealthCheckVip=True)
    (check,) = [each for each in made["loadBalancers"] if each["HostComputeEndpoints"] == ["10.244.1.2"]]
    assert check["SourceVIP"] == "10.244.1.254"


@pytest.mark.parametrize("address", ["203.0.113.9", "172.18.0.12"])
def test_to_what_is_no_pod_an_overlay_node_speaks_with_its_own_address(address: str) -> None:
    outside = slice_of("web", endpoint(address, node=None))
    (made,) = hns(service(), outside, facts=OVERLAY, sourceVip="10.244.1.254")["loadBalancers"]
    assert made["SourceVIP"] == "172.18.0.11"


@pytest.mark.parametrize(
    ("facts", "winkernel", "message"),
    [
        (OVERLAY, {}, "winkernel.sourceVip"),
        ({**OVERLAY, "hostMac": ""}, {"sourceVip": "10.244.1.254"}, "hns.hostMac"),
    ],
)
def test_what_an_overlay_network_needs_is_named(facts: Object, winkernel: Object, message: str) -> None:
    with pytest.raises(UnusableNode, match=message):
        hns(service(), facts=facts, **winkernel)


@pytest.mark.parametrize(
    "facts",
    [{"version": "13"}, {"networkType": "Nat"}, {"hostMac": "x"}, {"endpoints": ["x"]}, {"remoteSubnets": [{}]}],
)
def test_facts_that_cannot_be_used_are_named(facts: Object) -> None:
    with pytest.raises(InvalidFacts, match=f"facts of node w1: hns.{next(iter(facts))}"):
        hns(service(), facts=facts)


def test_pods_that_the_network_does_not_have_yet_are_left_out() -> None:
    (made,) = hns(service(), two_endpoints(), facts={"endpoints": []})["loadBalancers"]
    assert made["HostComputeEndpoints"] == [THERE]


@pytest.mark.parametrize(("version", "families"), [("11.9", {0}), ("11.10", {0, 2})])
def test_both_families_are_served_where_the_network_can(version: str, families: set[int]) -> None:
    six = slice_of("web", endpoint("fd00:10:244:2::5", node="n2"))
    made = hns(dual_stack(), two_endpoints(), six, facts={"version": version})
    assert {each.get("Flags", 0) & 2 for each in made["loadBalancers"]} == families


def test_a_mixed_cluster_has_each_node_in_its_own_mode() -> None:
    engine = Engine(Choices.of({"config": document(mode="nftables")}), preview=True)
    engine.update(snapshot(windows(), node("n2"), service(), two_endpoints()))
    assert (engine.state("w1").mode, engine.state("n2").mode) == ("kernelspace", "nftables")


def test_what_cannot_be_applied_says_so() -> None:
    engine = Engine(Choices.of({"config": document(mode="nftables")}))
    engine.update(snapshot(windows(), node("n2"), service()))
    with pytest.raises(UnusableNode, match=r"it runs Windows\. kernelspace mode is a preview"):
        engine.state("w1")
    windows_only = Engine(Choices.of({"config": document(mode="kernelspace")}), preview=True)
    windows_only.update(snapshot(node("n2"), service()))
    with pytest.raises(UnusableNode, match="is for nodes of Windows, and it runs Linux"):
        windows_only.state("n2")


def test_health_checks_that_nothing_answers_are_a_warning() -> None:
    engine = Engine(Choices.of({"config": document(mode="kernelspace")}), preview=True)
    asked = service(externalTrafficPolicy="Local", healthCheckNodePort=32000, **FULL)
    engine.update(snapshot(windows(), asked))
    (warning,) = engine.warnings_of("w1", None)
    assert "Service/shop/web: load balancers get no answer at healthCheckNodePort" in str(warning)


def test_a_change_is_a_whole_bundle() -> None:
    engine = Engine(Choices.of({"config": document(mode="kernelspace")}), preview=True)
    engine.update(snapshot(windows(), service(), two_endpoints()))
    before = engine.state("w1")
    engine.update(snapshot(windows(), service()))
    assert backends.state.delta(before, engine.state("w1")).needs_full
