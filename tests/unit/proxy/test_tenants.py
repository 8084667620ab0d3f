"""One Service more: whatever a tenant puts in it, the Services of others have the rules that they had.

What may change is what the documented precedence says (docs/safety.md), told here in another way than the engine does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.addresses import Family, parse_ip
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.proxy import view as view_module
from agentless_kube_proxy.proxy.budget import BUNDLE_BYTES, beyond, bytes_of
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.limits import ENDPOINTS_PER_PORT, ENTRIES_PER_SERVICE, LINE_BYTES, MOST_TOLD
from agentless_kube_proxy.proxy.policy import VipPolicy, under_policy
from agentless_kube_proxy.proxy.services import ServicePort, service_ports
from agentless_kube_proxy.proxy.view import ClusterView
from hypothesis import given, settings

from tests.unit.build import Object, config, node, port, service, slice_of, snapshot
from tests.unit.tenants import LONG, NODE_ADDRESSES, clusters_with_tenants

MODES = ("iptables", "nftables", "ipvs")


def states(objects: list[Object], mode: str) -> tuple[list[State], list[str]]:
    """The states of all nodes, and what was said of Services."""
    read, parsed = snapshot(*objects), config(mode=mode, clusterCIDR="10.244.0.0/16,fd00:10:244::/56")
    allowed, said = under_policy(read, parsed, VipPolicy())
    view, renderer = ClusterView(allowed, parsed), backends.renderer(parsed)
    made = [renderer.state(view.node_view(node_facts(each))) for each in read.nodes]
    return made, [*map(str, read.problems), *map(str, said), *map(str, view.left_out)]


def fragments(state: State) -> dict[tuple[str, str], Any]:
    """What each service port has, all of it."""
    return {(each.name, each.family): (each.open, each.own) for each in state.fragments}


# ------------------------------------------------------------------ who may lose something to the tenant


def claims(obj: Object) -> dict[tuple[str, str, int], int]:
    """What a Service claims, and how strongly: 0 for a cluster IP, 1 for a load balancer, 2 for an external IP."""
    spec: Object = obj["spec"]
    found: dict[tuple[str, str, int], int] = {}
    sorts = (spec["externalIPs"], [each["ip"] for each in obj["status"]["loadBalancer"].get("ingress", [])])
    for strength, addresses in ((2, sorts[0]), (1, sorts[1]), (0, spec.get("clusterIPs", []))):
        for address in addresses:
            if ("IPv6" if ":" in address else "IPv4") not in spec["ipFamilies"]:
                continue
            found |= {(parse_ip(address) or "", each["protocol"], each["port"]): strength for each in spec["ports"]}
    return found


def may_lose(other: Object, tenant: Object, mode: str) -> bool:
    """Whether the precedence gives the tenant something of another Service."""
    if "externalIPs" not in other["spec"]:
        return False
    mine, theirs = claims(tenant), claims(other)
    older = tenant["metadata"]["creationTimestamp"] < other["metadata"]["creationTimestamp"]
    for destination, strength in theirs.items():
        if destination in mine and (mine[destination] < strength or (mine[destination] == strength and older)):
            return True
    node_ports = {(each["protocol"], each.get("nodePort")) for each in other["spec"]["ports"]}
    # kube-proxy, too: at a node's address, an external IP goes before the node port of that number.
    return mode == "ipvs" and any(ip in NODE_ADDRESSES and (p, number) in node_ports for ip, p, number in mine)


@pytest.mark.parametrize("mode", MODES)
@given(clusters_with_tenants())
@settings(max_examples=60, deadline=None)
def test_one_service_more_changes_nothing_of_others(mode: str, drawn: tuple[list[Object], list[Object]]) -> None:
    residents, added = drawn
    before, _said = states(residents, mode)
    after, said = states([*residents, *added], mode)
    name = "{namespace}/{name}".format(**added[0]["metadata"])
    others = [each for each in residents if each["kind"] == "Service"]
    spared = {"{namespace}/{name}".format(**each["metadata"]) for each in others if not may_lose(each, added[0], mode)}
    for old, new in zip(before, after, strict=True):
        had, has = fragments(old), fragments(new)
        assert had.keys() <= has.keys()
        for key, text in had.items():
            if key[0].partition(" ")[0].partition(":")[0] in spared:
                assert has[key] == text, (key, said)
        assert {key[0].partition(" ")[0].partition(":")[0] for key in has.keys() - had.keys()} <= {name}
        if len(spared) == len(others):
            assert_only_added(old, new)


def assert_only_added(old: State, new: State) -> None:
    """What belongs to no Service by itself has lost nothing: where the tenant has a part in it, that came on top."""
    for obj, text in old.frame.items():
        had = Counter((text.head + text.tail).splitlines())
        has = Counter((new.frame[obj].head + new.frame[obj].tail).splitlines())
        assert not had - has, obj


# ------------------------------------------------------------------ more than a node takes

OTHER = [service("web", "shop", clusterIP="10.96.0.7"), slice_of("web", "10.244.1.7"), node("n1")]


def crowded(count: int, *, name: str = "crowd", namespace: str = "aaa", ports: int = 1, **fields: Any) -> list[Object]:
    """A Service with many endpoints, a thousand in each slice, as the API server wants it."""
    own = [port(80 + i, f"p{i}" if ports > 1 else LONG) for i in range(ports)]
    fields = {"clusterIP": "fd00:10:96::66", "ipFamilies": ["IPv6"], "clusterIPs": ["fd00:10:96::66"], **fields}
    made = [service(name, namespace, ports=own, **fields)]
    for first in range(0, count, 1000):
        addresses = [f"fd00:10:244:1111:2222:3333:4444:{i + 4096:x}" for i in range(first, min(count, first + 1000))]
        made.append(slice_of(name, *addresses, namespace=namespace, name=f"s{first}-{name[-8:]}", ports=own))
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("count", "ports"), [(ENDPOINTS_PER_PORT + 1, 1), (3000, 20)])
def test_a_service_with_more_endpoints_than_a_node_takes_is_left_out_and_named(
    mode: str, count: int, ports: int
) -> None:
    (before,), _said = states(OTHER, mode)
    (after,), said = states([*OTHER, *crowded(count, ports=ports)], mode)
    assert after.generation == before.generation
    what = "10,001 endpoints of port 80, more than 10,000" if ports == 1 else "60,020 entries, which are its frontends times their endpoints, and its source ranges, more than 50,000"  # fmt: skip
    assert said == [f"Service/aaa/crowd: has {what}, in IPv6; it is left out"]


# As many endpoints as a node takes, with the longest names and addresses that there are.
LARGEST = crowded(ENDPOINTS_PER_PORT, name=LONG, namespace=LONG, sessionAffinity="ClientIP")


@pytest.mark.parametrize("mode", MODES)
def test_all_lines_of_the_largest_service_are_of_a_length_that_nodes_read(mode: str) -> None:
    (state,), said = states([*OTHER, *LARGEST], mode)
    assert said == []
    longest = max(len(line) for _name, text in backends.files(state) for line in text.splitlines())
    assert longest < LINE_BYTES
    if mode == "nftables":
        assert longest > 2_500_000, "the names and addresses are as long as they can be"
    assert sum(len(text) for _name, text in backends.files(state)) < 100_000_000


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"externalIPs": [f"192.0.{i >> 8}.{i & 255}" for i in range(10_001)]}, "10,001 external and load balancer IPs"),
        ({"loadBalancerSourceRanges": [f"10.{i >> 8}.{i & 255}.0/24" for i in range(10_001)]}, "10,001 source ranges"),
        ({"externalIPs": [f"192.0.2.{i}" for i in range(200)], "ports": [port(i, f"p{i}") for i in range(1, 300)]}, "60,398 entries"),
    ],
)  # fmt: skip
def test_a_service_that_claims_more_than_a_node_takes_is_left_out_and_claims_nothing(fields: Object, what: str) -> None:
    (before,), _said = states(OTHER, "nftables")
    (after,), (said,) = states([*OTHER, service("crowd", "aaa", clusterIP="10.96.0.66", **fields)], "nftables")
    assert after.generation == before.generation
    assert said.startswith(f"Service/aaa/crowd: has {what}")
    assert said.endswith("; it is left out")


def test_a_thousand_claims_do_not_bury_those_of_others() -> None:
    many = [port(i, f"p{i}") for i in range(1, 101)]
    victim = service("victim", "shop", clusterIP="10.96.0.8", ports=many)
    _states, said = states([*OTHER, victim, service("crowd", "aaa", clusterIP="10.96.0.66", ports=many, externalIPs=["10.96.0.8"])], "iptables")  # fmt: skip
    granted = [each for each in said if "is the cluster IP of shop/victim; it is left out" in each]
    assert len(granted) == 20
    assert said[-1] == "Service/aaa/crowd: 80 more claims like these"


def test_the_limits_leave_room_for_what_people_have() -> None:
    """Two ports with three frontends and thousands of endpoints each."""
    assert ENTRIES_PER_SERVICE > 2 * 3 * 5000


# ------------------------------------------------------------------ more than a bundle holds, of many Services


def greedy(count: int, *, endpoints: int, sticky: bool) -> list[Object]:
    """Services of one namespace, each within the limits of a Service."""
    made = []
    for i in range(count):
        fields: Object = {"clusterIP": f"fd00:10:96::{i + 1:x}", "clusterIPs": [f"fd00:10:96::{i + 1:x}"]}
        fields["sessionAffinity"] = "ClientIP" if sticky else "None"
        made += crowded(endpoints, name=f"{LONG[:-3]}{i:03}", namespace=LONG, **fields)
    return made


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of a bundle, for a hundredth of the endpoints."""
    monkeypatch.setattr(view_module, "BUNDLE_BYTES", BUNDLE_BYTES // 100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sticky", [True, False])
@pytest.mark.usefixtures("small_bundles")
def test_a_namespace_with_more_than_a_bundle_holds_gives_way_and_no_other_does(mode: str, sticky: bool) -> None:
    small = [service("web", "shop", clusterIP="10.96.0.7"), slice_of("web", "10.244.1.1", "10.244.1.2")]
    (before,), _said = states([*small, node("n1")], mode)
    (after,), said = states([*small, *greedy(120, endpoints=100, sticky=sticky), node("n1")], mode)
    had, has = fragments(before), fragments(after)
    web = [key for key in had if key[0].startswith("shop/web")]
    # Rules name endpoints in comments up to a thousand of them.
    assert web
    assert [has[key][0] for key in web] == [had[key][0] for key in web]
    served = {key[0].partition(" ")[0].partition(":")[0] for key in has} - {"shop/web"}
    assert 0 < len(served) < 120
    assert said[-1] == f"{120 - len(served) - MOST_TOLD} more Services, for want of room in a bundle"
    assert said[0].endswith("more than its share of 2.4 MB; it is left out")
    # As much as fits, and no more than a node reads.
    size = sum(len(text) for _name, text in backends.files(after))
    assert 900_000 < size < 2_560_000


@pytest.mark.usefixtures("small_bundles")
def test_what_is_left_out_for_want_of_room_comes_back_when_there_is_some() -> None:
    crowd = greedy(30, endpoints=100, sticky=True)
    parsed = config(mode="nftables")
    full, less = snapshot(*OTHER, *crowd), snapshot(*OTHER, *(each for each in crowd if each["kind"] == "Service"))
    view = ClusterView(full, parsed)
    assert view.left_out
    after = ClusterView(dataclasses.replace(full, slices=less.slices), parsed, view)
    assert not after.left_out
    assert ClusterView(full, parsed, after).left_out == view.left_out


def test_shares_are_equal_and_what_is_not_needed_goes_to_those_who_need_more() -> None:
    sizes = {("a", "x"): 10, ("b", "x"): 30, ("b", "y"): 30, ("c", "x"): 100, ("c", "y"): 5, ("d", "x"): 3}
    ages = [("c", "x"), ("c", "y"), ("b", "y"), ("b", "x"), ("a", "x"), ("d", "x")]
    assert beyond(sizes, ages, 1000) == {}
    assert beyond(sizes, ages, 178) == {}
    assert beyond(sizes, ages, 177) == {("c", "y"): 104}
    # 13 of 93 are needed by a and d, which leaves 40 for b and for c.
    assert beyond(sizes, ages, 93) == {("c", "x"): 40, ("b", "x"): 40}
    assert beyond(sizes, ages, 0).keys() == sizes.keys()


def test_a_large_cluster_fits() -> None:
    """10,000 Services with ten endpoints, names of 30 letters, and a node port: kube-proxy's own tests stop there."""
    for mode in MODES:
        one = bytes_of(made_port(sticky=0), 2, 10, mode)
        assert 10_000 * one < BUNDLE_BYTES / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["udp to many addresses", "affinity, all on this node", "plain"])
