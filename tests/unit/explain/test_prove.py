"""What rules do is proved for all frontends; rules that are broken on purpose are found, each with a counterexample."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.explain.answer import explain
from agentless_kube_proxy.explain.intent import Intent, Place
from agentless_kube_proxy.explain.overlaps import double_claims, overlaps
from agentless_kube_proxy.explain.packet import Origin
from agentless_kube_proxy.explain.prove import Prover, disagreements, smallest
from agentless_kube_proxy.explain.question import Sender
from agentless_kube_proxy.explain.ruleset import Ruleset
from hypothesis import given, settings

from tests.unit.build import CLUSTER_CIDR, Object, document, endpoint, node, port, service, slice_of, snapshot
from tests.unit.clusters import clusters

MODES = ("iptables", "nftables", "ipvs", "userspace")
ALIKE = ("iptables", "nftables", "ipvs")  # modes that do the same


def intent(read: Snapshot, mode: str) -> Intent:
    return Intent(read, Choices(document(clusterCIDR=CLUSTER_CIDR, mode=mode)), {})


@given(objects=clusters(4))
@settings(max_examples=25, deadline=None)
def test_every_drawn_cluster_is_proved_and_the_modes_agree(objects: list[Object]) -> None:
    read = snapshot(*objects)
    ends = []
    for mode in ALIKE:
        prover, meant = Prover(), intent(read, mode)
        for each in read.nodes:
            prover.node(meant, each.name)
        assert not prover.proof.wrong, str(smallest(prover.proof.wrong))
        ends.append(prover.ends)
    found = [*disagreements(ends[0], ends[1]), *disagreements(ends[0], ends[2])]
    assert not found, str(smallest(found))


SHOP = snapshot(
    service(ports=[port(nodePort=30080)], type="LoadBalancer", ingress=("203.0.113.1",)),
    slice_of("web", endpoint("10.244.1.1"), endpoint("10.244.2.1", node="n2")),
    service("solo", clusterIP="10.96.7.8", internalTrafficPolicy="Local"),
    slice_of("solo", endpoint("10.244.1.9")),
    service("empty", clusterIP="10.96.7.9"),
    node("n1", "172.18.0.11"),
    node("n2", "172.18.0.12", pod_cidrs=("10.244.2.0/24",)),
)


def without(pattern: str) -> Callable[[str], str]:
    """Lines that match are taken out."""
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if not re.search(pattern, line))


def swapped(one: str, other: str) -> Callable[[str], str]:
    return lambda text: text.replace(one, "\0").replace(other, one).replace("\0", other)


BREAKS = {
    "iptables": {
        "a wrong endpoint": lambda text: text.replace("DNAT --to-destination 10.244.2.1:8080", "DNAT --to-destination 10.244.2.66:8080"),
        "a missing mark": without("masquerade traffic for shop/web:http external"),
        "no mark for what is from outside": without("-A KUBE-SVC-.* ! -s .*KUBE-MARK-MASQ"),
        "a mark that marks nothing": without("-A KUBE-MARK-MASQ"),
        "no masquerade": without("-j MASQUERADE"),
        "swapped chains": lambda text: re.sub(r"(-d 10.96.7.7/32 .*-j) KUBE-SVC-\w+", r"\1 KUBE-SEP-XXXXXXXXXXXXXXXX", text),
        "one endpoint chosen too often": lambda text: text.replace("--probability 0.50000000000", "--probability 0.90000000000"),
        "an endpoint that sees itself": without("-A KUBE-SEP-.* -s 10.244.1.1/32"),
        "no refusal": without("-j REJECT"),
        "no jump": without("-I PREROUTING"),
        "no jump for what the node sends": without("-I OUTPUT"),
        "no jump to where sources are replaced": without("-I POSTROUTING"),
        "no jump to node ports": without("-j KUBE-NODEPORTS"),
        "no jump to an endpoint": without("-A KUBE-SVC-.*probability"),
        "two Services swapped": swapped("-d 10.96.7.7/32", "-d 10.96.7.8/32"),
        "two endpoints of two Services swapped": swapped("--to-destination 10.244.1.1:8080", "--to-destination 10.244.1.9:8080"),
        "a node port of no Service": lambda text: text.replace("--dport 30080", "--dport 30081"),
        "a frontend of no Service": lambda text: text.replace("-d 10.96.7.8/32", "-d 10.96.7.80/32"),
    },
    "nftables": {
        "a wrong endpoint": lambda text: text.replace("10.244.2.1 . 8080", "10.244.2.66 . 8080"),
        "a missing mark": without('comment "masquerade"'),
        "no mark for what is from outside": without("masquerade clusterIP traffic"),
        "no masquerade": without("masquerade fully-random"),
        "swapped chains": lambda text: re.sub(r"(10.96.7.7 . tcp . 80 : goto )service-\S*", r"\1external-none", text),
        "an endpoint that sees itself": without("hairpin-connections { 10.244.1.1 "),
        "no refusal": without("no-endpoint-services { 10.96.7.9|@cluster-ips reject"),
        "no jump": without("nat-prerouting jump"),
        "no jump for what the node sends": without("nat-output jump"),
        "no jump to where sources are replaced": without("nat-postrouting jump"),
        "no jump to node ports": without("vmap @service-nodeports"),
        "one endpoint chosen too often": lambda text: text.replace("mod 2 map { 0 : 10.244.1.1 . 8080 ,", "mod 4 map { 0-2 : 10.244.1.1 . 8080 ,").replace("1 : 10.244.2.1 . 8080 }", "3 : 10.244.2.1 . 8080 }"),
        "a choice that leads nowhere": lambda text: text.replace(" , 1 : 10.244.2.1 . 8080 }", " }"),
        "two Services swapped": swapped("service-ips { 10.96.7.7 ", "service-ips { 10.96.7.8 "),
        "no element for a frontend": without("service-ips { 203.0.113.1 "),
        "no element for a node port": without("service-nodeports { tcp . 30080"),
        "no element for a cluster IP": without("cluster-ips { 10.96.7.7 }"),
        "no element for the node's address": without("nodeport-ips { 172"),
        "no endpoint may call itself": without("@hairpin-connections masquerade"),
        "a port that no Service has": without("@cluster-ips reject"),
        "a frontend of no Service": lambda text: text.replace("service-ips { 10.96.7.8 ", "service-ips { 10.96.7.80 "),
    },
    "ipvs": {
        "a wrong endpoint": lambda text: text.replace("-r 10.244.2.1:8080", "-r 10.244.2.66:8080"),
        "a missing mark": without("-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ"),
        "no masquerade": without("-j MASQUERADE"),
        "swapped servers": swapped("10.96.7.7:80", "10.96.7.8:80"),
        "an endpoint that sees itself": without("KUBE-LOOP-BACK 10.244.1.1,"),
        "an address that is not bound": without("addr add 10.96.7.7/32"),
        "no endpoint may call itself": without("--match-set KUBE-LOOP-BACK dst,dst,src"),
        "a port that no Service has": without("--match-set KUBE-IPVS-IPS dst -j REJECT"),
        "a set that is not there": without("create KUBE-EXTERNAL-IP-LOCAL "),
        "no jump": without("-I PREROUTING"),
        "no jump for what the node sends": without("-I OUTPUT .*-j KUBE-SERVICES"),
        "no jump to where sources are replaced": without("-I POSTROUTING"),
        "no jump to node ports": without("--dst-type LOCAL -j KUBE-NODE-PORT"),
        "one endpoint chosen too often": lambda text: re.sub(r"(-t 10.96.7.7:80 -r 10.244.1.1:8080 -m -w) 1", r"\1 9", text.replace("-s rr", "-s wrr")),
        "an endpoint that gets nothing": lambda text: re.sub(r"(-t 10.96.7.7:80 -r 10.244.1.1:8080 -m -w) 1", r"\1 0", text),
        "no server for a node port": without("172.18.0.11:30080"),
        "no element for a cluster IP": without("KUBE-CLUSTER-IP 10.96.7.7,"),
        "no element for a load balancer IP": without("add KUBE-LOAD-BALANCER 203"),
        "no element for a node port": without("add KUBE-NODE-PORT-TCP"),
    },
    "userspace": {
        "a wrong endpoint": lambda text: text.replace("server 10.244.2.1:8080 10.244.2.1:8080", "server 10.244.2.1:8080 10.244.2.66:8080"),
        "an endpoint that gets nothing": without("server 10.244.2.1:8080"),
        "one endpoint chosen too often": lambda text: text.replace("server 10.244.2.1:8080 10.244.2.1:8080", "server 10.244.1.1:8080 10.244.1.1:8080"),
        "two Services swapped": swapped("-d 10.96.7.7/32", "-d 10.96.7.8/32"),
        "two proxies swapped": swapped("bind *:24919", "bind *:26658"),
        "no proxy": without("bind "),
        "no jump": without("-I PREROUTING"),
        "no jump for what the node sends": without("-I OUTPUT"),
        "no jump to node ports": without("-A PREROUTING"),
        "a frontend of no Service": lambda text: text.replace("-d 10.96.7.8/32", "-d 10.96.7.80/32"),
    },
}  # fmt: skip
CASES = [pytest.param(mode, name, id=f"{mode}: {name}") for mode, found in BREAKS.items() for name in found]


def broken(mode: str, name: str) -> tuple[Place, Place]:
    """The node as it is meant to be, and with its rules broken."""
    meant = intent(SHOP, mode).place("n1")
    files = {file: BREAKS[mode][name](text) for file, text in meant.rules.files.items()}
    assert files != meant.rules.files
    return meant, Place(meant.view, Ruleset(files, mode))


@pytest.mark.parametrize("mode", MODES)
def test_whole_texts_are_proved(mode: str) -> None:
    place = intent(SHOP, mode).place("n1")
    prover = Prover()
    prover.texts(place.view, place.rules)
    assert not prover.proof.wrong, str(smallest(prover.proof.wrong))
    assert prover.proof.walked > 10


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_what_is_broken_is_found_by_a_proof(mode: str, name: str) -> None:
    _meant, other = broken(mode, name)
    prover = Prover()
    prover.texts(other.view, other.rules)
    found = smallest(prover.proof.wrong)
    assert found is not None
    assert (found.node, found.mode) == ("n1", mode)
    assert found.decided
    assert found.rules


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_what_is_broken_is_found_beside_a_kernel(mode: str, name: str) -> None:
    meant, other = broken(mode, name)
    asked = [
        (source, origin, (address, number, "tcp"))
        for source, origin in (("10.244.1.1", Origin.POD), ("192.0.2.1", Origin.OUTSIDE), ("172.18.0.11", Origin.NODE))
        for address, number in (
            ("10.96.7.7", 80),
            ("10.96.7.7", 81),
            ("10.96.7.8", 80),
            ("10.96.7.9", 80),
            ("203.0.113.1", 80),
            ("172.18.0.11", 30080),
        )
    ]
    told = [
        explain(meant, {}, Sender(source, origin), meant.packet(source, to, origin), other)
        for source, origin, to in asked
    ]
    assert any(each.live for each in told)
    same = [explain(meant, {}, each.sender, each.packet, dataclasses.replace(meant)) for each in told]
    assert not any(each.live for each in same)


def test_addresses_with_two_owners() -> None:
    read = snapshot(
        service("node", clusterIP="10.96.0.1", externalIPs=["172.18.0.12"]),
        service("pod", clusterIP="10.244.2.7"),
        service("api", clusterIP="10.96.0.3", ingress=("192.0.2.9",)),
        service("fine", clusterIP="10.96.0.4", externalIPs=["203.0.113.4"]),
        slice_of("kubernetes", endpoint("192.0.2.9", node=None), namespace="default"),
        node("n1", "172.18.0.11", pod_cidrs=("10.244.0.0/16",)),
        node("n2", "172.18.0.12", pod_cidrs=("10.244.2.0/24",)),
    )
    assert sorted(map(str, overlaps(read))) == [
        "10.244.2.7 is cluster IP of Service shop/pod and in the pod CIDR of node n1",
        "10.244.2.7 is cluster IP of Service shop/pod and in the pod CIDR of node n2",
        "172.18.0.12 is external IP of Service shop/node and an address of node n2",
        "192.0.2.9 is load balancer IP of Service shop/api and an address of the API server",
    ]


def test_frontends_with_two_owners() -> None:
    read = snapshot(
        service("a", clusterIP="10.96.0.1", externalIPs=["203.0.113.4"], ports=[port(80, nodePort=30080)]),
        service(
            "b", clusterIP="10.96.0.2", externalIPs=["203.0.113.4"], ports=[port(80, nodePort=30080), port(81, "x")]
        ),
        service("c", clusterIP="10.96.0.3", externalIPs=["203.0.113.4"], ports=[port(82)]),
    )
    assert sorted(map(str, double_claims(read.services))) == [
        "203.0.113.4:80/tcp is of Service shop/a and of Service shop/b",
        "node port 30080/tcp is of Service shop/a and of Service shop/b",
    ]
