"""The same connections through both namespaces must end the same way: same backends, same source seen, same refusal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import echo
from .draw import Cluster
from .namespaces import CROWD, OUTSIDE, Node, pod_client
from .plan import IPV4, IPV6
from .undefined import parse

Object = dict[str, Any]

PROTOCOLS = ("TCP", "UDP")
# Connections per probe and side: a failure is told by a few, a set of backends by some more, a large one with luck.
ROUNDS = (3, 8, 24, 60, 150)
AT_ONCE = 80
MOST_BACKENDS = 25


@dataclass(frozen=True)
class Probe:
    """A kind of connection: from where, to what."""

    source: str  # pod, node or outside
    address: str | None  # the source address; None leaves it to the kernel
    protocol: str
    destination: str
    port: int
    what: str  # the destination's kind and Service, for people
    sticky: bool  # the Service has session affinity

    @property
    def single(self) -> bool:
        """Whether all connections are of one caller that keeps its backend: which one that is, is left to chance."""
        return self.sticky and self.source != "outside"

    def __str__(self) -> str:
        origin = f"{self.source}{f' ({self.address})' if self.address else ''}"
        return f"{origin} to {self.what} {self.destination} {self.port}/{self.protocol}"


@dataclass(frozen=True)
class Discord:
    """A probe that ended in different ways."""

    probe: Probe
    real: frozenset[str]
    ours: frozenset[str]

    def __str__(self) -> str:
        real, ours = (", ".join(sorted(side)) for side in (self.real - self.ours, self.ours - self.real))
        both = ", ".join(sorted(self.real & self.ours)) or "nothing"
        only = f"  only with kube-proxy: {real or 'nothing'}\n  only with us: {ours or 'nothing'}"
        return f"{self.probe}\n{only}\n  both: {both}"


def probes(cluster: Cluster, most: int = 6) -> list[Probe]:
    """A seeded sample of a cluster's Services, each by all the ways that lead to it."""
    rng = random.Random(f"packets/{cluster.mode}/{cluster.seed}")
    candidates = [
        s
        for s in cluster.of("Service")
        if s["spec"].get("clusterIP", "None") != "None" and _backends(cluster, s) <= MOST_BACKENDS
    ]
    # A node without an address of a family has no source for masqueraded packets; how those fail is left to chance.
    own = [a["address"] for a in cluster.own_node()["status"]["addresses"] if a["type"] == "InternalIP"]
    families = {":" in address for address in own}
    made: list[Probe] = []
    for service in rng.sample(candidates, min(most, len(candidates))):
        sticky = service["spec"].get("sessionAffinity") == "ClientIP"
        for port in service["spec"]["ports"]:
            if port["protocol"] not in PROTOCOLS:
                continue
            for kind, address, number in _ways(cluster, service, port):
                if (":" in address) not in families:
                    continue
                what = f"{kind} of {service['metadata']['namespace']}/{service['metadata']['name']}"
                for source, origin in _origins(rng, cluster, address):
                    made.append(Probe(source, origin, port["protocol"], address, number, what, sticky))
    return made


def _backends(cluster: Cluster, service: Object) -> int:
    owner = (service["metadata"]["namespace"], service["metadata"]["name"])
    slices = [s for s in cluster.of("EndpointSlice") if (s["metadata"]["namespace"], _owner(s)) == owner]
    return sum(len(s["endpoints"]) for s in slices)


def _owner(obj: Object) -> str | None:
    owner: str | None = obj["metadata"].get("labels", {}).get("kubernetes.io/service-name")
    return owner


def _ways(cluster: Cluster, service: Object, port: Object) -> Iterator[tuple[str, str, int]]:
    """Every destination of a service port: kind, address, port."""
    spec = service["spec"]
    for address in spec["clusterIPs"]:
        yield "cluster IP", address, port["port"]
    yield "unused port", spec["clusterIPs"][0], 4
    for address in spec.get("externalIPs", [])[:2]:
        yield "external IP", str(parse(address)), port["port"]
    for ingress in service.get("status", {}).get("loadBalancer", {}).get("ingress", [])[:2]:
        if "ip" in ingress:
            yield "load balancer IP", str(parse(ingress["ip"])), port["port"]
    if "nodePort" in port:
        own = [a["address"] for a in cluster.own_node()["status"]["addresses"] if a["type"] == "InternalIP"]
        # With this gate the kube-proxy process itself listens there; rules cannot do that.
        served = cluster.config.get("featureGates", {}).get("KubeProxyNFTablesLocalhostNodePorts")
        for address in (*own, *(() if served else ("127.0.0.1", "::1"))):
            yield "node port", address, port["nodePort"]


