"""Clusters that kube-proxy itself treats in no fixed way: its result then depends on the order of a hash map."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Iterator
from typing import Any

Object = dict[str, Any]


def undefined(objects: Iterable[Object]) -> str | None:
    """Why a live kube-proxy's result is left to chance for these objects; None when it is not."""
    objects = list(objects)
    return _ambiguous_endpoint(objects) or _contested_frontend(objects)


def parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as kube-proxy reads it: leading zeros are decimal, IPv4-mapped is IPv4."""
    if ":" not in address:
        return ipaddress.ip_address(".".join(str(int(octet)) for octet in address.split(".")))
    parsed = ipaddress.IPv6Address(address)
    return parsed.ipv4_mapped or parsed


def _ambiguous_endpoint(objects: list[Object]) -> str | None:
    """Two slices that disagree on one ip:port, neither or both of them terminating: any of the two may win."""
    found: dict[tuple[Any, ...], set[str]] = {}
    for obj in objects:
        if obj["kind"] != "EndpointSlice" or obj["addressType"] == "FQDN":
            continue
        meta = obj["metadata"]
        owner = (meta["namespace"], meta.get("labels", {}).get("kubernetes.io/service-name"))
        for port in obj["ports"]:
            service_port = (*owner, port.get("name", ""), port.get("protocol", "TCP"))
            winners: dict[str, Object] = {}
            for endpoint in obj["endpoints"]:
                address = str(parse(endpoint["addresses"][0]))
                if address not in winners or not _terminating(endpoint):
                    winners[address] = endpoint
            for address, endpoint in winners.items():
                record = {k: endpoint.get(k) for k in ("conditions", "nodeName", "hints")}
                key = (*service_port, address, port.get("port"), _terminating(endpoint))
                found.setdefault(key, set()).add(json.dumps(record, sort_keys=True))
    for key, records in found.items():
        outranked = key[-1] and (*key[:-1], False) in found
        if len(records) > 1 and not outranked:
            return f"slices disagree on {key[:-1]}"
    return None


def _terminating(endpoint: Object) -> bool:
    return bool(endpoint.get("conditions", {}).get("terminating"))


def _contested_frontend(objects: list[Object]) -> str | None:
    """Two Services that claim one destination: the last one that was looked at has it, or the first one written."""
    owners: dict[tuple[object, ...], tuple[str, str]] = {}
    for obj in objects:
        if obj["kind"] == "Service":
            owner = (obj["metadata"]["namespace"], obj["metadata"]["name"])
            for frontend in frontends(obj):
                if owners.setdefault(frontend, owner) != owner:
                    return f"{owner} and {owners[frontend]} claim {frontend}"
    return None


def frontends(service: Object) -> Iterator[tuple[object, ...]]:
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return  # a name in DNS and nothing else, whatever its other fields say
    addresses = [a for a in spec.get("clusterIPs", []) if a != "None"] + spec.get("externalIPs", [])
    addresses += [i["ip"] for i in service.get("status", {}).get("loadBalancer", {}).get("ingress", []) if i.get("ip")]
    for port in spec.get("ports", []):
        for address in addresses:
            yield parse(address), port.get("protocol", "TCP"), port["port"]
        if port.get("nodePort"):
            yield "*", port.get("protocol", "TCP"), port["nodePort"]
