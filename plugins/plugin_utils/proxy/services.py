# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Services to service ports: one record per (Service, port) and family, with all that rules ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..addresses import Family, family_of
from ..cluster.snapshot import PortSpec, Service
from .config import ProxyConfig
from .portals import MODE, with_portals


@dataclasses.dataclass(frozen=True, slots=True)
class ServicePort:
    """A port of a Service in one family."""

    namespace: str
    name: str
    port_name: str
    protocol: str  # lower case, as rules write it
    family: Family
    cluster_ip: str
    port: int
    node_port: int
    external_ips: tuple[str, ...]
    load_balancer_vips: tuple[str, ...]
    source_ranges: tuple[str, ...]  # empty = no firewall
    sticky_seconds: int  # 0 = no ClientIP affinity
    external_policy_local: bool
    internal_policy_local: bool
    health_check_node_port: int
    externally_accessible: bool
    annotations: tuple[tuple[str, str], ...] = ()

    @property
    def name_string(self) -> str:
        """`namespace/name:port`, the name that rules carry in their comments."""
        return f"{self.namespace}/{self.name}:{self.port_name}" if self.port_name else f"{self.namespace}/{self.name}"

    @property
    def key(self) -> str:
        """Unique name of this service port in its family."""
        return f"{self.name_string} {self.protocol}"

    @property
    def uses_cluster(self) -> bool:
        """Whether endpoints anywhere in the cluster are needed."""
        return not self.internal_policy_local or self.externally_accessible

    @property
    def uses_local(self) -> bool:
        """Whether a Local policy asks for the node's own endpoints."""
        return self.internal_policy_local or (self.external_policy_local and self.externally_accessible)


def cluster_ip(service: Service, family: Family) -> str | None:
    """The cluster IP of a family; it is found by its position in ipFamilies, not by how it looks."""
    if not service.ip_families:
        return service.cluster_ip if family_of(service.cluster_ip) is family else None
    for index, name in enumerate(service.ip_families):
        if name == family.value and index < len(service.cluster_ips):
            return service.cluster_ips[index]
    return None


def _source_ranges(service: Service, family: Family) -> tuple[str, ...]:
    own = tuple(cidr for cidr in service.source_ranges if family_of(cidr) is family)
    # One range that allows everybody makes the others pointless: no firewall at all.
    return () if any(cidr.endswith("/0") for cidr in own) else own


def _external_policy_local(service: Service) -> bool:
    reachable = service.type in ("LoadBalancer", "NodePort") or bool(service.external_ips)
    return service.external_policy_local and reachable


def has_health_check(service: Service) -> bool:
    """Whether load balancers ask nodes for the endpoints of a Service."""
    return bool(service.health_check_node_port and service.type == "LoadBalancer" and service.external_policy_local)


def _kept(service: Service, port: PortSpec, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses at which this port of a Service is not another Service's."""
    return tuple(ip for ip in addresses if (ip, port.protocol, port.port) not in service.lost)


def service_ports(service: Service, family: Family, config: ProxyConfig) -> Iterator[ServicePort]:
    """The service ports of a Service in a family; none if it has no cluster IP there."""
    if config.mode == MODE:
        service = with_portals(service)
    ip = cluster_ip(service, family)
    if ip is None:
        return
    own_external_ips = external_ips = tuple(ip for ip in service.external_ips if family_of(ip) is family)
    own_vips = vips = tuple(ip for ip in service.load_balancer_vips if family_of(ip) is family)
    external_local = _external_policy_local(service)
    internal_local = service.internal_policy_local and not config.ignores("ServiceInternalTrafficPolicy")
    health_check = service.health_check_node_port if has_health_check(service) else 0
    # Two ports of one name and protocol collide; the later one wins.
    unique: dict[tuple[str, str], PortSpec] = {(port.name, port.protocol): port for port in service.ports}
    for port in unique.values():
        if service.lost:
            if (ip, port.protocol, port.port) in service.lost:
                continue
            external_ips, vips = _kept(service, port, own_external_ips), _kept(service, port, own_vips)
            if ("", port.protocol, port.node_port) in service.lost:
                port = dataclasses.replace(port, node_port=0)
        yield ServicePort(
            namespace=service.namespace,
            name=service.name,
            port_name=port.name,
            protocol=port.protocol,
            family=family,
            cluster_ip=ip,
            port=port.port,
            node_port=port.node_port,
            external_ips=external_ips if config.feature("AllowServiceExternalIPs") else (),
            load_balancer_vips=vips,
            source_ranges=_source_ranges(service, family),
            sticky_seconds=service.sticky_seconds,
            external_policy_local=external_local,
            internal_policy_local=internal_local,
            health_check_node_port=health_check,
            externally_accessible=bool(port.node_port or vips or external_ips),
            annotations=service.annotations,
        )
