"""A control host is lost, and another one goes on: with what nodes hold, or with a few files of the first one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from agentless_kube_proxy.cli import main
from agentless_kube_proxy.ledger import entries, unmerged, verify

from tests.lab import Lab

from .play import playbook
from .test_approval import endpoint_more, external_ip, following, kernel
from .test_sync import ALL

# What docs/second-host.md says is worth keeping.
APPROVALS = ("approved.json", "followed.json", "following.json", "following.snapshot.json")


def changes(run: Any) -> dict[str, Any]:
    """What a run says that it would change, by host."""
    return {host: run.node(host)["changes"] for host in ALL}


def test_another_control_host_tells_true_differences_keeps_approvals_and_continues_the_ledger(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    variables: dict[str, Any] = {"kube_proxy_approval": "frontends"}
    plan = following(playbook("plan_services", inventory, first, variables=variables))
    playbook("sync-services", inventory, first, variables={**variables, **plan})
    shop = external_ip(tmp_path / "shop")
    endpoint_more(shop)
    variables["kube_proxy_cluster_dir"] = str(shop)
    ledger = first / "akp" / "ledger.jsonl"
    head = verify(ledger)

    # The second has the approvals and a copy of the ledger, and nothing else: endpoints flow, Services wait.
    (second / "akp").mkdir(parents=True, mode=0o700)
    for name in APPROVALS:
        if (first / "akp" / name).exists():
            shutil.copy(first / "akp" / name, second / "akp" / name)
    assert main(["ledger", "merge", "--into", str(second / "akp" / "ledger.jsonl"), str(ledger)]) == 0
    told = [
        changes(playbook("sync-services", inventory, work, "--check", "--diff", variables=variables))
        for work in (first, second)
    ]
    assert told[0] == told[1], "it asked the nodes what they hold"
    assert all(told[0].values())
    moved = playbook("sync-services", inventory, second, variables=variables)
    assert moved.changed == dict.fromkeys(ALL, 1)
    assert "  Service/shop/catalog: was changed, and waits for approval" in moved.summary
    assert all("10.244.2.99:8080" in kernel(node) and "192.0.2.77" not in kernel(node) for node in nodes.nodes)
    continued = second / "akp" / "ledger.jsonl"
    assert verify(continued, head.hash).number > head.number
    assert next(entries(continued))["hash"] == next(entries(ledger))["hash"]

    # The third has nothing at all. What nodes hold is what was approved: a plan holds what is new since, and no more.
    plan = following(playbook("plan_services", inventory, third, variables=variables))
    text = Path(plan["kube_proxy_plan"]).with_suffix(".txt").read_text()
    services = [line for line in text.splitlines() if re.match("  [-+~] (?!node:)", line)]
    assert services == ["  ~ shop/catalog:http tcp IPv4"], text
    assert "what it had before was not computed here" in text, "of settings"
    playbook("sync-services", inventory, third, variables={**variables, **plan})
    assert all("192.0.2.77" in kernel(node) for node in nodes.nodes)
    assert playbook("sync-services", inventory, third, variables=variables).changed == dict.fromkeys(ALL, 0)

    # All that was done is in one ledger at the end.
    own = third / "akp" / "ledger.jsonl"
    heads = [verify(each).hash for each in (continued, own)]
    assert main(["ledger", "merge", "--into", str(continued), str(own)]) == 0
    for each in heads:
        verify(continued, each)
    done = [list(unmerged(entry))[-1] for entry in entries(continued)]
    assert {host for entry in done for host in entry["nodes"]} == set(ALL)
