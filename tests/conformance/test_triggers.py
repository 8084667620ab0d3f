"""What begins runs, and runs that share out the nodes, against a real API server: EDA, slices, freshness."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collection.control import wait_for
from tests.collection.play import BIN, SHOP, Run, ansible_environment, playbook
from tests.conftest import unused_prefix
from tests.controlplane import ControlPlane, netns
from tests.lab import Lab

from .shop import shop_plane

ADDRESS = "192.168.79.3"
LOCAL: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "shop", "name": "local"},
    "spec": {"internalTrafficPolicy": "Local", "ports": [{"name": "http", "port": 80}]},
}

pytestmark = pytest.mark.controlplane


def slice_on(node: str, *addresses: str) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": "shop",
            "name": f"local-{node}",
            "labels": {"kubernetes.io/service-name": "local"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": [each], "nodeName": node} for each in addresses],
    }


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with shop_plane("akpe", ADDRESS) as started:
        started.load([LOCAL, slice_on("n1", "10.244.1.71"), slice_on("n2", "10.244.2.71", "10.244.2.72")])
        yield started


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(unused_prefix(), 3) as made:
        yield made


@pytest.fixture
def inventory(plane: ControlPlane, lab: Lab, tmp_path: Path) -> Path:
    """With the variables of the runs in it, as a user would have them."""
    file = lab.inventory(tmp_path / "hosts.yml")
    content = yaml.safe_load(file.read_text())
    content["nodes"]["vars"] |= {
        "kube_proxy_kubeconfig": str(plane.kubeconfig(tmp_path / "kubeconfig", "akp")),
        "kube_proxy_config": str(SHOP / "kube-proxy.yaml"),
        "kube_proxy_dir": str(tmp_path / "akp"),
    }
    file.write_text(yaml.safe_dump(content))
    return file


def sync(
    plane: ControlPlane, inventory: Path, work: Path, *arguments: str, name: str = "sync-services", **more: Any
) -> Run:
    """A run with the variables of the inventory, and no others but these."""
    unset = {"kube_proxy_dir": str(work / "akp"), "kube_proxy_cluster_dir": ""}
    chosen = yaml.safe_load(inventory.read_text())["nodes"]["vars"]
    known = {key: value for key, value in chosen.items() if key.startswith("kube_proxy_")}
    return playbook(
        name,
        inventory,
        work,
        *arguments,
        variables={**known, **unset, **more},
        prefix=netns.command(plane.namespace, []),
    )


def test_slices_that_share_nothing_but_the_api_server_see_the_same_cluster(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    taken = sync(plane, inventory, tmp_path / "first", name="snapshot_services")
    (read,) = taken.of("snapshot")
    pinned = {
        "kube_proxy_resource_version": read.result["resource_version"],
        "kube_proxy_snapshot_digest": read.result["digest"],
    }
    assert all(pinned.values())
    moment = slice_on("n1", "10.244.1.71", "10.244.1.72")
    plane.client.replace(moment)
    try:
        for host in ("n1", "n2", "n3"):
            sync(plane, inventory, tmp_path / host, "--limit", host, **pinned)
        assert "10.244.1.72:8080" not in lab.node("n1").run(["iptables-save", "-t", "nat"]).stdout
        later = sync(plane, inventory, tmp_path / "later")
        assert later.changed == {"n1": 1, "n2": 0, "n3": 0}, "what changed since is news for one run that is not pinned"
    finally:
        plane.client.replace(slice_on("n1", "10.244.1.71"))


def test_the_time_from_a_change_of_endpoints_to_the_kernels_is_measured(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    options = {"kube_proxy_textfile": str(tmp_path)}
    sync(plane, inventory, tmp_path / "work", **options)
    began = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
    changed = slice_on("n2", "10.244.2.71", "10.244.2.72", "10.244.2.73")
    changed["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": stamp}
    plane.client.replace(changed)
    run = sync(plane, inventory, tmp_path / "work", **options)
    took = time.time() - int(began)
    assert run.changed["n2"] == 1
    metrics = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in (tmp_path / "akp_default.prom").read_text().splitlines()
        if line[0] != "#"
    }
    name = "kubeproxy_network_programming_duration_seconds"
    assert metrics[f'{name}_count{{cluster="default"}}'] == 1, "one change, which one node had to follow"
    assert 0 < metrics[f'{name}_sum{{cluster="default"}}'] <= took
    assert lab.nodes


@pytest.mark.timeout(900)
def test_a_change_of_the_cluster_runs_the_playbook_on_the_nodes_that_are_concerned(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    variables = yaml.safe_load(inventory.read_text())["nodes"]["vars"]
    chosen = tmp_path / "vars.yml"
    chosen.write_text(yaml.safe_dump({key: variables[key] for key in ("kube_proxy_kubeconfig", "kube_proxy_config")}))
    record = tmp_path / "record.jsonl"
    log = tmp_path / "log"
    argv = [str(BIN / "ansible-rulebook"), "--rulebook", "agentless.kube_proxy.sync_services", "--verbose"]
    argv += ["-i", str(inventory), "--vars", str(chosen)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            netns.command(plane.namespace, argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env={**ansible_environment(record), "HOME": str(tmp_path)},
        )
    try:
        assert runs(process, record, log, 1) == [{"n1", "n2", "n3"}], "the first is for all"
        plane.client.replace(slice_on("n2", "10.244.2.71"))
        assert runs(process, record, log, 2)[1:] == [{"n2"}], "only one node has this endpoint"
        kept = lab.node("n2").run(["iptables-save", "-t", "nat"]).stdout
        assert "10.244.2.71:8080" in kept
        assert "10.244.2.72:8080" not in kept
        node = next(obj for obj in plane.client.list_all("Node") if obj["metadata"]["name"] == "n3")
        plane.client.patch(node, {"metadata": {"annotations": {"nothing": "that matters"}}})
        plane.client.replace({**LOCAL, "spec": {**LOCAL["spec"], "ports": [{"name": "http", "port": 81}]}})
        assert runs(process, record, log, 3)[2:] == [{"n1", "n2", "n3"}], "the annotation was no news"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    assert "Source error" not in log.read_text()


def runs(process: subprocess.Popen[bytes], record: Path, log: Path, count: int) -> list[set[str]]:
    """The hosts that were asked in each run of the playbook, once so many have ended."""

    def ended() -> list[set[str]]:
        assert process.poll() is None, log.read_text()[-4000:]
        found: list[set[str]] = [set()]
        for line in record.read_text().splitlines() if record.exists() else ():
            each = json.loads(line)
            if each["action"] == "agentless.kube_proxy.summary" and each["outcome"] == "ok":
                found.append(set())
            elif each["action"] == "agentless.kube_proxy.node":
                found[-1].add(each["host"])
        return found[:-1] if len(found) > count else []

    try:
        return wait_for(ended, 240)
    except AssertionError as error:
        raise AssertionError(log.read_text()[-6000:]) from error
