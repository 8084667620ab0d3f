"""Nodes that are nowhere: of the cluster and of no inventory, of the inventory and of no cluster, and none at all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.lab import Lab

from .play import BIN, ROOT, SHOP, ansible_environment, playbook
from .test_sync import rules

pytestmark = pytest.mark.slow

ON_NODES = sorted(
    path.stem
    for path in (ROOT / "playbooks").glob("*_*.yml")
    if path.stem not in ("create_lab", "destroy_lab", "publish_services", "schedule_services", "snapshot_services")
)


def with_node(folder: Path, name: str) -> Path:
    """The shop, and one Node more."""
    shutil.copytree(SHOP, folder)
    objects = list(yaml.safe_load_all((folder / "nodes.yaml").read_text()))
    more = yaml.safe_load(yaml.safe_dump(objects[0]))
    more["metadata"]["name"] = name
    more["spec"]["podCIDRs"] = []
    more["status"]["addresses"] = [{"type": "InternalIP", "address": "172.18.0.99"}]
    (folder / "nodes.yaml").write_text(yaml.safe_dump_all([*objects, more]))
    return folder


def test_a_node_that_no_inventory_has_is_told_in_every_run(inventory: Path, tmp_path: Path) -> None:
    variables = {"kube_proxy_cluster_dir": str(with_node(tmp_path / "shop", "n4"))}
    told = "  Node n4 is no host of the inventory, and gets nothing from here"
    for _time in range(2):
        run = playbook("sync-services", inventory, tmp_path, variables=variables)
        assert run.summary[run.summary.index("Nodes without a host: 1") + 1] == told
    # Who limits a run leaves hosts out, but the inventory has them.
    limited = playbook("sync-services", inventory, tmp_path, "--limit", "n1", variables=variables)
    assert "Nodes without a host: 1" in limited.summary
    # A host of another name is that Node, in the play or not.
    content = yaml.safe_load(inventory.read_text())
    content["nodes"]["hosts"]["spare"] = {"kube_proxy_node_name": "n4"}
    inventory.write_text(yaml.safe_dump(content))
    known = playbook("sync-services", inventory, tmp_path, "--limit", "n1", variables=variables)
    assert not [line for line in known.summary if "without a host" in line]


def test_a_host_without_a_node_fails_and_the_others_are_served(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(inventory.read_text())
    content["nodes"]["hosts"]["n3"]["kube_proxy_node_name"] = "elsewhere"
    inventory.write_text(yaml.safe_dump(content))
    run = playbook("sync-services", inventory, tmp_path, check=False)
    assert run.code == 2
    assert run.summary[0] == "3 nodes: 2 changed, 0 unchanged, 1 failed"
    assert run.summary[1].startswith("  n3 failed: the cluster has no Node elsewhere; it has n1, n2, n3.")
    assert "Nodes without a host: 1" in run.summary
    assert "KUBE-SERVICES" not in rules(nodes.node("n3"))


@pytest.mark.parametrize("name", ON_NODES)
def test_an_inventory_without_hosts_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("nodes:\n  hosts:\n")
    run = playbook(name, tmp_path / "hosts.yml", tmp_path, check=False)
    assert run.code != 0
    said = " ".join(run.output.split())
    assert 'There is no host to work on. The inventory has 0 hosts, 0 of them match "nodes".' in said


def test_a_pattern_or_a_limit_that_leaves_no_host_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("nodes: {hosts: {n1: }}\nothers: {hosts: {bastion: }}\n")
    limited = playbook("sync-services", tmp_path / "hosts.yml", tmp_path, "--limit", "bastion", check=False)
    said = " ".join(limited.output.split())
    assert limited.code == 2
    assert 'has 2 hosts, 1 of them match "nodes", and none of these is within --limit.' in said
    pattern = playbook("sync-services", tmp_path / "hosts.yml", tmp_path, "-e", "kube_proxy_hosts=workers", check=False)
    assert pattern.code == 2
    assert 'has 2 hosts, 0 of them match "workers".' in " ".join(pattern.output.split())
    # As somebody types it who forgot -i.
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), "agentless.kube_proxy.sync_services"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**ansible_environment(tmp_path / "record"), "ANSIBLE_INVENTORY": "/dev/null"},
    )
    assert done.returncode == 2
    assert "There is no host to work on." in " ".join(done.stdout.split() + done.stderr.split())


def test_the_example_of_the_inventory_plugin_keeps_nodes_that_are_not_ready() -> None:
    done = subprocess.run(
        [str(BIN / "ansible-doc"), "--type", "inventory", "agentless.kube_proxy.nodes"],
        capture_output=True,
        text=True,
        check=True,
        env=ansible_environment(Path("/nonexistent")),
    )
    assert "only_ready: true" not in done.stdout
