"""Why an endpoint is in or out, and that this is what the selection did."""

from __future__ import annotations

import pytest
from agentless_kube_proxy.proxy.reasons import Reason, judge
from hypothesis import given

from tests.unit.build import Object, endpoint, node, service, slice_of, view
from tests.unit.clusters import clusters

GOING = {"ready": False, "serving": True, "terminating": True}


@pytest.mark.parametrize(
    ("endpoints", "local", "reasons"),
    [
        ([endpoint("10.244.1.1"), endpoint("10.244.1.2", ready=False)], False, ["ready", "notReady"]),
        ([endpoint("10.244.1.1"), endpoint("10.244.1.2", **GOING)], False, ["ready", "terminating"]),
        ([endpoint("10.244.1.1", **GOING)], False, ["terminatingFallback"]),
        ([endpoint("10.244.1.1"), endpoint("10.244.1.2", ready=False, serving=False, terminating=True)], False, ["ready", "notServing"]),
        ([endpoint("10.244.1.1", zones=("a",)), endpoint("10.244.1.2", zones=("b",))], False, ["ready", "otherZone"]),
        ([endpoint("10.244.1.1", nodes=("n1",)), endpoint("10.244.1.2", nodes=("n2",))], False, ["ready", "nodeHint"]),
        ([endpoint("10.244.1.1"), endpoint("10.244.2.1", node="n2")], True, ["ready", "otherNode"]),
        ([endpoint("10.244.1.1", ready=False), endpoint("10.244.2.1", node="n2")], True, ["notReady", "otherNode"]),
    ],
)  # fmt: skip
def test_reasons(endpoints: list[Object], local: bool, reasons: list[str]) -> None:
    policy = {"internalTrafficPolicy": "Local"} if local else {}
    seen = view(service(**policy), slice_of("web", *endpoints), node("n1", zone="a"))
    judged = judge(seen.families[0].ports[0], local=local, node_name="n1", zone="a")
    assert [each.reason.value for each in judged] == reasons


@given(clusters())
def test_what_is_in_is_what_was_selected(objects: list[Object]) -> None:
    for name, zone in (("n1", "a"), ("n2", "b")):
        for family in view(*objects, on=name).families:
            for each in family.ports:
                for local, chosen in ((True, each.selection.local), (False, each.selection.cluster)):
                    if each.port.uses_local if local else each.port.uses_cluster:
                        judged = judge(each, local=local, node_name=name, zone=zone)
                        assert tuple(one.endpoint for one in judged if one.used) == chosen
                        assert all(one.hints for one in judged if one.reason in (Reason.OTHER_ZONE, Reason.NODE_HINT))
