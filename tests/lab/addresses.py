"""The lab's address plan. It is the same in every lab, because no lab sees another; examples and tests rely on it.

| network | IPv4 | IPv6 |
|---|---|---|
| nodes | 172.18.0.0/16, node i is 172.18.0.(10+i) | fd00:172:18::/64, node i is ::(0x10+i) |
| pods of node i | 10.244.i.0/24 | fd00:10:244:i::/64 |
| outside | 198.51.100.0/24, the client is .10 and .200 | 2001:db8:51::/64, the client is ::10 and ::200 |

The controller is .1 or ::1 in the first and the last, and routes between them.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

CONTROLLER = ("172.18.0.1", "fd00:172:18::1")
OUTSIDE = ("198.51.100.10", "2001:db8:51::10")
STRANGER = ("198.51.100.200", "2001:db8:51::200")
"""The client's other addresses, for calls that some source range does not cover."""
OUTSIDE_GATEWAY = ("198.51.100.1", "2001:db8:51::1")
MOST_NODES = 200


def node_addresses(number: int) -> tuple[str, str]:
    return str(IPv4Address("172.18.0.10") + number), str(IPv6Address("fd00:172:18::10") + number)


def pod_cidrs(node: int) -> tuple[str, str]:
    return f"10.244.{node}.0/24", str(IPv6Network(f"fd00:10:244:{node:x}::/64"))


def pod_gateways(node: int) -> tuple[str, str]:
    return pod_addresses(node, 1)


def pod_addresses(node: int, number: int) -> tuple[str, str]:
    """Addresses of a node's pod, with the same last digits in both families for the eye."""
    ipv4, ipv6 = pod_cidrs(node)
    return str(IPv4Network(ipv4)[number]), str(IPv6Network(ipv6)[int(str(number), 16)])


def host_prefix(address: str) -> str:
    return f"{address}/{ip_address(address).max_prefixlen}"
