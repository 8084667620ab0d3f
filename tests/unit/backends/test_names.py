"""Names of kernel objects: hashes of what a Service port is called, never of its addresses."""

from __future__ import annotations

import base64
import hashlib

import pytest
from agentless_kube_proxy.backends.names import (
    hash16,
    nftables_base,
    nftables_endpoint_base,
    nftables_port_base,
    service_port_names,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.build import render, service, slice_of


def service_chains(**spec: str) -> list[str]:
    """The chains of shop/web:http in the kernel."""
    state = render(service(**spec), slice_of("web", "10.244.1.5"))
    return [obj[2] for each in state.fragments for obj, _text in each.own]


@pytest.mark.parametrize(
    ("namespace", "name", "port_name", "protocol", "hashed"),
    [
        ("ns1", "svc1", "p80", "TCP", "XPGD46QRK7WJZT7O"),
        ("ns2", "svc2", "p80", "TCP", "GNZBNJ2PO5MGZ6GT"),
        ("ns4", "svc4", "p80", "TCP", "4SW47YFZTEDKD3PK"),
        ("default", "kubernetes", "https", "TCP", "NPX46M4PTMTKRN6Y"),
        ("kube-system", "kube-dns", "dns", "UDP", "TCOU7JCQXEZGVUNU"),
        ("kube-system", "kube-dns", "dns-tcp", "TCP", "ERIFXISQEP7F7OF4"),
        ("default", "noname", "", "TCP", "VDEJV5Q2YLOBQTBM"),
        ("shop", "web", "http", "TCP", "67NZLRHBNDSAWJRO"),
    ],
)
def test_well_known_service_ports_have_their_well_known_chains(
    namespace: str, name: str, port_name: str, protocol: str, hashed: str
) -> None:
    names = service_port_names(namespace, name, port_name, protocol.lower())
    assert names["iptables"]["cluster policy"] == f"KUBE-SVC-{hashed}"


@pytest.mark.parametrize(
    ("namespace", "name", "endpoint", "hashed"),
    [
        ("ns1", "svc1", "10.180.0.1", "SXIVWICOYRO3J4NJ"),
        ("ns4", "svc4", "10.180.0.5", "C6EBXVWJJZMIWKLZ"),
        ("ns1", "svc1", "fd00:10:180::1", "OGYCNMB4EMRUSJ6N"),
    ],
)
def test_endpoint_chains(namespace: str, name: str, endpoint: str, hashed: str) -> None:
    names = service_port_names(namespace, name, "p80", "tcp", [(endpoint, 80)])
    assert f"KUBE-SEP-{hashed}" in names["iptables"].values()


@given(st.text())
def test_the_hash_is_base32_of_sha256(text: str) -> None:
    digest = hashlib.sha256(text.encode()).digest()
    assert hash16(text) == base64.b32encode(digest).decode()[:16]


def test_addresses_and_numbers_are_no_part_of_a_name() -> None:
    assert service_chains(clusterIP="10.96.0.1") == service_chains(clusterIP="10.96.0.2")
    assert service_chains()[0] == "KUBE-SVC-67NZLRHBNDSAWJRO"


def test_the_protocol_is() -> None:
    assert service_port_names("a", "b", "c", "tcp") != service_port_names("a", "b", "c", "udp")


def test_nftables_names_can_be_read() -> None:
    web = ("shop", "web", "http", "tcp")
    assert nftables_port_base(*web) == "KHN6ECMT-shop/web/tcp/http"
    assert nftables_endpoint_base(*web, "fd00::1", 80).endswith("-shop/web/tcp/http__fd00..1/80")


def test_nftables_names_fit_into_the_kernel() -> None:
    long = nftables_base("x" * 300)
    assert len(long) == 240
    assert long.endswith("x...")


def test_all_names_of_a_service_port_at_once() -> None:
    names = service_port_names("ns1", "svc1", "p80", "tcp", [("10.180.0.1", 80)])
    assert names["iptables"] == {
        "cluster policy": "KUBE-SVC-XPGD46QRK7WJZT7O",
        "local policy": "KUBE-SVL-XPGD46QRK7WJZT7O",
        "external destinations": "KUBE-EXT-XPGD46QRK7WJZT7O",
        "load balancer firewall": "KUBE-FW-XPGD46QRK7WJZT7O",
        "endpoint 10.180.0.1:80": "KUBE-SEP-SXIVWICOYRO3J4NJ",
    }
    assert names["nftables"]["cluster policy"] == f"service-{nftables_base('ns1/svc1/tcp/p80')}"
    assert (
        service_port_names("default", "noname", "", "tcp")["iptables"]["cluster policy"] == "KUBE-SVC-VDEJV5Q2YLOBQTBM"
    )
