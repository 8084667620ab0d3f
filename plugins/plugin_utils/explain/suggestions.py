# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The right question that is nearest to a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..addresses import endpoint_text, family_of, is_loopback, number_of, parse_ip
from ..cluster.slices import LABEL_SERVICE_NAME
from ..cluster.snapshot import Service
from .intent import Place
from .packet import Packet

_MOST = 5
_SCHEME = re.compile(r"\w+://")


def near(given: str, names: Sequence[str]) -> str:
    """Names that are written in a similar way; empty if there are none."""
    import difflib  # only a wrong question needs it

    return _mean(difflib.get_close_matches(given, names, _MOST, 0.6))


def same_name(names: Iterable[str], name: str) -> str:
    """Of names with a namespace, those that are equal but for the namespace; empty if there are none."""
    return _mean(list(dict.fromkeys(each for each in names if each.partition("/")[2] == name))[:_MOST])


def _mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def listed(names: Sequence[str]) -> str:
    """What there is instead."""
    return f"; it has {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}" if names else "; it has none"


def meant(text: str, services: Iterable[Service], node: str) -> str:
    """The destination that other tools would write like this: a URL, a DNS name, a name alone, a port alone."""
    bare = _SCHEME.sub("", text, count=1).partition("/")[0] if _SCHEME.match(text) else text
    host, _colon, port = bare.partition(":")
    if bare != text and parse_ip(host):
        return _mean([f"{host}:{port or 80}/tcp"])
    number = host or port
    if number.isdigit():
        claimed = any(str(each.node_port) == number for service in services for each in service.ports)
        return _mean([f"{node}:{number}"] if claimed else [f"ADDRESS:{number}"])
    name, _dot, rest = host.partition(".")
    namespace = rest.partition(".")[0]
    known = [each for each in services if not namespace or each.namespace == namespace]
    found = [f"{each.namespace}/{each.name}:{_port(each, port)}" for each in known if each.name == name and each.ports]
    return _mean(sorted(found)[:_MOST]) or near(f"{namespace}/{name}", sorted(f"{s.namespace}/{s.name}" for s in known))


def _port(service: Service, wanted: str) -> str:
    """The port that was asked for by name or number, else the first one."""
    names = {str(known): each.name or str(each.port) for each in service.ports for known in (each.name, each.port)}
    first = service.ports[0]
    return names.get(wanted.partition("/")[0], first.name or str(first.port))


def without_rules(objects: Iterable[tuple[str, Mapping[str, Any]]], service: tuple[str, str]) -> str:
    """Why a Service that is there has no rules; empty if it is not there. Objects are as they were printed."""
    for kind, each in objects:
        metadata, spec = each.get("metadata") or {}, each.get("spec") or {}
        if kind != "Service" or (metadata.get("namespace") or "default", metadata.get("name")) != service:
            continue
        title = "/".join(service)
        if spec.get("type") == "ExternalName":
            return f"{title}: is of type ExternalName: clients are told the name {spec.get('externalName')}, by DNS"
        if spec.get("clusterIP") == "None":
            return f"{title}: is headless: clients get the addresses of its endpoints from DNS, and no node has rules"
        return f"{title}: has no cluster IP, so no node has rules for it"
    return ""


def endpoint_of(objects: Iterable[tuple[str, Mapping[str, Any]]], address: str) -> str:
    """The Services that have an address as an endpoint; empty if none has. Objects are as they were printed."""
    found = dict.fromkeys(
        f"{metadata.get('namespace') or 'default'}/{owner}"
        for kind, each in objects
        if kind == "EndpointSlice"
        and (metadata := each.get("metadata") or {})
        and (owner := (metadata.get("labels") or {}).get(LABEL_SERVICE_NAME))
        and any(address in (endpoint.get("addresses") or ()) for endpoint in each.get("endpoints") or ())
    )
    return f"{address} is an endpoint of {', '.join(list(found)[:_MOST])}: ask for that Service" if found else ""


def nearest(services: Iterable[Service], place: Place, packet: Packet) -> str:
    """Where no Service is, the one that is nearest: other ports of the address, or the address of the port."""
    here: list[str] = []
    elsewhere: list[tuple[int, str]] = []
    own, family = place.is_own(packet.destination), family_of(packet.destination)
    for service in services:
        addresses = {*service.cluster_ips, service.cluster_ip, *service.external_ips, *service.load_balancer_vips}
        for port in service.ports:
            title = f"/{port.protocol} ({service.namespace}/{service.name})"
            if packet.destination in addresses:
                here.append(f"{endpoint_text(packet.destination, port.port)}{title}")
            elif own and port.node_port:
                here.append(f"{endpoint_text(packet.destination, port.node_port)}{title}")
            elif port.port == packet.port:
                for ip in addresses:
                    if family_of(ip) is family:
                        distance = abs(number_of(ip) - number_of(packet.destination))
                        elsewhere.append((distance, f"{endpoint_text(ip, port.port)}{title}"))
    if here:
        return f"Services answer there at {', '.join(here[:_MOST])}{', …' if len(here) > _MOST else ''}"
    if elsewhere and not is_loopback(packet.destination):
        return f"no Service has this address; the nearest one with that port is {min(elsewhere)[1]}"
    return ""
