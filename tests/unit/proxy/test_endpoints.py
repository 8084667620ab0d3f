"""EndpointSlices to the endpoints of each service port: paired, merged, deduplicated, ordered."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.addresses import FAMILIES
from agentless_kube_proxy.proxy.endpoints import Endpoint, merge_slices

from tests.unit.build import endpoint, port, service, slice_of, snapshot, view

V4, V6 = FAMILIES
HTTP = ("shop", "web", "http", "tcp")


def texts(*slices: Any, key: tuple[str, str, str, str] = HTTP) -> list[str]:
    return [each.text for each in merge_slices(snapshot(*slices).slices, V4).get(key, ())]


def merged(*slices: Any) -> dict[str, Endpoint]:
    return {each.text: each for each in merge_slices(snapshot(*slices).slices, V4)[HTTP]}


def test_endpoints_are_ordered_as_byte_strings_of_address_and_port() -> None:
    unsorted = slice_of("web", "10.0.0.2", "10.0.0.1", "10.0.0.10", "9.0.0.1", "100.0.0.1")
    assert texts(unsorted) == ["10.0.0.10:8080", "10.0.0.1:8080", "10.0.0.2:8080", "100.0.0.1:8080", "9.0.0.1:8080"]


def test_ipv6_endpoints_stand_in_brackets_and_in_the_same_order() -> None:
    made = merge_slices(snapshot(slice_of("web", "fd00::10", "fd00::1", "fd00::a")).slices, V6)
    assert [each.text for each in made[HTTP]] == ["[fd00::10]:8080", "[fd00::1]:8080", "[fd00::a]:8080"]
    assert [each.ip for each in made[HTTP]] == ["fd00::10", "fd00::1", "fd00::a"]


def test_each_family_reads_its_own_slices() -> None:
    slices = snapshot(slice_of("web", "10.0.0.1"), slice_of("web", "fd00::1")).slices
    assert [each.text for each in merge_slices(slices, V4)[HTTP]] == ["10.0.0.1:8080"]
    assert [each.text for each in merge_slices(slices, V6)[HTTP]] == ["[fd00::1]:8080"]


def test_every_port_of_a_slice_has_every_endpoint() -> None:
    both = slice_of("web", "10.0.0.1", "10.0.0.2", ports=[port(8080), port(53, "dns", "UDP")])
    assert texts(both) == ["10.0.0.1:8080", "10.0.0.2:8080"]
    assert texts(both, key=("shop", "web", "dns", "udp")) == ["10.0.0.1:53", "10.0.0.2:53"]


def test_several_slices_of_a_service_are_one_list() -> None:
    one = slice_of("web", "10.0.0.1", name="web-a")
    two = slice_of("web", "10.0.0.2", name="web-b", ports=[port(9090)])
    other = slice_of("web", "10.0.0.3", name="web-c", namespace="elsewhere")
    assert texts(one, two, other) == ["10.0.0.1:8080", "10.0.0.2:9090"]


def test_the_protocol_is_part_of_what_pairs_a_slice_with_a_service_port() -> None:
    dns = service("dns", ports=[port(53, "dns", "UDP"), port(53, "dns", "TCP")])
    only_tcp = slice_of("dns", "10.0.0.1", ports=[port(5353, "dns", "TCP")])
    tcp, udp = view(dns, only_tcp).families[0].ports
    assert (tcp.port.protocol, [each.text for each in tcp.endpoints]) == ("tcp", ["10.0.0.1:5353"])
    assert (udp.port.protocol, udp.endpoints) == ("udp", ())


def test_an_unnamed_port_pairs_with_an_unnamed_port() -> None:
    (made,) = view(service(ports=[port(80, "")]), slice_of("web", "10.0.0.1", ports=[port(8080, "")])).families[0].ports
    assert [each.text for each in made.endpoints] == ["10.0.0.1:8080"]


def test_endpoints_of_a_port_that_no_service_has_are_dropped() -> None:
    made = view(service(), slice_of("web", "10.0.0.1", ports=[port(1, "other")]), slice_of("ghost", "10.0.0.2"))
    assert [(each.port.name_string, each.endpoints) for each in made.families[0].ports] == [("shop/web:http", ())]
    assert made.families[0].total_endpoints == 0


# One address in two slices, web-a read first. What counts of it afterwards?
READY, GOING = {"ready": True}, {"ready": False, "serving": True, "terminating": True}


@pytest.mark.parametrize(
    ("first", "second", "node", "terminating"),
    [
        (READY, READY, "second", False),
        (GOING, READY, "second", False),
        (READY, GOING, "first", False),
        (GOING, GOING, "first", True),
        (READY, {"ready": False}, "second", False),
    ],
)
def test_a_terminating_record_never_replaces_another_and_any_other_does(
    first: Any, second: Any, node: str, terminating: bool
) -> None:
    a = slice_of("web", endpoint("10.0.0.1", node="first", **first), name="web-a")
    b = slice_of("web", endpoint("10.0.0.1", node="second", **second), name="web-b")
    same = slice_of(
        "web", endpoint("10.0.0.1", node="first", **first), endpoint("10.0.0.1", node="second", **second), name="web-a"
    )
    for slices in ((a, b), (b, a), (same,)):
        (kept,) = merged(*slices).values()
        assert (kept.node_name, kept.terminating) == (node, terminating)


def test_the_same_address_on_two_ports_is_two_endpoints() -> None:
    a = slice_of("web", "10.0.0.1", name="web-a")
    b = slice_of("web", "10.0.0.1", name="web-b", ports=[port(9090)])
    assert texts(a, b) == ["10.0.0.1:8080", "10.0.0.1:9090"]
