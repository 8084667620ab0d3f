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
from agentless_kube_proxy.tasks.trust import OLDEST, OldAnsible, require_ansible

from tests.unit import build
from tests.unit.apiserver import Server, serving

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


HOSTILE = {
    "template": "{{ lookup('pipe', 'touch MARK') }}",
    "option": "-oProxyCommand=touch MARK",
    "dash": "-n1.example",
    "blank": "n1 touch",
    "user": "root@n1",
    "scope": "fe80::1%$(touch MARK)",
    "hexadecimal": "0x7f.1",
    "number": "2130706433",
    "line": "n1\nansible_connection=local",
    "escape": "n1\x1b[2J",
    "slash": "n1/../x",
    "long": "n" * 64,
    "loopback": "127.0.0.53",
    "loopback6": "::1",
    "self": "localhost",
    "below-self": "a.localhost",
    "any": "0.0.0.0",
    "metadata": "169.254.169.254",
    "multicast": "ff02::1",
}


def test_what_is_no_address_and_no_name_is_not_connected_to(tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", str(tmp_path / "hostile.kube_nodes.yml")
    hostile = {f"h-{sort}": text.replace("MARK", str(mark)) for sort, text in HOSTILE.items()}
    (tmp_path / "cluster").mkdir()
    nodes = [build.node(name, f"Hostname={hostname}") for name, hostname in hostile.items()]
    nodes.append(build.node("n2", "Hostname=N2.example.com"))
    (tmp_path / "cluster" / "nodes.yaml").write_text(yaml.safe_dump_all(nodes))
    options = {"plugin": "agentless.kube_proxy.nodes", "cluster_dir": "cluster", "address_types": ["Hostname"]}
    Path(file).write_text(yaml.safe_dump(options))
    done = ansible("ansible-inventory", "-i", file, "--list", "--export")
    found = plain(json.loads(done.stdout))
    warnings = " ".join(done.stderr.split())
    assert found["nodes"]["hosts"] == sorted([*hostile, "n2"]), "the hosts themselves stay"
    assert hostvars(found, "n2")["ansible_host"] == "N2.example.com"
    for name, hostname in hostile.items():
        assert "ansible_host" not in hostvars(found, name)
        assert hostvars(found, name)["kube_node"]["addresses"][0]["address"] == hostname, "as data it is what it is"
        assert f"Node {name}: status.addresses: the Hostname" in warnings
    assert "choose other address_types" in warnings
    assert "\x1b" not in done.stderr
    # What Ansible does with the variables of a host, and with its name.
    told = ansible("ansible", "-i", file, "all", "-f", "20", "-m", "debug", "-a", "var=kube_node")
    assert told.stdout.count("SUCCESS") == len(nodes)
    ansible("ansible", "-i", file, "h-*", "-f", "20", "-m", "raw", "-a", "true", "-T", "1")
    assert not mark.exists()


def ansible(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": "/nonexistent", "ANSIBLE_HOST_KEY_CHECKING": "0"}
    program = str(Path(sys.executable).with_name(tool))
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_a_node_cannot_take_the_place_of_the_control_host(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    nodes = [build.node("localhost", "203.0.113.66"), build.node("127.0.0.1", "203.0.113.66"), build.node("n1")]
    (tmp_path / "cluster" / "nodes.yaml").write_text(yaml.safe_dump_all(nodes))
    assert inventory(tmp_path / "cluster", cluster_dir="cluster")["nodes"]["hosts"] == ["n1"]


@pytest.mark.parametrize("version", ["2.18.0", "2.18.12", "2.9.27", "1.0", "unknown"])
def test_a_version_of_ansible_that_evaluates_data_is_refused(version: str) -> None:
    with pytest.raises(OldAnsible, match=r"needs ansible-core 2\.19 or newer"):
        require_ansible(version)


def test_the_oldest_version_is_the_same_wherever_it_is_said() -> None:
    require_ansible("2.19.0")
    require_ansible("2.20.0b1")
    require_ansible()
    root = Path(__file__).parents[3]
    wanted = ".".join(map(str, OLDEST))
    assert yaml.safe_load((root / "meta" / "runtime.yml").read_text())["requires_ansible"] == f">={wanted}.0"
    assert f"ansible-core>={wanted}" in (root / "requirements-ansible.txt").read_text().split()
    for file in root.glob("roles/*/meta/main.yml"):
        assert yaml.safe_load(file.read_text())["galaxy_info"]["min_ansible_version"] == wanted, file


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        yield served


def test_nodes_come_from_an_api_server(cluster: Path, server: Server) -> None:
    found = inventory(cluster, host=server.url, api_key="secret")
    assert found["nodes"]["hosts"] == ["n0", "n1"]
    assert {path for path, _query in server.asked} == {"/api/v1/nodes"}


def test_an_api_server_that_refuses_is_an_error_and_no_empty_inventory(cluster: Path, server: Server) -> None:
    from tests.unit.apiserver import status

    server.once(status(403, "not you"), times=100)
    done = inventory(cluster, check=False, host=server.url, api_key="secret")
    assert done.returncode != 0
    assert 'verb "list" on the resource "nodes"' in done.stderr
