"""Bundles of nftables mode, made by the engine, and kernels as text that can be compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.node.host import Host
from tests.unit.build import node, port, render, service, slice_of

# Sysctls are not what these tests are about, and some cannot be set in a namespace.
NO_SYSCTLS = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
OURS = re.compile(r"^table ip6? kube-proxy \{\n.*?^\}\n", re.M | re.S)


def state(*objects: Any, **fields: Any) -> State:
    """The state of node n1 in nftables mode."""
    return render(*objects, **{"mode": "nftables", "conntrack": NO_SYSCTLS, **fields})


def shop(*ips: str, sticky: tuple[str, ...] = (), extra: tuple[Any, ...] = (), **fields: Any) -> State:
    """A shop: a load balancer with a firewall, and a cart whose customers stay with their endpoint."""
    web = service(
        type="LoadBalancer",
        ports=[port(nodePort=31080), port(53, "dns", "UDP")],
        ingress=("198.51.100.9",),
        loadBalancerSourceRanges=["203.0.113.0/24"],
    )
    slice_ports = [port(8080), port(53, "dns", "UDP")]
    cart = service("cart", clusterIP="10.96.7.8", sessionAffinity="ClientIP")
    objects = (
        node("n1", "172.18.0.11"),
        web,
        slice_of("web", *ips, ports=slice_ports),
        cart,
        slice_of("cart", *sticky),
    )
    return state(*objects, *extra, **fields)


def write(made: State, directory: Path) -> Path:
    """The whole bundle of a state."""
    write_bundle(made, directory)
    return directory


def write_change(old: State, new: State, directory: Path) -> Path:
    """The delta between two states."""
    write_delta(delta(old, new), new, directory)
    return directory


def by_hand(host: Host, bundle: Path) -> None:
    """Load a bundle as its files say, without the node program."""
    host.sh(f"cat {bundle}/nftables-*.nft | nft -f -")


def listing(host: Host, *, sessions: bool = True) -> str:
    """Our tables as nft lists them, objects and elements in a fixed order."""
    text = host.sh("for f in ip ip6; do nft list table $f kube-proxy 2>/dev/null || :; done")
    if not sessions:
        text = re.sub(r"(\tset affinity-\S+ \{\n(?:(?!\t\}).*\n)*?)\t\telements = \{[^}]*\}\n", r"\1", text)
    return "\n".join(sorted(_objects(text)))


def _objects(text: str) -> list[str]:
    objects = []
    for table in text.split("\n}\n"):
        name, _brace, body = table.partition("{\n")
        objects += [name + " ".join(sorted(_elements(each))) for each in body.split("\n\n")]
    return objects


def _elements(text: str) -> list[str]:
    """An object's lines; the elements of a set one by one."""
    head, equals, rest = text.partition("elements = {")
    if not equals:
        return [text]
    return [head, *(element.strip() for element in rest.rpartition("}")[0].split(","))]


def foreign(host: Host) -> str:
    """Everything in the kernel's tables that is not ours."""
    return OURS.sub("", host.sh("nft list ruleset"))


def wrap_nft(host: Host, script: str) -> dict[str, str]:
    """An environment in which `nft` is a script; `$nft` in it is the real one, `$n` counts its calls with -f."""
    directory = host.directory / "wrapped"
    directory.mkdir(exist_ok=True)
    count = directory / "count"
    count.write_text("0\n")
    (directory / "nft").write_text(
        f"""#!/bin/sh
nft=/usr/sbin/nft
n=0
if [ "$1" = -f ]; then n=$(($(cat {count}) + 1)); echo $n >{count}; fi
{script}
exec $nft "$@"
"""
    )
    (directory / "nft").chmod(0o755)
    return {"PATH": f"{directory}:{host.environment['PATH']}"}
