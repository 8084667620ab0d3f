"""What holds for every cluster, not only for those that somebody thought of."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.proxy.config import ProxyConfig
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView
from hypothesis import given, settings
from hypothesis import strategies as st

from .build import Object, config, snapshot
from .clusters import CONFIGS, broken_clusters, clusters, reordered
from .grammar import GRAMMARS

FIELDS: Object = {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/56"}


def states(read: Snapshot, settings_: ProxyConfig) -> list[State]:
    """The states of all nodes, sharing what they can share."""
    cluster, renderer = ClusterView(read, settings_), backends.renderer(settings_)
    return [renderer.state(cluster.node_view(node_facts(each))) for each in read.nodes]


def rendered(objects: list[Any], **fields: Any) -> list[State]:
    return states(snapshot(*objects), config(**(fields or FIELDS)))


def contents(state: State) -> dict[str, str]:
    return dict(backends.files(state))


@given(clusters(), CONFIGS, st.integers(0, 2**32))
def test_the_order_in_which_a_cluster_is_told_does_not_matter(objects: list[Object], fields: Object, seed: int) -> None:
    told, retold = (rendered(each, **fields) for each in (objects, reordered(objects, random.Random(seed))))
    assert [contents(state) for state in told] == [contents(state) for state in retold]
    assert [state.generation for state in told] == [state.generation for state in retold]


@given(clusters(), clusters())
@settings(max_examples=50)
def test_a_delta_leads_exactly_from_one_state_to_the_other(one: list[Object], two: list[Object]) -> None:
    for old, new in zip(rendered(one), rendered(two), strict=True):
        change = delta(old, new)
        objects, wanted = dict(old.objects()), dict(new.objects())
        assert change.before == {obj: objects[obj] for obj in change.changed if obj in objects}
        for obj in change.removed:
            del objects[obj]
        assert objects | change.changed == wanted
        # and it is not longer than it must be
        assert all(dict(old.objects()).get(obj) != text for obj, text in change.changed.items())


@given(clusters(), clusters(), CONFIGS)
@settings(max_examples=50)
def test_states_have_one_generation_if_and_only_if_their_objects_are_equal(
    one: list[Object], two: list[Object], fields: Object
) -> None:
    all_states = [*rendered(one), *rendered(two), *rendered(one, **fields)]
    for a in all_states:
        for b in all_states:
            assert (a.generation == b.generation) == (dict(a.objects()) == dict(b.objects()))


@given(clusters(), CONFIGS)
def test_sharing_between_nodes_changes_nothing(objects: list[Object], fields: Object) -> None:
    read, settings_ = snapshot(*objects), config(**fields)
    for shared, each in zip(states(read, settings_), read.nodes, strict=True):
        alone = backends.renderer(settings_).state(ClusterView(read, settings_).node_view(node_facts(each)))
        assert contents(shared) == contents(alone)


@given(clusters(), CONFIGS)
def test_every_chain_that_is_jumped_to_exists_and_every_chain_is_jumped_to(
    objects: list[Object], fields: Object
) -> None:
    for state in rendered(objects, **fields):
        for name in ("iptables.rules", "ip6tables.rules"):
            for table in re.split(r"^\*", contents(state)[name], flags=re.M)[1:]:
                declared = set(re.findall(r"^:(\S+)", table, re.M))
                targets = set(re.findall(r"-j (KUBE-\S+)", table))
                assert targets <= declared
                unused = declared - targets - {"KUBE-PROXY-CANARY", "KUBE-PROXY-GENERATION", "KUBE-MARK-MASQ"}
                assert not unused or unused == {"KUBE-NODEPORTS"}  # where nodePortAddresses select nothing


@given(clusters())
@settings(max_examples=50)
def test_no_rule_carries_an_address_of_the_other_family(objects: list[Object]) -> None:
    for state in rendered(objects):
        v4, v6 = (contents(state)[name] for name in ("iptables.rules", "ip6tables.rules"))
        assert not re.search(r"-[sd] \S*:\S*|destination \[", v4)
        assert not re.search(r"-[sd] \d+\.\d+\.\d+\.\d+|destination \d+\.", v6)


# ------------------------------------------------------------------ whatever comes in


def assert_grammar(state: State) -> None:
    for name, content in contents(state).items():
        assert content == "" or content.endswith("\n")
        for line in content.split("\n")[:-1]:
            assert GRAMMARS[name].fullmatch(line), (name, line)


@given(broken_clusters())
@settings(max_examples=300)
def test_whatever_the_input_nothing_breaks_and_no_line_is_out_of_the_ordinary(objects: list[Any]) -> None:
    read = snapshot(*objects)
    for problem in read.problems:
        assert str(problem).isprintable()
        assert problem.kind
        assert problem.reason
    for state in states(read, config(**FIELDS)):
        assert_grammar(state)


@given(clusters(), CONFIGS)
@settings(max_examples=50)
def test_the_lines_of_a_good_cluster_are_ordinary_under_every_configuration(
    objects: list[Object], fields: Object
) -> None:
    for state in rendered(objects, **fields):
        assert_grammar(state)


@pytest.mark.parametrize(
    "line",
    [
        '-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "a/b" -j ACCEPT',
        "-A INPUT -j ACCEPT",
        '-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m comment --comment "a/b" -m tcp -j DNAT --to-destination 10.0.0.1:80 -j ACCEPT',
        '-A KUBE-NODEPORTS -p tcp -m comment --comment "a/b" -j ACCEPT -m comment --comment "" -m tcp --dport 1 -j KUBE-EXT-AAAAAAAAAAAAAAAA',
        "",
    ],
)
def test_the_grammar_itself_is_strict(line: str) -> None:
    assert not GRAMMARS["iptables.rules"].fullmatch(line)
