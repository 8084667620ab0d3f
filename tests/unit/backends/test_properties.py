"""What holds for every cluster, not only for those that somebody thought of."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.common import ALLOW_FILE, allow_file
from agentless_kube_proxy.backends.iptables import marker_chain
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.proxy.config import ProxyConfig
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.build import Object, config, joined, snapshot
from tests.unit.clusters import CONFIGS, broken_clusters, clusters, reordered
from tests.unit.grammar import GRAMMARS

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


def all_of(state: State) -> dict[tuple[str, ...], str]:
    """Every object, and what may come to be dispatched."""
    return {**dict(state.objects()), ("file", ALLOW_FILE): allow_file(state)}


@given(clusters(), clusters(), CONFIGS)
@settings(max_examples=50)
def test_states_have_one_generation_if_and_only_if_their_objects_are_equal(
    one: list[Object], two: list[Object], fields: Object
) -> None:
    all_states = [*rendered(one), *rendered(two), *rendered(one, **fields)]
    for a in all_states:
        for b in all_states:
            assert (a.generation == b.generation) == (all_of(a) == all_of(b))


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
            text = joined(contents(state), name)
            for kind in ("mangle", "filter", "nat"):
                table = "".join(re.findall(rf"^\*{kind}\n(.*?)^COMMIT$", text, re.M | re.S))
                declared = set(re.findall(r"^:(\S+)", table, re.M))
                targets = set(re.findall(r"-j (KUBE-\S+)", table))
                assert targets <= declared
                unused = declared - targets - {"KUBE-PROXY-CANARY", marker_chain(state.generation), "KUBE-MARK-MASQ"}
                assert not unused or unused == {"KUBE-NODEPORTS"}  # where nodePortAddresses select nothing


@given(clusters())
@settings(max_examples=50)
def test_no_rule_carries_an_address_of_the_other_family(objects: list[Object]) -> None:
    for state in rendered(objects):
        v4, v6 = (joined(contents(state), name) for name in ("iptables.rules", "ip6tables.rules"))
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
    assert not GRAMMARS["iptables-1-endpoints.rules"].fullmatch(line)


# ------------------------------------------------------------------ what automation may bring

_GRANTS = re.compile(r"-A |add (?:element|rule) ")


def other_endpoints(objects: list[Object], seed: int) -> list[Object]:
    """The same cluster with other endpoints: some go, some move, some change their conditions."""
    chance = random.Random(seed)
    changed = copy.deepcopy(objects)
    for each in changed:
        if each["kind"] == "EndpointSlice":
            each["endpoints"] = [e for e in each.get("endpoints") or [] if chance.random() < 0.6]
            for endpoint in each["endpoints"]:
                endpoint["nodeName"] = chance.choice(("n1", "n2", "n3"))
                endpoint["conditions"] = {"ready": chance.random() < 0.7}
    return changed


def granting(files: dict[str, str]) -> set[str]:
    """The lines of dispatch files that grant something, as frontends.allow has them."""
    found = set()
    for name, text in files.items():
        if "-2-dispatch." in name:
            digit, table = ("6" if name.startswith("ip6") else "4"), ""
            for line in text.splitlines():
                table = line[1:] if line.startswith("*") else table
                if _GRANTS.match(line) and "KUBE-PROXY-GEN-" not in line:
                    found.add(line if name.endswith(".nft") else f"{digit} {table} {line}")
    return found


def replayed(*files: dict[str, str]) -> set[str]:
    """What is allowed after a whole bundle and deltas."""
    allowed: set[str] = set()
    for each in files:
        lines = each.get("frontends.allow", "").splitlines()
        allowed -= {line[1:] for line in lines if line.startswith("-")}
        allowed |= {line[1:] for line in lines if line.startswith("+")}
    return allowed


def frontends(files: dict[str, str]) -> dict[str, str]:
    """What automation may only bring as it is."""
    names = ("sysctls.conf", "nfacct.rules", "health.conf", "frontends.allow")
    return {name: text for name, text in files.items() if "-3-frontends." in name or name in names}


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@given(objects=clusters(), seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_no_change_of_endpoints_dispatches_what_was_not_approved(mode: str, objects: list[Object], seed: int) -> None:
    fields = {**FIELDS, "mode": mode}
    for old, new in zip(rendered(objects, **fields), rendered(other_endpoints(objects, seed), **fields), strict=True):
        files = dict(backends.delta_files(delta(old, new), new))
        assert "frontends.allow" not in files
        allowed = replayed(contents(old))
        assert granting(contents(old)) | granting(contents(new)) | granting(files) <= allowed
        assert allowed == replayed(contents(new))
        # A firewall of a load balancer comes and goes with the endpoints in iptables mode; nothing else of frontends.
        if not any(each["spec"].get("loadBalancerSourceRanges") for each in objects if each["kind"] == "Service"):
            assert not [name for name in files if "-3-frontends" in name]
            assert frontends(contents(old)) == frontends(contents(new))


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@given(one=clusters(), two=clusters())
@settings(max_examples=40)
def test_what_is_allowed_after_a_delta_is_what_the_whole_bundle_allows(
    mode: str, one: list[Object], two: list[Object]
) -> None:
    fields = {**FIELDS, "mode": mode}
    for old, new in zip(rendered(one, **fields), rendered(two, **fields), strict=True):
        files = dict(backends.delta_files(delta(old, new), new))
        assert replayed(contents(old), files) == replayed(contents(new)) >= granting(contents(new))
