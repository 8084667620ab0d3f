"""What load balancers are told of a node: the health check port of a Service, and whether the node stays."""

from __future__ import annotations

import pytest
from agentless_kube_proxy.backends.state import delta

from tests.unit.build import Object, dual_stack, endpoint, file, node, port, render, service, slice_of

BALANCED = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000}
MODES = ("iptables", "nftables", "ipvs")


def web(**fields: object) -> Object:
    return service(**{"ports": [port(nodePort=30080)], **BALANCED, **fields})


def checks(*objects: Object, on: str = "n1", **fields: object) -> list[str]:
    """Each check with its count."""
    state = render(*objects, on=on, **fields)
    counts: dict[tuple[str, str], str] = {}
    for line in file(state, "health.counts").splitlines()[1:]:
        _word, family, number, count = line.split()
        counts[family, number] = count
    found = [line.split()[1:] for line in file(state, "health.conf").splitlines() if line.startswith("check ")]
    assert list(counts) == [(family, number) for family, number, _namespace, _name in found]
    return [" ".join([*each, counts[each[0], each[1]]]) for each in found]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_tells_port_service_and_the_ready_endpoints_of_the_node(mode: str) -> None:
    objects = web(), slice_of("web", "10.244.1.1", "10.244.1.2", endpoint("10.244.2.1", node="n2"))
    state = render(*objects, mode=mode, nodePortAddresses=["0.0.0.0/0"])
    assert file(state, "health.conf") == "period 30\nlisten ipv4 0.0.0.0\ncheck ipv4 31000 shop web\nlisten ipv6 ::\n"
    assert file(state, "health.counts") == "eligible true\ncount ipv4 31000 2\n"


def test_in_nftables_mode_it_listens_on_the_primary_address_unless_told_otherwise() -> None:
    assert "listen ipv4 172.18.0.11\n" in file(render(web(), mode="nftables"), "health.conf")


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ({"ready": True}, 1),
        ({}, 1),
        ({"ready": False}, 0),
        ({"ready": False, "serving": True, "terminating": True}, 0),
    ],
)
def test_an_endpoint_counts_while_it_is_ready(conditions: dict[str, bool], count: int) -> None:
    assert checks(web(), slice_of("web", endpoint("10.244.1.1", **conditions))) == [f"ipv4 31000 shop web {count}"]


def test_an_address_counts_once_whatever_ports_it_has_and_ports_the_service_lacks_count_too() -> None:
    ports = [port(8080), port(9090, "metrics")]
    more = slice_of("web", "10.244.1.9", ports=[port(7070, "admin")], name="web-admin")
    assert checks(web(), slice_of("web", "10.244.1.1", ports=ports), more) == ["ipv4 31000 shop web 2"]


def test_a_service_without_endpoints_is_told_with_none() -> None:
    assert checks(web()) == ["ipv4 31000 shop web 0"]


def test_a_node_without_endpoints_tells_none_while_another_has_some() -> None:
    nodes = node("n1", "172.18.0.11"), node("n2", "172.18.0.12")
    assert checks(*nodes, web(), slice_of("web", "10.244.1.1"), on="n2") == ["ipv4 31000 shop web 0"]


@pytest.mark.parametrize("fields", [{"externalTrafficPolicy": "Cluster"}, {"type": "NodePort"}])
def test_only_a_load_balancer_of_policy_local_has_a_health_check(fields: Object) -> None:
    assert checks(web(**fields), slice_of("web", "10.244.1.1")) == []


def test_each_family_counts_its_own_endpoints() -> None:
    both = dual_stack(ports=[port(nodePort=30080)], **BALANCED)
    slices = slice_of("web", "10.244.1.1", "10.244.1.2"), slice_of("web", "fd00:10:244:1::1")
    assert checks(both, *slices) == ["ipv4 31000 shop web 2", "ipv6 31000 shop web 1"]


def test_of_two_services_with_one_port_the_first_by_name_answers() -> None:
    other = service("also", clusterIP="10.96.7.8", ports=[port(nodePort=30081)], **BALANCED)
    assert checks(web(), other) == ["ipv4 31000 shop also 0"]


def test_it_listens_where_node_ports_do() -> None:
    health = file(render(web(), nodePortAddresses=["127.0.0.0/8", "172.18.0.0/16"]), "health.conf")
    assert [line for line in health.splitlines() if line.startswith("listen ipv4")] == [
        "listen ipv4 127.0.0.1",
        "listen ipv4 172.18.0.11",
    ]


@pytest.mark.parametrize(
    ("fields", "eligible"),
    [
        ({"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}}, "false"),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}}, "true"),
        ({"metadata": {"name": "n1", "deletionTimestamp": "2026-01-01T00:00:00Z"}}, "false"),
        ({}, "true"),
    ],
)
def test_a_node_that_is_to_go_is_not_eligible(fields: Object, eligible: str) -> None:
    assert file(render({**node(), **fields}), "health.counts").startswith(f"eligible {eligible}\n")


def test_the_period_of_the_configuration_is_told() -> None:
    assert "period 10\n" in file(render(web(), iptables={"syncPeriod": "9.5s"}), "health.conf")


@pytest.mark.parametrize("mode", MODES)
def test_a_count_that_changes_no_rule_is_a_new_generation_and_travels_in_a_delta(mode: str) -> None:
    leaving = endpoint("10.244.1.1", ready=False, serving=True, terminating=True)
    old = render(web(), slice_of("web", "10.244.1.1"), mode=mode)
    new = render(web(), slice_of("web", leaving), mode=mode)
    change = delta(old, new)
    assert not change.needs_full
    assert set(change.changed) >= {("file", "health.counts")}
    assert ("file", "health.conf") not in change.changed
    assert {obj[0] for obj in change.changed} == {"file"}
    assert "count ipv4 31000 0\n" in change.changed["file", "health.counts"]
