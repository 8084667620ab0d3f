# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How much all Services together may ask of a node, and who gives way if it is too much.

A node takes bundles of up to 256 MB, and limits of single Services do not keep many of them under that. What each will
take is estimated, rather too high than too low. If the sum is more than a bundle holds, namespaces get equal shares:
those that need less than theirs keep all, and what they leave is shared by the others. In a namespace that needs more,
the oldest Services stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from .services import ServicePort

# Of the 256 MB that a node reads (AKP_MAX_BUNDLE), both families and all files together.
BUNDLE_BYTES = 240_000_000

# What one rule has beside the names in it, and how many there are for an address or a node port. What an endpoint
# takes beside the names in its rules, and how many names those have. Then what affinity adds, and a policy Local, with
# which two chains of a Service lead to it.
_RULE, _RULES = 100, 6
_NONE = (0, 0)
_ENDPOINT = {
    "iptables": (430, 3), "nftables": (240, 0), "ipvs": (230, 0), "userspace": (170, 0), "kernelspace": (400, 0),
}  # fmt: skip
_STICKY = {"iptables": (350, 1), "nftables": (1000, 10), "ipvs": _NONE, "userspace": (100, 0), "kernelspace": _NONE}
# once more with affinity
_LOCAL = {"iptables": (200, 1), "nftables": (100, 3), "ipvs": _NONE, "userspace": _NONE, "kernelspace": _NONE}
# A pair of addresses in conntrack.udp, which has each endpoint with each frontend.
_PAIR = 50

ServiceName: TypeAlias = tuple[str, str]


def bytes_of(port: ServicePort, frontends: int, endpoints: int, mode: str) -> int:
    """About as many bytes as a service port takes in one family, and hardly ever less than that."""
    names = len(port.name_string)
    sticky, local = bool(port.sticky_seconds), port.external_policy_local or port.internal_policy_local
    parts = (_ENDPOINT, 1), (_STICKY, sticky), (_LOCAL, local * (1 + sticky))
    each = sum(times * (part[mode][0] + part[mode][1] * names) for part, times in parts)
    ranges = len(port.source_ranges) * (1 + len(port.load_balancer_vips)) * _RULE
    pairs = frontends * endpoints * _PAIR if port.protocol == "udp" else 0
    # Virtual servers and load balancers have endpoints of their own; elsewhere all frontends lead to the same chains.
    times = frontends if mode in ("ipvs", "kernelspace") else 1
    return frontends * _RULES * (_RULE + names) + times * endpoints * each + ranges + pairs


def beyond(sizes: Mapping[ServiceName, int], oldest_first: Iterable[ServiceName], most: int) -> dict[ServiceName, int]:
    """The Services for which there is no room, each with the share of its namespace; none if all fit."""
    namespaces: dict[str, int] = {}
    for (namespace, _name), size in sizes.items():
        namespaces[namespace] = namespaces.get(namespace, 0) + size
    share = _share(namespaces.values(), most)
    left = dict.fromkeys((namespace for namespace, size in namespaces.items() if size > share), share)
    gone: dict[ServiceName, int] = {}
    for service in oldest_first:
        if service[0] in left and service in sizes:
            if sizes[service] <= left[service[0]]:
                left[service[0]] -= sizes[service]
            else:
                gone[service] = share
    return gone


def _share(needs: Iterable[int], most: int) -> int:
    """What each may have at most, so that all of it is not more than the most."""
    ordered = sorted(needs)
    for index, need in enumerate(ordered):
        waiting = len(ordered) - index
        if need * waiting > most:
            return most // waiting
        most -= need
    return max(ordered, default=0)
