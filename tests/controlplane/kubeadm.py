"""A cluster as kubeadm leaves one, to follow docs/tutorial.md on: `python -m tests.controlplane.kubeadm` opens a shell.

API server, etcd, kube-proxy and kubectl are real, and so are the kernels of the nodes. A loop of this process stands
for what only runs with containers, the DaemonSet controller and kubelet: it starts kube-proxy on the nodes that the
DaemonSet of that name wants, and stops it on the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.lab import Lab, Node
from tests.lab.manifests import objects, realise

from . import ControlPlane, binaries, netns
from .client import ApiError, Object

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "shop"
ADDRESS, GATEWAY = "192.168.82.1", "192.168.82.2"
SYSTEM = "/api/v1/namespaces/kube-system"
DAEMONSET = "/apis/apps/v1/namespaces/kube-system/daemonsets"
LABELS = {"k8s-app": "kube-proxy"}


@contextmanager
def plane_of(lab: Lab) -> Iterator[ControlPlane]:
    """A control plane that the nodes of the lab reach."""
    name = f"akpk{os.getpid()}"
    agent = (lab.state / "agent.pid").read_text().strip()
    netns.add(name)
    try:
        netns.ip("-n", name, "link", "add", "lab", "type", "veth", "peer", "name", "plane", "netns", agent)
        lab.sh(f"ip addr add {GATEWAY}/24 dev plane\nip link set plane up\n")
        for words in (f"addr add {ADDRESS}/24 dev lab", "link set lab up", f"route add default via {GATEWAY}"):
            netns.ip("-n", name, *words.split())
        with ControlPlane(name, (ADDRESS,)) as plane:
            yield plane
    finally:
        netns.delete(name)


class Kubelets:
    """Starts and stops kube-proxy on the nodes as its DaemonSet says, and keeps a Pod in the API server for each."""

    def __init__(self, lab: Lab, plane: ControlPlane, work: Path) -> None:
        self._plane, self._work = plane, work
        self._nodes = {node.name: node for node in lab.nodes}
        # A node sees the machine's /tmp, and no home directory.
        self._binary = str(shutil.copy(binaries() / "kube-proxy", work / "kube-proxy"))
        self._kubeconfig = plane.kubeconfig(work / "kube-proxy.kubeconfig", "kube-proxy", ADDRESS)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended = threading.Event()
        self._turn()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for name in [*self._running]:
            self._stop(name)

    def _loop(self) -> None:
        while not self._ended.wait(0.5):
            try:
                self._turn()
            except ApiError as error:
                print(error, file=sys.stderr)

    def _turn(self) -> None:
        daemonset = self._plane.client.request("GET", f"{DAEMONSET}/kube-proxy")
        for node in self._plane.client.list_all("Node"):
            name = node["metadata"]["name"]
            if wanted(daemonset, node["metadata"].get("labels", {})):
                self._start(name)
            else:
                self._stop(name)

    def _start(self, name: str) -> None:
        if name in self._running:
            return
        config = {**kube_proxy_config(), "hostnameOverride": name}
        config["clientConnection"] = {"kubeconfig": str(self._kubeconfig)}
        file = self._work / f"{name}.kube-proxy.yaml"
        file.write_text(yaml.safe_dump(config))
        with (self._work / f"{name}.kube-proxy.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                self._nodes[name].enter([self._binary, f"--config={file}"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._plane.client.request("POST", f"{SYSTEM}/pods", pod_of(name))

    def _stop(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        end_kube_proxy(self._nodes[name])
        process.wait(20)
        if not self._ended.is_set():
            self._plane.client.request("DELETE", f"{SYSTEM}/pods/kube-proxy-{name}?gracePeriodSeconds=0")


def end_kube_proxy(node: Node) -> None:
    node.run(["sh", "-c", "kill $(pgrep -x kube-proxy)"], check=False)


def wanted(daemonset: Object, labels: dict[str, str]) -> bool:
    """Whether the DaemonSet wants a pod on a node with these labels; of its affinity, `DoesNotExist` is understood."""
    affinity = daemonset["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    keys = [each["key"] for term in terms for each in term["matchExpressions"] if each["operator"] == "DoesNotExist"]
    return not any(key in labels for key in keys)


def pod_of(node: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"kube-proxy-{node}", "namespace": "kube-system", "labels": LABELS},
        "spec": {**pod_spec(), "nodeName": node},
    }


def pod_spec() -> Object:
    image = "registry.k8s.io/kube-proxy:v1.37.1"
    return {"hostNetwork": True, "containers": [{"name": "kube-proxy", "image": image}]}


def kube_proxy_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())
    return config | {"mode": "nftables"}


def system_objects() -> Iterator[tuple[str, Object]]:
    """What kubeadm makes for kube-proxy, and the path of each."""
    data = {"config.conf": yaml.safe_dump(kube_proxy_config()), "kubeconfig.conf": "apiVersion: v1\n"}
    yield (
        f"{SYSTEM}/configmaps",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-proxy"}, "data": data},
    )
    template = {"metadata": {"labels": LABELS}, "spec": pod_spec()}
    spec = {"selector": {"matchLabels": LABELS}, "template": template}
    yield DAEMONSET, {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "kube-proxy"}, "spec": spec}


def write_home(lab: Lab, plane: ControlPlane, home: Path) -> None:
    """What an operator has: a kubeconfig, a key, and how to log in to the nodes."""
    for folder in (".kube", ".ssh", "inventory/group_vars/all"):
        (home / folder).mkdir(parents=True)
    plane.kubeconfig(home / ".kube" / "config", "admin", ADDRESS)
    key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "you", "-f", str(home / ".ssh" / "id_ed25519")]
    subprocess.run(key, check=True)
    login = yaml.safe_load(lab.inventory(home / "hosts.yml").read_text())["nodes"]["vars"]
    (home / "hosts.yml").unlink()
    (home / "inventory" / "group_vars" / "all" / "login.yml").write_text(yaml.safe_dump(login, explicit_start=True))


@contextmanager
def cluster(prefix: str, work: Path) -> Iterator[tuple[Lab, list[str], dict[str, str]]]:
    """The lab, and the command and the environment that start a shell on its control host, in work/home."""
    home = work / "home"
    home.mkdir()
    with Lab(prefix, 3) as lab, plane_of(lab) as plane:
        realise(lab, SHOP)
        plane.load(obj for obj in objects(SHOP) if obj["kind"] in ("Node", "Service", "EndpointSlice"))
        for path, obj in system_objects():
            plane.client.request("POST", path, obj)
        write_home(lab, plane, home)
        kubelets = Kubelets(lab, plane, work)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "K8S_"))}
        path = f"{Path(sys.executable).parent}:{binaries()}:{os.environ['PATH']}"
        environment |= {"HOME": str(home), "PATH": path, "ANSIBLE_COLLECTIONS_PATH": "/nonexistent", "PS1": "$ "}
        environment["ANSIBLE_DISPLAY_SKIPPED_HOSTS"] = "no"
        environment.pop("KUBECONFIG", None)
        try:
            yield lab, netns.command(plane.namespace, ["bash", "--norc"]), environment
        finally:
            kubelets.close()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="akp-tutorial-") as work:
        print("A cluster of three nodes starts; this takes about ten seconds.")
        with cluster(f"tutorial-{os.getpid()}", Path(work)) as (_lab, shell, environment):
            print("It is there. Follow docs/tutorial.md; `exit` removes it.")
            return subprocess.run(shell, env=environment, cwd=environment["HOME"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