def _origins(rng: random.Random, cluster: Cluster, destination: str) -> Iterator[tuple[str, str | None]]:
    family = IPV6 if ":" in destination else IPV4
    yield "node", None
    if destination not in ("127.0.0.1", "::1"):
        yield "pod", pod_client(cluster.pod_cidrs[family == IPV6])
        yield "outside", rng.choice(OUTSIDE[family])


def _addresses(obj: Object) -> set[str]:
    return set() if obj["addressType"] == "FQDN" else {str(parse(e["addresses"][0])) for e in obj["endpoints"]}


def servers(cluster: Cluster, node: Node) -> Iterator[tuple[str, str, int, str | None]]:
    """Who has to listen so that every endpoint can answer: namespace, protocol, port, address."""
    own = {a["address"] for a in cluster.own_node()["status"]["addresses"]}
    ports: set[tuple[str, int]] = set()
    for obj in cluster.of("EndpointSlice"):
        for port in obj["ports"]:
            if port.get("port") and port.get("protocol", "TCP") in PROTOCOLS:
                ports.add((port["protocol"], port["port"]))
                addresses = (
                    {str(parse(e["addresses"][0])) for e in obj["endpoints"]} if obj["addressType"] != "FQDN" else set()
                )
                for address in addresses & own:
                    yield node.name, port["protocol"], port["port"], address
    for protocol, number in sorted(ports):
        yield node.world.name, protocol, number, None
        yield node.pods, protocol, number, None


class Side:
    """One node's servers, and calls through it."""

    def __init__(self, cluster: Cluster, node: Node, gate: asyncio.Semaphore) -> None:
        self._gate = gate
        self._servers = echo.Servers()
        for server in sorted(set(servers(cluster, node)), key=str):
            self._servers.serve(*server)
        self._places = {"node": node.name, "pod": node.pod, "outside": node.world.name}

    def close(self) -> None:
        self._servers.close()

    async def outcomes(self, probe: Probe, numbers: Sequence[int], timeout: float) -> frozenset[str]:
        """How these connections end; from many addresses where a single caller would always get the same answer."""
        crowd = CROWD[IPV6 if ":" in probe.destination else IPV4]

        async def one(number: int) -> str:
            source = f"{crowd}{1 + number:x}" if ":" in crowd else f"{crowd}{1 + number}"
            origin = source if probe.sticky and not probe.single else probe.address
            place = self._places[probe.source]
            async with self._gate:
                ended = await echo.call(place, probe.protocol, probe.destination, probe.port, origin, timeout)
            return ended.replace(f"saw {source}", "saw the caller") if origin == source else ended

        return frozenset(await asyncio.gather(*(one(number) for number in numbers)))


def alike(probe: Probe, real: frozenset[str], ours: frozenset[str]) -> bool:
    """Whether both sides ended alike; with a single caller only a backend that both sides met can tell."""
    if not probe.single:
        return real == ours
    answers = [{tuple(end.split(" saw ")) for end in side if " saw " in end} for side in (real, ours)]
    failures = [{end for end in side if " saw " not in end} for side in (real, ours)]
    met = {backend for backend, _ in answers[0]} & {backend for backend, _ in answers[1]}
    sights = [{answer for answer in side if answer[0] in met} for side in answers]
    return failures[0] == failures[1] and bool(answers[0]) == bool(answers[1]) and sights[0] == sights[1]


async def compare(cluster: Cluster, real: Node, ours: Node) -> tuple[int, list[Discord]]:
    """Probe both sides; returns how many probes there were, and those that disagree however often they are tried."""
    chosen = probes(cluster)
    gate = asyncio.Semaphore(AT_ONCE)  # more calls at once than this process can serve would time out
    sides = [Side(cluster, node, gate) for node in (real, ours)]

    async def settle(probe: Probe) -> Discord | None:
        found: list[frozenset[str]] = [frozenset(), frozenset()]
        start = 0
        for number, count in enumerate(ROUNDS):
            timeout = 0.5 * (1 + number)
            numbers = range(start, start + count)
            seen = await asyncio.gather(*(side.outcomes(probe, numbers, timeout) for side in sides))
            start += count
            # A busy machine loses an answer now and then: later rounds, with more patience, decide about silence.
            found = [(old - {"no answer"}) | new for old, new in zip(found, seen, strict=True)]
            if alike(probe, *found) and (number or not any(" saw" in end for end in found[0])):
                return None
        return Discord(probe, found[0], found[1])

    try:
        ended = await asyncio.gather(*(settle(probe) for probe in chosen))
    finally:
        for side in sides:
            side.close()
    return len(chosen), [discord for discord in ended if discord is not None]
