# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A Windows node: which load balancer takes a packet, as its documents tell. Windows itself cannot be followed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterator
from fractions import Fraction
from typing import Any

from ..addresses import endpoint_text
from ..backends.kernelspace import IPV6_FLAG, PROTOCOLS, Document
from ..backends.state import State

_PREVIEW = "kernelspace mode is a preview, never run on Windows: this is what the documents say"


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A packet's destination, and the load balancer that takes it, if one does."""

    node: str
    target: tuple[str, int, str]  # address, port and protocol
    port: str = ""  # "namespace/name:port"
    service: str = ""  # "namespace/name"
    document: Document | None = None

    @property
    def shares(self) -> dict[str, Fraction]:
        """Endpoints, each with how likely it is; one that is named twice is twice as likely."""
        if self.document is None:
            return {}
        ips = self.document["HostComputeEndpoints"]
        internal = self.document["PortMappings"][0]["InternalPort"]
        return {endpoint_text(ip, internal): Fraction(ips.count(ip), len(ips)) for ip in dict.fromkeys(ips)}


def taken(state: State, own: Container[str], target: tuple[str, int, str]) -> Taken:
    """What becomes of a packet to address, port and protocol on a node that has some addresses itself."""
    address, port, protocol = target
    wanted = (PROTOCOLS[protocol], port, IPV6_FLAG if ":" in address else 0)
    at_node: Taken | None = None
    for each in state.fragments:
        for _obj, text in each.own:
            document: Document = json.loads(text)
            mapping = document["PortMappings"][0]
            vips = document.get("FrontendVIPs", [])
            has = (mapping["Protocol"], mapping["ExternalPort"], document.get("Flags", 0) & IPV6_FLAG)
            found = Taken(state.node, target, each.name.partition(" ")[0], each.service, document)
            # A load balancer for health checks of the node has no such flag, in either family.
            if vips == [address] and has[:2] == wanted[:2]:
                return found
            if not vips and has == wanted and address in own:
                at_node = found
    return at_node or Taken(state.node, target)


def as_json(told: Taken) -> dict[str, Any]:
    """For programs. Whether Windows replaces the source is not known."""
    address, port, protocol = told.target
    return {
        "apiVersion": "akp/v2",
        "kind": "Explanation",
        "node": told.node,
        "mode": "kernelspace",
        "packet": {"destination": address, "port": port, "protocol": protocol},
        "outcome": "endpoints" if told.document else "passed",
        "service": told.service or None,
        "masquerade": None,
        "endpoints": [{"address": each, "share": float(share)} for each, share in told.shares.items()],
        "rules": [{"table": "hns", "chain": "loadBalancers", "rule": json.dumps(told.document)}]
        if told.document
        else [],
        "problems": [],
    }


def lines(told: Taken) -> Iterator[str]:
    """For people."""
    address, port, protocol = told.target
    where = f"{endpoint_text(address, port)}/{protocol} on {told.node}"
    if told.document is None:
        yield f"passed: no load balancer takes {where}"
        yield "  no Service has this destination, or none of its endpoints counts on this node"
    else:
        yield f"balanced: {where} is {told.port}, with {len(told.shares)} endpoints"
        yield from (f"  {each:<40} {float(share):6.1%}" for each, share in told.shares.items())
        yield f"  load balancer {json.dumps(told.document)}"
    yield f"  = note: {_PREVIEW}"
