# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The names of a service port's kernel objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..addresses import endpoint_text

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]

_NFT_NAME_LIMIT = 240

IPTABLES_PREFIXES = {
    "cluster policy": "KUBE-SVC-",
    "local policy": "KUBE-SVL-",
    "external destinations": "KUBE-EXT-",
    "load balancer firewall": "KUBE-FW-",
}
NFTABLES_PREFIXES = {
    "cluster policy": "service-",
    "local policy": "local-",
    "external destinations": "external-",
    "load balancer firewall": "firewall-",
}


def hash16(text: str) -> str:
    """The sixteen characters of base32 that iptables chain names end in.

    Every endpoint has one; ten bits at a time is three times as fast as base64.b32encode.
    """
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:10], "big")
    pairs = _PAIRS
    return (
        pairs[bits >> 70]
        + pairs[bits >> 60 & 1023]
        + pairs[bits >> 50 & 1023]
        + pairs[bits >> 40 & 1023]
        + pairs[bits >> 30 & 1023]
        + pairs[bits >> 20 & 1023]
        + pairs[bits >> 10 & 1023]
        + pairs[bits & 1023]
    )


def nftables_base(text: str) -> str:
    """Hash and readable name, cut to what a kernel name can hold."""
    name = f"{hash16(text)[:8]}-{text}"
    return name if len(name) <= _NFT_NAME_LIMIT else name[: _NFT_NAME_LIMIT - 3] + "..."


def nftables_port_base(namespace: str, name: str, port_name: str, protocol: str) -> str:
    """The common part of the service-, local-, external- and firewall- chains of a service port."""
    return nftables_base(f"{namespace}/{name}/{protocol}/{port_name}")


def nftables_endpoint_base(namespace: str, name: str, port_name: str, protocol: str, ip: str, number: int) -> str:
    """The common part of an endpoint's endpoint- chain and affinity- set."""
    return nftables_base(f"{namespace}/{name}/{protocol}/{port_name}__{ip.replace(':', '.')}/{number}")


def service_port_names(
    namespace: str, name: str, port_name: str, protocol: str, endpoints: Iterable[tuple[str, int]] = ()
) -> dict[str, dict[str, str]]:
    """Every name of a service port: mode -> what the object is -> its name."""
    title = f"{namespace}/{name}:{port_name}" if port_name else f"{namespace}/{name}"
    hashed = hash16(title + protocol)
    base = nftables_port_base(namespace, name, port_name, protocol)
    iptables = {what: prefix + hashed for what, prefix in IPTABLES_PREFIXES.items()}
    nftables = {what: prefix + base for what, prefix in NFTABLES_PREFIXES.items()}
    for ip, number in endpoints:
        text = endpoint_text(ip, number)
        own = nftables_endpoint_base(namespace, name, port_name, protocol, ip, number)
        iptables[f"endpoint {text}"] = "KUBE-SEP-" + hash16(title + protocol + text)
        nftables[f"endpoint {text}"] = f"endpoint-{own}"
        nftables[f"affinity set of {text}"] = f"affinity-{own}"
    return {"iptables": iptables, "nftables": nftables}
