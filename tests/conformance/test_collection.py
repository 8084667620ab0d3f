"""The collection against a real API server, with a token that may do exactly what the shipped role grants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collection.play import ROOT, Run, playbook
from tests.conftest import unused_prefix
from tests.controlplane import ApiError, ControlPlane, netns
from tests.controlplane.client import Client
from tests.lab import Lab
from tests.lab.program import PROGRAM

from .shop import shop_plane

ADDRESS = "192.168.79.1"
RBAC = ROOT / "examples" / "access" / "rbac.yaml"
ALL = ["n1", "n2", "n3"]

pytestmark = pytest.mark.controlplane


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane that holds the shop, and the access of examples/access/rbac.yaml."""
    with shop_plane("akpc", ADDRESS) as started:
        yield started


@pytest.fixture(scope="module")
def token(plane: ControlPlane) -> str:
    """A token of the service account of the shipped manifest, made as its comment says."""
    account, role, binding, *configuration = yaml.safe_load_all(RBAC.read_text())
    for obj in (role, binding):
        plane.client.create({**obj, "metadata": {"name": "shipped"}} | _renamed(obj))
    for obj in configuration:
        kind, namespace = f"{obj['kind'].lower()}s", obj["metadata"]["namespace"]
        plane.client.request("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/{kind}", obj)
    path = f"/api/v1/namespaces/{account['metadata']['namespace']}/serviceaccounts"
    plane.client.request("POST", path, account)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    made = plane.client.request("POST", f"{path}/{account['metadata']['name']}/token", request)
    return str(made["status"]["token"])


def _renamed(obj: dict[str, Any]) -> dict[str, Any]:
    """Beside the test fixture's own role of the same name."""
    return {"roleRef": {**obj["roleRef"], "name": "shipped"}} if "roleRef" in obj else {}


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[Lab]:
    with Lab(unused_prefix(), 3) as lab:
        yield lab


@pytest.fixture
def inventory(shared_lab: Lab, tmp_path: Path) -> Path:
    for node in shared_lab.nodes:
        node.run(["sh", str(PROGRAM), "cleanup"])
    return shared_lab.inventory(tmp_path / "hosts.yml")


