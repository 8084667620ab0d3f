"""cleanup_services.yml, as an operator types it who did not mean it, and who did."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab import Lab

from .play import playbook
from .test_safety import BATCHES, entries, kernel
from .test_sync import ALL, rules

pytestmark = pytest.mark.slow

NOT_NAMED = {"kube_proxy_confirm_cleanup": ""}
# What a node has that nobody can clean: the tool that reads its rules does not work.
NO_SAVE = "/usr/local/sbin/iptables-nft-save"


def test_nothing_is_removed_unless_the_cluster_is_named(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    before = [kernel(node) for node in nodes.nodes]
    written = len(entries(tmp_path))
    unnamed = playbook("cleanup_services", inventory, tmp_path, variables=NOT_NAMED, check=False)
    said = " ".join(unnamed.output.split())
    assert unnamed.code == 2
    assert "This removes the rules of all Services from 3 hosts (n1, n2, n3)" in said
    assert "-e kube_proxy_confirm_cleanup=default" in said
    other = {"kube_proxy_confirm_cleanup": "default", "kube_proxy_cluster_name": "production"}
    wrong = playbook("cleanup_services", inventory, tmp_path, variables=other, check=False)
    assert wrong.code == 2
    assert "kube_proxy_confirm_cleanup is 'default', and the cluster is 'production'" in " ".join(wrong.output.split())
    looked = playbook("cleanup_services", inventory, tmp_path, "--check", variables=NOT_NAMED)
    assert looked.summary[0] == "3 nodes: 3 would change, 0 unchanged, 0 failed"
    assert [kernel(node) for node in nodes.nodes] == before
    assert len(entries(tmp_path)) == written
    meant = playbook(
        "cleanup_services", inventory, tmp_path, "-e", "kube_proxy_confirm_cleanup=default", variables=NOT_NAMED
    )
    assert meant.summary[0] == "3 nodes: 3 changed, 0 unchanged, 0 failed"
    assert "Services: 0 added, 0 changed, 8 removed" in meant.summary[1]
    assert all("KUBE-SERVICES" not in rules(node) for node in nodes.nodes)


def test_the_first_node_that_cannot_be_cleaned_is_the_last(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    metrics = {"kube_proxy_textfile": str(tmp_path)}
    playbook("sync-services", inventory, tmp_path, variables=metrics)
    others = [kernel(node) for node in nodes.nodes[1:]]
    broken = "#!/bin/sh\nexit 1\n"
    nodes.node("n1").run(["sh", "-c", f"cat >{NO_SAVE}; chmod +x {NO_SAVE}"], input=broken)
    stopped = playbook("cleanup_services", inventory, tmp_path, variables={**BATCHES, **metrics}, check=False)
    assert stopped.code == 2
    assert stopped.summary[0] == "3 nodes: 0 changed, 0 unchanged, 1 failed, 2 not tried"
    assert "not tried, they keep what they have: n2, n3" in stopped.summary
    assert [kernel(node) for node in nodes.nodes[1:]] == others
    nodes.node("n1").run(["rm", NO_SAVE])
    done = playbook("cleanup_services", inventory, tmp_path, variables={**BATCHES, **metrics})
    assert done.changed == dict.fromkeys(ALL, 1)
    assert done.output.count("PLAY [Clean up Services]") == 3
    told = subprocess.run(["cat", tmp_path / "akp_default.prom"], check=True, capture_output=True, text=True).stdout
    assert "akp_node_confirmed_timestamp_seconds{" not in told, "a node that was given up is not fresh"
