"""The same connections through both namespaces must end the same way: same backends, same source seen, same refusal."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from . import echo
from .draw import Cluster
from .namespaces import CROWD, OUTSIDE, Node, pod_client
from .plan import IPV4, IPV6, internal_addresses
from .undefined import parse

Object = dict[str, Any]

PROTOCOLS = ("TCP", "UDP")
# Connections per probe and side: a failure is told by a few, a set of backends by some more, a large one with luck.
ROUNDS = (3, 8, 24, 60, 150)
AT_ONCE = 80
MOST_BACKENDS = 25
SOMEBODY_ELSES = "service.kubernetes.io/service-proxy-name"
LOOPBACK = ("127.0.0.1", "::1")
CALLER = "the caller"  # one of a crowd, seen by its own address


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
    backends: frozenset[str] = frozenset()  # who may answer, as address and port
    callers: frozenset[str] = frozenset()  # whom they may see

    @property
    def single(self) -> bool:
        """Whether all connections are of one caller that keeps its backend: which one that is, is left to chance."""
        return self.sticky and self.source != "outside"

    def __str__(self) -> str:
        origin = f"{self.source}{f' ({self.address})' if self.address else ''}"
        return f"{origin} to {self.what} {self.destination} {self.port}/{self.protocol}"


# Given a probe, what is to be said against ends of its connections; an empty text: nothing.
Judge: TypeAlias = Callable[[Probe], Callable[[frozenset[str]], str]]


def content(_probe: Probe) -> Callable[[frozenset[str]], str]:
    """A judge that has nothing to say."""
    return lambda _ends: ""


@dataclass(frozen=True)
class Discord:
    """A probe that ended in different ways, or otherwise than was foretold."""

    probe: Probe
    real: frozenset[str]
    ours: frozenset[str]
    objection: str = ""

    def __str__(self) -> str:
        real, ours = (", ".join(sorted(side)) for side in (self.real - self.ours, self.ours - self.real))
        both = ", ".join(sorted(self.real & self.ours)) or "nothing"
        only = f"  only with kube-proxy: {real or 'nothing'}\n  only with us: {ours or 'nothing'}"
        wrong = strangers(self.probe, self.real | self.ours)
        nobody = f"\n  of no backend, or no caller of this: {', '.join(sorted(wrong))}" if wrong else ""
        foretold = f"\n{self.objection}" if self.objection else ""
        return f"{self.probe}\n{only}\n  both: {both}{nobody}{foretold}"


def probes(cluster: Cluster, most: int = 6) -> list[Probe]:
    """A seeded sample of a cluster's Services, each by all the ways that lead to it."""
    rng = random.Random(f"packets/{cluster.mode}/{cluster.seed}")
    services = [s for s in cluster.of("Service") if s["spec"].get("clusterIP", "None") != "None"]
    candidates = [s for s in services if sum(len(e["endpoints"]) for e in _slices(cluster, s)) <= MOST_BACKENDS]
    # A node without an address of a family has no source for masqueraded packets; how those fail is left to chance.
    own = internal_addresses(cluster.own_node())
    families = {":" in address for address in own}
    masked = {*cluster.addresses, *LOOPBACK}
    # Of all Services, not only those that are probed: some share an address.
    backends: dict[tuple[str, int, str], set[str]] = {}
    for service in services:
        if SOMEBODY_ELSES in service["metadata"].get("labels", {}):
            continue
        # An address of a family that the Service does not have is no destination of it. It may be a host's own.
        served = {":" in address for address in service["spec"]["clusterIPs"]}
        for port in service["spec"]["ports"]:
            for _, address, number in _ways(cluster, service, port):
                if (":" in address) not in served:
                    continue
                backends.setdefault((address, number, port["protocol"]), set()).update(
                    _backends(cluster, service, port)
                )
    made: list[Probe] = []
    for service in rng.sample(candidates, min(most, len(candidates))):
        sticky = service["spec"].get("sessionAffinity") == "ClientIP"
        for port in service["spec"]["ports"]:
            if port["protocol"] not in PROTOCOLS:
                continue
            unused = ("unused port", service["spec"]["clusterIPs"][0], 4)
            for kind, address, number in (*_ways(cluster, service, port, most=2), unused):
                if (":" in address) not in families:
                    continue
                what = f"{kind} of {service['metadata']['namespace']}/{service['metadata']['name']}"
                # What no Service claims, whoever has the address answers, if anybody.
                answering = frozenset(backends.get((address, number, port["protocol"]), {f"{address} {number}"}))
                for source, origin in _origins(rng, cluster, address):
                    callers = frozenset(masked | {CALLER} | ({origin} if origin else set()))
                    made.append(
                        Probe(source, origin, port["protocol"], address, number, what, sticky, answering, callers)
                    )
    return made


def callers(drawn: Cluster, most: int = 6) -> Iterator[Probe]:
    """Probes, and endpoints of this node that call their own Services."""
    networks = [ipaddress.ip_network(cidr) for cidr in drawn.pod_cidrs]
    bridged = drawn.config.get("detectLocalMode") == "BridgeInterface"  # these pods are on no bridge
    for probe in probes(drawn, most):
        yield probe
        if probe.source != "pod" or bridged:
            continue
        for backend in sorted(probe.backends)[:2]:
            address = backend.split()[0]
            here = any(ipaddress.ip_address(address) in each for each in networks)
            if here and (":" in address) == (":" in probe.destination):
                yield replace(probe, source="itself", address=address, callers=probe.callers | {address})


