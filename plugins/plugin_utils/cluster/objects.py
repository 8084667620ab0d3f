# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""API objects, as the API server or kubectl print them, to validated facts.

Nothing that passes here can break out of a rule line: names are DNS labels, addresses and CIDRs are parsed and
printed anew, ports are integers in range, protocols are one of three words.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..addresses import family_of, parse_cidr, parse_ip, special
from . import fields
from .fields import InvalidObject, Object, Skipped
from .mirror import LOST, read_endpoints, with_mirrored
from .slices import read_slice
from .snapshot import (
    Endpoints,
    EndpointSlice,
    Node,
    PortSpec,
    Problem,
    Service,
    ServiceCIDR,
    Snapshot,
)

ANNOTATION_PREFIX = "kube-proxy.agentless.io/"
ANNOTATION_SCHEDULER = f"{ANNOTATION_PREFIX}scheduler"
ANNOTATION_PRESERVE = "preserve-destination"  # kube-proxy's own, on Windows
SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh")
DEFAULT_STICKY_SECONDS = 10800
MOST_PROBLEMS = 20  # of one object that are named
LABEL_PROXY_NAME = "service.kubernetes.io/service-proxy-name"
LABEL_ZONE = "topology.kubernetes.io/zone"
TAINT_LEAVING = "ToBeDeletedByClusterAutoscaler"

_SERVICE_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_CPUS = re.compile(r"[0-9]{1,6}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")

T = TypeVar("T")


