"""The address plan of drawn clusters: which numbers nodes, pods, Services and load balancers get, each used once."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

# The links of nodes; .1 is the control plane's.
NODE_NET4, NODE_NET6 = "192.168.77.", "fd77::"
SECOND_NET4 = "192.168.78."
POD_NET4, POD_NET6 = "10.244.", "fd00:10:244:"
CLUSTER_CIDR4, CLUSTER_CIDR6 = "10.244.0.0/16", "fd00:10:244::/48"
IPV4, IPV6 = "IPv4", "IPv6"


def node_address(index: int, family: str) -> str:
    return f"{NODE_NET4}{10 + index}" if family == IPV4 else f"{NODE_NET6}{10 + index}"


def pod_cidr(index: int, family: str) -> str:
    return f"{POD_NET4}{index}.0/24" if family == IPV4 else f"{POD_NET6}{index}::/64"


def pod_address(index: int, number: int, family: str) -> str:
    """The number-th pod of a node; beyond 240 they spill over into ranges that belong to no node."""
    if family == IPV6:
        return str(ipaddress.ip_address(f"{POD_NET6}{index}::{number:x}"))
    return f"{POD_NET4}{index + 16 * (number // 240)}.{10 + number % 240}"


@dataclass
class Plan:
    """Hands out numbers; the same seed hands out the same ones in the same order."""

    random: random.Random
    _seen: set[object] = field(default_factory=set)
    _pods: dict[tuple[int, str], Iterator[int]] = field(default_factory=dict)

    def take(self, objects: Iterable[Object]) -> None:
        """Remember what existing objects use, so that it is not handed out again."""
        for obj in objects:
            if obj["kind"] == "Service":
                spec = obj["spec"]
                self._seen.update(spec.get("clusterIPs", []))
                self._seen.update(
                    ("node port", port["nodePort"]) for port in spec.get("ports", []) if "nodePort" in port
                )
                self._seen.add(("node port", spec.get("healthCheckNodePort")))
            elif obj["kind"] == "EndpointSlice":
                self._seen.update(endpoint["addresses"][0] for endpoint in obj["endpoints"])

    def _once(self, draw: object) -> bool:
        if draw in self._seen:
            return False
        self._seen.add(draw)
        return True

    def cluster_ip(self, family: str) -> str:
        while True:
            if family == IPV4:
                number = self.random.randrange(0x0A600100, 0x0A6FFF00)
                address = str(ipaddress.IPv4Address(number))
            else:
                address = str(ipaddress.ip_address(f"fd00:10:96::{self.random.randrange(0x100, 0xFFFF):x}"))
            if self._once(address):
                return address

    def node_port(self) -> int:
        while True:
            port = self.random.randrange(30000, 32700)
            if self._once(("node port", port)):
                return port

    def frontend(self, address: str, protocol: str, port: int) -> bool:
        """Whether this destination was still free; it is taken now."""
        return self._once((ipaddress.ip_address(address), protocol, port))

    def external(self, family: str) -> str:
        if family == IPV4:
            return f"198.51.100.{self.random.randrange(1, 250)}"
        return f"2001:db8:51::{self.random.randrange(1, 0xFFFF):x}"

    def load_balancer(self, family: str) -> str:
        if family == IPV4:
            return f"203.0.113.{self.random.randrange(1, 250)}"
        return f"2001:db8:203::{self.random.randrange(1, 0xFFFF):x}"

    def pod(self, node: int, family: str) -> str:
        counter = self._pods.setdefault((node, family), iter(range(1, 60000)))
        return next(a for a in (pod_address(node, number, family) for number in counter) if self._once(a))


def internal_addresses(node: Object) -> list[str]:
    return [a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP"]
