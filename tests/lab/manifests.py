"""Makes a lab be the cluster that manifests describe: pods from EndpointSlices, routes from LoadBalancer addresses.

The manifests' Nodes must be the lab's (see addresses.py); a difference is an error, not something to be smoothed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from .record import LabError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .lab import Lab

Object = dict[str, Any]


def objects(directory: Path) -> Iterator[Object]:
    """All objects of all files, Lists unpacked."""
    for path in sorted(directory.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document is not None:
                yield from document["items"] if document["kind"].endswith("List") else [document]


def of_kind(directory: Path, kind: str) -> Iterator[Object]:
    return (item for item in objects(directory) if item["kind"] == kind)


def realise(lab: Lab, directory: Path) -> None:
    """Makes every pod that an EndpointSlice names, with addresses and ports, and announces LoadBalancer addresses.

    A load balancer sends to the first node, or with externalTrafficPolicy Local to a node that has an endpoint.
    """
    check_nodes(lab, directory)
    pods: dict[str, tuple[str, list[str], set[tuple[str, int]]]] = {}
    served_by: dict[tuple[str, str], str] = {}
    for endpoint_slice in of_kind(directory, "EndpointSlice"):
        ports = {(port.get("protocol", "TCP").lower(), port["port"]) for port in endpoint_slice["ports"]}
        for endpoint in endpoint_slice["endpoints"]:
            name = endpoint["targetRef"]["name"]
            _node, addresses, serves = pods.setdefault(name, (endpoint["nodeName"], [], set()))
            addresses += [address for address in endpoint["addresses"] if address not in addresses]
            serves |= ports
            served_by.setdefault(service_of(endpoint_slice), endpoint["nodeName"])
    for name, (node, addresses, serves) in pods.items():
        lab.add_pod(name, node, addresses=addresses, serve=sorted(serves))
    for service in of_kind(directory, "Service"):
        local = service["spec"].get("externalTrafficPolicy") == "Local"
        key = (service["metadata"]["namespace"], service["metadata"]["name"])
        via = served_by[key] if local else lab.nodes[0].name
        for ingress in service.get("status", {}).get("loadBalancer", {}).get("ingress", []):
            lab.announce(ingress["ip"], via)


def service_of(endpoint_slice: Object) -> tuple[str, str]:
    metadata = endpoint_slice["metadata"]
    return metadata["namespace"], metadata["labels"]["kubernetes.io/service-name"]


def check_nodes(lab: Lab, directory: Path) -> None:
    described = {}
    for node in of_kind(directory, "Node"):
        addresses = [entry["address"] for entry in node["status"]["addresses"] if entry["type"] == "InternalIP"]
        described[node["metadata"]["name"]] = (tuple(addresses), tuple(node["spec"]["podCIDRs"]))
    real = {node.name: (node.addresses, node.pod_cidrs) for node in lab.nodes}
    if described != real:
        raise LabError(f"the manifests' nodes are not the lab's:\n  {described}\n  {real}")
