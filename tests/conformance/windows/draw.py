"""Drawn clusters with a Windows node: Services as for the other modes, a network and a configuration of Windows."""

from __future__ import annotations

import copy
import random
import uuid
from dataclasses import dataclass, replace
from typing import Any

from tests.conformance import draw
from tests.conformance.namespaces import NODE_MAC
from tests.conformance.plan import IPV4, IPV6, node_address, pod_cidr

Object = dict[str, Any]

NETWORK_TYPES = ("L2Bridge", "Overlay")
VERSIONS = ("9.5", "13.2", "15.5")
SOURCE_VIP = {IPV4: "10.244.9.254", IPV6: "fd00:10:244:9::fffe"}


@dataclass(frozen=True)
class WindowsCase:
    """A cluster, and the Host Networking Service of the node in it."""

    cluster: draw.Cluster
    network_type: str
    version: str
    local: tuple[str, ...]  # addresses of pods that the CNI plugin has made
    root: str

    @property
    def facts(self) -> Object:
        """What the node says of itself."""
        routes = [{"destinationPrefix": prefix, "providerAddress": node} for prefix, node in self._routes()]
        return {
            "hns": {
                "version": self.version, "networkType": self.network_type, "hostMac": NODE_MAC,
                "remoteSubnets": routes, "endpoints": [*self.local, self.root], "rootEndpoint": self.root,
            }
        }  # fmt: skip

    def _routes(self) -> list[tuple[str, str]]:
        own = int(self.cluster.node[1:])
        others = [index for index in range(1, draw.NODES) if index != own]
        return [(pod_cidr(i, family), node_address(i, family)) for i in others for family in (IPV4, IPV6)]

    @property
    def network(self) -> Object:
        """The network as the service has it."""
        policies = [
            {"Type": "RemoteSubnetRoute", "Settings": {"DestinationPrefix": prefix, "ProviderAddress": node}}
            for prefix, node in self._routes()
        ]
        return {
            "ID": str(uuid.uuid5(uuid.NAMESPACE_DNS, "pods")), "Name": "pods", "Type": self.network_type,
            "Policies": policies, "SchemaVersion": {"Major": 2, "Minor": 0},
        }  # fmt: skip

    @property
    def endpoints(self) -> list[Object]:
        """The endpoints that are there before kube-proxy comes."""
        named = [("", ip) for ip in self.local] + [("root", self.root)]
        return [
            {
                "ID": str(uuid.uuid5(uuid.NAMESPACE_DNS, ip)), "Name": name or f"pod-{index}",
                "HostComputeNetwork": self.network["ID"], "IpConfigurations": [{"IpAddress": ip}],
                "SchemaVersion": {"Major": 2, "Minor": 0},
            }
            for index, (name, ip) in enumerate(named)
        ]  # fmt: skip

    def after(self, cluster: draw.Cluster) -> WindowsCase:
        """The same node in a later state of the cluster."""
        return replace(self, cluster=cluster)


def case(seed: int, network_type: str, version: str) -> WindowsCase:
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
    here = {
        address
        for obj in cluster.of("EndpointSlice")
        for each in obj["endpoints"] or ()
        if each.get("nodeName") == cluster.node
        for address in each["addresses"]
    }
    local = tuple(ip for ip in sorted(here) if rng.random() < 0.9)
    return WindowsCase(cluster, network_type, version, local, "10.244.9.2")
