"""One side of a twin: a node's network namespace between its pods and a world that holds everything else.

Both sides are built alike, down to the MAC addresses, so that nothing but the proxy can make a difference.

                     pods (all servers on this node)  veth1
    world  node0 ─── eth0  node
                     pod (a client on this node)      veth0, or cni0 where that is what the proxy looks for

The world and the pods own whole address ranges at once, by local routes: any of them can answer without being made.
Links need no IPv4 addresses (routes go through IPv6 link-local ones), so a node has exactly the addresses it should.
"""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tests.controlplane import netns

from .plan import CLUSTER_CIDR4, CLUSTER_CIDR6, IPV4, IPV6, NODE_NET4, NODE_NET6, SECOND_NET4
from .side import Network, Side

# The world's addresses on the link; the control plane listens on the first of each family.
WORLD4, WORLD6 = f"{NODE_NET4}1", f"{NODE_NET6}1"
WORLD = (WORLD4, f"{SECOND_NET4}1", "192.0.2.1", WORLD6)
WORLD_MAC, NODE_MAC = "02:77:00:00:00:01", "02:77:00:00:00:02"
WORLD_LINK_LOCAL, NODE_LINK_LOCAL = "fe80::77:ff:fe00:1", "fe80::77:ff:fe00:2"
# Where connections from outside come from: inside and outside of the source ranges that are drawn.
OUTSIDE = {IPV4: ("172.16.0.1", "203.0.113.253", "100.64.0.9"), IPV6: ("2001:db8:9::9", "fd00::1", "64:ff9b::9")}
# A whole range of sources, for what sticks to a client.
CROWD = {IPV4: "172.16.8.", IPV6: "2001:db8:8::"}
# Services' addresses lead to the node.
SERVICES = (
    "10.96.0.0/12", "198.51.100.0/24", "203.0.113.0/24", "fd00:10:96::/112", "2001:db8:51::/64", "2001:db8:203::/64",
)  # fmt: skip
QUIET = (
    "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
    "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0",
    "net.ipv4.conf.all.accept_redirects=0", "net.ipv4.conf.default.send_redirects=0",
    # Every refusal must arrive, however many there are.
    "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0",
)  # fmt: skip


def pod_client(cidr: str) -> str:
    """The address of the client pod in a node's pod CIDR; no drawn endpoint has it."""
    return str(ipaddress.ip_network(cidr)[0xFFFE if ":" in cidr else 5])


@dataclass
class World:
    """The far end of a node's link; stays while nodes come and go."""

    name: str

    def build(self) -> None:
        netns.delete(self.name)
        _add(self.name)
        ranges = (CLUSTER_CIDR4, CLUSTER_CIDR6, f"{CROWD[IPV4]}0/24", f"{CROWD[IPV6]}/64")
        _batch(self.name, [
            *(f"addr add {address} dev lo" for address in (WORLD4, WORLD6, *OUTSIDE[IPV4], *OUTSIDE[IPV6])),
            *(_route("add local", cidr, "dev lo table main") for cidr in ranges),
        ])  # fmt: skip

    def remove(self) -> None:
        netns.delete(self.name)


@dataclass
class Node(Side):
    """A node's namespace and its two of pods."""

    world: World

    def command(self, argv: Sequence[str]) -> list[str]:
        return netns.command(self.name, argv)

    @property
    def pods(self) -> str:
        return f"{self.name}-pods"

    @property
    def pod(self) -> str:
        return f"{self.name}-pod"

    def build(self, network: Network) -> None:
        """A node between its pods and the world, in which the other nodes' addresses are."""
        addresses, pods = network.addresses, network.pods
        self.remove()
        self.make()
        for name in (self.pods, self.pod):
            _add(name)
        netns.ip(
            "link", "add", "eth0", "address", NODE_MAC, "netns", self.name,
            "type", "veth", "peer", "name", "node0", "address", WORLD_MAC, "netns", self.world.name,
        )  # fmt: skip
        to_node = f"via inet6 {NODE_LINK_LOCAL} dev node0"
        _batch(self.world.name, [
            *(_address(address, "node0") for address in (*WORLD, *network.others)),
            "link set node0 up",
            *(_route("replace", prefix, to_node) for prefix in (*SERVICES, *pods, *addresses)),
        ])  # fmt: skip
        _batch(self.name, [
            *(_address(address, "eth0") for address in addresses),
            "link set eth0 up",
            *(_route("add", prefix, f"via inet6 {WORLD_LINK_LOCAL} dev eth0") for prefix in ("0.0.0.0/0", "::/0")),
        ])  # fmt: skip
        self._link(self.pods, "veth1", "fe80::2", pods)
        own = [pod_client(cidr) for cidr in pods]
        # In the main table, where the client's own route, being longer, still counts.
        _batch(self.pods, [
            *(_route("add local", cidr, "dev lo table main") for cidr in pods),
            *(_route("add", client, "via inet6 fe80::1 dev eth0") for client in own),
        ])  # fmt: skip
        self._link(self.pod, network.interface, "fe80::3", own)
        _batch(self.pod, [f"addr add {address} dev eth0" for address in own])

    def make(self) -> None:
        """The node's own namespace."""
        _add(self.name)

    def _link(self, pod: str, interface: str, link_local: str, routes: Sequence[str]) -> None:
        netns.ip("link", "add", interface, "netns", self.name, "type", "veth", "peer", "name", "eth0", "netns", pod)
        for name, device, address in ((self.name, interface, "fe80::1"), (pod, "eth0", link_local)):
            _batch(name, [
                f"link set {device} addrgenmode none", f"addr add {address}/64 dev {device}", f"link set {device} up",
            ])  # fmt: skip
        _batch(self.name, [_route("add", prefix, f"via inet6 {link_local} dev {interface}") for prefix in routes])
        _batch(pod, [_route("add", prefix, "via inet6 fe80::1 dev eth0") for prefix in ("0.0.0.0/0", "::/0")])

    def forward(self) -> None:
        """Let the node route, as a node with pods does; not before the comparison, which looks at these settings."""
        for setting in ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"):
            netns.run(self.name, "sysctl", "-qw", setting)

    def remove(self) -> None:
        # A veth pair goes with either end, but only once the kernel gets around to it; its name must be free at once.
        if netns.exists(self.name):
            netns.run(self.name, "ip", "link", "del", "eth0", check=False)
        for name in (self.name, self.pods, self.pod):
            netns.delete(name)


def _add(namespace: str) -> None:
    netns.add(namespace)
    quieten(namespace)


def quieten(namespace: str) -> None:
    """Nothing is checked, limited or refused but by rules."""
    netns.run(namespace, "sysctl", "-qw", *QUIET)


def _address(address: str, device: str) -> str:
    return f"addr add {address}/64 dev {device} nodad" if ":" in address else f"addr add {address}/24 dev {device}"


def _route(verb: str, prefix: str, where: str) -> str:
    """An IPv4 route may lead through an IPv6 address; an IPv6 route does so without being told."""
    return (
        f"-6 route {verb} {prefix} {where.replace('inet6 ', '')}" if ":" in prefix else f"route {verb} {prefix} {where}"
    )


def _batch(namespace: str, commands: Sequence[str]) -> None:
    """Several `ip` commands at the price of one; `-6` in front of a command asks for that family."""
    for flags in ((), ("-6",)):
        chosen = [c.removeprefix("-6 ") for c in commands if c.startswith("-6 ") == bool(flags)]
        argv = ["ip", *flags, "-n", namespace, "-batch", "-"]
        done = subprocess.run(argv, input="\n".join(chosen), capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"ip in {namespace}: {done.stderr.strip()}")
