# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""IP addresses and CIDRs as kube-proxy reads and prints them."""

from __future__ import annotations

import enum
import functools
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any

try:
    import netaddr
except ImportError:  # only the documentation of a plugin may be wanted here
    netaddr = None  # type: ignore[assignment,unused-ignore]

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_CANONICAL_IPV4 = re.compile(rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}")
_IPV4 = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})")
_PREFIX = re.compile(r"[0-9]{1,9}")
_MAPPED = b"\0" * 10 + b"\xff\xff"


class Family(enum.Enum):
    """An IP family, named as the API names it."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"

    __hash__ = object.__hash__  # identity is enough for a singleton, and hot

    @property
    def bits(self) -> int:
        """Prefix length of a single address."""
        return 32 if self is Family.IPV4 else 128

    @property
    def zero_cidr(self) -> str:
        """The CIDR that contains every address."""
        return "0.0.0.0/0" if self is Family.IPV4 else "::/0"

    @property
    def loopback(self) -> str:
        """The loopback network as rules name it."""
        return "127.0.0.0/8" if self is Family.IPV4 else "::1/128"

    @property
    def other(self) -> Family:
        """The other one of the two."""
        return Family.IPV6 if self is Family.IPV4 else Family.IPV4


FAMILIES = (Family.IPV4, Family.IPV6)


def parse_ip(text: str) -> str | None:
    """Canonical text of an address, or None.

    IPv4 octets may have leading zeros and are decimal all the same; an IPv4-mapped IPv6 address is IPv4.
    """
    if _CANONICAL_IPV4.fullmatch(text):
        return text
    if match := _IPV4.fullmatch(text):
        octets = [int(octet) for octet in match.groups()]
        return "{}.{}.{}.{}".format(*octets) if max(octets) <= 255 else None
    try:
        packed = socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return None
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    # The C library would print ::1.2.3.4 where Go and the rules say ::102:304.
    return str(ipaddress.IPv6Address(packed))


def family_of(address: str) -> Family:
    """Family of a canonical address or CIDR."""
    return Family.IPV6 if ":" in address else Family.IPV4


@functools.lru_cache(maxsize=65536)
def parse_cidr(text: str) -> str | None:
    """Canonical `network/prefix` of a CIDR with its host bits masked off, or None."""
    address, slash, prefix = text.partition("/")
    ip = parse_ip(address)
    if ip is None or not slash or not _PREFIX.fullmatch(prefix):
        return None
    length = int(prefix)
    mapped = ":" in address and ":" not in ip
    if mapped:
        length -= 96
    if not 0 <= length <= family_of(ip).bits:
        return None
    return str(netaddr.IPNetwork(f"{ip}/{length}").cidr)


@functools.lru_cache(maxsize=4096)
def _network(cidr: str) -> Any:
    return netaddr.IPNetwork(cidr)


def contains(cidr: str, address: str) -> bool:
    """Whether a canonical CIDR contains a canonical address."""
    return family_of(cidr) is family_of(address) and netaddr.IPAddress(address) in _network(cidr)


def any_contains(cidrs: Iterable[str], address: str) -> bool:
    """Whether one of the canonical CIDRs contains a canonical address."""
    return any(contains(cidr, address) for cidr in cidrs)


def is_loopback(address: str) -> bool:
    """Whether a canonical address is 127.x.x.x or ::1."""
    return address == "::1" or (address.startswith("127.") and ":" not in address)


def is_link_local_v6(address: str) -> bool:
    """Whether a canonical address is in fe80::/10."""
    return ":" in address and netaddr.IPAddress(address).is_link_local()


def host_cidr(address: str) -> str:
    """The address as a CIDR of its own, as iptables-save prints it."""
    return f"{address}/128" if ":" in address else f"{address}/32"


def endpoint_text(ip: str, port: int) -> str:
    """`ip:port`, an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
