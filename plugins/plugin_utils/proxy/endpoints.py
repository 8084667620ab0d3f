# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""EndpointSlices to the endpoints of each service port: merged, deduplicated, ordered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ..addresses import Family, special
from ..cluster.snapshot import EndpointSlice
from .config import ProxyConfig

# namespace, Service name, port name, protocol
ServicePortKey: TypeAlias = tuple[str, str, str, str]


class Endpoint(NamedTuple):
    """An address and port that serves a service port; a tuple for the same reason as SliceEndpoint."""

    text: str  # ip:port, an IPv6 address in brackets
    ip: str
    port: int
    node_name: str
    ready: bool
    serving: bool
    terminating: bool
    zone_hints: frozenset[str]
    node_hints: frozenset[str]
    pod: str = ""  # for people


def known_slices(slices: Sequence[EndpointSlice], config: ProxyConfig) -> Sequence[EndpointSlice]:
    """Slices as they are, or without what the configuration has userspace mode ignore."""
    no_terminating, no_hints = config.ignores("ProxyTerminatingEndpoints"), config.ignores("TopologyAwareHints")
    if not (no_terminating or no_hints):
        return slices
    return [
        dataclasses.replace(
            each,
            endpoints=tuple(
                e._replace(zone_hints=frozenset(), node_hints=frozenset()) if no_hints else e
                for e in each.endpoints
                if not (no_terminating and e.terminating)
            ),
        )
        for each in slices
    ]


def merge_slices(slices: Iterable[EndpointSlice], family: Family) -> dict[ServicePortKey, tuple[Endpoint, ...]]:
    """The endpoints of every service port, sorted as byte strings of ip:port.

    An address that stands in two slices counts once; a terminating record never replaces another one.
    """
    merged: dict[ServicePortKey, dict[str, Endpoint]] = {}
    brackets = "[{}]:{}" if family is Family.IPV6 else "{}:{}"
    for each in slices:
        if each.address_type != family.value:
            continue
        for port in each.ports:
            number = port.port
            known = merged.setdefault((each.namespace, each.service, port.name, port.protocol), {})
            for source in each.endpoints:
                # The reader leaves such out and says so; nothing that leads to a node itself gets further than here.
                if special(source.address):
                    continue
                text = brackets.format(source.address, number)
                if source.terminating and text in known:
                    continue
                known[text] = Endpoint(text, source.address, number, *source[1:])
    return {key: tuple(known[text] for text in sorted(known)) for key, known in merged.items()}
