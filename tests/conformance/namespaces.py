"""One side of a twin: a node's network namespace beside a world that holds everything the node can reach.

Both sides are built alike, down to the MAC addresses, so that nothing but the proxy can make a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.controlplane import netns

# The world's addresses on the link; the control plane listens on the first of each family.
WORLD4, WORLD6 = "192.168.77.1", "fd77::1"
WORLD = (f"{WORLD4}/24", "192.168.78.1/24", "192.0.2.1/24", f"{WORLD6}/64")
WORLD_MAC, NODE_MAC = "02:77:00:00:00:01", "02:77:00:00:00:02"
NODE_LINK_LOCAL = "fe80::77:ff:fe00:2"


@dataclass
class World:
    """The far end of a node's link; stays while nodes come and go."""

    name: str

    def build(self) -> None:
        netns.delete(self.name)
        netns.add(self.name)
        netns.run(self.name, "sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
        # There from the start, since a server may want to listen before the first node comes.
        for address in (f"{WORLD4}/32", f"{WORLD6}/128"):
            netns.ip("-n", self.name, "addr", "add", address, "dev", "lo")

    def remove(self) -> None:
        netns.delete(self.name)


@dataclass
class Node:
    """A node's namespace: a link to the world, carrying exactly the node's addresses."""

    name: str
    world: World

    def build(self, addresses: Sequence[str]) -> None:
        self.remove()
        netns.add(self.name)
        for setting in ("net.ipv6.conf.default.accept_dad=0", "net.ipv6.conf.all.accept_dad=0"):
            netns.run(self.name, "sysctl", "-qw", setting)
        netns.ip(
            "link", "add", "eth0", "address", NODE_MAC, "netns", self.name,
            "type", "veth", "peer", "name", "node0", "address", WORLD_MAC, "netns", self.world.name,
        )  # fmt: skip
        for address in WORLD:
            self._address(self.world.name, address, "node0")
        netns.ip("-n", self.world.name, "link", "set", "node0", "up")
        for address in addresses:
            self._address(self.name, f"{address}/64" if ":" in address else f"{address}/24", "eth0")
        netns.ip("-n", self.name, "link", "set", "eth0", "up")

    @staticmethod
    def _address(namespace: str, address: str, device: str) -> None:
        netns.ip("-n", namespace, "addr", "add", address, "dev", device, *(["nodad"] if ":" in address else []))

    def remove(self) -> None:
        # The veth pair goes with either end, but only once the kernel gets around to it; its name must be free at once.
        if netns.exists(self.name):
            netns.run(self.name, "ip", "link", "del", "eth0", check=False)
        netns.delete(self.name)
