"""The collection: fifty nodes without news, and ten thousand Services from a real API server."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane import TOKENS, ControlPlane, netns
from tests.lab import Lab
from tests.lab.addresses import node_addresses, pod_cidrs

from . import ROOT, Measure, timed
from .cluster import write_cluster

BIN = Path(sys.executable).parent
NODES = 50
SERVICES, ENDPOINTS = 10_000, 10
ADDRESS = "192.168.79.2"
MIB = 1024.0
ENVIRONMENT = {
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_COLLECTIONS_PATH": "/nonexistent",
}


def measures(tmp: Path) -> Iterator[Measure]:
    """Both bars."""
    yield without_news(tmp)
    yield from snapshot(tmp)


def without_news(tmp: Path) -> Measure:
    """A sync of fifty nodes that have all they shall have, and the least that Ansible can do with as many."""
    raw = tmp / "raw.yml"
    task = {"ansible.builtin.raw": "true"}
    raw.write_text(yaml.safe_dump([{"hosts": "nodes", "gather_facts": False, "tasks": [task]}]))
    sync = ROOT / "playbooks" / "sync-services.yml"
    with Lab(f"bench-{os.getpid()}", NODES) as lab:
        inventory = lab.inventory(tmp / "hosts.yml")
        variables = {
            "kube_proxy_dir": str(tmp / "akp"),
            "kube_proxy_cluster_dir": str(_shop(tmp / "shop")),
            "kube_proxy_config": str(ROOT / "examples" / "shop" / "kube-proxy.yaml"),
        }
        argv = [str(BIN / "ansible-playbook"), "-i", str(inventory), "-e", json.dumps(variables)]
        environment = {**ENVIRONMENT, "ANSIBLE_FORKS": str(NODES)}
        timed([*argv, str(sync)], env=environment)
        pairs = [
            (timed([*argv, str(sync)], env=environment), timed([*argv, str(raw)], env=environment)) for _ in range(5)
        ]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Measure(f"sync-services.yml, {NODES} nodes, no news", ours, "a play with one raw task", theirs, 2.0)


def _shop(folder: Path) -> Path:
    """The shop of the examples on as many nodes as there are."""
    folder.mkdir()
    for file in (ROOT / "examples" / "shop").glob("*.yaml"):
        if file.name != "nodes.yaml":
            (folder / file.name).write_bytes(file.read_bytes())
    nodes = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"n{i}"},
            "spec": {"podCIDRs": list(pod_cidrs(i))},
            "status": {"addresses": [{"type": "InternalIP", "address": address} for address in node_addresses(i)]},
        }
        for i in range(1, NODES + 1)
    ]
    (folder / "nodes.yaml").write_text(yaml.safe_dump_all(nodes))
    return folder


def snapshot(tmp: Path) -> Iterator[Measure]:
    """A snapshot of a large cluster, and curl and json.loads of the same pages."""
    what = f"snapshot of {SERVICES:,} x {ENDPOINTS} from an API server"
    with _plane() as plane:
        plane.load(_objects(tmp / "cluster"))
        config = plane.kubeconfig(tmp / "kubeconfig", "akp")
        play = tmp / "snapshot.yml"
        task = {"agentless.kube_proxy.snapshot": {"kubeconfig": str(config), "dir": str(tmp / "akp")}}
        play.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]))
        runs = [(_snapshot(plane, play, tmp), _curl(plane, tmp)) for _ in range(3)]
        ours = statistics.median(seconds for (seconds, _memory), _curl_seconds in runs)
        theirs = statistics.median(seconds for _snapshot_run, seconds in runs)
        yield Measure(what, ours, "curl and json.loads of the same pages", theirs, 2.0)
        memory = max(memory for (_seconds, memory), _curl_seconds in runs)
        yield Measure("its memory", memory, "1 GiB", MIB, 1.0, "MiB")


def _objects(folder: Path) -> Iterator[dict[str, Any]]:
    """The large cluster, without what the API server gives objects itself."""
    write_cluster(folder, SERVICES, ENDPOINTS)
    for file in sorted(folder.glob("*.json")):
        for obj in json.loads(file.read_bytes())["items"]:
            for field in ("resourceVersion", "uid"):
                obj["metadata"].pop(field, None)
            for field in ("clusterIP", "clusterIPs"):
                obj.get("spec", {}).pop(field, None)
            if obj["kind"] == "Service":
                del obj["status"]
            yield obj


@contextlib.contextmanager
def _plane() -> Iterator[ControlPlane]:
    name = f"akpb{os.getpid()}"
    netns.add(name)
    netns.ip("-n", name, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    try:
        with ControlPlane(name, (ADDRESS,)) as plane:
            yield plane
    finally:
        netns.delete(name)


def _snapshot(plane: ControlPlane, play: Path, tmp: Path) -> tuple[float, float]:
    """Seconds of the task, and the largest process of the run in MiB."""
    program = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "print(done.stdout + done.stderr, file=sys.stderr)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.exit(done.returncode)\n"
    )
    argv = [sys.executable, "-c", program, str(BIN / "ansible-playbook"), "-v", str(play)]
    done = subprocess.run(
        netns.command(plane.namespace, argv),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp,
        env={**os.environ, **ENVIRONMENT},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stderr.split("=> ", 1)[1].split("\n\n", 1)[0])
    if result["counts"]["Service"] < SERVICES:
        raise SystemExit(f"only {result['counts']} were read")
    return float(result["seconds"]), int(done.stdout) / 1024


def _curl(plane: ControlPlane, tmp: Path) -> float:
    """All pages of the four lists with the same selectors, by curl, and then through json.loads."""
    pages = tmp / "pages"
    pages.mkdir(exist_ok=True)
    services = "labelSelector=%21service.kubernetes.io%2Fservice-proxy-name&fieldSelector=spec.clusterIP%21%3DNone"
    lists = (
        f"api/v1/services?{services}",
        "apis/discovery.k8s.io/v1/endpointslices?labelSelector=%21service.kubernetes.io%2Fheadless",
        "api/v1/nodes?x",
        "apis/networking.k8s.io/v1/servicecidrs?x",
    )
    curl = ["curl", "-s", "--cacert", str(plane.pki.ca), "-H", f"Authorization: Bearer {TOKENS['akp']}"]
    began, number = time.perf_counter(), 0
    for path in lists:
        token = ""
        while True:
            number += 1
            file = pages / f"{number}.json"
            url = f"https://{ADDRESS}:6443/{path}&limit=500&continue={token}"
            subprocess.run(netns.command(plane.namespace, [*curl, "-o", str(file), url]), check=True)
            token = json.loads(file.read_bytes())["metadata"].get("continue", "")
            if not token:
                break
    return time.perf_counter() - began
