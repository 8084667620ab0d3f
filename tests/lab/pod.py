"""A pod: a network namespace, linked to its node by a routed veth pair as many CNI plugins do it.

Its servers and calls are sockets of the lab's agent, so a pod costs no process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .addresses import host_prefix
from .node import run
from .place import Place

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from .node import Node


@dataclass(frozen=True)
class Pod(Place):
    node: Node
    interface: str
    """The node's end of the veth pair."""

    def run(self, argv: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command with the pod's network and the node's files."""
        enter = [
            "nsenter",
            f"--target={self.agent_pid}",
            "--mount",
            "--pid",
            "--",
            "nsenter",
            f"--net=/run/netns/{self.netns}",
        ]
        return run(self.name, [*enter, "--", *argv], check=check)

    @property
    def agent_pid(self) -> int:
        return int((self.agent.parent / "agent.pid").read_text())

    def link_script(self) -> str:
        """Commands that connect the pod to its node, to be run inside the lab."""
        node, interface = self.node, self.interface
        inside = ["link set lo up", *link_up("eth0", "fe80::2")]
        outside = [f"link add {interface} type veth peer name eth0 netns {self.netns}", *link_up(interface, "fe80::1")]
        if node.bridge:
            end = f"{node.name}-{interface}"
            outside = [
                f"link add {end} type veth peer name eth0 netns {self.netns}",
                f"link set {end} master {node.bridge} up",
            ]
        gateways = {":" in gateway: gateway for gateway in node.pod_gateways}
        for address in self.addresses:
            gateway = gateways[":" in address]
            nodad = " nodad" if ":" in address else ""
            inside.append(f"addr add {host_prefix(address)} dev eth0{nodad}")
            inside.append(f"route add {host_prefix(gateway)} dev eth0")
            inside.append(f"route add default via {gateway} dev eth0")
            if node.bridge:
                continue  # the node has them already, for all of its pods
            outside.append(f"addr add {host_prefix(gateway)} dev {interface}{nodad}")
            outside.append(f"route add {host_prefix(address)} dev {interface} src {gateway}")
        # Pods on one bridge would learn from their node's redirects to reach each other without it.
        settings = " ".join(f"net.ipv6.conf.{where}.accept_redirects=0" for where in ("all", "eth0"))
        settle = f"ip netns exec {self.netns} sysctl -qw {settings}\n"
        return batch(node.netns, outside) + (settle if node.bridge else "") + batch(self.netns, inside)


def link_up(interface: str, link_local: str) -> list[str]:
    """Brings an interface up with a link-local address at once; the kernel would need two seconds to trust its own."""
    return [
        f"link set {interface} addrgenmode none",
        f"link set {interface} up",
        f"addr add {link_local}/64 dev {interface} nodad",
    ]


def batch(netns: str, lines: Sequence[str]) -> str:
    """Shell text that runs many ip commands in one process."""
    where = f" -n {netns}" if netns else ""
    return f"ip{where} -batch - <<'END'\n" + "\n".join(lines) + "\nEND\n"
