"""Nodes as hosts, through Ansible's own inventory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import build
from .apiserver import Server, serving

Inventory = dict[str, Any]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    first = build.node("n1", "fd00::11", "172.18.0.11", "Hostname=n1", zone="zone-a")
    first["metadata"]["labels"] |= {"node-role.kubernetes.io/control-plane": "", "example.com/rack": "r 1"}
    first["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    second = build.node("n2.example", "ExternalIP=203.0.113.2")
    second["metadata"]["labels"] |= {"note": "{{ lookup('pipe', 'touch /tmp/akp-pwned') }}"}
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "nodes.yaml").write_text(yaml.safe_dump_all([first, second]))
    return folder


def inventory(folder: Path, *, check: bool = True, **options: Any) -> Any:
    file = folder.parent / "test.kube_nodes.yml"
    file.write_text(yaml.safe_dump({"plugin": "agentless.kube_proxy.nodes", **options}))
    tool = str(Path(sys.executable).with_name("ansible-inventory"))
    done = subprocess.run(
        [tool, "-i", str(file), "--list", "--export"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": "/nonexistent",
            "ANSIBLE_INVENTORY_UNPARSED_FAILED": "1",
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
        },
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
        return plain(json.loads(done.stdout))
    return done


def plain(value: Any) -> Any:
    """Without the marks of strings that must not be templated."""
    if isinstance(value, dict):
        return (
            value["__ansible_unsafe"] if set(value) == {"__ansible_unsafe"} else {k: plain(v) for k, v in value.items()}
        )
    return [plain(each) for each in value] if isinstance(value, list) else value


def hostvars(found: Inventory, host: str) -> Inventory:
    return dict(found["_meta"]["hostvars"][host])


def test_every_node_is_a_host_that_can_be_reached(cluster: Path) -> None:
    found = inventory(cluster, cluster_dir="cluster")
    assert found["nodes"]["hosts"] == ["n1", "n2.example"]
    assert hostvars(found, "n1")["ansible_host"] == "172.18.0.11"
    assert hostvars(found, "n2.example")["ansible_host"] == "203.0.113.2"
    assert hostvars(found, "n1")["kube_proxy_node_name"] == "n1"
    assert hostvars(found, "n1")["kube_node"]["zone"] == "zone-a"


def test_zone_role_readiness_and_labels_are_groups(cluster: Path) -> None:
    found = inventory(cluster, cluster_dir="cluster", label_groups=["example.com/rack"])
    groups = {name: group["hosts"] for name, group in found.items() if isinstance(group, dict) and "hosts" in group}
    assert groups == {
        "nodes": ["n1", "n2.example"],
        "ready": ["n1"],
        "not_ready": ["n2.example"],
        "zone_zone_a": ["n1"],
        "role_control_plane": ["n1"],
        "example_com_rack_r_1": ["n1"],
    }


def test_the_family_and_type_of_the_address_can_be_chosen(cluster: Path) -> None:
    assert (
        hostvars(inventory(cluster, cluster_dir="cluster", address_family="IPv6"), "n1")["ansible_host"] == "fd00::11"
    )
    named = inventory(cluster, cluster_dir="cluster", address_types=["Hostname"])
    assert hostvars(named, "n1")["ansible_host"] == "n1"
    assert "ansible_host" not in hostvars(named, "n2.example")


def test_nodes_that_are_not_ready_can_be_left_out(cluster: Path) -> None:
    assert inventory(cluster, cluster_dir="cluster", only_ready=True)["nodes"]["hosts"] == ["n1"]


def test_groups_and_variables_can_be_composed(cluster: Path) -> None:
    found = inventory(
        cluster,
        cluster_dir="cluster",
        compose={"ansible_user": "'ops'"},
        keyed_groups=[{"key": "kube_node.zone", "prefix": "z"}],
    )
    assert hostvars(found, "n1")["ansible_user"] == "ops"
    assert found["z_zone_a"]["hosts"] == ["n1"]


def test_a_label_is_never_a_template(cluster: Path) -> None:
    found = inventory(cluster, cluster_dir="cluster")
    assert hostvars(found, "n2.example")["kube_node"]["labels"]["note"].startswith("{{ lookup")
    assert not Path("/tmp/akp-pwned").exists()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        yield served


def test_nodes_come_from_an_api_server(cluster: Path, server: Server) -> None:
    found = inventory(cluster, host=server.url, api_key="secret")
    assert found["nodes"]["hosts"] == ["n0", "n1"]
    assert {path for path, _query in server.asked} == {"/api/v1/nodes"}


def test_an_api_server_that_refuses_is_an_error_and_no_empty_inventory(cluster: Path, server: Server) -> None:
    from .apiserver import status

    server.once(status(403, "not you"), times=100)
    done = inventory(cluster, check=False, host=server.url, api_key="secret")
    assert done.returncode != 0
    assert 'verb "list" on the resource "nodes"' in done.stderr
