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

MODES = ("iptables", "nftables", "ipvs")


def intent(read: Snapshot, mode: str) -> Intent:
    return Intent(read, Choices(document(clusterCIDR=CLUSTER_CIDR, mode=mode)), {})


@given(objects=clusters(4))
@settings(max_examples=25, deadline=None)
def test_every_drawn_cluster_is_proved_and_the_modes_agree(objects: list[Object]) -> None:
    read = snapshot(*objects)
    ends = []
    for mode in MODES:
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
        for source, origin in (("10.244.1.1", Origin.POD), ("192.0.2.1", Origin.OUTSIDE))
        for address, number in (
            ("10.96.7.7", 80),
            ("10.96.7.7", 81),
            ("10.96.7.8", 80),
            ("10.96.7.9", 80),
            ("203.0.113.1", 80),
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
