"""Objects whose fields have other types than they should: each is left out or named, and the rest goes on."""

from __future__ import annotations

import copy
import datetime
import functools
import operator
from typing import Any

from agentless_kube_proxy import backends
from agentless_kube_proxy.proxy.facts import UnusableNode, node_facts
from agentless_kube_proxy.proxy.policy import VipPolicy, under_policy
from agentless_kube_proxy.proxy.view import ClusterView
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.build import Object, config, node, service, slice_of, snapshot
from tests.unit.clusters import JSON, cluster, places


def nested() -> Any:
    """Deeper than copy.deepcopy goes, and a new one each time: breaks may be made within it."""
    return functools.reduce(lambda inner, _: [inner], range(900), 1)


NESTED: Any = nested()
CONFUSED: st.SearchStrategy[Any] = JSON | st.sampled_from(
    (
        16**6000,  # more digits than Python prints
        -(16**6000),
        float("nan"),
        float("inf"),
        b"bytes",
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.date(2020, 1, 1),
        NESTED,
        {1: 2, None: []},
        "127.0.0.1",
        "239.1.2.3",
        "::",
    )
)
CIDRS: Object = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "ServiceCIDR",
    "metadata": {"name": "kubernetes"},
    "spec": {"cidrs": ["10.96.0.0/16"]},
}
STEADY = [service("steady", "steady", clusterIP="10.96.200.1"), slice_of("steady", "10.244.1.200", namespace="steady")]


def confused(seed: int, breaks: list[tuple[int, int, Any]]) -> list[Any]:
    """A cluster in which any field of any object may be something else."""
    objects = [*cluster(3, seed), copy.deepcopy(CIDRS)]
    for which, where, what in breaks:
        target: Any = objects[which % len(objects)]
        found = list(places(target))
        *parents, last = found[where % len(found)]
        parent = functools.reduce(operator.getitem, parents, target)
        parent[last] = nested() if what is NESTED else copy.deepcopy(what)
    return objects


BREAKS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9999), CONFUSED), min_size=1, max_size=8)


@given(st.integers(0, 2**32), BREAKS)
@settings(max_examples=100, deadline=None)
def test_a_confused_object_ends_no_run_and_takes_nothing_from_others(seed: int, breaks: Any) -> None:
    read = snapshot(*confused(seed, breaks), *STEADY, node("healthy", "172.18.0.99"))
    for problem in read.problems:
        assert str(problem).isprintable()
        assert len(str(problem)) < 1000
    for mode in ("iptables", "nftables", "ipvs"):
        parsed = config(mode=mode)
        allowed, _said = under_policy(read, parsed, VipPolicy())
        view, renderer = ClusterView(allowed, parsed), backends.renderer(parsed)
        for each in allowed.nodes:
            try:
                state = renderer.state(view.node_view(node_facts(each)))
            except UnusableNode:
                assert each.name != "healthy"
                continue
            assert "steady/steady:http tcp" in {fragment.name for fragment in state.fragments}
            for _name, text in backends.files(state):
                assert text.isascii()
