# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The resources of the API that rules depend on, and how each is asked for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """One of the five resources, and the selectors for it."""

    name: str
    kind: str
    group: str  # the API group; the core group is empty
    version: str
    selectors: tuple[tuple[str, str], ...] = ()
    only: str = ""  # namespace/name of the one object that is read

    @property
    def api_version(self) -> str:
        """As objects spell it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        """Of the objects of all namespaces, or of the only one."""
        group = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        namespace, _slash, name = self.only.partition("/")
        return f"{group}/namespaces/{namespace}/{self.name}/{name}" if name else f"{group}/{self.name}"


SERVICES = Resource(
    "services",
    "Service",
    "",
    "v1",
    (
        ("labelSelector", "!service.kubernetes.io/service-proxy-name"),
        ("fieldSelector", "spec.clusterIP!=None"),
    ),
)
ENDPOINT_SLICES = Resource(
    "endpointslices",
    "EndpointSlice",
    "discovery.k8s.io",
    "v1",
    (("labelSelector", "!service.kubernetes.io/headless"),),
)
NODES = Resource("nodes", "Node", "", "v1")
# Those that no controller of the cluster writes, and that ask to be mirrored: all others have EndpointSlices.
ENDPOINTS = Resource(
    "endpoints",
    "Endpoints",
    "",
    "v1",
    (
        (
            "labelSelector",
            "!endpoints.kubernetes.io/managed-by,endpointslice.kubernetes.io/skip-mirror!=true,"
            "!service.kubernetes.io/headless",
        ),
    ),
)
SERVICE_CIDRS = Resource("servicecidrs", "ServiceCIDR", "networking.k8s.io", "v1")
CONFIGURATION = Resource("configmaps", "ConfigMap", "", "v1", only="kube-system/kube-proxy")
RESOURCES = (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS, ENDPOINTS)
