# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How much one Service may ask of a node.

A node refuses a bundle as a whole. So that no Service can have that happen to all others, a Service that no node would
take is left out of the bundle and named. The node program reads lines of up to LINE_BYTES; the counts below keep every
line of one Service under that in each mode, with the longest names and addresses that there are.
"""

from __future__ import annotations

import re

from ..cluster.snapshot import Service

# The node program folds what is longer, and refuses what was folded.
LINE_BYTES = 4_000_000

# Of one service port in one family. In nftables mode one rule holds them all, with affinity in up to 270 bytes each.
ENDPOINTS_PER_PORT = 10_000

# Of one Service: external IPs and load balancer IPs together, and source ranges, which all stand in one line.
ADDRESSES_PER_SERVICE = 10_000
SOURCE_RANGES_PER_SERVICE = 10_000

# Of one Service in one family, over all its ports: frontends times endpoints, and load balancer IPs times source
# ranges, which is what ipvs mode writes. With the longest names an endpoint has up to 3,000 bytes, which is 150 MB of
# the 256 of a bundle; what all Services together may have is in `budget`.
ENTRIES_PER_SERVICE = 50_000

# How many claims of one Service, or Services for which there is no room, are named.
MOST_TOLD = 20

# The ports that a node opens for health checks, unless its own settings say otherwise: the API server's default range.
HEALTH_CHECK_PORTS = (30000, 32767)

# The port by which the control host comes in, unless the inventory says otherwise.
CONTROL_PORTS = (22,)

_RANGE = re.compile(r"([1-9][0-9]{0,4})-([1-9][0-9]{0,4})")


def too_large(service: Service) -> str:
    """What a Service has, whatever its endpoints, that is more than a node takes; empty if it is not."""
    addresses = len(service.external_ips) + len(service.load_balancer_vips)
    entries = (2 + addresses + len(service.load_balancer_vips) * len(service.source_ranges)) * len(service.ports)
    for count, most, what in (
        (addresses, ADDRESSES_PER_SERVICE, "external and load balancer IPs"),
        (len(service.source_ranges), SOURCE_RANGES_PER_SERVICE, "source ranges"),
        (entries, ENTRIES_PER_SERVICE, "entries, which are its ports times their addresses and source ranges"),
    ):
        if count > most:
            return f"has {count:,} {what}, more than {most:,}"
    return ""


def port_range(text: str) -> tuple[int, int] | None:
    """A range of ports such as 30000-32767; None if the text is none."""
    match = _RANGE.fullmatch(text)
    low, high = (int(match[1]), int(match[2])) if match else (1, 0)
    return (low, high) if low <= high <= 65535 else None
