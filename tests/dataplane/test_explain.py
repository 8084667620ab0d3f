"""What `akp explain` says about a packet is what the packet does: who answers, and which source the endpoint sees.

Explained are the rules that the nodes' own tools print, so their listings are read as well.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.addresses import family_of
from agentless_kube_proxy.carry.live import SCRIPT, printed, read_live
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.explain.answer import Explanation, explain
from agentless_kube_proxy.explain.intent import Intent, Place
from agentless_kube_proxy.explain.packet import Origin
from agentless_kube_proxy.explain.prove import Prover, smallest
from agentless_kube_proxy.explain.question import Sender, sender

from tests.lab.addresses import STRANGER
from tests.lab.node import Node
from tests.lab.place import REFUSED, TIMEOUT, UNREACHABLE, Reply
from tests.unit.build import CLUSTER_CIDR, document, snapshot

from .cluster import CONNTRACK, FAMILIES, NODES, Cluster, slices
from .test_services import SERVICES, destination, entry_node, rows

Places = dict[str, Place]


@pytest.fixture(scope="module", params=["iptables", "nftables"])
def explained(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[tuple[Cluster, Places]]:
    """All Services applied in a mode, and every node with the rules that its kernel has."""
    objects = [each for name, (made, pods) in SERVICES.items() for each in (made, *slices(cluster.lab, name, *pods))]
    answers = cluster.apply(*objects, mode=request.param)
    assert all(answer["ok"] for answer in answers.values())
    settings = document(clusterCIDR=CLUSTER_CIDR, conntrack=CONNTRACK, mode=request.param)
    intent = Intent(snapshot(*objects, *cluster.nodes()), Choices(settings), cluster.facts)
    places = {}
    for name in NODES:
        rules = printed(cluster.lab.node(name).run(["sh", "-c", f"{SCRIPT}; true"]).stdout)
        assert rules.mode == request.param
        places[name] = Place(intent.view(name), rules)
    yield cluster, places
    cluster.apply(*objects)


def told(
    cluster: Cluster, places: Places, caller: str, where: str, to: tuple[str, int, str], source: str
) -> list[Explanation]:
    """What is said on the node where the packet begins, and, if it passes there, on the one that has the address."""
    found: list[Explanation] = []
    entry = entry_node(cluster, caller, where)
    owner = next((name for name in NODES if to[0] in cluster.lab.node(name).addresses), entry)
    for name in dict.fromkeys((entry, owner)):
        place = places[name]
        who = sender(snapshot(*cluster.nodes()), place, source, family_of(to[0]))
        if who.origin is Origin.NODE:
            who = Sender(place.source_of(family_of(to[0]), to[0]), Origin.NODE)
        found.append(explain(place, {}, who, place.packet(who.address, to, who.origin), place))
        if found[-1].verdict.end.value != "passed":
            break
    return found


def expected(cluster: Cluster, last: Explanation, family: int) -> set[Any]:
    """The replies that an explanation foretells."""
    node = cluster.lab.node(last.node)
    pods = {pod.addresses[family]: pod for pod in cluster.lab.pods.values()}
    replies = set()
    for target, masked in last.verdict.masquerades.items():
        pod = pods[target.rpartition(":")[0].strip("[]")]
        own = (node.pod_gateways if pod.node == node else node.addresses)[family]
        replies.add(Reply(pod.name, own if masked else last.packet.source))
    return replies


@pytest.mark.parametrize("family", FAMILIES)
def test_packets_do_what_is_explained(explained: tuple[Cluster, Places], family: str) -> None:
    cluster, places = explained
    index, wrong = FAMILIES[family], []
    for caller, name, where, _answers, _seen in rows():
        if where.startswith("localhost") and where[-1] != family[-1]:
            continue
        address, node_port = destination(cluster, name, where, index)
        place = cluster.place("outside" if caller == "stranger" else caller)
        source = STRANGER[index] if caller == "stranger" else place.addresses[index]
        last = told(cluster, places, caller, where, (address, node_port or 80, "tcp"), source)[-1]
        assert not last.live
        end = last.verdict.end.value
        bound = source if caller == "stranger" else ""
        count = {"endpoints": 24, "dropped": 2}.get(end, 1)
        timeout = 0.3 if end == "dropped" else 2.0
        replies = set(place.calls("tcp", address, node_port or 80, count, timeout=timeout, source=bound))
        # Nothing listens on a node itself, so what is passed on to it is refused by its kernel.
        foretold = {"dropped": {TIMEOUT}, "refused": {REFUSED}, "passed": {REFUSED}}.get(end) or expected(
            cluster, last, index
        )
        if replies != foretold and not (isinstance(place, Node) and replies == {UNREACHABLE}):
            wrong.append((caller, name, where, end, replies, foretold))
    assert not wrong


def test_a_node_is_read_over_the_connection_of_the_inventory(explained: tuple[Cluster, Places], tmp_path: Path) -> None:
    cluster, places = explained
    rules = read_live(str(cluster.lab.inventory(tmp_path / "inventory.yml")), "n1")
    assert rules.mode == places["n1"].rules.mode
    live = Place(places["n1"].view, rules)
    packet = live.packet("10.244.1.200", ("10.96.0.10", 80, "tcp"), Origin.POD)
    found = explain(places["n1"], {}, Sender("10.244.1.200", Origin.POD), packet, live)
    assert found.verdict.end.value == "endpoints"
    assert found.live == ()


# plain and plain-local have different policies, so to swap them is a change.
SWAP = r"s|10.96.0.10{0}|SWAPPED|; s|10.96.0.11{0}|10.96.0.10{0}|; s|SWAPPED|10.96.0.11{0}|"
BREAKS = {
    "iptables": {
        "a wrong endpoint": "s/--to-destination [^ ]*/--to-destination 10.9.9.9:1/",
        "a missing mark": "/-A KUBE-MARK-MASQ /d",
        "swapped chains": SWAP.format("/32"),
        "a missing jump": "/-A PREROUTING .*-j KUBE-SERVICES/d",
        "a wrong probability": "s/--probability 0.5[0-9]*/--probability 0.9/",
    },
    "nftables": {
        "a wrong endpoint": "s/map { 0 : [0-9.]* /map { 0 : 10.9.9.9 /",
        "a missing mark": "/masquerade clusterIP traffic/d",
        "swapped chains": SWAP.format(" . tcp . 80 :"),
        "a missing jump": "/chain nat-prerouting/,/}/{/jump services/d}",
        "a wrong probability": "s/numgen random mod 2 map {/numgen random mod 4 map { 2 : 10.9.9.9 . 1,/",
        "a removed element": "s/10.96.0.10 . tcp . 80 :/10.96.0.99 . tcp . 80 :/",
    },
}
LOADS = {
    "iptables": ("iptables-save", "iptables-restore"),
    "nftables": ("nft list table ip kube-proxy", "{ echo 'delete table ip kube-proxy'; cat; } | nft -f -"),
}


def test_what_is_broken_in_a_kernel_is_found(explained: tuple[Cluster, Places]) -> None:
    cluster, places = explained
    node, meant = cluster.lab.node("n1"), places["n1"]
    save, load = LOADS[meant.rules.mode]
    whole = node.run(["sh", "-c", save]).stdout
    asked = [
        (source, origin, (address, number, "tcp"))
        for source, origin in (("10.244.1.200", Origin.POD), ("192.0.2.1", Origin.OUTSIDE))
        for address, number in (("10.96.0.10", 80), ("10.96.0.11", 80), (node.addresses[0], 30012))
    ]

    def found() -> tuple[str, bool]:
        """The smallest counterexample of a proof, and whether an explanation beside the kernel finds anything."""
        live = Place(meant.view, printed(node.run(["sh", "-c", f"{SCRIPT}; true"]).stdout))
        prover = Prover()
        prover.texts(live.view, live.rules)
        told = (explain(meant, {}, Sender(ip, at), meant.packet(ip, to, at), live) for ip, at, to in asked)
        return str(smallest(prover.proof.wrong) or ""), any(each.live for each in told)

    assert found() == ("", False)
    for name, script in BREAKS[meant.rules.mode].items():
        broken = subprocess.run(["sed", script], input=whole, capture_output=True, text=True, check=True).stdout
        assert broken != whole, name
        try:
            node.run(["sh", "-c", load], input=broken)
            proof, beside = found()
        finally:
            node.run(["sh", "-c", load], input=whole)
        assert proof, name
        assert beside, name
    assert found() == ("", False)
