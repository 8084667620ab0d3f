"""A node with ip_vs for the tests of ipvs mode: the lab's n3, with pods of its own and on n1."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.lab import Lab
from tests.lab.node import Node
from tests.lab.program import PROGRAMS
from tests.node.host import Result
from tests.unit.build import Object, endpoint, node, port, render, service, slice_of

PODS = {"near": "n3", "far-1": "n1", "far-2": "n1"}
SET_FILES = ("ipset-1-frontends.rules", "ipset-2-endpoints.rules")
SERVER_FILES = ("ipvs-1-frontends.rules", "ipvs-2-endpoints.rules")
SERVE = [("tcp", 8080), ("udp", 5353)]
NO_CONNTRACK: Object = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
SYSCTLS = ("vs.conntrack", "vs.expire_nodest_conn", "vs.expire_quiescent_template", "ip_forward")


@dataclass
class World:
    """The lab, and what the node of interest is told."""

    lab: Lab
    directory: Path
    names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        for name, where in PODS.items():
            if name not in self.lab.pods:
                self.lab.add_pod(name, where, serve=SERVE)
        for name, where in (("client-1", "n1"), ("client-3", "n3")):
            if name not in self.lab.pods:
                self.lab.add_pod(name, where)

    @property
    def node(self) -> Node:
        return self.lab.node("n3")

    def address(self, pod: str, family: int = 0) -> str:
        return self.lab.pod(pod).addresses[family]

    def state(self, *objects: Object, **fields: Any) -> State:
        """What n3 is to hold for these objects."""
        known = [node(each.name, *each.addresses, pod_cidrs=each.pod_cidrs) for each in self.lab.nodes]
        settings = {"mode": "ipvs", "conntrack": NO_CONNTRACK, "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"}
        return render(*known, *objects, on="n3", **{**settings, **fields})

    def web(self, number: int, *pods: str, name: str = "", **spec: Any) -> list[Object]:
        """A Service of both families on TCP 80 and UDP 53 with these pods."""
        name = name or f"web-{number}"
        ips = [f"10.96.0.{number}", f"fd00:10:96::{number}"]
        tcp, udp = port(80, "http"), port(53, "dns", "UDP")
        if spec.get("type"):
            tcp["nodePort"] = udp["nodePort"] = 30000 + number
        made = [service(name, clusterIP=ips[0], clusterIPs=ips, ipFamilies=["IPv4", "IPv6"], ports=[tcp, udp], **spec)]
        ports = [port(8080, "http"), port(5353, "dns", "UDP")]
        for family in (0, 1):
            entries = [endpoint(self.address(pod, family), node=PODS[pod]) for pod in pods]
            if entries:
                made.append(slice_of(name, *entries, ports=ports, name=f"{name}-{family}"))
        return made

    def bundle(self, state: State) -> Path:
        path = self.directory / f"bundle-{next(self.names)}"
        write_bundle(state, path)
        return path

    def delta(self, old: State, new: State) -> Path:
        path = self.directory / f"delta-{next(self.names)}"
        write_delta(delta(old, new), new, path)
        return path

    def akp(self, *arguments: str | Path, **env: str) -> Result:
        """Run the program of the mode of the bundle that is among the arguments, else that of ipvs mode."""
        modes = [mode_of(each) for each in arguments if isinstance(each, Path)]
        program = PROGRAMS[modes[-1] if modes else "ipvs"]
        done = self.node.run(["sh", str(program), *map(str, arguments)], check=False, env=env)
        return Result(done.returncode, done.stdout, done.stderr)

    def apply(self, state: State | Path, *options: str) -> dict[str, Any]:
        """Apply what must be accepted."""
        bundle = state if isinstance(state, Path) else self.bundle(state)
        result = self.akp("apply", *options, bundle)
        assert result.code == 0, result.stdout + result.stderr
        return result.json

    def status(self) -> dict[str, Any]:
        return self.akp("status", "--verify").json

    def sh(self, script: str) -> str:
        return self.node.run(["sh", "-euc", script]).stdout

    def kernel(self) -> dict[str, list[str]]:
        return kernel_of(self.node)

    def empty(self) -> bool:
        """Whether nothing of ours is left."""
        kernel = self.kernel()
        rules = "\n".join(kernel["iptables"] + kernel["ip6tables"])
        return not (kernel["sets"] or kernel["servers"] or kernel["addresses"] or kernel["link"] or "KUBE-" in rules)


def kernel_of(node: Node) -> dict[str, list[str]]:
    """All that ipvs mode is about, as the tools print it, without what says nothing."""
    parts = {
        "iptables": "iptables-save -t filter; iptables-save -t nat",
        "ip6tables": "ip6tables-save -t filter; ip6tables-save -t nat",
        "sets": r"ipset save | sed -e 's/ bucketsize [0-9]*//' -e 's/ initval [0-9a-fx]*//' | sort",
        "servers": "ipvsadm -Sn | sort",
        "addresses": "ip -o addr show dev kube-ipvs0 2>/dev/null | awk '{ print $4 }' | sort || :",
        "link": "ip -br link show kube-ipvs0 2>/dev/null || :",
    }
    script = "".join(f"echo '== {name}'\n{command}\n" for name, command in parts.items())
    found: dict[str, list[str]] = {}
    for line in node.run(["sh", "-euc", script]).stdout.splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif not line.startswith(("#", ":INPUT", ":OUTPUT", ":FORWARD", ":PREROUTING", ":POSTROUTING")):
            found[[*found][-1]].append(line.partition(" [")[0] if line.startswith(":") else line)
    return found


def wanted(bundle: Path) -> dict[str, list[str]]:
    """The same of a bundle."""
    lines = {name: (bundle / name).read_text().splitlines() for name in (*SET_FILES, *SERVER_FILES)}
    return {
        "sets": sorted(line for name in SET_FILES for line in lines[name]),
        "servers": sorted(line for name in SERVER_FILES for line in lines[name]),
        "addresses": sorted(line.split()[2] for line in (bundle / "ip.batch").read_text().splitlines()[1:]),
    }


def rules(bundle: Path, name: str) -> list[str]:
    """The rules of a file, sorted; jumps as they stand once inserted."""
    lines = (bundle / name).read_text().splitlines()
    return sorted(line.replace("-I ", "-A ", 1) for line in lines if line.startswith(("-A ", "-I ")))


def generation(bundle: Path) -> str:
    return str(json.loads((bundle / "manifest.json").read_text())["generation"])


def mode_of(bundle: Path) -> str:
    return str(json.loads((bundle / "manifest.json").read_text())["mode"])
