"""What nodes shall have while a cluster changes: claims are judged again when what they are judged by changes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from agentless_kube_proxy.backends import files
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.engine import Engine
from agentless_kube_proxy.proxy.facts import UnusableNode
from agentless_kube_proxy.proxy.policy import RefusedVips

from .build import document, node, port, service, slice_of, snapshot

CLAIM = service(externalIPs=["192.0.2.5"])
KUBERNETES = service("kubernetes", "default", clusterIP="10.96.0.1")


@pytest.fixture
def engine() -> Engine:
    return Engine(Choices.of({"config": document(), "vip_policy": "refuse"}))


def test_an_api_server_that_moves_to_a_claimed_address_is_noticed(engine: Engine) -> None:
    before = snapshot(CLAIM, KUBERNETES, slice_of("kubernetes", "192.0.2.4", namespace="default"), node())
    moved = snapshot(CLAIM, KUBERNETES, slice_of("kubernetes", "192.0.2.5", namespace="default"), node())
    engine.update(before)
    with pytest.raises(RefusedVips, match=r"192\.0\.2\.5 is an address of the API server"):
        engine.update(dataclasses.replace(before, slices=moved.slices))


NODES = (node("n1"), node("n2", "172.18.0.12"))
CLUSTER = snapshot(CLAIM, slice_of("web", "10.244.1.1"), *NODES)
MINE = {"addresses": [{"interface": "eth1", "address": "192.0.2.5"}, {"interface": "eth0", "address": "172.18.0.12"}]}
NAMED = "Service/shop/web: externalIPs 192.0.2.5 is an address of an interface of the node n2"


def test_a_node_that_says_it_has_a_claimed_address_is_refused_alone(engine: Engine) -> None:
    engine.update(CLUSTER)
    before = engine.state("n1").generation
    with pytest.raises(UnusableNode, match=f"refused: {NAMED}"):
        engine.state("n2", MINE)
    assert engine.state("n1").generation == before
    assert engine.state("n2", {"addresses": []}).generation


@pytest.mark.parametrize("policy", ["omit", "warn"])
def test_a_node_loses_only_its_own_external_ips_by_what_it_says(policy: str) -> None:
    engine = Engine(Choices.of({"config": document(), "vip_policy": policy}))
    engine.update(CLUSTER)
    honest, whole, liar = engine.state("n1"), engine.state("n2"), engine.state("n2", MINE)
    texts = ["".join(str(each) for _name, each in files(state)) for state in (honest, whole, liar)]
    left = policy == "warn"
    assert ["192.0.2.5" in text for text in texts] == [True, True, left]
    assert [each.text for each in engine.warnings_of("n2", MINE)] == [
        NAMED if left else f"{NAMED}; it is left out there"
    ]
    assert engine.warnings_of("n1", {"addresses": []}) == ()
    assert engine.warnings == ()
    # What is shared by all nodes is still theirs after the cluster has changed.
    engine.update(dataclasses.replace(CLUSTER, slices=()))
    engine.update(CLUSTER)
    assert engine.state("n2", MINE).generation == liar.generation
    assert engine.state("n1").generation == honest.generation


def test_what_a_node_says_of_another_nodes_address_changes_nothing() -> None:
    """Node objects tell whose it is, for all nodes."""
    engine = Engine(Choices.of({"config": document(), "vip_policy": "omit"}))
    engine.update(snapshot(service(externalIPs=["172.18.0.11"]), *NODES))
    (warning,) = engine.warnings
    assert "is an address of the node n1" in warning.text
    assert engine.warnings_of("n2", {"addresses": ["172.18.0.11"]}) == ()


WAYS = {"addresses": [{"interface": "eth1", "address": "192.0.2.5"}, {"interface": "eth0", "address": "172.18.0.12"}]}


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
@pytest.mark.parametrize("policy", ["warn", "omit"])
def test_the_way_in_to_a_node_is_no_services_there_by_whatever_address_and_port_it_is(mode: str, policy: str) -> None:
    """One host of the inventory has another port than the rest, and an address that its Node object does not tell."""
    others = [service("web", "shop", externalIPs=["203.0.113.9"]), slice_of("web", "10.244.1.1")]
    engine = Engine(Choices.of({"config": document(mode=mode), "vip_policy": policy}))
    engine.update(snapshot(*others, *NODES))
    before = engine.state("n2", WAYS)
    # At each address of the node: by the port of all hosts, and by its own.
    ports = [port(22, "a"), port(2222, "b"), port(80, "c", nodePort=2222)]
    thief = service("thief", "aaa", clusterIP="10.96.6.6", externalIPs=["192.0.2.5", "172.18.0.12"], ports=ports)
    for own, taken in ((22, {22}), (2222, {22, 2222})):
        engine.update(snapshot(*others, thief, slice_of("thief", "10.244.1.66", namespace="aaa", ports=ports), *NODES))
        facts = {**WAYS, "controlPort": own}
        claimed = services_of(engine.state("n2", facts))["aaa/thief"]
        for number in (22, 2222):
            kept = [] if number in taken or policy == "omit" else ["172.18.0.12", "192.0.2.5"]
            assert sorted(claimed[number].get("externalIPs", [])) == kept, number
        assert claimed[80].get("nodePort") == (None if own == 2222 else 2222)
        told = " ".join(each.text for each in engine.warnings_of("n2", facts))
        assert policy == "omit" or f"192.0.2.5:{own}/tcp is the way in to the node n2 for the control host" in told
    assert services_of(engine.state("n2", WAYS))["shop/web"] == services_of(before)["shop/web"]


@pytest.mark.parametrize("port_said", [True, "22", -1, 65536, 2**70, None, [22]])
def test_a_control_port_that_is_none_is_not_known(port_said: object) -> None:
    engine = Engine(Choices.of({"config": document()}))
    engine.update(CLUSTER)
    assert engine.state("n2", {**WAYS, "controlPort": port_said}).generation == engine.state("n2", WAYS).generation


def services_of(state: State) -> dict[str, dict[int, dict[str, Any]]]:
    """What services.jsonl says, by Service and port."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in dict(files(state))["services.jsonl"].splitlines():
        record = json.loads(line)
        found.setdefault(record["service"], {})[int(record["clusterIP"].rpartition(":")[2])] = record
    return found
