"""What a node is: its addresses and families, where node ports answer, and how rules tell a local pod."""

from __future__ import annotations

import re
from typing import Any

import pytest
from agentless_kube_proxy.addresses import FAMILIES, Family
from agentless_kube_proxy.proxy.facts import (
    DetectLocal,
    InvalidFacts,
    NodeFacts,
    NodePortAddresses,
    UnusableNode,
    detect_local,
    node_facts,
    node_ips,
    node_port_addresses,
)
from agentless_kube_proxy.proxy.view import NodeView, usable_families
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.build import config, node, service, snapshot, view
from tests.unit.clusters import JSON

V4, V6 = FAMILIES


def facts(*addresses: str, gathered: Any = None, **fields: Any) -> NodeFacts:
    return node_facts(snapshot(node("n1", *addresses, **fields)).nodes[0], gathered)


# ------------------------------------------------------------------ the Node object and what the node says itself


def test_without_facts_from_the_node_a_current_kernel_is_assumed() -> None:
    assert facts("172.18.0.11", "fd00::11", zone="a", cpu="4") == NodeFacts(
        name="n1",
        zone="a",
        node_ips=("172.18.0.11", "fd00::11"),
        pod_cidrs=("10.244.1.0/24", "fd00:10:244:1::/64"),
        interface_addresses=("127.0.0.1", "::1", "172.18.0.11", "fd00::11"),
        families=FAMILIES,
        cpus=4,
        nfacct=True,
        tcp_be_liberal=False,
    )


def test_internal_addresses_come_before_external_ones_and_host_names_do_not_count() -> None:
    given = ("ExternalIP=203.0.113.1", "Hostname=n1", "InternalIP=172.18.0.11", "InternalDNS=n1.local", "fd00::11")
    assert facts(*given).node_ips == ("172.18.0.11", "fd00::11", "203.0.113.1")


def test_what_the_node_says_itself_goes_before_what_the_node_object_says() -> None:
    said = {
        "addresses": [
            "172.18.0.11/16",
            {"address": "127.0.0.1", "interface": "lo"},
            {"address": "FE80::1", "interface": "eth0"},
            {"address": "10.96.0.1", "interface": "kube-ipvs0"},
            "172.18.0.11",
        ],
        "capabilities": {"ipv4": True, "ipv6": False, "nfacct": False},
        "cpus": 8,
        "tcpBeLiberal": True,
        "kernel": "6.18.44-fc",
        "zone": "b",
        "podCIDRs": ["10.244.7.0/24"],
    }
    assert facts("172.18.0.11", zone="a", gathered=said) == NodeFacts(
        name="n1",
        zone="b",
        node_ips=("172.18.0.11",),
        pod_cidrs=("10.244.7.0/24",),
        interface_addresses=("127.0.0.1", "172.18.0.11", "fe80::1"),
        families=(V4,),
        cpus=8,
        nfacct=False,
        tcp_be_liberal=True,
        kernel=(6, 18),
        ipvs_addresses=("10.96.0.1",),
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"addresses": "10.0.0.1"}, "facts of node n1: addresses: must be a list, not '10.0.0.1'"),
        ({"addresses": ["eth0"]}, "facts of node n1: addresses: 'eth0' is not an IP address"),
        ({"addresses": [{"interface": "eth0"}]}, "facts of node n1: addresses: None is not an IP address"),
        (
            {"addresses": [{"address": "1.2.3.4 -j X"}]},
            "facts of node n1: addresses: '1.2.3.4 -j X' is not an IP address",
        ),
        ({"capabilities": []}, "facts of node n1: capabilities: must be a mapping, not []"),
        ({"podCIDRs": ["10.0.0.1"]}, "facts of node n1: podCIDRs: '10.0.0.1' is not a CIDR"),
    ],
)
def test_facts_that_cannot_be_used_are_named(said: Any, message: str) -> None:
    with pytest.raises(InvalidFacts) as caught:
        facts(gathered=said)
    assert str(caught.value) == message


# ------------------------------------------------------------------ node addresses and families


@pytest.mark.parametrize(
    ("addresses", "bind", "primary", "v4", "v6"),
    [
        (("172.18.0.11",), "0.0.0.0", V4, "172.18.0.11", "::1"),
        (("fd00::11",), "0.0.0.0", V6, "127.0.0.1", "fd00::11"),
        (("172.18.0.11", "fd00::11"), "0.0.0.0", V4, "172.18.0.11", "fd00::11"),
        (("fd00::11", "172.18.0.11"), "::", V6, "172.18.0.11", "fd00::11"),
        # of each family the first counts
        (("172.18.0.11", "172.18.0.12", "fd00::11", "fd00::12"), "0.0.0.0", V4, "172.18.0.11", "fd00::11"),
        (("fd00::11", "ExternalIP=203.0.113.1"), "0.0.0.0", V6, "203.0.113.1", "fd00::11"),
        # no address yet: loopback
        (("Hostname=n1",), "0.0.0.0", V4, "127.0.0.1", "::1"),
        # bindAddress decides where it is a real address
        (("172.18.0.11",), "10.9.9.9", V4, "10.9.9.9", "::1"),
        (("172.18.0.11", "fd00::11"), "fd00::99", V6, "172.18.0.11", "fd00::99"),
    ],
)
def test_the_nodes_address_in_each_family(
    addresses: tuple[str, ...], bind: str, primary: Family, v4: str, v6: str
) -> None:
    assert node_ips(facts(*addresses), config(bindAddress=bind)) == (primary, {V4: v4, V6: v6})


