"""Which endpoints of a service port a node uses.

Seen from node n1 in zone a unless a case says otherwise. An endpoint is written `NAME@NODE CONDITION [HINTS]`:
ready; going (serves, but terminates); slow (neither ready nor terminating); gone (terminates and does not serve);
hints as zone:a,b and node:n1.
"""

from __future__ import annotations

import dataclasses

import pytest
from agentless_kube_proxy.proxy.endpoints import Endpoint
from agentless_kube_proxy.proxy.topology import select_endpoints
from hypothesis import given
from hypothesis import strategies as st

CONDITIONS = {
    "ready": (True, True, False),
    "going": (False, True, True),
    "slow": (False, True, False),
    "gone": (False, False, True),
    "announced": (True, False, True),  # publishNotReadyAddresses: ready, whatever else
}


def parse(text: str) -> Endpoint:
    where, condition, *hints = text.split()
    name, node = where.split("@")
    ready, serving, terminating = CONDITIONS[condition]
    named = dict(hint.split(":") for hint in hints)
    zones, nodes = (frozenset(named[key].split(",")) if key in named else frozenset() for key in ("zone", "node"))
    return Endpoint(name, name, 80, node, ready, serving, terminating, zones, nodes)


@dataclasses.dataclass
class Case:
    title: str
    uses: str  # which policies ask: "cluster", "local" or both
    endpoints: list[str]
    cluster: str
    local: str
    all: str
    has_any: bool
    node: str = "n1"
    zone: str = "a"