def kubeconfig(plane: ControlPlane, token: str) -> dict[str, Any]:
    """As a mapping, so that nothing is on disk."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "c",
                "cluster": {
                    "server": f"https://{ADDRESS}:6443",
                    "certificate-authority-data": _base64(plane.pki.ca.read_bytes()),
                },
            }
        ],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def sync(plane: ControlPlane, token: str, inventory: Path, work: Path, *arguments: str, **options: Any) -> Run:
    variables = {"kube_proxy_cluster_dir": "", "kube_proxy_kubeconfig": kubeconfig(plane, token)}
    name = options.pop("name", "sync-services")
    check = options.pop("check", True)
    environment = options.pop("environment", None)
    return playbook(
        name,
        inventory,
        work,
        *arguments,
        variables=variables | options,
        environment=environment,
        prefix=netns.command(plane.namespace, []),
        check=check,
    )


def test_the_shipped_role_is_enough_and_no_more(plane: ControlPlane, token: str) -> None:
    _account, role, *_others = yaml.safe_load_all(RBAC.read_text())
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        (group, resource, verb)
        for group, resource in (
            ("", "services"),
            ("", "nodes"),
            ("", "endpoints"),
            ("discovery.k8s.io", "endpointslices"),
            ("networking.k8s.io", "servicecidrs"),
        )
        for verb in ("list", "watch")
    }
    client = plane.client_as("admin")
    client.token = token
    for kind in ("Service", "Node", "EndpointSlice", "ServiceCIDR"):
        assert client.list_all(kind)
    for path in ("/api/v1/secrets", "/api/v1/pods", "/api/v1/configmaps", "/api/v1/nodes/n1", "/api/v1/namespaces"):
        with pytest.raises(ApiError) as refused:
            client.request("GET", path)
        assert refused.value.status == 403


def test_from_the_api_server_to_the_nodes_and_nothing_the_second_time(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    first = sync(plane, token, inventory, tmp_path)
    assert first.changed == dict.fromkeys(ALL, 1)
    (taken,) = first.of("snapshot")
    assert taken.result["source"] == f"https://{ADDRESS}:6443"
    assert len(set(taken.result["resource_versions"].values())) == 1
    assert token not in first.output
    second = sync(plane, token, inventory, tmp_path)
    assert second.changed == dict.fromkeys(ALL, 0)


def test_check_predicts_the_run_after_a_change_in_the_cluster(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    sync(plane, token, inventory, tmp_path)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "shop", "name": "later"}}
    plane.client.create({**service, "spec": {"ports": [{"port": 80}]}})
    try:
        check = sync(plane, token, inventory, tmp_path, "--check", "--diff")
        run = sync(plane, token, inventory, tmp_path, "--diff")
    finally:
        plane.client.delete(service)
    assert "+ shop/later tcp IPv4" in check.output
    same = ("changed", "changes", "chains", "generation", "previous", "diff")
    for host in ALL:
        assert {key: check.node(host)[key] for key in same} == {key: run.node(host)[key] for key in same}


def test_what_is_read_from_the_api_server_is_what_kubectl_would_have_printed(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    exported = plane.export(tmp_path / "exported")
    for file in exported.glob("*.json"):
        assert json.loads(file.read_text())["items"]
    live = sync(plane, token, inventory, tmp_path / "live")
    files = playbook(
        "sync-services", inventory, tmp_path / "files", variables={"kube_proxy_cluster_dir": str(exported)}
    )
    assert [each.result["generations"] for each in live.of("bundle")] == [
        each.result["generations"] for each in files.of("bundle")
    ]
    assert files.changed == dict.fromkeys(ALL, 0)


def test_a_wrong_token_and_a_missing_right_are_told_apart(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    wrong = sync(plane, token + "x", inventory, tmp_path, check=False)
    assert wrong.code != 0
    assert "does not accept the credentials (401)" in wrong.output
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "shipped"}}
    rules = plane.client.request("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/shipped")["rules"]
    plane.client.patch(role, {"rules": [rule for rule in rules if "endpointslices" not in rule["resources"]]})
    try:
        forbidden = sync(plane, token, inventory, tmp_path, check=False)
    finally:
        plane.client.patch(role, {"rules": rules})
    assert forbidden.code != 0
    wanted = 'RBAC does not grant the verb \\"list\\" on the resource \\"endpointslices\\" of API group'
    assert wanted in forbidden.output or wanted.replace("\\", "") in forbidden.output
    assert forbidden.summary[-2].startswith("stopped: ")
    for run in (wrong, forbidden):
        assert all(counts["changed"] == 0 for counts in run.recap.values())


def config_map(name: str, mode: str) -> dict[str, Any]:
    """As kubeadm leaves the configuration of a kube-proxy."""
    config = {**yaml.safe_load((ROOT / "examples" / "shop" / "kube-proxy.yaml").read_text()), "mode": mode}
    data = {"config.conf": yaml.safe_dump(config), "kubeconfig.conf": "apiVersion: v1\n"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_the_configuration_is_the_clusters_own(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    path = "/api/v1/namespaces/kube-system/configmaps"
    missing = sync(plane, token, inventory, tmp_path, kube_proxy_config="cluster", check=False)
    said = " ".join(missing.output.split())
    assert missing.code != 0
    assert "the API server does not serve /api/v1/namespaces/kube-system/configmaps/kube-proxy (404)" in said
    for name in ("kube-proxy", "other"):
        plane.client.request("POST", path, config_map(name, "nftables"))
    try:
        # A first run finds it by itself; the next ones take it from the working directory.
        first = sync(plane, token, inventory, tmp_path, kube_proxy_config="")
        assert "mode nftables, by the configuration of the ConfigMap kube-system/kube-proxy" in first.summary
        assert first.changed == dict.fromkeys(ALL, 1)
        again = sync(plane, token, inventory, tmp_path, kube_proxy_config="")
        assert "mode nftables, by the configuration of the last run" in again.summary
        assert again.changed == dict.fromkeys(ALL, 0)
        asked = sync(plane, token, inventory, tmp_path, kube_proxy_config="cluster")
        assert asked.changed == dict.fromkeys(ALL, 0)
        # The account reads that one object and no other.
        account = Client(plane.namespace, ADDRESS, 6443, plane.pki.ca, token)
        assert account.request("GET", f"{path}/kube-proxy")["kind"] == "ConfigMap"
        for forbidden in (f"{path}/other", path, "/api/v1/namespaces/default/configmaps/kube-proxy"):
            with pytest.raises(ApiError, match="403"):
                account.request("GET", forbidden)
        # What the cluster changed is not carried out before somebody asked for it.
        plane.client.request("PUT", f"{path}/kube-proxy", config_map("kube-proxy", "iptables"))
        refused = sync(plane, token, inventory, tmp_path, kube_proxy_config="cluster", check=False)
        assert refused.code != 0
        assert "mode nftables -> iptables" in " ".join(refused.output.split())
    finally:
        for name in ("kube-proxy", "other"):
            plane.client.request("DELETE", f"{path}/{name}")


def test_credentials_in_the_environment_work_as_in_kubernetes_core(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    environment = {
        "K8S_AUTH_HOST": f"https://{ADDRESS}:6443",
        "K8S_AUTH_API_KEY": token,
        "K8S_AUTH_SSL_CA_CERT": str(plane.pki.ca),
    }
    run = sync(plane, token, inventory, tmp_path, kube_proxy_kubeconfig="", environment=environment)
    assert run.changed == dict.fromkeys(ALL, 1)
    untrusted = {**environment, "K8S_AUTH_SSL_CA_CERT": ""}
    refused = sync(plane, token, inventory, tmp_path, kube_proxy_kubeconfig="", environment=untrusted, check=False)
    assert "its certificate is not trusted (ca_cert)" in refused.output


def test_waiting_ends_when_an_endpoint_changes_and_not_before(
    plane: ControlPlane, token: str, inventory: Path, tmp_path: Path
) -> None:
    sync(plane, token, inventory, tmp_path)
    play = [
        {
            "hosts": "nodes",
            "gather_facts": False,
            "tasks": [{"agentless.kube_proxy.wait_for_change": {"timeout": "{{ wait }}"}, "run_once": True}],
        }
    ]
    (tmp_path / "wait.yml").write_text(yaml.safe_dump(play))
    found = next(
        obj
        for obj in plane.client.list_all("EndpointSlice")
        if obj["metadata"]["name"] == "catalog-ipv4"
        or obj["metadata"]["labels"].get("kubernetes.io/service-name") == "catalog"
    )
    noise = {"metadata": {"annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "now"}}}
    plane.client.patch(found, noise)
    quiet = sync(plane, token, inventory, tmp_path, name=str(tmp_path / "wait.yml"), wait=3)
    (waited,) = quiet.of("wait_for_change")
    assert waited.result["timed_out"] is True
    endpoints = found["endpoints"]
    timer = threading.Timer(4, lambda: plane.client.patch(found, {"endpoints": endpoints[:-1]}))
    timer.start()
    began = time.monotonic()
    try:
        run = sync(plane, token, inventory, tmp_path, name=str(tmp_path / "wait.yml"), wait=120)
    finally:
        timer.join()
        plane.client.patch(found, {"endpoints": endpoints})
    assert time.monotonic() - began < 100
    (waited,) = run.of("wait_for_change")
    assert waited.result["objects"] == [
        {
            "kind": "EndpointSlice",
            "namespace": found["metadata"]["namespace"],
            "name": found["metadata"]["name"],
            "action": "changed",
        }
    ]


def test_nodes_of_the_cluster_are_an_inventory(
    plane: ControlPlane, token: str, shared_lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    """A new user's way: a kubeconfig, and nothing else but how to log in."""
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps(kubeconfig(plane, token)))
    folder = tmp_path / "inventory"
    folder.mkdir()
    (folder / "shop.kube_nodes.yml").write_text(
        yaml.safe_dump({"plugin": "agentless.kube_proxy.nodes", "kubeconfig": str(config)})
    )
    (folder / "group_vars").mkdir()
    login = yaml.safe_load(inventory.read_text())["nodes"]["vars"]
    (folder / "group_vars" / "nodes.yml").write_text(yaml.safe_dump(login))
    run = sync(plane, token, folder, tmp_path, kube_proxy_kubeconfig=str(config))
    assert run.changed == dict.fromkeys(ALL, 1)
    assert shared_lab.nodes