def test_no_service_takes_more_than_is_estimated(mode: str, case: str) -> None:
    """A tenant who stays below an estimate that is too low could make a bundle that a node refuses for all."""
    udp, local = case.startswith("udp"), case.startswith("affinity")
    name, namespace, protocol = "s" * 63, "n" * 63, "UDP" if udp else "TCP"
    fields: dict[str, Any] = {"externalIPs": [f"192.0.2.{i}" for i in range(1, 121)]} if udp else {}
    if local:
        fields = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "sessionAffinity": "ClientIP"}
    made = service(
        name, namespace, ports=[port(80, "p" * 15, protocol)], ingress=("203.0.113.9",) if local else (), **fields
    )
    endpoints = [f"10.244.1.{i}" for i in range(1, 221)]
    slice_ = slice_of(name, *endpoints, namespace=namespace, ports=[port(8080, "p" * 15, protocol)])
    with_it, without = (written_bytes(objects, mode) for objects in ([node(), made, slice_], [node()]))
    (found,) = service_ports(snapshot(made).services[0], Family.IPV4, config(mode=mode))
    frontends = 1 + len(found.external_ips) + len(found.load_balancer_vips) + bool(found.node_port)
    assert 20_000 < with_it - without <= bytes_of(found, frontends, len(endpoints), mode)


def written_bytes(objects: list[Object], mode: str) -> int:
    """How large the files of the one node are."""
    ((state,), said) = states(objects, mode)
    assert said == []
    return sum(len(content) for _name, content in backends.files(state))


def made_port(sticky: int) -> ServicePort:
    (made,) = snapshot(service("a" * 15, "b" * 10, ports=[port(80, "http")])).services
    (found,) = service_ports(made, Family.IPV4, config())
    return dataclasses.replace(found, sticky_seconds=sticky)
