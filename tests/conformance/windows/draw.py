"""Drawn clusters with a Windows node: Services as for the other modes, a network and a configuration of Windows."""

from __future__ import annotations

import copy
import random
import uuid
from dataclasses import dataclass, replace
from typing import Any

from tests.conformance import draw
from tests.conformance.plan import IPV4, IPV6, internal_addresses, node_address, pod_cidr
from tests.conformance.undefined import parse

Object = dict[str, Any]

NETWORK_TYPES = ("L2Bridge", "Overlay")
VERSIONS = ("13.2", "15.5")
OLD = "9.5"  # of Windows Server 2019, which serves one family
SOURCE_VIP = {IPV4: "10.244.9.254", IPV6: "fd00:10:244:9::fffe"}
ROOT = "10.244.9.2"


@dataclass(frozen=True)
class Drawn:
    """A cluster, and the pods of its Windows node that the CNI plugin has made."""

    cluster: draw.Cluster
    local: tuple[str, ...]

    @property
    def families(self) -> tuple[str, ...]:
        """Those of the node; the first is the primary one."""
        primary = IPV6 if ":" in self.cluster.addresses[0] else IPV4
        return (primary, IPV4 if primary == IPV6 else IPV6)

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Where the pods of other nodes are; one node is not known yet."""
        own = int(self.cluster.node[1:])
        others = [index for index in range(1, draw.NODES) if index != own]
        return [(pod_cidr(i, family), node_address(i, family)) for i in others for family in (IPV4, IPV6)]


@dataclass(frozen=True)
class HostNetworking:
    """The service of a node: what is in it before kube-proxy comes."""

    drawn: Drawn
    network_type: str
    version: str

    def __str__(self) -> str:
        return f"{self.network_type}-{self.version}"

    @property
    def served(self) -> tuple[str, ...]:
        """The families for which kube-proxy works there."""
        both = self.network_type == "L2Bridge" and self.version != OLD
        return self.drawn.families if both else self.drawn.families[:1]

    @property
    def network(self) -> Object:
        policies = [
            {"Type": "RemoteSubnetRoute", "Settings": {"DestinationPrefix": prefix, "ProviderAddress": node}}
            for prefix, node in self.drawn.routes
        ]
        return {
            "ID": str(uuid.uuid5(uuid.NAMESPACE_DNS, "pods")), "Name": "pods", "Type": self.network_type,
            "Policies": policies, "SchemaVersion": {"Major": 2, "Minor": 0},
        }  # fmt: skip

    @property
    def endpoints(self) -> list[Object]:
        named = [(f"pod-{index}", ip) for index, ip in enumerate(self.drawn.local)] + [("root", ROOT)]
        return [
            {
                "ID": str(uuid.uuid5(uuid.NAMESPACE_DNS, ip)), "Name": name,
                "HostComputeNetwork": self.network["ID"], "IpConfigurations": [{"IpAddress": ip}],
                "SchemaVersion": {"Major": 2, "Minor": 0},
            }
            for name, ip in named
        ]  # fmt: skip


def draw_case(seed: int) -> Drawn:
    """Draw a cluster whose node runs Windows."""
    rng = random.Random(f"windows/{seed}")
    drawn = draw.cluster(seed, "iptables")
    objects = copy.deepcopy(drawn.objects)
    for obj in objects:
        if obj["kind"] == "Node" and obj["metadata"]["name"] == drawn.node:
            obj["metadata"]["labels"]["kubernetes.io/os"] = "windows"
        if obj["kind"] == "Service" and rng.random() < 0.2:
            obj["metadata"].setdefault("annotations", {})["preserve-destination"] = rng.choice(("true", "false"))
    primary = IPV6 if ":" in drawn.addresses[0] else IPV4
    winkernel = {
        "networkName": "pods", "rootHnsEndpointName": "root", "enableDSR": rng.random() < 0.5,
        "forwardHealthCheckVip": rng.random() < 0.5, "sourceVip": SOURCE_VIP[primary],
    }  # fmt: skip
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "kernelspace",
        "hostnameOverride": drawn.node, "winkernel": winkernel,
    }  # fmt: skip
    cluster = replace(drawn, mode="kernelspace", config=config, objects=tuple(objects))
    return Drawn(cluster, _local(rng, cluster))


def _local(rng: random.Random, cluster: draw.Cluster) -> tuple[str, ...]:
    """Most of the node's pods; the CNI plugin has not made the others yet.

    Where slices do not agree on which node has an address, such as that of a node, it is always there: otherwise
    kube-proxy takes it for all Services, or not for all of them, by the order in which a hash map names these.
    """
    nodes: dict[str, set[str | None]] = {}
    for obj in cluster.of("EndpointSlice"):
        for each in obj["endpoints"] or () if obj["addressType"] != "FQDN" else ():
            for address in each["addresses"]:
                nodes.setdefault(str(parse(address)), set()).add(each.get("nodeName"))
    own = internal_addresses(cluster.own_node())
    contested = {*own, *(ip for ip, found in nodes.items() if len(found) > 1)}
    here = sorted({ip for ip, found in nodes.items() if cluster.node in found} | set(own))
    return tuple(ip for ip in here if rng.random() < 0.9 or ip in contested)