@pytest.mark.parametrize(
    ("usable", "primary", "programmed"),
    [
        ((V4, V6), V4, (V4, V6)),
        ((V4, V6), V6, (V4, V6)),
        ((V4,), V4, (V4,)),
        ((V6,), V6, (V6,)),
    ],
)
def test_both_families_are_programmed_wherever_the_node_can(usable: Any, primary: Family, programmed: Any) -> None:
    assert usable_families(NodeFacts("n1", families=usable), primary) == programmed


@pytest.mark.parametrize(("usable", "primary"), [((V4,), V6), ((V6,), V4), ((), V4)])
def test_a_node_whose_primary_family_does_not_work_is_refused(usable: Any, primary: Family) -> None:
    with pytest.raises(UnusableNode, match=rf"^node n1: its primary family {primary.value} is not usable there$"):
        usable_families(NodeFacts("n1", families=usable), primary)


def test_an_ipv4_only_cluster_has_ipv6_tables_all_the_same() -> None:
    assert [each.family for each in view(service(), clusterCIDR="10.244.0.0/16").families] == [V4, V6]


# ------------------------------------------------------------------ nodePortAddresses

IPS = {V4: "172.18.0.11", V6: "fd00:172:18::11"}
INTERFACES = ("127.0.0.1", "::1", "172.18.0.11", "10.0.0.5", "fd00:172:18::11", "fe80::1", "172.17.0.1")


def chosen(family: Family, *entries: str, ips: Any = IPS) -> tuple[bool, tuple[str, ...], bool, bool]:
    made: NodePortAddresses = node_port_addresses(family, config(nodePortAddresses=list(entries)), ips, INTERFACES)
    return made.match_all, made.ips, made.contains_ipv4_loopback, made.contains_explicit_loopback


ALL4 = (True, (), True, False)
ALL6 = (True, (), False, False)


@pytest.mark.parametrize(
    ("entries", "v4", "v6"),
    [
        ((), ALL4, ALL6),
        (("all",), ALL4, ALL6),
        (("0.0.0.0/0",), ALL4, ALL6),
        (("1.2.3.4/0", "::/0"), ALL4, ALL6),
        (("primary",), (False, ("172.18.0.11",), False, False), (False, ("fd00:172:18::11",), False, False)),
        (("localhost",), (False, ("127.0.0.1",), True, True), (False, ("::1",), False, True)),
        (
            ("primary", "localhost"),
            (False, ("127.0.0.1", "172.18.0.11"), True, True),
            (False, ("::1", "fd00:172:18::11"), False, True),
        ),
        # CIDRs of one family say nothing about the other
        (("172.16.0.0/12",), (False, ("172.17.0.1", "172.18.0.11"), False, False), ALL6),
        (("fe80::/10",), ALL4, (False, ("fe80::1",), False, False)),
        (("127.0.0.0/8",), (False, ("127.0.0.1",), True, True), ALL6),
        (("127.0.0.1/32",), (False, ("127.0.0.1",), True, True), ALL6),
        (("::1/128",), ALL4, (False, ("::1",), False, True)),
        # a network that only happens to contain 127.0.0.0
        (("64.0.0.0/2",), (False, ("127.0.0.1",), True, False), ALL6),
        # what selects nothing leaves node ports unreachable
        (("192.0.2.0/24",), (False, (), False, False), ALL6),
        # a zero CIDR makes the others pointless, except for what they say of loopback
        (("localhost", "all"), (True, (), True, True), (True, (), False, True)),
        (("all", "localhost"), (True, (), True, True), (True, (), False, True)),
        (("10.0.0.0/8", "0.0.0.0/0"), (True, (), True, False), ALL6),
    ],
)
def test_node_port_addresses_select_addresses_of_the_nodes_interfaces(
    entries: tuple[str, ...], v4: Any, v6: Any
) -> None:
    assert chosen(V4, *entries) == v4
    assert chosen(V6, *entries) == v6


def test_primary_on_an_ipv4_only_node_leaves_ipv6_wide_open() -> None:
    only_v4 = {V4: "172.18.0.11", V6: "::1"}
    assert chosen(V4, "primary", ips=only_v4) == (False, ("172.18.0.11",), False, False)
    assert chosen(V6, "primary", ips=only_v4) == ALL6


def test_primary_on_a_node_without_addresses_selects_all() -> None:
    unknown = {V4: "127.0.0.1", V6: "::1"}
    assert chosen(V4, "primary", ips=unknown) == ALL4


