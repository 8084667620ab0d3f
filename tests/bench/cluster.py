"""A large cluster as files, the same one at every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NODES = 100


def write_cluster(directory: Path, services: int, endpoints: int, *, local_share: float = 0.0) -> None:
    """`services` Services of one port with `endpoints` endpoints each; a share of them with policy Local."""
    directory.mkdir(parents=True, exist_ok=True)
    every = round(1 / local_share) if local_share else 0
    lists: dict[str, list[dict[str, Any]]] = {
        "services": [_service(i, local=bool(every) and i % every == 0) for i in range(services)],
        "endpointslices": [_slice(i, endpoints) for i in range(services)],
        "nodes": [_node(i) for i in range(NODES)],
    }
    for name, items in lists.items():
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        (directory / f"{name}.json").write_text(text, encoding="utf-8")


def write_config(file: Path, mode: str) -> None:
    """A KubeProxyConfiguration of that mode for the cluster."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clusterCIDR": "10.128.0.0/9",
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    file.write_text(json.dumps(config), encoding="utf-8")


def _service(i: int, *, local: bool) -> dict[str, Any]:
    ip = f"10.{96 + i // 65536}.{i // 256 % 256}.{i % 256}"
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "clusterIP": ip,
        "clusterIPs": [ip],
        "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack",
        "sessionAffinity": "None",
        "internalTrafficPolicy": "Cluster",
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
    }
    if local:
        spec |= {"type": "NodePort", "externalTrafficPolicy": "Local"}
        spec["ports"][0]["nodePort"] = 30000 + i % 2768
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"svc-{i}", "namespace": f"ns-{i % 50}", "resourceVersion": str(i), "uid": f"uid-{i}"},
        "spec": spec,
        "status": {"loadBalancer": {}},
    }


def _slice(i: int, endpoints: int) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"svc-{i}-abcde",
            "namespace": f"ns-{i % 50}",
            "labels": {"kubernetes.io/service-name": f"svc-{i}"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [_endpoint(i, i * endpoints + j, j) for j in range(endpoints)],
    }


def _endpoint(service: int, number: int, index: int) -> dict[str, Any]:
    return {
        "addresses": [f"10.{128 + number // 65536}.{number // 256 % 256}.{number % 256}"],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "nodeName": f"node-{number % NODES}",
        "zone": "zone-a",
        "targetRef": {"kind": "Pod", "namespace": f"ns-{service % 50}", "name": f"svc-{service}-{index}"},
    }


def _node(i: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"node-{i}", "labels": {"topology.kubernetes.io/zone": "zone-a"}},
        "spec": {"podCIDRs": [f"10.{128 + i}.0.0/16"]},
        "status": {"addresses": [{"type": "InternalIP", "address": f"192.168.{i // 250}.{i % 250 + 1}"}]},
    }
