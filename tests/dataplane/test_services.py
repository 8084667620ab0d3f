"""Who answers a call to a Service, and which source address the pod sees; for every type, policy, family and protocol.

A row reads: CALLER calls SERVICE at DESTINATION; ANSWERS are the pods that do, all of them, or what happens instead;
SEEN is the source that they see: the client's own address, or the node's where it has been masqueraded.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.addresses import STRANGER
from tests.lab.node import Node
from tests.lab.place import REFUSED, TIMEOUT, UNREACHABLE, Place, Reply
from tests.lab.pod import Pod
from tests.unit.build import Object

from .cluster import FAMILIES, Cluster, dual, slices

LOCAL: Object = {"externalTrafficPolicy": "Local"}
ALLOWED = ["198.51.100.0/25", "2001:db8:51::/121", "172.18.0.11/32", "fd00:172:18::11/128"]

SERVICES = {
    # name: (Service, pods)
    "plain": (dual("plain", 10), ["web-1", "web-2"]),
    "plain-local": (dual("plain-local", 11, internalTrafficPolicy="Local"), ["web-1", "web-2"]),
    "port": (dual("port", 12, type="NodePort", node_ports=True), ["web-1", "web-2"]),
    "port-local": (dual("port-local", 13, type="NodePort", node_ports=True, **LOCAL), ["web-1", "web-2"]),
    "balanced": (dual("balanced", 14, type="LoadBalancer", node_ports=True, outside="ingress"), ["web-1", "web-2"]),
    "balanced-local": (
        dual("balanced-local", 15, type="LoadBalancer", node_ports=True, outside="ingress", **LOCAL),
        ["web-1", "web-2"],
    ),
    "external": (dual("external", 16, outside="externalIPs"), ["web-1", "web-2"]),
    "external-local": (dual("external-local", 17, outside="externalIPs", **LOCAL), ["web-1", "web-2"]),
    "guarded": (
        dual("guarded", 18, type="LoadBalancer", node_ports=True, outside="ingress", loadBalancerSourceRanges=ALLOWED),
        ["web-1", "web-2"],
    ),
    "both-local": (
        dual("both-local", 19, type="NodePort", node_ports=True, internalTrafficPolicy="Local", **LOCAL),
        ["web-1", "web-2"],
    ),
    "empty": (dual("empty", 20, type="LoadBalancer", node_ports=True, outside="ingress"), []),
    "empty-local": (dual("empty-local", 21, type="LoadBalancer", node_ports=True, outside="ingress", **LOCAL), []),
    "slow": (dual("slow", 22, type="NodePort", node_ports=True), ["web-1:slow", "web-2:slow"]),
    "going": (dual("going", 23, type="NodePort", node_ports=True), ["web-1:going", "web-2:going"]),
    "going-local": (
        dual("going-local", 24, type="NodePort", node_ports=True, internalTrafficPolicy="Local", **LOCAL),
        ["web-1:going", "web-2"],
    ),
    "going-elsewhere": (dual("going-elsewhere", 25, type="NodePort", node_ports=True), ["web-1:going", "web-2"]),
    "solo": (dual("solo", 26, type="NodePort", node_ports=True, outside="externalIPs"), ["web-1"]),
}

BOTH = "web-1 web-2"
CALLS = """
caller     service          destination     answers   seen

# cluster IP: pods keep their address, everybody else is masqueraded
client-1   plain            cluster-ip      BOTH      client
client-3   plain            cluster-ip      BOTH      client
n1         plain            cluster-ip      BOTH      node
n3         plain            cluster-ip      BOTH      node
outside    plain            cluster-ip      BOTH      node

# internalTrafficPolicy Local: only this node's pods, or silence
client-1   plain-local      cluster-ip      web-1     client
n1         plain-local      cluster-ip      web-1     node
outside    plain-local      cluster-ip      web-1     node
client-3   plain-local      cluster-ip      timeout   -
n3         plain-local      cluster-ip      timeout   -

