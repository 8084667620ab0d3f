# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The cluster as far as rules depend on it: validated, immutable, free of anything a rule line must not hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

# Where packets go: address, protocol and port. A node port has no address of its own.
Destination: TypeAlias = tuple[str, str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class PortSpec:
    """One entry of a Service's `spec.ports`."""

    name: str
    protocol: str  # tcp, udp or sctp
    port: int
    node_port: int  # 0 = none


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A Service that kube-proxy would have listed."""

    namespace: str
    name: str
    type: str
    cluster_ip: str
    cluster_ips: tuple[str, ...]
    ip_families: tuple[str, ...]
    external_ips: tuple[str, ...]
    load_balancer_vips: tuple[str, ...]  # ingress entries with an ip and an ipMode other than Proxy
    source_ranges: tuple[str, ...]
    sticky_seconds: int  # 0 = no ClientIP affinity
    external_policy_local: bool
    internal_policy_local: bool
    health_check_node_port: int
    ports: tuple[PortSpec, ...]
    annotations: tuple[tuple[str, str], ...] = ()  # only ours; never part of a rule line
    created: str = ""  # as the API server writes it, so that the older one sorts first; empty where it is not known
    ingress_ips: tuple[str, ...] = ()  # all ingress entries with an ip, whatever their ipMode
    lost: frozenset[Destination] = frozenset()  # destinations that it claims and does not get


@dataclasses.dataclass(frozen=True, slots=True)
class SlicePort:
    """One entry of an EndpointSlice's `ports` that names a port."""

    name: str
    protocol: str
    port: int


class SliceEndpoint(NamedTuple):
    """One entry of an EndpointSlice's `endpoints`, with the API's defaults filled in.

    A tuple, which is made four times as fast as a frozen dataclass: clusters have a hundred thousand of them.
    """

    address: str
    node_name: str
    ready: bool
    serving: bool
    terminating: bool
    zone_hints: frozenset[str]
    node_hints: frozenset[str]
    pod: str = ""  # the name of the Pod, in the namespace of the slice; no rule depends on it


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointSlice:
    """An EndpointSlice of addresses of one family, and the Service that owns it."""

    namespace: str
    name: str
    service: str
    address_type: str
    ports: tuple[SlicePort, ...]
    endpoints: tuple[SliceEndpoint, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoints:
    """An Endpoints object, which has the name of its Service, as the EndpointSlices that it stands for."""

    namespace: str
    name: str
    slices: tuple[EndpointSlice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A Node as far as rules on it, or an inventory of it, depend on it."""

    name: str
    addresses: tuple[tuple[str, str], ...]  # (type, value) in status order
    zone: str
    pod_cidrs: tuple[str, ...]
    cpus: int | None
    labels: tuple[tuple[str, str], ...]
    ready: bool
    leaving: bool = False  # it is being deleted, or the cluster autoscaler is about to

    @property
    def windows(self) -> bool:
        """Whether it runs Windows."""
        return ("kubernetes.io/os", "windows") in self.labels


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceCIDR:
    """A ServiceCIDR."""

    name: str
    cidrs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something in the input that was left out, and why."""

    kind: str
    namespace: str
    name: str
    field: str
    reason: str
    source: str = ""  # the file it came from

    def __str__(self) -> str:
        where = "/".join(part for part in (self.kind, self.namespace, self.name or "(no name)") if part)
        return ": ".join(part for part in (self.source, where, self.field, self.reason) if part)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All facts of one moment. Objects are sorted by namespace and name, so input order never matters."""

    services: tuple[Service, ...]
    slices: tuple[EndpointSlice, ...]
    nodes: tuple[Node, ...]
    service_cidrs: tuple[ServiceCIDR, ...]
    problems: tuple[Problem, ...] = ()
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind -> how many were not read

    def node(self, name: str) -> Node | None:
        """The Node of that name."""
        return next((node for node in self.nodes if node.name == name), None)
