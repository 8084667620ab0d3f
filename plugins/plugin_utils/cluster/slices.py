# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""EndpointSlices, as the API server or kubectl print them, to validated facts.

A hundred thousand endpoints are read in one go, so the way of one that is right is short; only where something is wrong
is it looked at again, to say what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..addresses import family_of, parse_ip, special
from . import fields
from .fields import InvalidObject, Object, Skipped
from .snapshot import EndpointSlice, SliceEndpoint, SlicePort

LABEL_HEADLESS = "service.kubernetes.io/headless"
LABEL_SERVICE_NAME = "kubernetes.io/service-name"

Tell: TypeAlias = Callable[[str, str], None]

NO_HINTS: frozenset[str] = frozenset()
# The API's three-valued booleans; whatever else stands there is found by not being a key.
_UNLESS_FALSE = {None: True, True: True, False: False}
_IF_TRUE = {None: False, True: True, False: False}


def read_slice(obj: Object, problem: Tell) -> EndpointSlice:
    """An EndpointSlice of IP addresses; what of it cannot be used is told, by field and reason."""
    metadata = fields.typed(obj, "", "metadata", dict, {})
    name = fields.object_name(metadata, fields.DNS_SUBDOMAIN, "DNS subdomain")
    namespace = fields.namespace(metadata)
    labels = fields.typed(metadata, "metadata", "labels", dict, {})
    if LABEL_HEADLESS in labels:
        raise Skipped("EndpointSlice of a headless Service")
    service = labels.get(LABEL_SERVICE_NAME)
    if not isinstance(service, str) or not service:
        raise InvalidObject(f"metadata.labels[{LABEL_SERVICE_NAME}]", "is missing, so no Service owns it")
    if not fields.DNS_LABEL.fullmatch(service):
        raise InvalidObject(f"metadata.labels[{LABEL_SERVICE_NAME}]", f"{fields.shown(service)} is no DNS label")
    address_type = obj.get("addressType")
    if address_type == "FQDN":
        raise Skipped("EndpointSlice of addressType FQDN")
    if address_type not in ("IPv4", "IPv6"):
        raise InvalidObject("addressType", f"{fields.shown(address_type)} is not IPv4, IPv6 or FQDN")
    return EndpointSlice(
        namespace=namespace,
        name=name,
        service=service,
        address_type=address_type,
        ports=tuple(
            SlicePort(fields.port_name(entry, path), fields.protocol(entry, path), number)
            for path, entry in fields.mappings(obj, "", "ports")
            # A port without a number means "all ports", which kube-proxy does not support. One without a name, as in a
            # manifest that was never stored, has the empty one: the API server fills that in.
            if (number := fields.port_number(entry, path, "port", zero=True))
        ),
        endpoints=tuple(_endpoints(obj, address_type, problem)),
    )


def _endpoints(obj: Object, address_type: str, problem: Tell) -> Iterator[SliceEndpoint]:
    for index, entry in enumerate(fields.typed(obj, "", "endpoints", list, [])):
        try:
            addresses = entry.get("addresses")
            if not addresses:
                continue
            address = parse_ip(addresses[0])
            if address is None or family_of(address).value != address_type:
                field = f"endpoints[{index}].addresses[0]"
                reason = f"{fields.shown(addresses[0])} is not an {address_type} address; the endpoint is left out"
                problem(field, reason)
                continue
            if reason := special(address):
                problem(f"endpoints[{index}].addresses[0]", f"{address} {reason}; the endpoint is left out")
                continue
            conditions = entry.get("conditions") or {}
            hints = entry.get("hints")
            yield SliceEndpoint(
                address,
                (entry.get("nodeName") or "") + "",  # a TypeError unless it is a string
                _UNLESS_FALSE[conditions.get("ready")],
                _UNLESS_FALSE[conditions.get("serving")],
                _IF_TRUE[conditions.get("terminating")],
                _hints(hints, "forZones") if hints else NO_HINTS,
                _hints(hints, "forNodes") if hints else NO_HINTS,
                pod_name(entry.get("targetRef")),
            )
        except (AttributeError, KeyError, TypeError):
            # A hundred thousand endpoints are read without looking twice; what went wrong is found out here.
            problem(*_wrong_member(f"endpoints[{index}]", entry))


def pod_name(reference: object) -> str:
    """The name of the Pod behind an endpoint. No rule has it, so one that is no name is left out without a word."""
    if not isinstance(reference, dict) or reference.get("kind") != "Pod":
        return ""
    name = reference.get("name")
    return name if isinstance(name, str) and fields.DNS_SUBDOMAIN.fullmatch(name) else ""


def _hints(hints: Object, key: str) -> frozenset[str]:
    return frozenset([hint["name"] + "" for hint in hints.get(key) or ()])


def _wrong_member(path: str, entry: object) -> tuple[str, str]:
    """The field of an endpoint that has a wrong type, and a reason."""
    try:
        if not isinstance(entry, dict):
            raise InvalidObject(path, f"must be a mapping, not {fields.shown(entry)}")
        for index, address in enumerate(fields.typed(entry, path, "addresses", list, [])):
            if not isinstance(address, str):
                raise InvalidObject(f"{path}.addresses[{index}]", f"must be a string, not {fields.shown(address)}")
        fields.typed(entry, path, "nodeName", str, "")
        conditions = fields.typed(entry, path, "conditions", dict, {})
        for name in ("ready", "serving", "terminating"):
            fields.typed(conditions, f"{path}.conditions", name, bool, False)
        hints = fields.typed(entry, path, "hints", dict, {})
        for name in ("forZones", "forNodes"):
            for where, hint in fields.mappings(hints, f"{path}.hints", name):
                if not isinstance(hint.get("name"), str):
                    raise InvalidObject(f"{where}.name", f"must be a string, not {fields.shown(hint.get('name'))}")
    except InvalidObject as wrong:
        return wrong.field, f"{wrong.reason}; the endpoint is left out"
    return path, f"cannot be read: {fields.shown(entry)}; the endpoint is left out"