CASES = [
    # ---- only policy Cluster
    Case("no endpoints at all", "cluster", [], "", "", "", False),
    Case("all that are ready", "cluster", ["A@n1 ready", "B@n2 ready"], "A B", "", "A B", True),
    Case("not those that are slow", "cluster", ["A@n1 slow", "B@n2 ready"], "B", "", "B", True),
    Case("a ready one keeps those that are going out", "cluster", ["A@n1 going", "B@n2 ready"], "B", "", "B", True),
    Case("those that are going if none is ready", "cluster", ["A@n1 going", "B@n2 going"], "A B", "", "A B", True),
    Case("not those that are gone", "cluster", ["A@n1 going", "B@n2 gone"], "A", "", "A", True),
    Case("none if none can serve", "cluster", ["A@n1 slow", "B@n2 gone"], "", "", "", False),
    Case("announced counts as ready", "cluster", ["A@n1 announced", "B@n2 slow"], "A", "", "A", True),
    # ---- zone hints
    Case("those for this zone", "cluster", ["A@n1 ready zone:a", "B@n2 ready zone:b"], "A", "", "A", True),
    Case("a hint can name two zones", "cluster", ["A@n1 ready zone:a,b", "B@n2 ready zone:b"], "A", "", "A", True),
    Case("one ready endpoint without a hint is enough for all", "cluster", ["A@n1 ready zone:a", "B@n2 ready"], "A B", "", "A B", True),
    Case("a slow endpoint without a hint disturbs nobody", "cluster", ["A@n1 ready zone:a", "B@n2 ready zone:b", "C@n2 slow"], "A", "", "A", True),
    Case("no hint for this zone", "cluster", ["A@n1 ready zone:b", "B@n2 ready zone:c"], "A B", "", "A B", True),
    Case("a node without a zone", "cluster", ["A@n1 ready zone:a", "B@n2 ready zone:b"], "A B", "", "A B", True, zone=""),
    Case("only a slow endpoint is hinted for this zone", "cluster", ["A@n1 slow zone:a", "B@n2 ready zone:b"], "B", "", "B", True),
    Case("hints do not restrict the terminating fall-back", "cluster", ["A@n1 going zone:a", "B@n2 going zone:b"], "A B", "", "A B", True),
    # ---- node hints
    Case("those for this node", "cluster", ["A@n1 ready node:n1", "B@n2 ready node:n2"], "A", "", "A", True),
    Case("a hint is not where the endpoint lives", "cluster", ["A@n1 ready node:n2", "B@n2 ready node:n1"], "B", "", "B", True),
    Case("node hints go before zone hints", "cluster", ["A@n1 ready node:n1 zone:b", "B@n2 ready node:n2 zone:a"], "A", "", "A", True),
    Case("no node hint for this node: zone hints", "cluster", ["A@n2 ready node:n2 zone:a", "B@n3 ready node:n3 zone:b"], "A", "", "A", True),
    Case("a node hint is missing: zone hints", "cluster", ["A@n1 ready zone:b", "B@n2 ready node:n1 zone:a"], "B", "", "B", True),
    Case("neither is complete: all", "cluster", ["A@n1 ready node:n1", "B@n2 ready zone:a"], "A B", "", "A B", True),
    Case("no node hint for this node and no zone hints: all", "cluster", ["A@n2 ready node:n2", "B@n3 ready node:n3"], "A B", "", "A B", True),
    # ---- only policy Local
    Case("the node's own", "local", ["A@n1 ready", "B@n2 ready"], "", "A", "A", True),
    Case("the node's own that are going if none of them is ready", "local", ["A@n1 going", "B@n2 ready"], "", "A", "A", True),
    Case("only ready ones if there is one", "local", ["A@n1 going", "B@n1 ready"], "", "B", "B", True),
    Case("none here but one elsewhere", "local", ["A@n1 gone", "B@n2 ready"], "", "", "", True),
    Case("none here but one going elsewhere", "local", ["B@n2 going"], "", "", "", True),
    Case("none anywhere", "local", ["A@n1 slow", "B@n2 gone"], "", "", "", False),
    Case("hints never restrict the node's own", "local", ["A@n1 ready zone:b", "B@n1 ready zone:a"], "", "A B", "A B", True),
    Case("no endpoints, Local", "local", [], "", "", "", False),
    # ---- both
    Case("all, and the node's own among them", "cluster local", ["A@n1 ready", "B@n2 ready"], "A B", "A", "A B", True),
    Case("all, none of them here", "cluster local", ["B@n2 ready", "C@n3 ready"], "B C", "", "B C", True),
    Case("the node's own is going, another is ready", "cluster local", ["A@n1 going", "B@n2 ready"], "B", "A", "A B", True),
    Case("all are going", "cluster local", ["A@n1 going", "B@n2 going"], "A B", "A", "A B", True),
    Case("none can serve", "cluster local", ["A@n1 slow", "B@n2 gone"], "", "", "", False),
    Case("hints restrict the cluster's, not the node's own", "cluster local", ["A@n1 ready zone:b", "B@n2 ready zone:a"], "B", "A", "A B", True),
    Case("node hints do that too", "cluster local", ["A@n1 ready node:n2", "B@n2 ready node:n1"], "B", "A", "A B", True),
    Case("hints and the node's own going", "cluster local", ["A@n1 going zone:b", "B@n2 ready zone:a", "C@n3 ready zone:b"], "B", "A", "A B", True),
    Case("what is reachable stays in order", "cluster local", ["A@n2 ready zone:a", "B@n1 ready zone:b", "C@n2 ready zone:a"], "A C", "B", "A B C", True),
    Case("a node without a name has nothing of its own", "cluster local", ["A@ ready", "B@n2 ready"], "A B", "", "A B", True, node=""),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
def test_endpoint_selection(case: Case) -> None:
    chosen = select_endpoints(
        [parse(text) for text in case.endpoints],
        uses_cluster="cluster" in case.uses,
        uses_local="local" in case.uses,
        node_name=case.node,
        zone=case.zone,
    )
    assert {
        "cluster": " ".join(each.text for each in chosen.cluster),
        "local": " ".join(each.text for each in chosen.local),
        "all": " ".join(each.text for each in chosen.all),
        "has_any": chosen.has_any,
    } == {"cluster": case.cluster, "local": case.local, "all": case.all, "has_any": case.has_any}


def test_the_cases_are_different_ones() -> None:
    assert len({(case.uses, *case.endpoints, case.zone, case.node) for case in CASES}) == len(CASES) >= 32


@st.composite
def endpoint_lists(draw: st.DrawFn) -> list[Endpoint]:
    names = draw(st.lists(st.sampled_from("ABCDEFGH"), unique=True).map(sorted))
    nodes, zones = st.sampled_from(["n1", "n2", "n3"]), st.sampled_from("ab")
    return [
        Endpoint(
            name,
            name,
            80,
            draw(nodes),
            *draw(st.sampled_from(list(CONDITIONS.values()))),
            draw(st.frozensets(zones, max_size=2)),
            draw(st.frozensets(nodes, max_size=2)),
        )
        for name in names
    ]


@given(endpoint_lists(), st.booleans(), st.booleans())
def test_whatever_the_endpoints(endpoints: list[Endpoint], uses_cluster: bool, uses_local: bool) -> None:
    chosen = select_endpoints(endpoints, uses_cluster=uses_cluster, uses_local=uses_local, node_name="n1", zone="a")
    usable = [each for each in endpoints if each.ready or (each.serving and each.terminating)]
    assert set(chosen.all) == set(chosen.cluster) | set(chosen.local)
    assert set(chosen.all) <= set(usable)
    assert all(each.node_name == "n1" for each in chosen.local)
    assert [each.text for each in chosen.all] == sorted(each.text for each in chosen.all)
    if uses_cluster or uses_local:
        assert chosen.has_any is bool(usable)
    if uses_cluster:
        assert bool(chosen.cluster) is bool(usable)
    # Those that go out of service are used only where nobody else is left.
    for group in (chosen.cluster, chosen.local):
        assert len({each.ready for each in group}) <= 1
