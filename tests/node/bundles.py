# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""Bundles by hand: the smallest that are complete, and big synthetic ones."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentless_kube_proxy.bundle.manifest import manifest_text, sha256
from agentless_kube_proxy.bundle.program import node_program

JUMPS = {
    "filter": (
        '-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES',
        '-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES',
        '-I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS',
        '-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD',
        '-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL',
        '-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL',
        '-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL',
        "-I INPUT -j KUBE-FIREWALL",
        "-I OUTPUT -j KUBE-FIREWALL",
    ),
    "nat": (
        '-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING',
    ),
}
STATIC = {
    "mangle": ("KUBE-PROXY-CANARY",),
    "filter": (
        *("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-NODEPORTS"),
        *("KUBE-PROXY-FIREWALL", "KUBE-FIREWALL", "KUBE-PROXY-CANARY", "KUBE-PROXY-GENERATION"),
    ),
    "nat": (
        *("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ"),
        *("KUBE-PROXY-CANARY", "KUBE-PROXY-GENERATION"),
    ),
}
NODEPORTS_LAST = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"


@dataclass(frozen=True)
class Service:
    """One TCP service port and its endpoints, by their addresses."""

    name: str
    ip: str
    endpoints: tuple[str, ...]
    port: int = 80

    @property
    def chain(self) -> str:
        return "KUBE-SVC-" + hash16(f"{self.name}tcp")

    def endpoint_chain(self, endpoint: str) -> str:
        return "KUBE-SEP-" + hash16(f"{self.name}tcp{endpoint}")


def hash16(text: str) -> str:
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:16].decode()


def shop(*endpoints: str) -> tuple[Service, ...]:
    """Two small services; the arguments are the endpoints of the first."""
    first = endpoints or ("10.244.1.10:8080", "10.244.1.2:8080", "10.244.2.7:8080")
    return (Service("shop/web:http", "10.96.7.7", first), Service("shop/cart:http", "10.96.7.8", ("10.244.1.3:8080",)))


def many(services: int, endpoints: int) -> Iterator[Service]:
    """A synthetic cluster."""
    for i in range(services):
        addresses = ((i * endpoints + k) for k in range(endpoints))
        yield Service(
            f"ns{i % 50}/svc-{i}:http",
            f"10.{96 + i // 65536}.{i // 256 % 256}.{i % 256}",
            tuple(f"10.{200 + a // 62500}.{a // 250 % 250}.{a % 250 + 1}:8080" for a in addresses),
        )


def rules(services: Iterable[Service], *, ipv6: bool = False, extra: Mapping[str, Iterable[str]] | None = None) -> str:
    """An iptables file; `GENERATION` in it is filled in by `write`. `extra` are more rules of static chains, by table."""
    services = () if ipv6 else tuple(services)
    more = extra or {}
    loopback = "::1/128" if ipv6 else "127.0.0.0/8"
    marker = "-A KUBE-PROXY-GENERATION -m comment --comment GENERATION"

    def table(name: str, groups: Iterable[str], lines: Iterable[str]) -> Iterator[str]:
        yield f"*{name}"
        yield from (f":{chain} - [0:0]" for chain in STATIC[name])
        yield from groups
        yield from lines
        yield from more.get(name, ())
        yield from JUMPS.get(name, ())
        yield "COMMIT"

    out = ["# a bundle made by hand", *table("mangle", (), ())]
    forward = (
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT',
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule"'
        " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )
    out += table("filter", (), (*forward, marker))
    dispatch = [
        f'-A KUBE-SERVICES -d {s.ip}/32 -p tcp -m comment --comment "{s.name} cluster IP"'
        f" -m tcp --dport {s.port} -j {s.chain}"
        for s in services
    ]
    nat = [
        *dispatch,
        f'-A KUBE-SERVICES ! -d {loopback} -m comment --comment "{NODEPORTS_LAST}"'
        " -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
        "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
        "-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0",
        '-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully',
        "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
        marker,
    ]
    out += table("nat", (line for service in services for line in group(service)), nat)
    return "\n".join(out) + "\n"


def group(service: Service) -> Iterator[str]:
    """The chains of one service port."""
    n = len(service.endpoints)
    chains = [service.endpoint_chain(e) for e in service.endpoints]
    yield f"# {service.name} tcp"
    yield f":{service.chain} - [0:0]"
    yield from (f":{chain} - [0:0]" for chain in chains)
    yield (
        f'-A {service.chain} ! -s 10.244.0.0/16 -d {service.ip}/32 -p tcp -m comment --comment "{service.name} cluster IP"'
        f" -m tcp --dport {service.port} -j KUBE-MARK-MASQ"
    )
    for i, (endpoint, chain) in enumerate(zip(service.endpoints, chains, strict=True)):
        chance = f" -m statistic --mode random --probability {round(2**31 / (n - i)) / 2**31:.11f}" if i < n - 1 else ""
        yield f'-A {service.chain} -m comment --comment "{service.name} -> {endpoint}"{chance} -j {chain}'
    for endpoint, chain in zip(service.endpoints, chains, strict=True):
        address = endpoint.rpartition(":")[0]
        yield f'-A {chain} -s {address}/32 -m comment --comment "{service.name}" -j KUBE-MARK-MASQ'
        yield f'-A {chain} -p tcp -m comment --comment "{service.name}" -m tcp -j DNAT --to-destination {endpoint}'


def write(directory: Path, files: Mapping[str, str], **fields: str) -> Path:
    """A bundle directory from files: digests, manifest, program. `GENERATION` in a file becomes the generation."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    generation = fields.pop("generation", sha256("\0".join(f"{k}\0{v}" for k, v in sorted(files.items()))))
    contents = {name: re.sub(r"\bGENERATION$", generation, text, flags=re.M) for name, text in files.items()}
    contents["akp-node"] = node_program()
    for name, text in contents.items():
        (directory / name).write_text(text)
    manifest = {
        "kind": "Bundle",
        "node": "n1",
        "mode": "iptables",
        "compat": "1.37",
        "generation": generation,
        **fields,
    }
    (directory / "manifest.json").write_text(
        manifest_text({**manifest, "files": {name: sha256(text) for name, text in contents.items()}})
    )
    return directory


def replace_file(directory: Path, name: str, text: str) -> Path:
    """The bundle with another text in a file, and a manifest that fits it."""
    (directory / name).write_text(text)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["apiVersion"], manifest["digest"]
    manifest["files"][name] = sha256(text)
    (directory / "manifest.json").write_text(manifest_text(manifest))
    return directory


def simple(directory: Path, services: Iterable[Service] | None = None, **files: str) -> Path:
    """A complete bundle of some services in both families; `files` replaces or adds files (`_` stands for `.`)."""
    chosen = shop() if services is None else services
    base = {"iptables.rules": rules(chosen), "ip6tables.rules": rules((), ipv6=True)}
    base |= {name.replace("_", "."): text for name, text in files.items()}
    return write(directory, base)
