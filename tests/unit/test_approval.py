"""Plans: what they hold for, and who agreed to what."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.controller.approval import beside

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64


def plan(**hosts: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "akp/v1", "kind": "Plan", "snapshot": "5" * 64, "hosts": hosts}


CHANGES = {"node": "n1", "previous": OLD, "generation": NEW, "changed": True, "changes": []}
FIRST = {**CHANGES, "previous": None}
# Of a host that was not even asked what it would become, as it had it.
STAYS = {"node": None, "previous": None, "generation": NEW, "changed": False, "changes": None}


@pytest.mark.parametrize(
    ("entry", "has"), [(CHANGES, OLD), (CHANGES, NEW), (FIRST, ""), (FIRST, NEW), (STAYS, NEW)], ids=str
)
def test_a_plan_holds_for_hosts_as_they_were_and_for_those_that_have_it(entry: dict[str, Any], has: str) -> None:
    assert beside(plan(n1=entry), {"n1": NEW}, {"n1": has}) == {}


@pytest.mark.parametrize(
    ("entry", "has", "told"),
    [
        (CHANGES, OTHER, f"has generation {OTHER}, but the plan was made when it had generation {OLD}, and says"),
        (CHANGES, "", f"has nothing applied, but the plan was made when it had generation {OLD}, and says"),
        (FIRST, OTHER, f"has generation {OTHER}, but the plan was made when it had nothing applied, and says"),
        (STAYS, OLD, f"has generation {OLD}, but the plan was made when it had generation {NEW}, and says"),
    ],
    ids=str,
)
def test_a_plan_does_not_hold_for_hosts_that_became_something_else(entry: dict[str, Any], has: str, told: str) -> None:
    wrong = beside(plan(n1=entry, n2=CHANGES), {"n1": NEW, "n2": NEW}, {"n1": has, "n2": OLD})
    assert set(wrong) == {"n1"}
    assert wrong["n1"].startswith(told)
    assert wrong["n1"].endswith("make a new plan")


def test_a_plan_is_for_its_hosts_and_its_generations() -> None:
    wrong = beside(plan(n1=CHANGES), {"n1": OTHER, "n9": NEW}, {"n1": OLD, "n9": ""})
    assert wrong == {
        "n1": f"would get generation {OTHER}, but the plan says {NEW}; make a new plan",
        "n9": "is not in the plan; make a new plan",
    }
