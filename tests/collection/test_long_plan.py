"""A plan of thousands of changes: complete, counted truly, and in a file that the summary names."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from .play import BIN, SHOP, playbook

pytestmark = pytest.mark.slow

# AKP_SERVICES=10000 has the size of a large cluster.
SERVICES = int(os.environ.get("AKP_SERVICES", "1200"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """The Nodes of the shop, with very many Services."""
    folder = tmp_path / "large"
    folder.mkdir()
    for name in ("nodes.yaml", "servicecidr.yaml"):
        (folder / name).write_text((SHOP / name).read_text())
    items = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"web{number}", "namespace": f"team{number % 10}"},
            "spec": {
                "clusterIP": f"10.{100 + number // 60000}.{number // 250 % 240}.{number % 250 + 1}",
                "ports": [{"port": 80, "protocol": "TCP"}],
            },
        }
        for number in range(SERVICES)
    ]
    (folder / "services.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    return folder


def test_a_plan_of_many_changes_lists_all_of_them(inventory: Path, tmp_path: Path, large: Path) -> None:
    config = {**yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()), "mode": "nftables"}
    given = {"kube_proxy_cluster_dir": str(large), "kube_proxy_config": config, "kube_proxy_hosts": "n1,n2"}
    began = time.monotonic()
    planned = playbook("plan_services", inventory, tmp_path, variables=given)
    print(f"{SERVICES} Services on 2 nodes, planned in {time.monotonic() - began:.1f} s")
    plan = tmp_path / "akp" / "plan.json"
    counted = f"Services: {SERVICES} added, 0 changed, 0 removed; endpoints: 0 added, 0 removed"
    assert counted in planned.summary
    assert f"all changes, by nodes and Services: {plan.with_suffix('.txt')}" in planned.summary
    assert "more, all in the file that the summary names" in planned.output
    began = time.monotonic()
    shown = subprocess.run([str(BIN / "akp"), "approve", str(plan)], capture_output=True, text=True, check=True).stdout
    print(f"shown in {time.monotonic() - began:.1f} s")
    for text in (shown, plan.with_suffix(".txt").read_text()):
        lines = text.splitlines()
        assert lines[0] == "on n1, n2:"
        assert sum(line.startswith("  + team") for line in lines) == SERVICES
    (told,) = planned.of("summary")
    follow = {"kube_proxy_plan": str(plan), "kube_proxy_plan_digest": told.result["plan_digest"]}
    followed = playbook("sync-services", inventory, tmp_path, "--diff", variables={**given, **follow})
    assert counted in followed.summary
    (named,) = [line for line in followed.summary if line.startswith("all changes, by nodes and Services: ")]
    listed = Path(named.partition(": ")[2]).read_text()
    assert listed.count("\n  + team") == SERVICES
