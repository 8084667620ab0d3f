"""What the inventory says about the way in to nodes is what no Service gets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from .play import ROOT, SHOP, playbook

PLAY = [
    {
        "hosts": "all",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROOT / "roles" / "sync" / "defaults" / "main.yml")],
        "tasks": [{"agentless.kube_proxy.snapshot": {}}, {"agentless.kube_proxy.bundle": {}}],
    }
]


@pytest.mark.parametrize(("variables", "number"), [({}, 22), ({"ansible_port": 2222}, 2222)])
def test_the_port_of_the_inventory_is_the_one_that_no_service_gets(
    variables: dict[str, int], number: int, tmp_path: Path
) -> None:
    shop = tmp_path / "cluster"
    shutil.copytree(SHOP, shop)
    thief = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "thief"},
        "spec": {
            "clusterIP": "10.96.10.66",
            "externalIPs": ["172.18.0.12"],
            "ports": [{"name": f"p{each}", "port": each} for each in (22, 2222)],
        },
    }
    (shop / "thief.yaml").write_text(yaml.safe_dump(thief))
    (tmp_path / "play.yml").write_text(yaml.safe_dump(PLAY))
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"n1": variables}}}))
    chosen = {"kube_proxy_cluster_dir": str(shop)}
    run = playbook(str(tmp_path / "play.yml"), tmp_path / "hosts.yml", tmp_path / "work", variables=chosen)
    (bundle,) = run.of("bundle")
    left_out = [each for each in bundle.result["warnings"] if each.endswith("it is left out")]
    reason = "is the way in to the node n2 for the control host"
    assert left_out == [f"Service/shop/thief: externalIPs 172.18.0.12:{number}/tcp {reason}; it is left out"]