# node port: reaches all pods from every node, masqueraded, whoever calls
outside    port             node-port-n1    BOTH      node
outside    port             node-port-n3    BOTH      node
client-1   port             node-port-n1    BOTH      node
client-3   port             node-port-n3    BOTH      node
client-1   port             node-port-n3    BOTH      n3
n1         port             node-port-n1    BOTH      node
n1         port             node-port-n3    BOTH      n3
n3         port             node-port-n3    BOTH      node
n1         port             localhost-4     BOTH      node
n3         port             localhost-4     BOTH      node
n1         port             localhost-6     refused   -
client-1   port             cluster-ip      BOTH      client

# externalTrafficPolicy Local: clients outside reach this node's pods with their own address, or nothing
outside    port-local       node-port-n1    web-1     client
outside    port-local       node-port-n3    timeout   -
n1         port-local       node-port-n3    timeout   -
# but pods and the node itself are served as if it were a cluster IP
client-1   port-local       node-port-n1    BOTH      client
client-3   port-local       node-port-n3    BOTH      client
n1         port-local       node-port-n1    BOTH      node
n3         port-local       node-port-n3    BOTH      node
n3         port-local       localhost-4     BOTH      node
n3         port-local       localhost-6     timeout   -
client-3   port-local       cluster-ip      BOTH      client

# load balancer
outside    balanced         address-1       BOTH      node
outside    balanced         address-3       BOTH      node
client-1   balanced         address-1       BOTH      node
client-3   balanced         address-1       BOTH      node
n1         balanced         address-3       BOTH      node
n3         balanced         address-1       BOTH      node
outside    balanced         node-port-n3    BOTH      node
outside    balanced-local   address-1       web-1     client
outside    balanced-local   address-3       timeout   -
client-1   balanced-local   address-1       BOTH      client
client-3   balanced-local   address-1       BOTH      client
n1         balanced-local   address-1       BOTH      node
n3         balanced-local   address-1       BOTH      node
outside    balanced-local   node-port-n1    web-1     client
outside    balanced-local   node-port-n3    timeout   -

# external IPs
outside    external         address-1       BOTH      node
outside    external         address-3       BOTH      node
client-1   external         address-1       BOTH      node
n3         external         address-1       BOTH      node
outside    external-local   address-1       web-1     client
outside    external-local   address-3       timeout   -
client-3   external-local   address-1       BOTH      client
n3         external-local   address-1       BOTH      node

# source ranges guard the load balancer's addresses and nothing else
outside    guarded          address-1       BOTH      node
outside    guarded          address-3       BOTH      node
stranger   guarded          address-1       timeout   -
stranger   guarded          address-3       timeout   -
client-1   guarded          address-1       timeout   -
n1         guarded          address-1       BOTH      node
n3         guarded          address-1       timeout   -
stranger   guarded          node-port-n1    BOTH      node
client-1   guarded          cluster-ip      BOTH      client

# both policies Local
client-1   both-local       cluster-ip      web-1     client
client-3   both-local       cluster-ip      timeout   -
outside    both-local       node-port-n1    web-1     client
outside    both-local       node-port-n3    timeout   -
client-3   both-local       node-port-n3    BOTH      client

# no endpoints: refused everywhere, not dropped, whatever the policy
client-1   empty            cluster-ip      refused   -
client-3   empty            cluster-ip      refused   -
n1         empty            cluster-ip      refused   -
n3         empty            cluster-ip      refused   -
outside    empty            cluster-ip      refused   -
outside    empty            node-port-n1    refused   -
outside    empty            node-port-n3    refused   -
client-1   empty            node-port-n1    refused   -
n1         empty            localhost-4     refused   -
n1         empty            localhost-6     refused   -
outside    empty            address-1       refused   -
outside    empty            address-3       refused   -
client-1   empty            address-1       refused   -
outside    empty-local      node-port-n1    refused   -
outside    empty-local      address-1       refused   -
client-3   empty-local      cluster-ip      refused   -

# endpoints that are not ready are none; those that terminate but serve are better than none
client-1   slow             cluster-ip      refused   -
outside    slow             node-port-n1    refused   -
client-1   going            cluster-ip      BOTH      client
outside    going            node-port-n3    BOTH      node
client-1   going-local      cluster-ip      web-1     client
outside    going-local      node-port-n1    web-1     client
client-3   going-local      node-port-n3    web-2     client
client-1   going-elsewhere  cluster-ip      web-2     client
outside    going-elsewhere  node-port-n1    web-2     node

