# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The addresses of a node's interfaces, and which of them the kernel gives to what the node itself sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..addresses import contains, family_of, is_link_local_v6, is_loopback, number_of, parse_cidr, parse_ip
from ..proxy.facts import IPVS_DEVICE

_PRIVATE = "fc00::/7"  # the kernel rather calls private addresses from private ones, and public ones from public ones


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """An address, and the network around it that is reached without a gateway."""

    interface: str
    address: str
    network: str


def links_of(facts: Mapping[str, Any] | None) -> tuple[Link, ...]:
    """The links of a node as its facts tell them; none if there are no facts, or without prefixes."""
    found = []
    for entry in (facts or {}).get("addresses") or ():
        if not isinstance(entry, Mapping) or entry.get("interface") == IPVS_DEVICE:
            continue
        address, prefix = parse_ip(str(entry.get("address"))), entry.get("prefix")
        network = parse_cidr(f"{address}/{prefix}") if address and isinstance(prefix, int) else None
        if address and network and not is_loopback(address) and not is_link_local_v6(address):
            found.append(Link(str(entry.get("interface") or ""), address, network))
    return tuple(found)


def source_among(links: tuple[Link, ...], node_ip: str, destination: str) -> str:
    """The address that the kernel chooses as source; by default routes leave from the interface of the node's IP."""
    fitting = [each for each in links if family_of(each.address) is family_of(destination)]
    near = [each for each in fitting if contains(each.network, destination)]
    if near:
        nearest = max(int(each.network.rpartition("/")[2]) for each in near)
        fitting = [each for each in near if int(each.network.rpartition("/")[2]) == nearest]
    else:
        device = next((each.interface for each in fitting if each.address == node_ip), "")
        fitting = [each for each in fitting if each.interface == device]
    if ":" in destination:
        return max(fitting, key=lambda each: _preference(each.address, node_ip, destination)).address if fitting else ""
    return node_ip if not near else fitting[0].address


def _preference(address: str, node_ip: str, destination: str) -> tuple[bool, int, bool]:
    """How the kernel ranks sources of IPv6: alike private, then the longest common beginning."""
    differing = number_of(address) ^ number_of(destination)
    alike = contains(_PRIVATE, address) is contains(_PRIVATE, destination)
    return alike, -differing.bit_length(), address == node_ip
