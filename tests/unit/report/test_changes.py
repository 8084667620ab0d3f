"""The plan and the ledger, as the page tells them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from agentless_kube_proxy import ledger
from agentless_kube_proxy.report.changes import plan_of
from agentless_kube_proxy.report.runs import MOST_RUNS, ledger_of
from agentless_kube_proxy.tasks.directory import write_json

from tests.page.fleet import Fleet, fleet


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return fleet(tmp_path_factory.mktemp("akp"), time.time())


def test_what_is_removed_comes_first_and_what_needs_no_approval_last(shop: Fleet) -> None:
    plan = plan_of(shop.directory.plan, shop.directory, shop.allowed)
    assert plan is not None
    assert [(each.action, each.title, each.endpoints_only) for each in plan.changes] == [
        ("removed", "shop/admin:http", False),
        ("changed", "shop/frontend:http", False),
        ("changed", "shop/frontend:http", False),
        ("added", "shop/gifts:http", False),
        ("changed", "shop/orders:http", True),
    ]
    assert {each.where for each in plan.changes} == {"every node"}
    assert (plan.state, plan.signed.names, plan.signed.count) == ("waits", ("alice",), 1)
    assert dict(plan.services) == {"added": 1, "changed": 2, "removed": 1}


def test_without_the_file_of_signers_no_signer_is_named(shop: Fleet) -> None:
    plan = plan_of(shop.directory.plan)
    assert plan is not None
    assert (plan.signed.count, plan.signed.names) == (1, None)


def test_a_plan_that_was_carried_out_or_changed_does_not_wait(shop: Fleet, tmp_path: Path) -> None:
    plan = plan_of(shop.directory.plan, shop.directory)
    assert plan is not None
    write_json(shop.directory.followed, {"plan": plan.digest, "run": "1", "frontends": {}})
    done = plan_of(shop.directory.plan, shop.directory)
    shop.directory.followed.unlink()
    assert done is not None
    assert (done.state, done.waits) == ("carried out", False)
    forged = tmp_path / "plan.json"
    forged.write_text(shop.directory.plan.read_text().replace("shop/gifts", "shop/gift"))
    assert plan_of(forged) is None


def test_a_long_ledger_shows_its_last_runs_and_a_node_whose_turn_never_came(tmp_path: Path) -> None:
    file = tmp_path / ledger.FILE
    assert ledger_of(file) is None
    for number in range(MOST_RUNS + 5):
        fields = {"run": f"r{number}", "who": {"user": "akp"}, "action": "sync", "result": "begun"}
        ledger.append(file, {**fields, "nodes": {"n1": {}, "n2": {}}})
        ledger.append(file, {**fields, "result": "ok", "nodes": {"n1": {"before": "a", "after": "b"}}})
    found = ledger_of(file)
    assert found is not None
    assert (len(found.runs), found.left, found.runs[0].name) == (MOST_RUNS, 5, f"r{MOST_RUNS + 4}")
    assert found.runs[0].untouched == ("n2",)
    assert (found.runs[0].what, found.runs[0].entries) == ("changed 2 nodes", "entries 209 to 210")
