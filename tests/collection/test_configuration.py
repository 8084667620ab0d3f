"""The configuration belongs to the cluster: a run that forgets it changes nothing, another one has to be asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import Lab

from .play import SHOP, Run, playbook
from .test_sync import ALL, rules

pytestmark = pytest.mark.slow

CONFIG = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())
NFTABLES = {**CONFIG, "mode": "nftables"}


def sync(inventory: Path, work: Path, *arguments: str, name: str = "sync-services", **variables: Any) -> Run:
    """A run that is given no configuration unless a test names one."""
    check = variables.pop("check", True)
    given = {"kube_proxy_config": "", **variables}
    return playbook(name, inventory, work, *arguments, variables=given, check=check)


def with_config_map(folder: Path, config: dict[str, Any]) -> Path:
    """The shop, with the configuration of its kube-proxy as kubeadm keeps it."""
    shutil.copytree(SHOP, folder)
    metadata = {"name": "kube-proxy", "namespace": "kube-system"}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    (folder / "configmap.json").write_text(json.dumps({**found, "data": {"config.conf": yaml.safe_dump(config)}}))
    return folder


def test_a_run_that_forgets_the_configuration_changes_nothing_and_another_is_refused(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    first = sync(inventory, tmp_path, kube_proxy_config=NFTABLES)
    assert "mode nftables, by the configuration of kube_proxy_config" in first.summary
    forgotten = sync(inventory, tmp_path)
    assert forgotten.changed == dict.fromkeys(ALL, 0)
    assert "mode nftables, by the configuration of the last run" in forgotten.summary
    before = [node.run(["nft", "list", "ruleset"]).stdout for node in nodes.nodes]

    other = {**CONFIG, "clusterCIDR": "10.128.0.0/9", "nodePortAddresses": ["primary"]}
    told = "mode nftables -> iptables; clusterCIDR"
    for name in ("sync-services", "plan_services"):
        refused = sync(inventory, tmp_path, name=name, kube_proxy_config=other, check=False)
        assert refused.code == 2, name
        stopped = next(line for line in refused.summary if line.startswith("stopped: "))
        assert told in stopped
        assert "kube_proxy_allow_mode_change=true" in stopped
        assert refused.summary[0].endswith("0 unchanged, 0 failed, 3 not tried")
    assert not (tmp_path / "akp" / "plan.json").exists()
    assert [node.run(["nft", "list", "ruleset"]).stdout for node in nodes.nodes] == before

    # Asked for by name, it is announced to those who approve, and done. The plan has the configuration with it.
    meant = {"kube_proxy_config": other, "kube_proxy_allow_mode_change": True}
    planned = sync(inventory, tmp_path, name="plan_services", **meant)
    assert "the settings change: 4" in planned.summary
    assert "  mode nftables -> iptables on n1, n2, n3" in planned.summary
    text = (tmp_path / "akp" / "plan.txt").read_text()
    assert text.startswith("on n1, n2, n3:\n  ~ node: settings\n      ~ mode nftables -> iptables\n")
    followed = sync(
        inventory,
        tmp_path,
        kube_proxy_plan=str(tmp_path / "akp" / "plan.json"),
        kube_proxy_plan_digest=next(each.result["plan_digest"] for each in planned.of("summary")),
    )
    assert followed.changed == dict.fromkeys(ALL, 1)
    assert "mode iptables, by the configuration of the plan" in followed.summary
    assert all("KUBE-SERVICES" in rules(node) for node in nodes.nodes)


def test_a_fresh_control_host_does_not_change_the_mode_of_nodes(inventory: Path, tmp_path: Path) -> None:
    sync(inventory, tmp_path, kube_proxy_config=NFTABLES)
    fresh = {"kube_proxy_dir": str(tmp_path / "fresh")}
    refused = sync(inventory, tmp_path, check=False, **fresh)
    assert refused.code == 2
    assert refused.summary[0] == "3 nodes: 0 changed, 0 unchanged, 3 failed"
    assert "  n1 failed: has mode nftables and would get mode iptables" in refused.summary[1]
    assert "no configuration was given: 1" in refused.summary
    # With the ConfigMap of the cluster among its files, it has what the nodes have.
    cluster = with_config_map(tmp_path / "cluster", NFTABLES)
    own = {"kube_proxy_dir": str(tmp_path / "own"), "kube_proxy_cluster_dir": str(cluster)}
    run = sync(inventory, tmp_path, kube_proxy_config="cluster", **own)
    assert run.changed == dict.fromkeys(ALL, 0)
    assert "mode nftables, by the configuration of the ConfigMap kube-system/kube-proxy" in run.summary


def test_roles_that_need_the_mode_take_it_from_the_last_run(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    sync(inventory, tmp_path, kube_proxy_config=NFTABLES)
    only = {"kube_proxy_manage_packages": False, "kube_proxy_hosts": "n1"}
    sync(inventory, tmp_path, name="prepare_nodes", **only)
    assert "nf_tables" in nodes.node("n1").run(["cat", "/etc/modules-load.d/kube-proxy.conf"]).stdout


def test_publishing_another_mode_has_to_be_asked_for(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    given = {"kube_proxy_publish_path": str(tmp_path / "www"), "kube_proxy_publish_keys": [str(tmp_path / "key")]}
    here = Path("localhost,")

    def publish(**variables: Any) -> Run:
        return sync(here, tmp_path / "work", name="publish_services", **given, **variables)

    publish(kube_proxy_config=NFTABLES)
    assert not publish().changed["localhost"]
    refused = publish(kube_proxy_config=CONFIG, check=False)
    assert refused.code == 2
    assert "mode nftables -> iptables" in " ".join(refused.output.split())
    meant = publish(kube_proxy_config=CONFIG, kube_proxy_allow_mode_change=True)
    assert meant.changed["localhost"]
    assert "the settings change: mode nftables -> iptables" in " ".join(meant.output.split())
