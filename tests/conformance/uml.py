"""Twins inside one user-mode kernel, which has ip_vs: two network namespaces of it, beside a control plane outside.

The kernel is a node of the lab, and runs what it is told over ssh. Only the side of kube-proxy is linked to the world;
the other one has the same interface, but nothing leads to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

from tests.controlplane import netns
from tests.lab import Lab
from tests.lab.addresses import CONTROLLER
from tests.lab.node import PATH

from .namespaces import NODE_LINK_LOCAL, NODE_MAC
from .side import Network, Side

MODULES = "ip_vs ip_vs_rr ip_vs_lc ip_vs_sh ip_vs_mh ip_vs_wrr dummy veth"


class UmlPlace:
    """A lab with a node of its own kernel, and a name for the network in which the control plane can live."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.namespace, self.addresses = f"{prefix}-ctl", CONTROLLER

    def __enter__(self) -> UmlPlace:
        self._lab = Lab(self._prefix, 0, uml=1)
        try:
            self.node = self._lab.node("n1")
            netns.ip("netns", "attach", self.namespace, (self._lab.state / "agent.pid").read_text().strip())
            self.node.run(["modprobe", "-a", *MODULES.split()])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):
            netns.delete(self.namespace)
        self._lab.close()

    def side(self, name: str) -> UmlSide:
        return UmlSide(name, self, linked=name == "real")

    def route(self, addresses: Sequence[str]) -> None:
        """Lead addresses to the kernel, from the control plane."""
        for address in addresses:
            via = self.node.addresses[":" in address]
            netns.ip("-n", self.namespace, "route", "replace", address, "via", via)


@dataclass
class UmlSide(Side):
    pause: ClassVar[float] = 3.0  # looking takes the one processor away from those who work
    place: UmlPlace
    linked: bool

    def command(self, argv: Sequence[str]) -> list[str]:
        return self.place.node.enter(["env", f"PATH={PATH}", "ip", "netns", "exec", self.name, *argv])

    def build(self, network: Network) -> None:
        """The same interface on both sides; pods are not needed to compare what is programmed for them."""
        name, outer = self.name, f"{self.name}0"
        prefixes = [f"{address}/{64 if ':' in address else 24}" for address in network.addresses]
        script = [
            f"ip netns add {name}",
            f"ip netns exec {name} sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0",
            f"ip link add {outer} type veth peer name eth0 address {NODE_MAC} netns {name}",
            f"ip link set {outer} addrgenmode none",
            f"ip addr add fe80::1/64 dev {outer} nodad",
            f"ip link set {outer} up",
            f"ip -n {name} link set lo up",
            *(f"ip -n {name} addr add {p} dev eth0{' nodad' if ':' in p else ''}" for p in prefixes),
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} route add 0.0.0.0/0 via inet6 fe80::1 dev eth0",
            f"ip -n {name} -6 route add ::/0 via fe80::1 dev eth0",
        ]
        if self.linked:
            for address in network.addresses:
                family, via = ("-6", NODE_LINK_LOCAL) if ":" in address else ("-4", f"inet6 {NODE_LINK_LOCAL}")
                script.append(f"ip {family} route replace {address} via {via} dev {outer}")
            self.place.route(network.addresses)
        self.remove()
        self._sh(script)

    def remove(self) -> None:
        self._sh([
            f"! ip link show {self.name}0 >/dev/null 2>&1 || ip link del {self.name}0",
            f"! [ -e /run/netns/{self.name} ] || ip netns del {self.name}",
        ])  # fmt: skip

    def _sh(self, commands: Sequence[str]) -> None:
        self.place.node.run(["sh", "-eu"], input="\n".join(commands) + "\n")
