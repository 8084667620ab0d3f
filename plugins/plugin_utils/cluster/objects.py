# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""API objects, as the API server or kubectl print them, to validated facts.

Nothing that passes here can break out of a rule line: names are DNS labels, addresses and CIDRs are parsed and
printed anew, ports are integers in range, protocols are one of three words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..addresses import family_of, parse_cidr, parse_ip
from .snapshot import (
    EndpointSlice,
    Node,
    PortSpec,
    Problem,
    Service,
    ServiceCIDR,
    SliceEndpoint,
    SlicePort,
    Snapshot,
)

ANNOTATION_PREFIX = "kube-proxy.agentless.io/"
DEFAULT_STICKY_SECONDS = 10800
LABEL_HEADLESS = "service.kubernetes.io/headless"
LABEL_PROXY_NAME = "service.kubernetes.io/service-proxy-name"
LABEL_SERVICE_NAME = "kubernetes.io/service-name"
LABEL_ZONE = "topology.kubernetes.io/zone"

_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_PROTOCOLS = {"TCP": "tcp", "UDP": "udp", "SCTP": "sctp"}
_SERVICE_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_NO_HINTS: frozenset[str] = frozenset()

T = TypeVar("T")
Object = dict[str, Any]


class InvalidObject(Exception):
    """An object that cannot be used: which field, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Skipped(Exception):
    """An object that kube-proxy would not have been given; the message names the sort."""


def _typed(parent: Object, field: str, key: str, kind: type[T], default: T) -> T:
    value = parent.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidObject(f"{field}.{key}" if field else key, f"must be {_type_name(kind)}, not {_shown(value)}")
    return value


def _type_name(kind: type) -> str:
    return {dict: "a mapping", list: "a list", str: "a string", int: "an integer", bool: "true or false"}[kind]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _name(metadata: Object, pattern: re.Pattern[str], what: str) -> str:
    name = _typed(metadata, "metadata", "name", str, "")
    if not name:
        raise InvalidObject("metadata.name", "is missing")
    if not pattern.fullmatch(name):
        raise InvalidObject("metadata.name", f"{_shown(name)} is no {what}")
    return name


def _namespace(metadata: Object) -> str:
    namespace = _typed(metadata, "metadata", "namespace", str, "") or "default"
    if not _DNS_LABEL.fullmatch(namespace):
        raise InvalidObject("metadata.namespace", f"{_shown(namespace)} is no DNS label")
    return namespace


def _port_number(entry: Object, field: str, key: str, *, zero: bool) -> int:
    number = _typed(entry, field, key, int, 0)
    if not (0 if zero else 1) <= number <= 65535:
        raise InvalidObject(f"{field}.{key}", f"{number} is not between 1 and 65535")
    return number


def _protocol(entry: Object, field: str) -> str:
    protocol = entry.get("protocol")
    if protocol is None or protocol == "":
        return "tcp"
    known = _PROTOCOLS.get(protocol) if isinstance(protocol, str) else None
    if known is None:
        raise InvalidObject(f"{field}.protocol", f"{_shown(protocol)} is not TCP, UDP or SCTP")
    return known


def _port_name(entry: Object, field: str) -> str:
    name = _typed(entry, field, "name", str, "")
    if name and not _DNS_LABEL.fullmatch(name):
        raise InvalidObject(f"{field}.name", f"{_shown(name)} is no DNS label")
    return name


def _one_of(parent: Object, field: str, key: str, allowed: tuple[str, ...]) -> str:
    value = _typed(parent, field, key, str, "")
    if value and value not in allowed:
        raise InvalidObject(f"{field}.{key}", f"{_shown(value)} is not one of {', '.join(allowed)}")
    return value or allowed[0]


def _entries(parent: Object, field: str, key: str) -> Iterator[tuple[str, Object]]:
    """The mappings of a list, each with its path."""
    for index, entry in enumerate(_typed(parent, field, key, list, [])):
        path = f"{field}.{key}[{index}]" if field else f"{key}[{index}]"
        if not isinstance(entry, dict):
            raise InvalidObject(path, f"must be a mapping, not {_shown(entry)}")
        yield path, entry


class Reader:
    """Collects objects into a Snapshot; what cannot be used becomes a Problem and the rest goes on."""

    def __init__(self) -> None:
        self._services: list[tuple[Service, str]] = []
        self._slices: list[tuple[EndpointSlice, str]] = []
        self._nodes: list[tuple[Node, str]] = []
        self._service_cidrs: list[tuple[ServiceCIDR, str]] = []
        self._problems: list[Problem] = []
        self._ignored: dict[str, int] = {}
        self._identity = ("", "", "")
        self._source = ""
        self._kinds: dict[tuple[str, str], Callable[[Object], None]] = {
            ("Service", "v1"): lambda obj: self._services.append((self._service(obj), self._source)),
            ("EndpointSlice", "discovery.k8s.io/v1"): lambda obj: self._slices.append((self._slice(obj), self._source)),
            ("Node", "v1"): lambda obj: self._nodes.append((self._node(obj), self._source)),
            ("ServiceCIDR", "networking.k8s.io/v1"): self._add_service_cidr,
            ("ServiceCIDR", "networking.k8s.io/v1beta1"): self._add_service_cidr,
        }

    def add(self, obj: object, source: str = "") -> None:
        """Take an object or a List of objects."""
        self._source = source
        if not isinstance(obj, dict):
            self._identity = ("object", "", "")
            self._problem("", f"must be a mapping, not {_shown(obj)}")
            return
        kind, version = obj.get("kind"), obj.get("apiVersion")
        if isinstance(kind, str) and kind.endswith("List") and isinstance(obj.get("items"), list):
            # The API server leaves kind and apiVersion out of the items of a typed List.
            item_kind = kind.removesuffix("List")
            for item in obj["items"]:
                if item_kind and isinstance(item, dict) and "kind" not in item:
                    self.add_object(item, item_kind, version, source)
                else:
                    self.add(item, source)
            return
        self.add_object(obj, kind, version, source)

    def add_object(self, obj: Object, kind: object, version: object, source: str = "") -> None:
        """Take one object of a known kind."""
        self._source = source
        take = next(
            (take for (name, group), take in self._kinds.items() if name == kind and version in (group, None)), None
        )
        if take is None:
            self._ignore(str(kind) if kind else "(no kind)")
            return
        metadata = obj.get("metadata")
        named = metadata if isinstance(metadata, dict) else {}
        self._identity = (str(kind), str(named.get("namespace") or ""), str(named.get("name") or ""))
        try:
            take(obj)
        except InvalidObject as problem:
            self._problem(problem.field, problem.reason)
        except Skipped as skipped:
            self._ignore(str(skipped))

    def snapshot(self) -> Snapshot:
        """What was collected."""
        return Snapshot(
            services=self._unique("Service", self._services),
            slices=self._unique("EndpointSlice", self._slices),
            nodes=self._unique("Node", self._nodes),
            service_cidrs=self._unique("ServiceCIDR", self._service_cidrs),
            problems=tuple(sorted(self._problems, key=str)),
            ignored=dict(sorted(self._ignored.items())),
        )

    def _unique(self, kind: str, objects: Iterable[tuple[T, str]]) -> tuple[T, ...]:
        """Sorted by namespace and name. Of an object given twice, one is kept, whatever the order of the files."""
        kept: dict[tuple[str, str], tuple[T, str]] = {}
        for obj, source in objects:
            key = (getattr(obj, "namespace", ""), getattr(obj, "name", ""))
            other = kept.get(key)
            if other is not None and other[0] != obj:
                kept[key] = min(other, (obj, source), key=repr)
                reason = f"another {kind} of this name was given in {other[1] or 'the input'}; one of the two is used"
                self._problems.append(Problem(kind, *key, "metadata.name", reason, source))
            elif other is None:
                kept[key] = (obj, source)
        return tuple(kept[key][0] for key in sorted(kept))

    def _problem(self, field: str, reason: str) -> None:
        self._problems.append(Problem(*self._identity, field, reason, self._source))

    def _ignore(self, sort: str) -> None:
        self._ignored[sort] = self._ignored.get(sort, 0) + 1

    def _service(self, obj: Object) -> Service:
        metadata = _typed(obj, "", "metadata", dict, {})
        name = _name(metadata, _DNS_LABEL, "DNS label")
        namespace = _namespace(metadata)
        if LABEL_PROXY_NAME in _typed(metadata, "metadata", "labels", dict, {}):
            raise Skipped("Service of another proxy")
        spec = _typed(obj, "", "spec", dict, {})
        service_type = _one_of(spec, "spec", "type", _SERVICE_TYPES)
        if service_type == "ExternalName":
            raise Skipped("Service of type ExternalName")
        cluster_ip = _typed(spec, "spec", "clusterIP", str, "")
        if cluster_ip == "None":
            raise Skipped("headless Service")
        if not cluster_ip:
            raise Skipped("Service without a cluster IP")
        cluster_ips = _typed(spec, "spec", "clusterIPs", list, [cluster_ip])
        affinity = _one_of(spec, "spec", "sessionAffinity", ("None", "ClientIP"))
        annotations = _typed(metadata, "metadata", "annotations", dict, {})
        status = _typed(_typed(obj, "", "status", dict, {}), "status", "loadBalancer", dict, {})
        return Service(
            namespace=namespace,
            name=name,
            type=service_type,
            cluster_ip=self._cluster_ip("spec.clusterIP", cluster_ip),
            cluster_ips=tuple(self._cluster_ip(f"spec.clusterIPs[{i}]", ip) for i, ip in enumerate(cluster_ips)),
            ip_families=tuple(str(family) for family in _typed(spec, "spec", "ipFamilies", list, [])),
            external_ips=tuple(self._usable(parse_ip, spec, "spec", "externalIPs", "an IP address")),
            load_balancer_vips=tuple(self._vips(status)),
            source_ranges=tuple(self._usable(_source_range, spec, "spec", "loadBalancerSourceRanges", "a CIDR")),
            sticky_seconds=self._sticky_seconds(spec) if affinity == "ClientIP" else 0,
            external_policy_local=_one_of(spec, "spec", "externalTrafficPolicy", ("Cluster", "Local")) == "Local",
            internal_policy_local=_one_of(spec, "spec", "internalTrafficPolicy", ("Cluster", "Local")) == "Local",
            health_check_node_port=_port_number(spec, "spec", "healthCheckNodePort", zero=True),
            ports=tuple(
                PortSpec(
                    name=_port_name(entry, path),
                    protocol=_protocol(entry, path),
                    port=_port_number(entry, path, "port", zero=False),
                    node_port=_port_number(entry, path, "nodePort", zero=True),
                )
                for path, entry in _entries(spec, "spec", "ports")
            ),
            annotations=tuple(
                sorted((k, v) for k, v in annotations.items() if isinstance(v, str) and k.startswith(ANNOTATION_PREFIX))
            ),
        )

    @staticmethod
    def _cluster_ip(field: str, text: object) -> str:
        ip = parse_ip(text) if isinstance(text, str) else None
        if ip is None:
            raise InvalidObject(field, f"{_shown(text)} is not an IP address")
        return ip

    @staticmethod
    def _sticky_seconds(spec: Object) -> int:
        config = _typed(spec, "spec", "sessionAffinityConfig", dict, {})
        client_ip = _typed(config, "spec.sessionAffinityConfig", "clientIP", dict, {})
        field = "spec.sessionAffinityConfig.clientIP"
        seconds = _typed(client_ip, field, "timeoutSeconds", int, DEFAULT_STICKY_SECONDS)
        if not 0 < seconds <= 86400:
            raise InvalidObject(f"{field}.timeoutSeconds", f"{seconds} is not between 1 and 86400")
        return seconds

    def _usable(
        self, parse: Callable[[str], str | None], parent: Object, field: str, key: str, what: str
    ) -> Iterator[str]:
        """The entries of a list of strings that parse; kube-proxy drops the others, and so do we, saying so."""
        for index, text in enumerate(_typed(parent, field, key, list, [])):
            value = parse(text) if isinstance(text, str) else None
            if value is not None:
                yield value
            elif text != "":
                self._problem(f"{field}.{key}[{index}]", f"{_shown(text)} is not {what}; the entry is left out")

    def _vips(self, status: Object) -> Iterator[str]:
        for path, entry in _entries(status, "status.loadBalancer", "ingress"):
            text = _typed(entry, path, "ip", str, "")
            if not text or entry.get("ipMode") not in (None, "VIP"):
                continue
            ip = parse_ip(text)
            if ip is None:
                self._problem(f"{path}.ip", f"{_shown(text)} is not an IP address; the entry is left out")
            else:
                yield ip

    def _slice(self, obj: Object) -> EndpointSlice:
        metadata = _typed(obj, "", "metadata", dict, {})
        name = _name(metadata, _DNS_SUBDOMAIN, "DNS subdomain")
        namespace = _namespace(metadata)
        labels = _typed(metadata, "metadata", "labels", dict, {})
        if LABEL_HEADLESS in labels:
            raise Skipped("EndpointSlice of a headless Service")
        service = labels.get(LABEL_SERVICE_NAME)
        if not isinstance(service, str) or not service:
            raise InvalidObject(f"metadata.labels[{LABEL_SERVICE_NAME}]", "is missing, so no Service owns it")
        if not _DNS_LABEL.fullmatch(service):
            raise InvalidObject(f"metadata.labels[{LABEL_SERVICE_NAME}]", f"{_shown(service)} is no DNS label")
        address_type = obj.get("addressType")
        if address_type == "FQDN":
            raise Skipped("EndpointSlice of addressType FQDN")
        if address_type not in ("IPv4", "IPv6"):
            raise InvalidObject("addressType", f"{_shown(address_type)} is not IPv4, IPv6 or FQDN")
        return EndpointSlice(
            namespace=namespace,
            name=name,
            service=service,
            address_type=address_type,
            ports=tuple(
                SlicePort(_port_name(entry, path), _protocol(entry, path), number)
                for path, entry in _entries(obj, "", "ports")
                # A port without a name or a number means "all ports", which kube-proxy does not support.
                if entry.get("name") is not None and (number := _port_number(entry, path, "port", zero=True))
            ),
            endpoints=tuple(self._endpoints(obj, address_type)),
        )

    def _endpoints(self, obj: Object, address_type: str) -> Iterator[SliceEndpoint]:
        for index, entry in enumerate(_typed(obj, "", "endpoints", list, [])):
            try:
                addresses = entry.get("addresses")
                if not addresses:
                    continue
                address = parse_ip(addresses[0])
                if address is None or family_of(address).value != address_type:
                    field = f"endpoints[{index}].addresses[0]"
                    reason = f"{_shown(addresses[0])} is not an {address_type} address; the endpoint is left out"
                    self._problem(field, reason)
                    continue
                conditions = entry.get("conditions") or {}
                hints = entry.get("hints")
                yield SliceEndpoint(
                    address,
                    entry.get("nodeName") or "",
                    conditions.get("ready") is not False,
                    conditions.get("serving") is not False,
                    conditions.get("terminating") is True,
                    frozenset(zone["name"] for zone in hints.get("forZones") or ()) if hints else _NO_HINTS,
                    frozenset(node["name"] for node in hints.get("forNodes") or ()) if hints else _NO_HINTS,
                )
            except (AttributeError, KeyError, TypeError):
                self._problem(f"endpoints[{index}]", f"has a member of a wrong type: {_shown(entry)}; it is left out")

    def _node(self, obj: Object) -> Node:
        metadata = _typed(obj, "", "metadata", dict, {})
        name = _name(metadata, _DNS_SUBDOMAIN, "DNS subdomain")
        labels = _typed(metadata, "metadata", "labels", dict, {})
        spec = _typed(obj, "", "spec", dict, {})
        status = _typed(obj, "", "status", dict, {})
        capacity = str(_typed(status, "status", "capacity", dict, {}).get("cpu") or "")
        conditions = _entries(status, "status", "conditions")
        return Node(
            name=name,
            addresses=tuple(self._node_addresses(status)),
            zone=str(labels.get(LABEL_ZONE) or ""),
            pod_cidrs=tuple(self._usable(parse_cidr, spec, "spec", "podCIDRs", "a CIDR")),
            cpus=int(capacity) if capacity.isascii() and capacity.isdigit() else None,
            labels=tuple(sorted((str(key), str(value)) for key, value in labels.items())),
            ready=any(entry.get("type") == "Ready" and entry.get("status") == "True" for _path, entry in conditions),
        )

    def _node_addresses(self, status: Object) -> Iterator[tuple[str, str]]:
        for path, entry in _entries(status, "status", "addresses"):
            sort, text = _typed(entry, path, "type", str, ""), _typed(entry, path, "address", str, "")
            ip = parse_ip(text)
            if sort not in ("InternalIP", "ExternalIP"):
                yield sort, text
            elif ip is None:
                self._problem(f"{path}.address", f"{_shown(text)} is not an IP address; the entry is left out")
            else:
                yield sort, ip

    def _add_service_cidr(self, obj: Object) -> None:
        metadata = _typed(obj, "", "metadata", dict, {})
        spec = _typed(obj, "", "spec", dict, {})
        cidrs = tuple(self._usable(parse_cidr, spec, "spec", "cidrs", "a CIDR"))
        self._service_cidrs.append((ServiceCIDR(_name(metadata, _DNS_SUBDOMAIN, "DNS subdomain"), cidrs), self._source))


def _source_range(text: str) -> str | None:
    return parse_cidr(text.strip())
