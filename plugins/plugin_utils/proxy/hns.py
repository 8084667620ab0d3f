# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The Host Networking Service of a Windows node, as far as load balancers depend on it.

A Node object tells nothing of it. Facts of a node have it under `hns`:

    {"hns": {"version": "13.2", "networkType": "Overlay", "hostMac": "00:15:5d:00:00:01",
             "remoteSubnets": [{"destinationPrefix": "10.244.1.0/24", "providerAddress": "192.168.1.11"}],
             "endpoints": ["10.244.3.2"], "rootEndpoint": "10.244.3.2"}}
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ..addresses import any_contains, parse_cidr, parse_ip
from ..cluster.snapshot import Snapshot
from ..texts import shortened, visible
from .services import has_health_check
from .warned import Warned

Version: TypeAlias = tuple[int, int]

NETWORK_TYPES = ("L2Bridge", "Overlay")
_MAC = re.compile(r"[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}")
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")


class InvalidHns(ValueError):
    """Facts about the Host Networking Service that cannot be used; the message names the field."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostNetwork:
    """What the service of a node can do, and the network that its pods are on."""

    version: Version = (13, 2)  # Windows Server 2022
    overlay: bool = False
    host_mac: str = ""  # of the interface with the node's address, as 00:15:5d:00:00:01
    remote_subnets: tuple[tuple[str, str], ...] = ()  # prefix, and the node that leads there
    endpoints: frozenset[str] | None = None  # addresses of pods that the CNI plugin has made; None: not known
    root_endpoint: str = ""  # address of the endpoint that winkernel.rootHnsEndpointName names; empty: there is none

    @property
    def does_dsr(self) -> bool:
        """Whether load balancers can answer past the node that they came in by."""
        return (9, 3) <= self.version < (10, 0) or self.version >= (10, 2)

    @property
    def does_dual_stack(self) -> bool:
        """Whether both families can be served."""
        return self.version >= (11, 10) and not self.overlay

    def provider(self, ip: str) -> str:
        """The node that leads to an address, or that it is the address of; the last route that fits wins."""
        found = [node for prefix, node in self.remote_subnets if node == ip or any_contains((prefix,), ip)]
        return found[-1] if found else ""


def host_network(told: object) -> HostNetwork:
    """The service that facts of a node describe; InvalidHns names what cannot be used."""
    if not isinstance(told, Mapping):
        raise InvalidHns("hns: must be a mapping")
    return _Reader(told).network()


def parse_mac(text: object) -> str:
    """A MAC address as 00:15:5d:00:00:01; empty if the text is none."""
    return text.lower().replace("-", ":") if isinstance(text, str) and _MAC.fullmatch(text) else ""


def health_checks_lost(node: str, snapshot: Snapshot) -> Iterator[Warned]:
    """The Services whose load balancer asks a health check port, which no Windows node can answer without an agent."""
    for each in snapshot.services:
        if has_health_check(each):
            text = f"Service/{each.namespace}/{each.name}: load balancers get no answer at healthCheckNodePort there"
            yield Warned("not served by Windows nodes", f"node {node}: {text}")


class _Reader:
    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told

    def network(self) -> HostNetwork:
        kind = self._text("networkType", "L2Bridge")
        if kind.lower() not in map(str.lower, NETWORK_TYPES):
            raise self._wrong("networkType", kind, f"one of {', '.join(NETWORK_TYPES)}")
        version = _VERSION.fullmatch(self._text("version", "13.2"))
        if version is None:
            raise self._wrong("version", self._told["version"], "MAJOR.MINOR")
        told = self._text("hostMac", "")
        mac = parse_mac(told)
        if told and not mac:
            raise self._wrong("hostMac", told, "a MAC address")
        known = self._list("endpoints") if "endpoints" in self._told else None
        root = self._text("rootEndpoint", "")
        return HostNetwork(
            version=(int(version[1]), int(version[2])),
            overlay=kind.lower() == "overlay",
            host_mac=mac,
            remote_subnets=tuple(self._route(each) for each in self._list("remoteSubnets")),
            endpoints=None if known is None else frozenset(self._ip("endpoints", each) for each in known),
            root_endpoint=self._ip("rootEndpoint", root) if root else "",
        )

    def _route(self, entry: object) -> tuple[str, str]:
        route = entry if isinstance(entry, Mapping) else {}
        text = route.get("destinationPrefix")
        prefix = parse_cidr(text) if isinstance(text, str) else None
        if prefix is None:
            raise self._wrong("remoteSubnets", entry, "a destinationPrefix and a providerAddress")
        return prefix, self._ip("remoteSubnets", route.get("providerAddress"))

    def _text(self, field: str, default: str) -> str:
        value = self._told.get(field, default)
        if not isinstance(value, str):
            raise self._wrong(field, value, "a text")
        return value

    def _list(self, field: str) -> list[Any]:
        value = self._told.get(field, [])
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        return value

    def _ip(self, field: str, value: object) -> str:
        ip = parse_ip(value) if isinstance(value, str) else None
        if ip is None:
            raise self._wrong(field, value, "an IP address")
        return ip

    def _wrong(self, field: str, value: object, wanted: str) -> InvalidHns:
        shown = visible(shortened(repr(value), 80))
        return InvalidHns(f"hns.{field}: must be {wanted}, not {shown}")