def _slices(cluster: Cluster, service: Object) -> list[Object]:
    owner = (service["metadata"]["namespace"], service["metadata"]["name"])
    return [s for s in cluster.of("EndpointSlice") if (s["metadata"]["namespace"], _owner(s)) == owner]


def _backends(cluster: Cluster, service: Object, port: Object) -> Iterator[str]:
    """All endpoints of a service port, ready or not, as they answer: address and port."""
    meant = (port.get("name", ""), port["protocol"])
    for obj in _slices(cluster, service):
        for its in obj["ports"]:
            if its.get("port") and (its.get("name", ""), its.get("protocol", "TCP")) == meant:
                yield from (f"{address} {its['port']}" for address in _addresses(obj))


def _owner(obj: Object) -> str | None:
    owner: str | None = obj["metadata"].get("labels", {}).get("kubernetes.io/service-name")
    return owner


def _ways(cluster: Cluster, service: Object, port: Object, most: int | None = None) -> Iterator[tuple[str, str, int]]:
    """Every destination of a service port, or so many of a kind: kind, address, port."""
    spec = service["spec"]
    for address in spec["clusterIPs"]:
        yield "cluster IP", address, port["port"]
    for address in spec.get("externalIPs", [])[:most]:
        yield "external IP", str(parse(address)), port["port"]
    for ingress in service.get("status", {}).get("loadBalancer", {}).get("ingress", [])[:most]:
        if "ip" in ingress:
            yield "load balancer IP", str(parse(ingress["ip"])), port["port"]
    if "nodePort" in port:
        # With this gate the kube-proxy process itself listens there; rules cannot do that.
        served = cluster.config.get("featureGates", {}).get("KubeProxyNFTablesLocalhostNodePorts")
        for address in (*internal_addresses(cluster.own_node()), *(() if served else LOOPBACK)):
            yield "node port", address, port["nodePort"]


def _origins(rng: random.Random, cluster: Cluster, destination: str) -> Iterator[tuple[str, str | None]]:
    family = IPV6 if ":" in destination else IPV4
    yield "node", None
    if destination not in LOOPBACK:
        yield "pod", pod_client(cluster.pod_cidrs[family == IPV6])
    # What the world itself has does not come to the node.
    if destination not in (*LOOPBACK, *cluster.others):
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
                for address in _addresses(obj) & own:
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
        self._places = {"node": node.name, "pod": node.pod, "outside": node.world.name, "itself": node.pods}

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
            return ended.replace(f"saw {source}", f"saw {CALLER}") if origin == source else ended

        return frozenset(await asyncio.gather(*(one(number) for number in numbers)))


def strangers(probe: Probe, ends: frozenset[str]) -> set[str]:
    """Answers of those who are no endpoint of this destination, or who saw neither the caller nor its node."""
    answers = {end: end.split(" saw ") for end in ends if " saw " in end}
    return {end for end, (who, seen) in answers.items() if who not in probe.backends or seen not in probe.callers}


def alike(probe: Probe, real: frozenset[str], ours: frozenset[str]) -> bool:
    """Whether both sides ended alike, and right; with a single caller only a backend that both sides met can tell."""
    if strangers(probe, real | ours):
        return False
    if probe.source == "itself":
        return True  # some answers do not come by the node, as this rig has many endpoints in one namespace
    if not probe.single:
        return real == ours
    answers = [{tuple(end.split(" saw ")) for end in side if " saw " in end} for side in (real, ours)]
    failures = [{end for end in side if " saw " not in end} for side in (real, ours)]
    met = {backend for backend, _ in answers[0]} & {backend for backend, _ in answers[1]}
    sights = [{answer for answer in side if answer[0] in met} for side in answers]
    return failures[0] == failures[1] and bool(answers[0]) == bool(answers[1]) and sights[0] == sights[1]


async def compare(cluster: Cluster, real: Node, ours: Node, judge: Judge = content) -> tuple[int, list[Discord]]:
    """Probe both sides; returns how many probes there were, and those that disagree however often they are tried."""
    chosen = list(callers(cluster))
    objections = {probe: judge(probe) for probe in chosen}  # asking takes time, in which no connection waits
    gate = asyncio.Semaphore(AT_ONCE)  # more calls at once than this process can serve would time out
    sides = [Side(cluster, node, gate) for node in (real, ours)]

    async def settle(probe: Probe) -> Discord | None:
        found: list[frozenset[str]] = [frozenset(), frozenset()]
        start, objected = 0, ""
        for number, count in enumerate(ROUNDS):
            timeout = 0.5 * (1 + number)
            numbers = range(start, start + count)
            seen = await asyncio.gather(*(side.outcomes(probe, numbers, timeout) for side in sides))
            start += count
            # A busy machine loses an answer now and then: later rounds, with more patience, decide about silence.
            found = [(old - {"no answer"}) | new for old, new in zip(found, seen, strict=True)]
            tried = number or not any(" saw" in end for end in found[0])
            objected = next(filter(None, map(objections[probe], found)), "")
            if tried and alike(probe, *found) and not objected:
                return None
        return Discord(probe, found[0], found[1], objected)

    try:
        ended = await asyncio.gather(*(settle(probe) for probe in chosen))
    finally:
        for side in sides:
            side.close()
    return len(chosen), [discord for discord in ended if discord is not None]
