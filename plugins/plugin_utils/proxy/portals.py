# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Userspace mode: the addresses and node ports of a Service that lead to its proxy, as kube-proxy 1.25 opens them."""

from __future__ import annotations

import dataclasses
from itertools import takewhile

from ..addresses import family_of
from ..cluster.snapshot import Service, Snapshot
from .config import ProxyConfig

PROTOCOLS = ("tcp", "udp")
MODE = "userspace"


@dataclasses.dataclass(frozen=True, slots=True)
class Portals:
    """The portals of a Service beside its cluster IP, as far as kube-proxy gets.

    It opens them one after the other in the family of the cluster IP. iptables refuses an address of the other family,
    and then kube-proxy opens no more, not even the node port.
    """

    external_ips: tuple[str, ...]
    load_balancer_vips: tuple[str, ...]
    stopped_at: str  # an address; empty if all were opened


def portals_of(service: Service) -> Portals:
    """Those of a Service."""
    family = family_of(service.cluster_ip)
    wanted = (*service.external_ips, *service.load_balancer_vips)
    opened = tuple(takewhile(lambda ip: family_of(ip) is family, wanted))
    count = len(service.external_ips)
    return Portals(opened[:count], opened[count:], wanted[len(opened)] if len(opened) < len(wanted) else "")


def with_portals(service: Service) -> Service:
    """A Service in the one family that kube-proxy 1.25 serves, with the portals that it opens."""
    portals = portals_of(service)
    ports = service.ports
    if portals.stopped_at:
        ports = tuple(dataclasses.replace(port, node_port=0) for port in ports)
    return dataclasses.replace(
        service,
        cluster_ips=(service.cluster_ip,),
        ip_families=(family_of(service.cluster_ip).value,),
        external_ips=portals.external_ips,
        load_balancer_vips=portals.load_balancer_vips,
        ports=tuple(port for port in ports if port.protocol in PROTOCOLS),
    )


def with_all_ingress(snapshot: Snapshot, config: ProxyConfig) -> Snapshot:
    """The cluster as the mode sees it: kube-proxy 1.25 did not know that a load balancer can be a proxy itself."""
    if config.mode != MODE or all(each.ingress_ips == each.load_balancer_vips for each in snapshot.services):
        return snapshot
    services = tuple(
        each
        if each.ingress_ips == each.load_balancer_vips
        else dataclasses.replace(each, load_balancer_vips=each.ingress_ips)
        for each in snapshot.services
    )
    return dataclasses.replace(snapshot, services=services)