# ------------------------------------------------------------------ localhostNodePorts


@pytest.mark.parametrize(
    ("fields", "effective"),
    [
        ({}, True),
        ({"iptables": {"localhostNodePorts": False}}, False),
        ({"nodePortAddresses": ["primary"]}, False),
        ({"nodePortAddresses": ["localhost"]}, True),
        ({"nodePortAddresses": ["primary", "127.0.0.0/8"]}, True),
        ({"nodePortAddresses": ["fd00::/8"]}, True),
        ({"nodePortAddresses": ["localhost"], "iptables": {"localhostNodePorts": False}}, False),
    ],
)
def test_localhost_node_ports_need_an_ipv4_loopback_address_that_is_selected(fields: Any, effective: bool) -> None:
    v4, v6 = view(service(), **fields).families
    assert v4.localhost_node_ports is effective
    assert v6.localhost_node_ports is False


# ------------------------------------------------------------------ detectLocalMode


@pytest.mark.parametrize(
    ("fields", "v4", "v6"),
    [
        ({"clusterCIDR": ""}, None, None),
        ({"clusterCIDR": "10.244.7.7/16"}, DetectLocal(cidr="10.244.0.0/16"), None),
        ({"clusterCIDR": "fd00:10:244::/56"}, None, DetectLocal(cidr="fd00:10:244::/56")),
        (
            {"clusterCIDR": "fd00:10:244::/56,10.244.0.0/16"},
            DetectLocal(cidr="10.244.0.0/16"),
            DetectLocal(cidr="fd00:10:244::/56"),
        ),
        (
            {"detectLocalMode": "NodeCIDR", "clusterCIDR": "10.0.0.0/8"},
            DetectLocal(cidr="10.244.1.0/24"),
            DetectLocal(cidr="fd00:10:244:1::/64"),
        ),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}},
            DetectLocal(interface="cbr0"),
            DetectLocal(interface="cbr0"),
        ),
        (
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
            DetectLocal(prefix="veth"),
            DetectLocal(prefix="veth"),
        ),
    ],
)
def test_how_rules_tell_a_pod_of_this_node(fields: Any, v4: Any, v6: Any) -> None:
    assert detect_local(V4, facts(), config(**fields)) == v4
    assert detect_local(V6, facts(), config(**fields)) == v6


def test_the_first_pod_cidr_of_a_family_counts() -> None:
    known = facts(pod_cidrs=("10.244.1.0/24", "10.244.2.0/24"))
    assert detect_local(V4, known, config(detectLocalMode="NodeCIDR")) == DetectLocal(cidr="10.244.1.0/24")
    assert detect_local(V6, known, config(detectLocalMode="NodeCIDR")) is None


@pytest.mark.parametrize(
    ("given", "fields", "message"),
    [
        (
            node("n1", pod_cidrs=()),
            {"detectLocalMode": "NodeCIDR"},
            "node n1: detectLocalMode NodeCIDR needs spec.podCIDRs of the Node, which are not set",
        ),
        (
            node("n1", "172.18.0.11", pod_cidrs=("fd00::/64",)),
            {"detectLocalMode": "NodeCIDR"},
            "node n1: spec.podCIDRs of the Node has no CIDR of family IPv4",
        ),
        (
            node("n1", "fd00::11", pod_cidrs=("10.244.1.0/24",)),
            {"detectLocalMode": "NodeCIDR"},
            "node n1: spec.podCIDRs of the Node has no CIDR of family IPv6",
        ),
    ],
)
def test_a_node_that_the_configuration_cannot_work_on_is_named(given: Any, fields: Any, message: str) -> None:
    with pytest.raises(UnusableNode) as caught:
        view(service(), given, **fields)
    assert str(caught.value) == message


def test_cluster_cidrs_of_the_family_that_is_not_programmed_are_refused() -> None:
    ipv4_only = {"capabilities": {"ipv6": False}}
    with pytest.raises(UnusableNode, match=r"^node n1: clusterCIDR has no CIDR of family IPv4$"):
        view(service(), facts=ipv4_only, clusterCIDR="fd00:10:244::/56")
    # With both families programmed it is merely odd.
    assert [each.detect_local for each in view(service(), clusterCIDR="10.244.0.0/16").families] == [
        DetectLocal(cidr="10.244.0.0/16"),
        None,
    ]


@given(
    st.sampled_from(("addresses", "capabilities", "cpus", "kernel", "zone", "podCIDRs", "tcpBeLiberal")),
    JSON | st.fixed_dictionaries({"ipv6": JSON, "nfacct": JSON}) | st.lists(st.fixed_dictionaries({"address": JSON})),
)
def test_whatever_a_node_says_is_used_or_refused(key: str, value: Any) -> None:
    def outcome() -> object:
        try:
            return view(service(), facts={key: value})
        except (InvalidFacts, UnusableNode) as refused:
            return str(refused)

    made = outcome()
    assert isinstance(made, NodeView) or re.match(r"(facts of )?node n1: ", str(made))
