"""In ipvs mode too, what `akp explain` says about a packet is what the packet does, in a kernel that has ip_vs."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.addresses import family_of
from agentless_kube_proxy.carry.live import SCRIPT, printed
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.explain.answer import Explanation, explain
from agentless_kube_proxy.explain.intent import Intent, Place
from agentless_kube_proxy.explain.packet import Origin
from agentless_kube_proxy.explain.question import Sender, sender

from tests.lab import Lab
from tests.lab.place import REFUSED, TIMEOUT, Reply
from tests.node.ipvs import NO_CONNTRACK, World
from tests.unit.build import document, node, snapshot

pytestmark = pytest.mark.timeout(1200)  # this kernel is slow, and slower still beside other work

CLUSTER_CIDR = "10.244.0.0/16,fd00:10:244::/48"
# caller, and the number of the Service at which destination
INSIDE = tuple((number, "cluster-ip") for number in (31, 32, 34, 35))
PLACES = (*INSIDE, (32, "node-port"), (33, "node-port"))
CALLS = [
    (caller, *place)
    for place in PLACES
    for caller in ("client-3", "near", "n3", "outside")
    if caller != "outside" or place[1] == "node-port"
]


@pytest.fixture(scope="module")
def balanced(uml_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Place]:
    """Services applied to n3, and n3 with the rules, sets and servers that its kernel has."""
    world = World(uml_lab, tmp_path_factory.mktemp("explain"))
    objects = [
        *world.web(31, "near", "far-1"),
        *world.web(32, "near", "far-1", type="NodePort"),
        *world.web(33, "near", "far-1", type="NodePort", externalTrafficPolicy="Local"),
        *world.web(34),
        *world.web(35, "far-1", internalTrafficPolicy="Local"),
    ]
    world.apply(world.state(*objects))
    nodes = [node(each.name, *each.addresses, pod_cidrs=each.pod_cidrs) for each in uml_lab.nodes]
    choices = Choices(document(mode="ipvs", conntrack=NO_CONNTRACK, clusterCIDR=CLUSTER_CIDR))
    intent = Intent(snapshot(*objects, *nodes), choices, {})
    rules = printed(world.node.run(["sh", "-c", f"{SCRIPT}; true"]).stdout)
    assert rules.mode == "ipvs"
    return world, Place(intent.view("n3"), rules)


def told(world: World, place: Place, source: str, to: tuple[str, int, str]) -> Explanation:
    nodes = [node(each.name, *each.addresses, pod_cidrs=each.pod_cidrs) for each in world.lab.nodes]
    who = sender(snapshot(*nodes), place, source, family_of(to[0]))
    if who.origin is Origin.NODE:
        who = Sender(place.source_of(family_of(to[0]), to[0]), Origin.NODE)
    return explain(place, {}, who, place.packet(who.address, to, who.origin))


def foretold(world: World, last: Explanation, family: int) -> set[Any]:
    """The replies that an explanation foretells."""
    end = last.verdict.end.value
    if end != "endpoints":
        return {TIMEOUT} if end == "dropped" else {REFUSED}
    pods = {pod.addresses[family]: pod for pod in world.lab.pods.values()}
    replies = set()
    for target, masked in last.verdict.masquerades.items():
        pod = pods[target.rpartition(":")[0].strip("[]")]
        own = (world.node.pod_gateways if pod.node == world.node else world.node.addresses)[family]
        replies.add(Reply(pod.name, own if masked else last.packet.source))
    return replies


@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_packets_do_what_is_explained(balanced: tuple[World, Place], family: int) -> None:
    world, place = balanced
    wrong = []
    for caller, number, where in CALLS:
        address = (f"10.96.0.{number}", f"fd00:10:96::{number}")[family]
        to = (address, 80, "tcp") if where == "cluster-ip" else (world.node.addresses[family], 30000 + number, "tcp")
        at = {"n3": world.node, "outside": world.lab.outside}.get(caller) or world.lab.pod(caller)
        last = told(world, place, at.addresses[family], to)
        replies = set(at.calls("tcp", to[0], to[1], 10 if last.verdict.end.value == "endpoints" else 1, timeout=5.0))
        if replies != foretold(world, last, family):
            wrong.append((caller, number, where, last.verdict.end.value, replies, foretold(world, last, family)))
    assert not wrong
