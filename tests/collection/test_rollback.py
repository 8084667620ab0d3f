"""rollback_services.yml: the rules are wrong, and those of an hour ago were right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab

from .play import Run, playbook
from .test_safety import BATCHES, entries, kernel
from .test_sync import ALL, edited_shop, sabotage

pytestmark = pytest.mark.slow


def generations(run: Run) -> dict[str, str]:
    return {host: run.node(host)["generation"] for host in ALL}


def test_nodes_go_back_one_step_in_batches_and_stop_at_the_first_that_is_not_well(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    good = generations(playbook("sync-services", inventory, tmp_path))
    before = [kernel(node) for node in nodes.nodes]
    bad = generations(
        playbook(
            "sync-services",
            inventory,
            tmp_path,
            variables={"kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))},
        )
    )
    wrong = [kernel(node) for node in nodes.nodes]
    looked = playbook("rollback_services", inventory, tmp_path, "--check", "--diff")
    assert looked.summary[0] == "3 nodes: 3 would change, 0 unchanged, 0 failed"
    assert "- shop/new tcp IPv4" in looked.output
    # Nobody answers there: a change that is not confirmed is none.
    nobody = [{"address": "127.0.0.1", "port": 9, "timeout": 1}]
    probes: dict[str, Any] = {**BATCHES, "kube_proxy_probes": nobody}
    unsure = playbook("rollback_services", inventory, tmp_path, variables=probes, check=False)
    assert unsure.summary[0] == "3 nodes: 0 changed, 0 unchanged, 1 failed, 2 not tried"
    assert f"the node went back to generation {bad['n1']}" in unsure.summary[1]
    sabotage(nodes.node("n1"))
    stopped = playbook("rollback_services", inventory, tmp_path, variables=BATCHES, check=False)
    assert stopped.code == 2
    assert "not tried, they keep what they have: n2, n3" in stopped.summary
    assert "use --limit for nodes that failed or were not tried" in " ".join(stopped.output.split())
    nodes.node("n1").run(["sh", "-c", "rm /usr/local/sbin/*"])
    assert [kernel(node) for node in nodes.nodes] == wrong
    back = playbook("rollback_services", inventory, tmp_path, variables=BATCHES)
    assert back.output.count("PLAY [Roll Services back]") == 3
    assert generations(back) == good
    assert f"n2 went from generation {bad['n2']} back to generation {good['n2']}" in " ".join(back.output.split())
    assert [kernel(node) for node in nodes.nodes] == before
    last = entries(tmp_path)[-1]
    assert (last["action"], last["nodes"]["n3"]["before"], last["nodes"]["n3"]["after"]) == (
        "rollback",
        bad["n3"],
        good["n3"],
    )


def test_nodes_go_back_to_what_they_had_at_a_time(inventory: Path, tmp_path: Path) -> None:
    first = generations(playbook("sync-services", inventory, tmp_path))
    time.sleep(1.1)
    then = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    time.sleep(1.1)
    shop = edited_shop(tmp_path / "shop")
    for name in ("a", "b"):
        (shop / "metrics.yaml").write_text((shop / "new.yaml").read_text().replace("new", name).replace(".99", ".98"))
        playbook("sync-services", inventory, tmp_path, variables={"kube_proxy_cluster_dir": str(shop)})
    back = playbook("rollback_services", inventory, tmp_path, "-e", f"kube_proxy_rollback_time={then}")
    assert generations(back) == first
    again = playbook("rollback_services", inventory, tmp_path, "-e", f"kube_proxy_rollback_time={then}")
    assert again.changed == dict.fromkeys(ALL, 0), "whoever names a time may repeat the run"
    early = playbook("rollback_services", inventory, tmp_path, "-e", "kube_proxy_rollback_time=2001-01-01", check=False)
    assert "has nothing about n1 up to 2001-01-01T" in early.summary[1]
    none = playbook("rollback_services", inventory, tmp_path, "-e", "kube_proxy_rollback_time=noon", check=False)
    assert "  n1 failed: 'noon' is no time; write it such as " in none.summary[1]
    both = ("-e", f"kube_proxy_rollback_time={then}", "-e", f"kube_proxy_rollback_generation={first['n1'][:12]}")
    assert "mutually exclusive" in playbook("rollback_services", inventory, tmp_path, *both, check=False).output
    named = ("-e", f"kube_proxy_rollback_generation={first['n1'][:12]}", "--limit", "n1")
    assert playbook("rollback_services", inventory, tmp_path, *named).changed == {"n1": 0}
