# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""IP addresses and CIDRs as kube-proxy reads and prints them. No other module computes with addresses.

docs/decisions/0011-addresses.md says where netaddr does it, and where something faster.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import re
import socket
import sys
from collections.abc import Iterable
from typing import Any

from .errors import UserError

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_CANONICAL_IPV4 = re.compile(rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}")
_IPV4 = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})")
_PREFIX = re.compile(r"[0-9]{1,9}")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_MAPPED = b"\0" * 10 + b"\xff\xff"

# Destinations that mean the node itself, all hosts, or none. One expression: every endpoint is held against it. Node
# programs refuse the same ones, and with them the whole bundle: what is left out here must be all that they refuse.
_SPECIAL = re.compile(
    r"(?P<loopback>127\.|::1$)|(?P<unspecified>0\.|::$|255\.255\.255\.(?!255$))"
    r"|(?P<link_local>169\.254\.|fe[89ab][0-9a-f]:)|(?P<multicast>2(?:2[4-9]|3[0-9])\.|ff[0-9a-f]{2}:)"
    r"|(?P<broadcast>255\.255\.255\.255$)|(?P<embedded>::|0:|2002:)"
)
_SPECIAL_WORDS = {
    "unspecified": "is no address that anything could have",
    "loopback": "is a loopback address",
    "link_local": "is a link-local address",
    "multicast": "is a multicast address",
    "broadcast": "is the broadcast address",
    "embedded": "is in a range of IPv6 that stands for IPv4 addresses",
}


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
        bits = socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return None
    if bits.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, bits[12:])
    # The C library would print ::1.2.3.4 where Go and the rules say ::102:304.
    return str(ipaddress.IPv6Address(bits))


def family_of(address: str) -> Family:
    """Family of a canonical address or CIDR."""
    return Family.IPV6 if ":" in address else Family.IPV4


def packed(address: str) -> bytes:
    """The 4 or 16 bytes of a canonical address."""
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


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
    first, last = span_of(f"{ip}/{length}")
    # Most have no host bits, and a command that meets only these starts without netaddr.
    return f"{ip}/{length}" if not first & (last - first) else str(_netaddr().IPNetwork(f"{ip}/{length}").cidr)


class MissingPackage(UserError):
    """A Python package that is needed is not there."""


def _netaddr() -> Any:
    """The package, once it is needed: the documentation of a plugin can be read without it."""
    try:
        import netaddr
    except ImportError as error:
        raise MissingPackage(
            "the Python package netaddr is missing; install it into the Python that runs this: "
            f"{sys.executable} -m pip install 'netaddr>=1.0'"
        ) from error
    return netaddr


@functools.lru_cache(maxsize=4096)
def contains(cidr: str, address: str) -> bool:
    """Whether a canonical CIDR contains a canonical address."""
    if family_of(cidr) is not family_of(address):
        return False
    first, last = span_of(cidr)
    return first <= number_of(address) <= last


def any_contains(cidrs: Iterable[str], address: str) -> bool:
    """Whether one of the canonical CIDRs contains a canonical address."""
    return any(contains(cidr, address) for cidr in cidrs)


def number_of(address: str) -> int:
    """A canonical address as a number."""
    return int.from_bytes(packed(address))


def span_of(cidr: str) -> tuple[int, int]:
    """The first and the last address of a canonical CIDR, as numbers."""
    address, _slash, length = cidr.partition("/")
    first = number_of(address)
    return first, first + (1 << family_of(address).bits - int(length)) - 1


def last_host(cidr: str) -> str:
    """The last address of a CIDR before the one that could be its broadcast address."""
    network = _netaddr().IPNetwork(cidr).cidr
    return str(network[-2] if network.size > 2 else network[0])


def special(address: str) -> str:
    """Why a canonical address can be no destination of a Service, or nothing. The API server refuses most of them."""
    match = _SPECIAL.match(address)
    return _SPECIAL_WORDS[match.lastgroup or ""] if match else ""


def is_loopback(address: str) -> bool:
    """Whether a canonical address is 127.x.x.x or ::1."""
    return address == "::1" or (address.startswith("127.") and ":" not in address)


def is_link_local_v6(address: str) -> bool:
    """Whether a canonical address is in fe80::/10."""
    return address[:3] in ("fe8", "fe9", "fea", "feb") and address[4:5] == ":"


def host_cidr(address: str) -> str:
    """The address as a CIDR of its own, as iptables-save prints it."""
    return f"{address}/128" if ":" in address else f"{address}/32"


def endpoint_text(ip: str, port: int) -> str:
    """`ip:port`, an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def parse_host(text: str) -> str | None:
    """The address or the DNS name (RFC 1123) that a program may be told to connect to, or None.

    A name never begins with a dash, so that no program takes it for an option, and its last label is no number: the C
    library would read 0x7f.1 as an address.
    """
    address = parse_ip(text)
    if address is not None:
        return address
    if not _HOST_NAME.fullmatch(text) or _NUMBER.fullmatch(text.rpartition(".")[2]):
        return None
    return text
