# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Userspace mode: at which port of a node the proxy of each service port listens.

kube-proxy draws the ports at random. Here they follow from the cluster alone: the older Service chooses first, and each
service port starts at a hash of its name and takes the next port that is free. So a new Service moves no port of an
older one, and all nodes have the same ports.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

from ..cluster.snapshot import Service
from .claims import age
from .config import ProxyConfig
from .endpoints import ServicePortKey
from .portals import PROTOCOLS, portals_of
from .warned import Warned


@dataclasses.dataclass(frozen=True)
class ProxyPorts:
    """The ports that service ports have, and what there is to say about others."""

    ports: Mapping[ServicePortKey, int] = dataclasses.field(default_factory=dict)
    warnings: tuple[Warned, ...] = ()


def proxy_ports(services: Iterable[Service], config: ProxyConfig) -> ProxyPorts:
    """The proxy port of every service port; TCP and UDP have ports of their own."""
    first, last = config.userspace.port_range
    size = last - first + 1
    taken: dict[str, set[int]] = {protocol: set() for protocol in PROTOCOLS}
    found: dict[ServicePortKey, int] = {}
    said: list[Warned] = []
    for service in sorted(services, key=age):
        title = f"Service/{service.namespace}/{service.name}"
        portals = portals_of(service)
        if portals.stopped_at:
            text = f"{title}: {portals.stopped_at} is of another family than the cluster IP; it, the addresses after it"
            said.append(Warned("left out", f"{text} and the node ports are left out, as with kube-proxy 1.25"))
        for name, protocol in dict.fromkeys((port.name, port.protocol) for port in service.ports):
            if protocol not in taken:
                text = f"{title}: port {name or '(no name)'}: {protocol.upper()} is not for userspace mode"
                said.append(Warned("left out", f"{text}; it is left out"))
                continue
            own = taken[protocol]
            if len(own) == size:
                text = f"{title}: port {name or '(no name)'}: portRange {first}-{last} has no port left for it"
                said.append(Warned("left out", f"{text}; it is left out"))
                continue
            offset = _hash(f"{service.namespace}/{service.name}:{name} {protocol}") % size
            while first + offset in own:
                offset = (offset + 1) % size
            own.add(first + offset)
            found[service.namespace, service.name, name, protocol] = first + offset
    return ProxyPorts(found, tuple(said))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
