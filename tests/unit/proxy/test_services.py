"""Services to service ports: which count in a family, and what rules will ask of them."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.addresses import FAMILIES, Family
from agentless_kube_proxy.proxy.services import ServicePort, service_ports

from tests.unit.build import config, dual_stack, port, service, snapshot

V4, V6 = FAMILIES


def ports_of(given: Any, family: Family = V4, **fields: Any) -> list[ServicePort]:
    return list(service_ports(snapshot(given).services[0], family, config(**fields)))


def only(family: Family = V4, /, gates: dict[str, bool] | None = None, **spec: Any) -> ServicePort:
    (port_,) = ports_of(service(**spec), family, featureGates=gates or {})
    return port_


# ------------------------------------------------------------------ families


@pytest.mark.parametrize(
    ("spec", "v4", "v6"),
    [
        # an old object without ipFamilies: by how the address looks
        ({"clusterIP": "10.96.0.1"}, "10.96.0.1", None),
        ({"clusterIP": "fd00::1"}, None, "fd00::1"),
        # otherwise by position
        ({"clusterIP": "10.96.0.1", "ipFamilies": ["IPv4"]}, "10.96.0.1", None),
        ({"clusterIP": "fd00::1", "ipFamilies": ["IPv6"]}, None, "fd00::1"),
        (
            {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"], "ipFamilies": ["IPv4", "IPv6"]},
            "10.96.0.1",
            "fd00::1",
        ),
        (
            {"clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.96.0.1"], "ipFamilies": ["IPv6", "IPv4"]},
            "10.96.0.1",
            "fd00::1",
        ),
        # a family without an address of its own is not served
        ({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ipFamilies": ["IPv4", "IPv6"]}, "10.96.0.1", None),
        # clusterIPs beyond ipFamilies do not count, whatever they look like
        (
            {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"], "ipFamilies": ["IPv4"]},
            "10.96.0.1",
            None,
        ),
        # of two entries of a family the first counts
        (
            {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "10.96.0.2"], "ipFamilies": ["IPv4", "IPv4"]},
            "10.96.0.1",
            None,
        ),
        ({"clusterIP": "10.96.0.1", "clusterIPs": [], "ipFamilies": ["IPv4"]}, None, None),
        ({"clusterIP": "::ffff:10.96.0.1"}, "10.96.0.1", None),
    ],
)
def test_the_cluster_ip_of_a_family_is_found_by_its_position(spec: Any, v4: str | None, v6: str | None) -> None:
    given = service(**spec)
    assert [each.cluster_ip for each in ports_of(given, V4)] == ([v4] if v4 else [])
    assert [each.cluster_ip for each in ports_of(given, V6)] == ([v6] if v6 else [])


def test_addresses_are_sorted_into_families_and_keep_their_order() -> None:
    given = dual_stack(
        externalIPs=["192.0.2.9", "2001:db8::9", "192.0.2.1", "2001:db8::1", "192.0.2.9"],
        loadBalancerSourceRanges=["10.0.0.0/8", "fd00::/8", "9.0.0.0/8"],
        ingress=("198.51.100.2", "2001:db8::2", "198.51.100.1"),
    )
    (v4,), (v6,) = ports_of(given, V4), ports_of(given, V6)
    assert v4.external_ips == ("192.0.2.9", "192.0.2.1", "192.0.2.9")
    assert v6.external_ips == ("2001:db8::9", "2001:db8::1")
    assert v4.load_balancer_vips == ("198.51.100.2", "198.51.100.1")
    assert v6.load_balancer_vips == ("2001:db8::2",)
    assert v4.source_ranges == ("10.0.0.0/8", "9.0.0.0/8")
    assert v6.source_ranges == ("fd00::/8",)


# ------------------------------------------------------------------ ports


def test_every_port_is_a_service_port_of_its_own() -> None:
    given = service(
        ports=[port(80, "http", nodePort=30080), port(53, "dns", "UDP"), port(53, "dns", "TCP"), port(9, "", "SCTP")]
    )
    assert [(each.name_string, each.protocol, each.port, each.node_port) for each in ports_of(given)] == [
        ("shop/web:http", "tcp", 80, 30080),
        ("shop/web:dns", "udp", 53, 0),
        ("shop/web:dns", "tcp", 53, 0),
        ("shop/web", "sctp", 9, 0),
    ]
    assert len({each.key for each in ports_of(given)}) == 4


def test_a_service_without_ports_contributes_nothing() -> None:
    assert ports_of(service(ports=[])) == []


def test_of_two_ports_of_one_name_and_protocol_the_later_wins() -> None:
    assert [each.port for each in ports_of(service(ports=[port(80), port(81)]))] == [81]


# ------------------------------------------------------------------ source ranges


@pytest.mark.parametrize(
    ("ranges", "v4", "v6"),
    [
        ([], (), ()),
        (["10.0.0.0/8"], ("10.0.0.0/8",), ()),
        (["10.0.0.0/8", "fd00::/8"], ("10.0.0.0/8",), ("fd00::/8",)),
        # one that allows everybody opens the family, and only that
        (["10.0.0.0/8", "0.0.0.0/0", "fd00::/8"], (), ("fd00::/8",)),
        (["10.0.0.0/8", "fd00::/8", "::/0"], ("10.0.0.0/8",), ()),
        (["1.2.3.4/0", "10.0.0.0/8"], (), ()),
    ],
)
def test_a_range_that_allows_everybody_means_no_firewall(ranges: list[str], v4: Any, v6: Any) -> None:
    given = dual_stack(loadBalancerSourceRanges=ranges)
    assert ports_of(given, V4)[0].source_ranges == v4
    assert ports_of(given, V6)[0].source_ranges == v6


# ------------------------------------------------------------------ policies

LOCAL = {"externalTrafficPolicy": "Local"}


@pytest.mark.parametrize(
    ("spec", "local"),
    [
        ({"type": "LoadBalancer", **LOCAL}, True),
        ({"type": "NodePort", **LOCAL}, True),
        ({"type": "ClusterIP", "externalIPs": ["192.0.2.1"], **LOCAL}, True),
        # external IPs of the other family count for the policy
        ({"type": "ClusterIP", "externalIPs": ["2001:db8::1"], **LOCAL}, True),
        ({"type": "ClusterIP", **LOCAL}, False),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, False),
        ({"type": "LoadBalancer"}, False),
    ],
)
def test_external_traffic_policy_local_needs_a_service_that_is_reachable_from_outside(spec: Any, local: bool) -> None:
    assert only(**spec).external_policy_local is local


@pytest.mark.parametrize(
    ("policy", "local"),
    [({}, False), ({"internalTrafficPolicy": None}, False), ({"internalTrafficPolicy": "Local"}, True)],
)
def test_internal_traffic_policy_local_is_for_every_type(policy: Any, local: bool) -> None:
    assert only(**policy).internal_policy_local is local


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Local"}, 32100),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, 0),
        ({"type": "NodePort", "externalTrafficPolicy": "Local"}, 0),
        ({"type": "ClusterIP", "externalTrafficPolicy": "Local", "externalIPs": ["192.0.2.1"]}, 0),
    ],
)
def test_a_health_check_node_port_is_for_load_balancers_of_policy_local(spec: Any, number: int) -> None:
    assert only(healthCheckNodePort=32100, **spec).health_check_node_port == number


@pytest.mark.parametrize(
    ("spec", "accessible"),
    [
        ({}, False),
        ({"ports": [port(nodePort=30080)]}, True),
        ({"externalIPs": ["192.0.2.1"]}, True),
        ({"externalIPs": ["2001:db8::1"]}, False),
        ({"ingress": ("198.51.100.1",)}, True),
        ({"ingress": ({"ip": "198.51.100.1", "ipMode": "Proxy"},)}, False),
        ({"ingress": ("2001:db8::1",)}, False),
        # the type alone makes nothing reachable, and does not hinder either
        ({"type": "LoadBalancer"}, False),
        ({"type": "ClusterIP", "ports": [port(nodePort=30080)], "ingress": ("198.51.100.1",)}, True),
    ],
)
def test_only_addresses_and_node_ports_make_a_service_accessible_from_outside(spec: Any, accessible: bool) -> None:
    assert only(**spec).externally_accessible is accessible


@pytest.mark.parametrize(
    ("internal_local", "external_local", "accessible", "uses_cluster", "uses_local"),
    [
        (False, False, False, True, False),
        (False, False, True, True, False),
        (False, True, True, True, True),
        (False, True, False, True, False),
        (True, False, False, False, True),
        (True, False, True, True, True),
        (True, True, True, True, True),
        (True, True, False, False, True),
    ],
)
def test_which_endpoints_a_service_needs(
    internal_local: bool, external_local: bool, accessible: bool, uses_cluster: bool, uses_local: bool
) -> None:
    made = only(
        type="LoadBalancer",
        internalTrafficPolicy="Local" if internal_local else "Cluster",
        externalTrafficPolicy="Local" if external_local else "Cluster",
        ingress=("198.51.100.1",) if accessible else (),
    )
    assert (made.uses_cluster, made.uses_local) == (uses_cluster, uses_local)


def test_external_ips_can_be_forbidden_but_still_make_a_service_accessible() -> None:
    made = only(externalIPs=["192.0.2.1"], gates={"AllowServiceExternalIPs": False}, **LOCAL)
    assert made.external_ips == ()
    assert made.externally_accessible
    assert made.external_policy_local
