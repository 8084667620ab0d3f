"""Addresses and CIDRs are read sloppily, as kube-proxy reads them, and printed in one canonical form."""

from __future__ import annotations

import ipaddress

import pytest
from agentless_kube_proxy.addresses import (
    FAMILIES,
    Family,
    any_contains,
    contains,
    endpoint_text,
    family_of,
    host_cidr,
    is_link_local_v6,
    is_loopback,
    parse_cidr,
    parse_ip,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("255.255.255.255", "255.255.255.255"),
        # leading zeros are decimal, not octal
        ("172.30.0.041", "172.30.0.41"),
        ("10.00.0.01", "10.0.0.1"),
        ("010.020.030.040", "10.20.30.40"),
        ("000000001.2.3.4", "1.2.3.4"),
        # an IPv4-mapped address is IPv4
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("::FFFF:102:304", "1.2.3.4"),
        ("0:0:0:0:0:ffff:1.2.3.4", "1.2.3.4"),
        # lower case, the longest run of zeros compressed
        ("FD00:10:96::A", "fd00:10:96::a"),
        ("fd00:0:0:0:1:0:0:1", "fd00::1:0:0:1"),
        ("2001:db8:0:1:1:1:1:1", "2001:db8:0:1:1:1:1:1"),
        ("::", "::"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::1.2.3.4", "::102:304"),
        ("64:ff9b::1.2.3.4", "64:ff9b::102:304"),
    ],
)
def test_an_address_has_one_way_to_be_printed(text: str, canonical: str) -> None:
    assert parse_ip(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        " 10.0.0.1",
        "10.0.0.1 ",
        "10.0.0.1\n",
        "10.0.0",
        "10.0.0.0.1",
        "10.0.0.256",
        "10.0.0.-1",
        "10.0.0.0x1",
        "10.0.0.1/32",
        "10.0.0.1:80",
        "٣.0.0.1",
        "1.2.3.0000000001",
        "fe80::1%eth0",
        "fd00:::1",
        "fd00::1::2",
        "fd00:10:96::10000",
        "1:2:3:4:5:6:7:8:9",
        "[::1]",
        "10.0.0.1 -j ACCEPT",
        "10.0.0.1\n-A INPUT -j ACCEPT",
        "::1\0",
        "\ud800",
        "None",
        "localhost",
    ],
)
def test_what_is_no_address_is_not_read_as_one(text: str) -> None:
    assert parse_ip(text) is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("10.1.2.3/32", "10.1.2.3/32"),
        ("203.0.113.0/025", "203.0.113.0/25"),
        ("192.168.064.0/018", "192.168.64.0/18"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("1.2.3.4/0", "0.0.0.0/0"),
        ("FD00:10:244::1/56", "fd00:10:244::/56"),
        ("::/0", "::/0"),
        ("::1/128", "::1/128"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
    ],
)
def test_a_cidr_is_printed_as_its_network(text: str, canonical: str) -> None:
    assert parse_cidr(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "10.0.0.0",
        "10.0.0.0/",
        "10.0.0.0/33",
        "10.0.0.0/-1",
        "10.0.0.0/+8",
        "10.0.0.0/8 ",
        " 10.0.0.0/8",
        "10.0.0.0/8/8",
        "10.0.0.0/255.0.0.0",
        "10.0.0.0/٨",
        "10.0.0.0/" + "0" * 5000 + "8",
        "fd00::/129",
        "::ffff:10.0.0.0/95",
        "10.0.0.0/8 -j ACCEPT",
        "primary",
    ],
)
def test_what_is_no_cidr_is_not_read_as_one(text: str) -> None:
    assert parse_cidr(text) is None


@given(st.ip_addresses())
def test_python_and_we_print_addresses_alike(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    assert parse_ip(str(address)) == str(mapped or address)


@given(st.ip_addresses(v=4), st.ip_addresses(v=4), st.integers(0, 32))
def test_a_network_contains_what_python_says_it_does(
    address: ipaddress.IPv4Address, other: ipaddress.IPv4Address, prefix: int
) -> None:
    cidr = parse_cidr(f"{address}/{prefix}")
    assert cidr is not None
    assert contains(cidr, str(address))
    assert contains(cidr, str(other)) == (other in ipaddress.ip_network(cidr))


@pytest.mark.parametrize(
    ("cidrs", "address", "contained"),
    [
        (("10.0.0.0/8", "192.168.0.0/16"), "192.168.3.4", True),
        (("10.0.0.0/8",), "11.0.0.1", False),
        (("fd00::/8",), "fd12::1", True),
        (("::/0",), "10.0.0.1", False),
        (("0.0.0.0/0",), "::1", False),
        ((), "10.0.0.1", False),
    ],
)
def test_membership_stays_within_a_family(cidrs: tuple[str, ...], address: str, contained: bool) -> None:
    assert any_contains(cidrs, address) is contained


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.255.0.9", True), ("::1", True), ("128.0.0.1", False), ("::", False), ("127::1", False)],
)
def test_loopback_is_127_and_1(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    ("address", "link_local"), [("fe80::1", True), ("febf::1", True), ("fec0::1", False), ("169.254.0.1", False)]
)
def test_link_local_means_fe80(address: str, link_local: bool) -> None:
    assert is_link_local_v6(address) is link_local


def test_forms_that_rules_use() -> None:
    assert host_cidr("10.0.0.1") == "10.0.0.1/32"
    assert host_cidr("fd00::1") == "fd00::1/128"
    assert endpoint_text("10.0.0.1", 80) == "10.0.0.1:80"
    assert endpoint_text("fd00::1", 80) == "[fd00::1]:80"
    assert [family_of(text) for text in ("10.0.0.1", "10.0.0.0/8", "::1", "fd00::/8")] == [
        Family.IPV4,
        Family.IPV4,
        Family.IPV6,
        Family.IPV6,
    ]
    assert [(f.value, f.bits, f.zero_cidr, f.loopback, f.other.value) for f in FAMILIES] == [
        ("IPv4", 32, "0.0.0.0/0", "127.0.0.0/8", "IPv6"),
        ("IPv6", 128, "::/0", "::1/128", "IPv4"),
    ]