class Reader:
    """Collects objects into a Snapshot; what cannot be used becomes a Problem and the rest goes on."""

    def __init__(self) -> None:
        self._services: list[tuple[Service, str]] = []
        self._slices: list[tuple[EndpointSlice, str]] = []
        self._endpoints: list[tuple[Endpoints, str]] = []
        self._nodes: list[tuple[Node, str]] = []
        self._service_cidrs: list[tuple[ServiceCIDR, str]] = []
        self._problems: list[Problem] = []
        self._ignored: dict[str, int] = {}
        self._identity = ("", "", "")
        self._told = 0
        self._source = ""
        self._kinds: dict[tuple[str, str], Callable[[Object], None]] = {
            ("Service", "v1"): lambda obj: self._services.append((self._service(obj), self._source)),
            ("EndpointSlice", "discovery.k8s.io/v1"): lambda obj: self._slices.append(
                (read_slice(obj, self._problem), self._source)
            ),
            ("Endpoints", "v1"): lambda obj: self._endpoints.append((read_endpoints(obj, self._problem), self._source)),
            ("Node", "v1"): lambda obj: self._nodes.append((self._node(obj), self._source)),
            ("ServiceCIDR", "networking.k8s.io/v1"): self._add_service_cidr,
            ("ServiceCIDR", "networking.k8s.io/v1beta1"): self._add_service_cidr,
        }

    def add(self, obj: object, source: str = "") -> None:
        """Take an object or a List of objects."""
        self._source = source
        if not isinstance(obj, dict):
            self._identity, self._told = ("object", "", ""), 0
            self._problem("", f"must be a mapping, not {fields.shown(obj)}")
            return
        kind, version = obj.get("kind"), obj.get("apiVersion")
        if isinstance(kind, str) and kind.endswith("List") and "items" in obj:
            items = obj["items"] if obj["items"] is not None else []
            if not isinstance(items, list):
                self._identity, self._told = (fields.plain(kind), "", ""), 0
                self._problem("items", f"must be a list, not {fields.shown(items)}")
                return
            # The API server leaves kind and apiVersion out of the items of a typed List.
            item_kind = kind.removesuffix("List")
            for item in items:
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
            self._ignore(fields.plain(kind) if kind else "(no kind)")
            return
        metadata = obj.get("metadata")
        named = metadata if isinstance(metadata, dict) else {}
        self._told = 0
        self._identity = (str(kind), fields.plain(named.get("namespace")), fields.plain(named.get("name")))
        try:
            take(obj)
        except InvalidObject as problem:
            self._problem(problem.field, problem.reason)
        except Skipped as skipped:
            self._ignore(str(skipped))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Nothing is known to lead here. One object that does must not end the run for all others.
            self._problem("", f"cannot be read: {fields.plain(f'{type(error).__name__}: {error}')}")

    def snapshot(self) -> Snapshot:
        """What was collected."""
        slices, lost = with_mirrored(self._unique("EndpointSlice", self._slices), self.endpoints())
        if lost:
            self._ignored[LOST] = lost
        return Snapshot(
            services=self._unique("Service", self._services),
            slices=slices,
            nodes=self._unique("Node", self._nodes),
            service_cidrs=self._unique("ServiceCIDR", self._service_cidrs),
            problems=tuple(sorted(self._problems, key=str)),
            ignored=dict(sorted(self._ignored.items())),
        )

    def endpoints(self) -> tuple[Endpoints, ...]:
        """The Endpoints that were collected, whether or not they count."""
        return self._unique("Endpoints", self._endpoints)

    def _unique(self, kind: str, objects: Iterable[tuple[T, str]]) -> tuple[T, ...]:
        """Sorted by namespace and name. Of an object given twice, one is kept, whatever the order of the files."""
        kept: dict[tuple[str, str], tuple[T, str]] = {}
        for obj, source in objects:
            key = (getattr(obj, "namespace", ""), getattr(obj, "name", ""))
            other = kept.get(key)
            if other is not None and other[0] != obj:
                kept[key] = min(other, (obj, source), key=_order)
                reason = f"another {kind} of this name was given in {other[1] or 'the input'}; one of the two is used"
                self._problems.append(Problem(kind, *key, "metadata.name", reason, source))
            elif other is None:
                kept[key] = (obj, source)
        return tuple(kept[key][0] for key in sorted(kept))

    def _problem(self, field: str, reason: str) -> None:
        """Keep what is wrong with an object; one with a thousand wrong entries must not bury the problems of others."""
        self._told += 1
        if self._told > MOST_PROBLEMS:
            if self._told > MOST_PROBLEMS + 1:
                return
            field, reason = "", "has more problems than are listed here"
        self._problems.append(Problem(*self._identity, field, reason, self._source))

    def _ignore(self, sort: str) -> None:
        self._ignored[sort] = self._ignored.get(sort, 0) + 1

    def _service(self, obj: Object) -> Service:
        metadata = fields.typed(obj, "", "metadata", dict, {})
        name = fields.object_name(metadata, fields.DNS_LABEL, "DNS label")
        namespace = fields.namespace(metadata)
        if LABEL_PROXY_NAME in fields.typed(metadata, "metadata", "labels", dict, {}):
            raise Skipped("Service of another proxy")
        spec = fields.typed(obj, "", "spec", dict, {})
        service_type = fields.one_of(spec, "spec", "type", _SERVICE_TYPES)
        if service_type == "ExternalName":
            raise Skipped("Service of type ExternalName")
        cluster_ip = fields.typed(spec, "spec", "clusterIP", str, "")
        if cluster_ip == "None":
            raise Skipped("headless Service")
        if not cluster_ip:
            raise Skipped("Service without a cluster IP")
        affinity = fields.one_of(spec, "spec", "sessionAffinity", ("None", "ClientIP"))
        annotations = fields.typed(metadata, "metadata", "annotations", dict, {})
        status = fields.typed(fields.typed(obj, "", "status", dict, {}), "status", "loadBalancer", dict, {})
        ingress = list(self._ingress(status))
        return Service(
            namespace=namespace,
            name=name,
            type=service_type,
            cluster_ip=self._cluster_ip("spec.clusterIP", cluster_ip),
            cluster_ips=tuple(self._cluster_ips(spec, cluster_ip)),
            ip_families=tuple(fields.ip_families(spec)),
            external_ips=tuple(self._usable(parse_ip, spec, "spec", "externalIPs", "an IP address", vips=True)),
            load_balancer_vips=tuple(ip for ip, mode in ingress if mode in (None, "VIP")),
            source_ranges=tuple(self._usable(_source_range, spec, "spec", "loadBalancerSourceRanges", "a CIDR")),
            sticky_seconds=self._sticky_seconds(spec) if affinity == "ClientIP" else 0,
            external_policy_local=fields.one_of(spec, "spec", "externalTrafficPolicy", ("Cluster", "Local")) == "Local",
            internal_policy_local=fields.one_of(spec, "spec", "internalTrafficPolicy", ("Cluster", "Local")) == "Local",
            health_check_node_port=fields.port_number(spec, "spec", "healthCheckNodePort", zero=True),
            ports=tuple(
                PortSpec(
                    name=fields.port_name(entry, path),
                    protocol=fields.protocol(entry, path),
                    port=fields.port_number(entry, path, "port", zero=False),
                    node_port=fields.port_number(entry, path, "nodePort", zero=True),
                )
                for path, entry in fields.mappings(spec, "spec", "ports")
            ),
            annotations=tuple(sorted(self._annotations(annotations))),
            created=self._created(metadata),
            ingress_ips=tuple(ip for ip, _mode in ingress),
        )

    def _annotations(self, annotations: Object) -> Iterator[tuple[str, str]]:
        """Those that are meant for us."""
        for key, value in annotations.items():
            if not isinstance(value, str) or not is_ours(key):
                continue
            if key == ANNOTATION_SCHEDULER and value not in SCHEDULERS:
                reason = f"{fields.shown(value)} is not one of {', '.join(SCHEDULERS)}; the annotation is left out"
                self._problem(f"metadata.annotations[{key}]", reason)
            else:
                yield key, value

    def _cluster_ips(self, spec: Object, first: str) -> Iterator[str]:
        """spec.clusterIPs. An address of the other family in a rule would make the node refuse all rules."""
        families = list(fields.ip_families(spec))
        for index, text in enumerate(fields.typed(spec, "spec", "clusterIPs", list, [first])):
            ip = self._cluster_ip(f"spec.clusterIPs[{index}]", text)
            if index < len(families) and family_of(ip).value != families[index]:
                reason = f"{fields.shown(ip)} is not an {families[index]} address, as spec.ipFamilies[{index}] has it"
                raise InvalidObject(f"spec.clusterIPs[{index}]", reason)
            yield ip

    @staticmethod
    def _cluster_ip(field: str, text: object) -> str:
        ip = parse_ip(text) if isinstance(text, str) else None
        if ip is None:
            raise InvalidObject(field, f"{fields.shown(text)} is not an IP address")
        if reason := special(ip):
            raise InvalidObject(field, f"{fields.shown(text)} {reason}")
        return ip

    def _created(self, metadata: Object) -> str:
        """metadata.creationTimestamp, which decides between Services that claim the same; files may have none."""
        value = metadata.get("creationTimestamp")
        if isinstance(value, datetime.datetime):  # which YAML makes of a time without quotes
            value = (value.astimezone(datetime.UTC) if value.tzinfo else value).strftime("%Y-%m-%dT%H:%M:%SZ")
        if not value or (isinstance(value, str) and _TIME.fullmatch(value)):
            return value or ""
        self._problem(
            "metadata.creationTimestamp", f"{fields.shown(value)} is no time; the Service counts as the youngest"
        )
        return ""

    @staticmethod
    def _sticky_seconds(spec: Object) -> int:
        config = fields.typed(spec, "spec", "sessionAffinityConfig", dict, {})
        client_ip = fields.typed(config, "spec.sessionAffinityConfig", "clientIP", dict, {})
        field = "spec.sessionAffinityConfig.clientIP"
        seconds = fields.typed(client_ip, field, "timeoutSeconds", int, DEFAULT_STICKY_SECONDS)
        if not 0 < seconds <= 86400:
            raise InvalidObject(f"{field}.timeoutSeconds", f"{seconds} is not between 1 and 86400")
        return seconds

    def _usable(
        self, parse: Callable[[str], str | None], parent: Object, field: str, key: str, what: str, *, vips: bool = False
    ) -> Iterator[str]:
        """The entries of a list of strings that parse; kube-proxy drops the others, and so do we, saying so."""
        for index, text in enumerate(fields.typed(parent, field, key, list, [])):
            value = parse(text) if isinstance(text, str) else None
            if value is not None:
                if not vips or self._is_destination(f"{field}.{key}[{index}]", value):
                    yield value
            elif text != "":
                self._problem(f"{field}.{key}[{index}]", f"{fields.shown(text)} is not {what}; the entry is left out")

    def _is_destination(self, field: str, ip: str) -> bool:
        """Whether packets may be sent for an address at all; if not, it is named."""
        if reason := special(ip):
            self._problem(field, f"{ip} {reason}; the entry is left out")
        return not reason

    def _ingress(self, status: Object) -> Iterator[tuple[str, object]]:
        """Addresses of load balancers, each with its ipMode."""
        for path, entry in fields.mappings(status, "status.loadBalancer", "ingress"):
            text = fields.typed(entry, path, "ip", str, "")
            if not text:
                continue
            ip = parse_ip(text)
            if ip is None:
                self._problem(f"{path}.ip", f"{fields.shown(text)} is not an IP address; the entry is left out")
            elif self._is_destination(f"{path}.ip", ip):
                yield ip, entry.get("ipMode")

    def _node(self, obj: Object) -> Node:
        metadata = fields.typed(obj, "", "metadata", dict, {})
        name = fields.object_name(metadata, fields.DNS_SUBDOMAIN, "DNS subdomain")
        labels = fields.typed(metadata, "metadata", "labels", dict, {})
        spec = fields.typed(obj, "", "spec", dict, {})
        status = fields.typed(obj, "", "status", dict, {})
        capacity = fields.plain(fields.typed(status, "status", "capacity", dict, {}).get("cpu"))
        conditions = fields.mappings(status, "status", "conditions")
        return Node(
            name=name,
            addresses=tuple(self._node_addresses(status)),
            zone=fields.plain(labels.get(LABEL_ZONE) or ""),
            pod_cidrs=tuple(self._usable(parse_cidr, spec, "spec", "podCIDRs", "a CIDR")),
            cpus=int(capacity) if _CPUS.fullmatch(capacity) else None,
            labels=tuple(sorted((fields.plain(key), fields.plain(value)) for key, value in labels.items())),
            ready=any(entry.get("type") == "Ready" and entry.get("status") == "True" for _path, entry in conditions),
            leaving=bool(metadata.get("deletionTimestamp"))
            or any(entry.get("key") == TAINT_LEAVING for _path, entry in fields.mappings(spec, "spec", "taints")),
        )

    def _node_addresses(self, status: Object) -> Iterator[tuple[str, str]]:
        for path, entry in fields.mappings(status, "status", "addresses"):
            sort, text = fields.typed(entry, path, "type", str, ""), fields.typed(entry, path, "address", str, "")
            ip = parse_ip(text)
            if sort not in ("InternalIP", "ExternalIP"):
                yield sort, text
            elif ip is None:
                self._problem(f"{path}.address", f"{fields.shown(text)} is not an IP address; the entry is left out")
            else:
                yield sort, ip

    def _add_service_cidr(self, obj: Object) -> None:
        metadata = fields.typed(obj, "", "metadata", dict, {})
        spec = fields.typed(obj, "", "spec", dict, {})
        cidrs = tuple(self._usable(parse_cidr, spec, "spec", "cidrs", "a CIDR"))
        self._service_cidrs.append(
            (ServiceCIDR(fields.object_name(metadata, fields.DNS_SUBDOMAIN, "DNS subdomain"), cidrs), self._source)
        )


def is_ours(annotation: object) -> bool:
    """Whether something that we write depends on an annotation."""
    named = isinstance(annotation, str) and annotation.startswith(ANNOTATION_PREFIX)
    return named or annotation == ANNOTATION_PRESERVE


def _order(given: tuple[Any, str]) -> tuple[str, str]:
    """An order among different objects of one name that does not depend on how they were given."""
    obj, source = given
    return json.dumps(dataclasses.asdict(obj), default=sorted), source


def _source_range(text: str) -> str | None:
    return parse_cidr(text.strip())