# a pod that calls itself sees its node instead of itself
web-1      solo             cluster-ip      web-1     node
web-1      solo             node-port-n1    web-1     node
web-1      solo             address-1       web-1     node
web-2      solo             cluster-ip      web-1     client
"""


def rows() -> list[tuple[str, ...]]:
    lines = [line for line in CALLS.splitlines() if line and not line.startswith(("#", "caller"))]
    return [tuple(BOTH if word == "BOTH" else word for word in line.split()) for line in lines]


@pytest.fixture(scope="module")
def shop(cluster: Cluster) -> Cluster:
    """All of the Services above, applied."""
    objects = []
    for name, (made, pods) in SERVICES.items():
        objects += [made, *slices(cluster.lab, name, *pods)]
    answers = cluster.apply(*objects)
    assert all(answer["ok"] for answer in answers.values())
    return cluster


def destination(shop: Cluster, name: str, where: str, family: int) -> tuple[str, int | None]:
    """The address of a destination, and its port if it is a node port."""
    given: dict[str, Any] = SERVICES[name][0]
    spec = given["spec"]
    node_port = spec["ports"][0].get("nodePort")
    if where == "cluster-ip":
        return spec["clusterIPs"][family], None
    if where.startswith("localhost"):
        return ("127.0.0.1", "::1")[family], node_port
    if where.startswith("node-port-"):
        return shop.lab.node(where.removeprefix("node-port-")).addresses[family], node_port
    ingress = [entry["ip"] for entry in given["status"]["loadBalancer"].get("ingress", [])]
    outside = [ip for ip in (*spec.get("externalIPs", []), *ingress) if (":" in ip) == bool(family)]
    return next(ip for ip in outside if ip.endswith(where[-1])), None


def entry_node(shop: Cluster, caller: str, where: str) -> str:
    """The node whose rules decide: the caller's own, or from outside the one that the address is routed to."""
    if caller in ("outside", "stranger"):
        return "n3" if where[-1] == "3" else "n1"
    place = shop.place(caller)
    return place.node.name if isinstance(place, Pod) else place.name


def seen_source(shop: Cluster, caller: Place, server: str, seen: str, entry: str, family: int, source: str) -> str:
    if seen == "client":
        return source or caller.addresses[family]
    node = shop.lab.node(entry if seen == "node" else seen)
    # A masqueraded packet leaves with the address of the interface it leaves by.
    return (node.pod_gateways if shop.lab.pod(server).node == node else node.addresses)[family]


def cases() -> list[Any]:
    """Every row in both families, except where it names one."""
    return [
        pytest.param(*row, family, id=f"{' '.join(row[:3])} {family}")
        for row in rows()
        for family in FAMILIES
        if not row[2].startswith("localhost") or row[2][-1] == family[-1]
    ]


@pytest.mark.parametrize("proto", ["tcp", "udp"])
@pytest.mark.parametrize(("caller", "name", "where", "answers", "seen", "family"), cases())
def test_call(
    shop: Cluster, caller: str, name: str, where: str, answers: str, seen: str, family: str, proto: str
) -> None:
    index = FAMILIES[family]
    source = STRANGER[index] if caller == "stranger" else ""
    place = shop.place("outside" if caller == "stranger" else caller)
    address, node_port = destination(shop, name, where, index)
    number = node_port or {"tcp": 80, "udp": 53}[proto]
    silent = answers == "timeout"
    # A refusal is asked for once, because ICMPv6 has a rate limit.
    count = 1 if answers == "refused" else 3 if silent else 24
    replies = set(place.calls(proto, address, number, count, timeout=0.3 if silent else 2.0, source=source))
    if answers in ("timeout", "refused"):
        expected = TIMEOUT if silent else REFUSED
        if isinstance(place, Node) and proto == "udp":
            # Whose own datagram does not get out is told so at once.
            assert replies in ({expected}, {UNREACHABLE})
        else:
            assert replies == {expected}
        return
    entry = entry_node(shop, caller, where)
    assert replies == {
        Reply(server, seen_source(shop, place, server, seen, entry, index, source)) for server in answers.split()
    }
