"""A cluster that is followed change by change is the cluster that is read at once."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.cluster.store import ObjectChange, Store, key_of, read_object
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.backends.test_properties import FIELDS, contents, rendered
from tests.unit.build import Object, config, endpoint, service, slice_of, snapshot
from tests.unit.clusters import CONFIGS, clusters


def put(store: Store, obj: Object) -> bool:
    return store.put(key_of(obj["kind"], obj), read_object(obj, obj["kind"], obj["apiVersion"]))


def remove(store: Store, obj: Object) -> bool:
    return store.put(key_of(obj["kind"], obj), None)


@given(clusters(), clusters(), CONFIGS, st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_following_gives_what_reading_at_once_gives(
    one: list[Object], two: list[Object], fields: Object, random: Any
) -> None:
    parsed = config(**(fields or FIELDS))
    store, renderer, view = Store(), backends.renderer(parsed), None
    old = {key_of(obj["kind"], obj): obj for obj in one}
    new = {key_of(obj["kind"], obj): obj for obj in two}
    for obj in old.values():
        put(store, obj)
    steps = [(put, obj) for obj in new.values()] + [(remove, old[key]) for key in old.keys() - new.keys()]
    random.shuffle(steps)
    for start in range(0, len(steps) + 1, 2):
        later = ClusterView(store.snapshot(), parsed, view)
        if view is not None:
            renderer.forget(view.dropped(later))
        view = later
        # Asked in between, so that there is something to remember wrongly.
        for node in store.snapshot().nodes:
            renderer.state(view.node_view(node_facts(node)))
        for step, obj in steps[start : start + 2]:
            step(store, obj)
    view = ClusterView(store.snapshot(), parsed, view)
    followed = [renderer.state(view.node_view(node_facts(node))) for node in store.snapshot().nodes]
    fresh = rendered(list(new.values()), **fields)
    assert [state.generation for state in followed] == [state.generation for state in fresh]
    assert [contents(state) for state in followed] == [contents(state) for state in fresh]


def test_a_snapshot_of_one_object_at_a_time_is_the_snapshot_of_all() -> None:
    objects = [
        service("web"),
        service("cart"),
        slice_of("web", endpoint("10.0.0.1")),
        service("bad", ports=[{"port": 0}]),
    ]
    store = Store()
    for obj in reversed(objects):
        put(store, obj)
    assert store.snapshot() == snapshot(*objects)


def test_what_did_not_change_is_the_same_object() -> None:
    store = Store()
    for name in ("web", "cart"):
        put(store, service(name))
    before = store.snapshot()
    assert not put(store, service("cart"))
    assert put(store, service("web", sessionAffinity="ClientIP"))
    after = store.snapshot()
    assert after.services[0] is before.services[0]
    assert after.services[1] is not before.services[1]
    assert after.slices is before.slices


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(put, service("web"))], ["added"]),
        ([(put, service("web")), (remove, service("web"))], []),
        ([(put, service("web", clusterIP="None"))], []),
        ([(put, service("old", sessionAffinity="ClientIP"))], ["changed"]),
        ([(put, service("old", sessionAffinity="ClientIP")), (put, service("old"))], []),
        ([(remove, service("old"))], ["removed"]),
        ([(put, service("old", clusterIP="None"))], ["removed"]),
        ([(remove, service("old")), (put, service("old"))], []),
    ],
    ids=["new", "came and went", "headless", "changed", "changed back", "gone", "now headless", "made anew"],
)
def test_what_is_told_is_the_difference_to_what_was_told_before(steps: list[Any], told: list[str]) -> None:
    store = Store()
    put(store, service("old"))
    assert store.take() == [ObjectChange("Service", "shop", "old", "added")]
    for step, obj in steps:
        step(store, obj)
    assert store.pending == bool(told)
    assert [each.action for each in store.take()] == told
    assert store.take() == []
