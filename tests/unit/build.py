"""Services, EndpointSlices and Nodes as the API server prints them, and the state that follows from them.

Keyword arguments are the API's own field names, so that a test reads like the manifest it stands for.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from agentless_kube_proxy import backends
from agentless_kube_proxy.addresses import family_of
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.cluster.objects import Reader
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.proxy.config import ProxyConfig
from agentless_kube_proxy.proxy.config_document import parse_config
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.policy import VipPolicy, under_policy
from agentless_kube_proxy.proxy.view import ClusterView, NodeView

Object = dict[str, Any]

CLUSTER_CIDR = "10.244.0.0/16,fd00:10:244::/56"


def port(number: int = 80, name: str = "http", protocol: str = "TCP", **fields: Any) -> Object:
    """An entry of a Service's spec.ports."""
    return {"name": name, "port": number, "protocol": protocol, **fields}


def service(
    name: str = "web",
    namespace: str = "shop",
    *,
    ports: Any = None,
    ingress: tuple[Any, ...] = (),
    labels: Object | None = None,
    annotations: Object | None = None,
    **spec: Any,
) -> Object:
    """A Service; ingress entries are load balancer addresses, or mappings where one has an ipMode."""
    entries = [{"ip": entry} if isinstance(entry, str) else entry for entry in ingress]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": name, "labels": labels, "annotations": annotations},
        "spec": {"clusterIP": "10.96.7.7", "ports": [port()] if ports is None else ports, **spec},
        "status": {"loadBalancer": {"ingress": entries} if entries else {}},
    }


def dual_stack(name: str = "web", namespace: str = "shop", **spec: Any) -> Object:
    """A Service with a cluster IP of either family."""
    families = {"ipFamilies": ["IPv4", "IPv6"], "clusterIPs": ["10.96.7.7", "fd00:10:96::77"]}
    return service(name, namespace, **{**families, **spec})


def endpoint(
    *addresses: str,
    node: str | None = "n1",
    zones: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
    **conditions: Any,
) -> Object:
    """An entry of an EndpointSlice's endpoints; zones and nodes are its hints."""
    made: Object = {"addresses": list(addresses), "conditions": conditions}
    if node is not None:
        made["nodeName"] = node
    hints = {"forZones": [{"name": zone} for zone in zones], "forNodes": [{"name": each} for each in nodes]}
    if any(hints.values()):
        made["hints"] = {key: value for key, value in hints.items() if value}
    return made


def slice_of(
    service: str = "web",
    *endpoints: Object | str,
    namespace: str = "shop",
    name: str = "",
    ports: Any = None,
    labels: Object | None = None,
    **fields: Any,
) -> Object:
    """An EndpointSlice of a Service; an endpoint given as an address is a ready one on node n1."""
    entries = [endpoint(entry) if isinstance(entry, str) else entry for entry in endpoints]
    first = entries[0]["addresses"][0] if entries and entries[0]["addresses"] else "10.244.1.1"
    family = family_of(first).value
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace,
            "name": name or f"{service}-{family.lower()}",
            "labels": {"kubernetes.io/service-name": service} if labels is None else labels,
        },
        "addressType": family,
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}] if ports is None else ports,
        "endpoints": entries,
        **fields,
    }


def node(
    name: str = "n1",
    *addresses: str,
    zone: str = "",
    pod_cidrs: tuple[str, ...] = ("10.244.1.0/24", "fd00:10:244:1::/64"),
    cpu: str = "2",
) -> Object:
    """A Node; its addresses are InternalIPs unless written as TYPE=ADDRESS."""
    pairs = [text.split("=", 1) if "=" in text else ("InternalIP", text) for text in addresses or ("172.18.0.11",)]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone} if zone else {}},
        "spec": {"podCIDRs": list(pod_cidrs)},
        "status": {
            "addresses": [{"type": sort, "address": address} for sort, address in pairs],
            "capacity": {"cpu": cpu},
        },
    }


def config(**fields: Any) -> ProxyConfig:
    """A KubeProxyConfiguration."""
    return parse_config(document(**fields))


def document(**fields: Any) -> Object:
    """The YAML of a KubeProxyConfiguration, parsed."""
    return {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", **fields}


def snapshot(*objects: Any) -> Snapshot:
    """What is read from these objects."""
    reader = Reader()
    for each in objects:
        reader.add(each)
    return reader.snapshot()


def view(*objects: Any, on: str = "n1", facts: Object | None = None, **fields: Any) -> NodeView:
    """What node `on` sees of these objects. A Node is made up where none is given; fields are configuration."""
    read = snapshot(*objects) if any(each.get("kind") == "Node" for each in objects) else snapshot(*objects, node(on))
    assert not read.problems, read.problems
    known = read.node(on)
    assert known is not None
    settings = config(**{"clusterCIDR": CLUSTER_CIDR, **fields})
    allowed, _said = under_policy(read, settings, VipPolicy())
    return ClusterView(allowed, settings).node_view(node_facts(known, facts))


def render(*objects: Any, on: str = "n1", facts: Object | None = None, **fields: Any) -> State:
    """The state of node `on`."""
    seen = view(*objects, on=on, facts=facts, **fields)
    return backends.renderer(seen.config).state(seen)


NO_NFACCT: Object = {"capabilities": {"nfacct": False}}


def chain(state: State, table: str, name: str, family: str = "IPv4") -> str:
    """The rules of a chain, as iptables-save prints them."""
    return str(dict(state.objects())[family, table, name])


# Names that stand for all files of a tool, one after the other.
FILES = {
    "iptables.rules": r"iptables-\d-.*",
    "ip6tables.rules": r"ip6tables-\d-.*",
    "nftables.nft": r"nftables-\d-.*",
    "ipset.rules": r"ipset-\d-.*",
    "ipvs.rules": r"ipvs-\d-.*",
}


def file(state: State, name: str) -> str:
    """A file of the bundle, or all files of a tool."""
    return joined(dict(backends.files(state)), name)


def joined(files: dict[str, str], name: str) -> str:
    """A file, or all files of a tool."""
    return (
        files[name]
        if name in files
        else "".join(files[each] for each in sorted(files) if re.fullmatch(FILES[name], each))
    )


def text(rules: str) -> str:
    """Rules from an indented block of a test; those of the other lines are none."""
    return textwrap.dedent(rules).lstrip("\n")
