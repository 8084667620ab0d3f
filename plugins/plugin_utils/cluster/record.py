# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A cluster on disk: the fields that rules depend on, one object a line, in a file that kubectl would understand.

A record is a List of Lists, as `kubectl get -o json` prints them, so everything that reads cluster files reads it.
The same cluster gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import write_atomic
from . import fields
from .files import UnreadableFile
from .mirror import LABEL_SKIP_MIRROR
from .objects import (
    ANNOTATION_PREFIX,
    LABEL_PROXY_NAME,
    LABEL_ZONE,
    TAINT_LEAVING,
    Reader,
    is_ours,
)
from .slices import LABEL_HEADLESS, LABEL_SERVICE_NAME
from .snapshot import Snapshot
from .trigger import trigger_time

DIGEST = f"{ANNOTATION_PREFIX}digest"
SOURCE = f"{ANNOTATION_PREFIX}source"
CONFIGURATION = f"{ANNOTATION_PREFIX}configuration"

# Where a ConfigMap of kubeadm has it.
CONFIGURATION_KEY = "config.conf"

# The kinds in the order of the record, and the versions that are read; the first is the one they are recorded as.
KINDS = {
    "Service": ("v1",),
    "EndpointSlice": ("discovery.k8s.io/v1",),
    "Node": ("v1",),
    "ServiceCIDR": ("networking.k8s.io/v1", "networking.k8s.io/v1beta1"),
    "Endpoints": ("v1",),
}


def _ours(annotations: Any) -> Any:
    if not isinstance(annotations, dict):
        return annotations
    return {key: value for key, value in annotations.items() if is_ours(key)}


def _readiness(conditions: Any) -> Any:
    if not isinstance(conditions, list):
        return conditions
    return [
        {"type": "Ready", "status": entry.get("status")}
        for entry in conditions
        if isinstance(entry, dict) and entry.get("type") == "Ready"
    ]


def _leaving(taints: Any) -> Any:
    if not isinstance(taints, list):
        return taints
    return [{"key": TAINT_LEAVING} for entry in taints if isinstance(entry, dict) and entry.get("key") == TAINT_LEAVING]


def _pod(reference: Any) -> Any:
    """Which Pod an endpoint is, for people who ask; no rule depends on it."""
    if not isinstance(reference, dict) or reference.get("kind") != "Pod":
        return None
    name = reference.get("name")
    return {"kind": "Pod", "name": name} if isinstance(name, str) and fields.DNS_SUBDOMAIN.fullmatch(name) else None


# What is kept: True means all, a mapping these members, a function what it returns. Lists go entry by entry.
_WHOLE: Any = True
_NAME = {"name": _WHOLE, "namespace": _WHOLE}
_ADDRESS = {"ip": _WHOLE, "nodeName": _WHOLE, "targetRef": _pod}
_KEPT: dict[str, Any] = {
    "Service": {
        "metadata": {
            **_NAME,
            "creationTimestamp": _WHOLE,
            "labels": {LABEL_PROXY_NAME: _WHOLE},
            "annotations": _ours,
        },
        "spec": dict.fromkeys(
            (
                "type",
                "clusterIP",
                "clusterIPs",
                "ipFamilies",
                "externalIPs",
                "loadBalancerSourceRanges",
                "sessionAffinity",
                "sessionAffinityConfig",
                "externalTrafficPolicy",
                "internalTrafficPolicy",
                "healthCheckNodePort",
            ),
            _WHOLE,
        )
        | {"ports": dict.fromkeys(("name", "protocol", "port", "nodePort"), _WHOLE)},
        "status": {"loadBalancer": {"ingress": {"ip": _WHOLE, "ipMode": _WHOLE}}},
    },
    "EndpointSlice": {
        "metadata": {**_NAME, "labels": {LABEL_SERVICE_NAME: _WHOLE, LABEL_HEADLESS: _WHOLE}},
        "addressType": _WHOLE,
        "ports": dict.fromkeys(("name", "protocol", "port"), _WHOLE),
        "endpoints": dict.fromkeys(("addresses", "conditions", "nodeName", "hints"), _WHOLE) | {"targetRef": _pod},
    },
    "Node": {
        "metadata": {**_NAME, "labels": _WHOLE, "deletionTimestamp": _WHOLE},
        "spec": {"podCIDRs": _WHOLE, "taints": _leaving},
        "status": {"addresses": _WHOLE, "capacity": {"cpu": _WHOLE}, "conditions": _readiness},
    },
    "ServiceCIDR": {"metadata": _NAME, "spec": {"cidrs": _WHOLE}},
    "Endpoints": {
        "metadata": {**_NAME, "labels": {LABEL_SKIP_MIRROR: _WHOLE, LABEL_HEADLESS: _WHOLE}},
        "subsets": {
            "addresses": _ADDRESS,
            "notReadyAddresses": _ADDRESS,
            "ports": dict.fromkeys(("name", "protocol", "port"), _WHOLE),
        },
    },
}
# Of a Node, what a rule can depend on: labels and readiness are for inventories.
_NODE_RULES = {
    "metadata": {**_NAME, "labels": {LABEL_ZONE: _WHOLE}, "deletionTimestamp": _WHOLE},
    "spec": {"podCIDRs": _WHOLE, "taints": _WHOLE},
    "status": {"addresses": _WHOLE, "capacity": {"cpu": _WHOLE}},
}


def prune(kind: str, obj: Any) -> Any:
    """An object with nothing in it that rules, inventories and explanations do not need."""
    return _pruned(obj, _KEPT[kind])


def _pruned(value: Any, kept: Any) -> Any:
    if kept is True:
        return value
    if isinstance(kept, dict):
        if isinstance(value, dict):
            return {key: _pruned(value[key], kept[key]) for key in kept if key in value}
        if isinstance(value, list):
            return [_pruned(entry, kept) for entry in value]
        return value  # of a wrong type: the reader of the record says so
    return kept(value)


_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


# As `_pod` leaves it; in a string of JSON its quotes would have backslashes before them.
_POD = re.compile(r',?"targetRef":(?:null|\{"kind":"Pod","name":"[-a-z0-9.]*"\})')


def rule_text(kind: str, item: str) -> str:
    """Of an item of a record, what a rule can depend on."""
    if kind in ("EndpointSlice", "Endpoints"):
        return _POD.sub("", item)
    return _sound(_encode(_pruned(json.loads(item), _NODE_RULES))) if kind == "Node" else item


def item_digest(kind: str, item: str) -> bytes:
    """Names what a rule can depend on of an item of a record."""
    return hashlib.sha256(rule_text(kind, item).encode()).digest()


def digest_of(lists: Iterable[tuple[str, Iterable[bytes]]]) -> str:
    """Names a cluster: of each kind, the digests of its items in the order of a record.

    A watch names the cluster at each change of one object: it need not read all others again.
    """
    digest = hashlib.sha256()
    for kind, items in lists:
        digest.update(f"{kind}\n".encode())
        digest.update(b"".join(items))
    return digest.hexdigest()


def item_of(kind: str, obj: Any) -> str:
    """An object as it is recorded."""
    return _sound(_encode(prune(kind, obj)))


def _sound(text: str) -> str:
    """JSON that a file can hold: halves of characters, which it can name, stay names."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """All objects of one kind, each a line of JSON, sorted by namespace and name."""

    kind: str
    api_version: str
    resource_version: str  # empty if they came from files
    items: tuple[str, ...]
    # Of EndpointSlices that say so: the item -> when the last change of it began. For readers of the API server; no
    # part of the cluster's state, and not written down.
    triggers: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The five lists, and where they came from."""

    lists: tuple[Listing, ...]
    source: str
    # The configuration of the cluster's own kube-proxy as text, if it was read; no part of what the digest names.
    configuration: str = dataclasses.field(default="", compare=False)

    @property
    def digest(self) -> str:
        """Names what rules depend on: neither resourceVersions nor the readiness of a Node."""
        return digest_of((each.kind, [item_digest(each.kind, item) for item in each.items]) for each in self.lists)

    @property
    def counts(self) -> dict[str, int]:
        """How many objects of each kind there are."""
        return {each.kind: len(each.items) for each in self.lists}

    @property
    def resource_versions(self) -> dict[str, str]:
        """Of each list, for a watch that goes on from here."""
        return {each.kind: each.resource_version for each in self.lists}

    @property
    def resource_version(self) -> str:
        """The one moment that all lists are of; empty if they are not, or came from files."""
        versions = {each.resource_version for each in self.lists if each.items or each.resource_version}
        return versions.pop() if len(versions) == 1 else ""

    def triggered_since(self, before: Record) -> list[float]:
        """When the changes of endpoints began that were not in another record yet, where the API server told."""
        known = {item for each in before.lists for item in each.items}
        times = (trigger_time(text) for each in self.lists for item, text in each.triggers.items() if item not in known)
        return sorted(time for time in times if time is not None)

    def chunks(self) -> Iterator[str]:
        """The text of the record."""
        notes = {DIGEST: self.digest, SOURCE: self.source}
        if self.configuration:
            notes[CONFIGURATION] = self.configuration
        yield f'{{"apiVersion":"v1","kind":"List","metadata":{{"annotations":{_encode(notes)}}},"items":[\n'
        for index, each in enumerate(self.lists):
            head = {"resourceVersion": each.resource_version}
            yield f'{{"apiVersion":"{each.api_version}","kind":"{each.kind}List","metadata":{_encode(head)},"items":[\n'
            yield ",\n".join(each.items)
            yield "\n]},\n" if index < len(self.lists) - 1 else "\n]}\n"
        yield "]}\n"

    def write(self, path: Path) -> None:
        """Replace a file in one step. Only its owner may read it: it tells what a cluster is made of."""
        write_atomic(path, self.chunks())


def record_of(documents: Iterable[Any], source: str) -> Record:
    """A record of parsed files: objects and Lists of them, as `Reader.add` takes them; or UnreadableFile."""
    found: dict[str, dict[tuple[str, str], str]] = {kind: {} for kind in KINDS}
    for kind, version, obj in _objects(documents, None, None):
        if kind not in KINDS or version not in (*KINDS[kind], None):
            continue
        metadata = obj.get("metadata")
        named = metadata if isinstance(metadata, dict) else {}
        key = (fields.plain(named.get("namespace")), fields.plain(named.get("name")))
        try:
            text = item_of(kind, obj)
        except (RecursionError, TypeError, ValueError) as error:
            # YAML knows keys and numbers that JSON does not.
            raise UnreadableFile(
                f"{source}: {kind}/{'/'.join(filter(None, key))}: has no form in JSON: {error}"
            ) from error
        # Whatever the order of the files, the same one of two objects of a name is kept.
        found[kind][key] = min(text, found[kind].get(key, text))
    return Record(
        tuple(
            Listing(kind, KINDS[kind][0], "", tuple(text for _key, text in sorted(items.items())))
            for kind, items in found.items()
        ),
        source,
    )


def configuration_of(documents: Iterable[Any]) -> str:
    """The configuration of the cluster's own kube-proxy, if its ConfigMap is among the objects of parsed files."""
    for kind, _version, obj in _objects(documents, None, None):
        metadata, data = (obj.get(key) for key in ("metadata", "data"))
        if kind == "ConfigMap" and isinstance(metadata, dict) and isinstance(data, dict):
            named = (metadata.get("namespace"), metadata.get("name"))
            if named == ("kube-system", "kube-proxy") and isinstance(data.get(CONFIGURATION_KEY), str):
                return str(data[CONFIGURATION_KEY])
    return ""


def _objects(documents: Iterable[Any], kind: str | None, version: str | None) -> Iterator[tuple[str, str | None, Any]]:
    for document in documents:
        if not isinstance(document, dict):
            continue  # Reader.add tells of it
        own_kind, own_version = document.get("kind") or kind, document.get("apiVersion") or version
        if not isinstance(own_kind, str):
            continue
        if own_kind.endswith("List") and isinstance(document.get("items"), list):
            yield from _objects(document["items"], own_kind.removesuffix("List") or None, own_version)
        else:
            yield own_kind, own_version, document


def read_record(path: Path) -> Record:
    """A record that was written earlier; UnreadableFile if it is none or was changed."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        notes = _head(lines[0])["metadata"]["annotations"]
        record = Record(tuple(_listings(lines[1:])), notes[SOURCE], notes.get(CONFIGURATION, ""))
        unchanged = record.digest == notes[DIGEST]
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UnreadableFile(f"{path}: is not a snapshot, or not as it was written: {error}") from error
    if not unchanged:
        raise UnreadableFile(f"{path}: its digest does not match: the file was changed")
    return record


def peek(path: Path) -> str:
    """The digest that a record carries, without reading the rest; empty if there is no record."""
    return _noted(path, DIGEST)


def peek_source(path: Path) -> str:
    """In the same way, where it was read."""
    return _noted(path, SOURCE)


def peek_configuration(path: Path) -> str:
    """In the same way, the configuration of the cluster's own kube-proxy; empty if it was not read."""
    return _noted(path, CONFIGURATION)


def _noted(path: Path, name: str) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return str(_head(file.readline().rstrip("\n"))["metadata"]["annotations"][name])
    except (OSError, KeyError, TypeError, ValueError):
        return ""


def _listings(lines: Iterable[str]) -> Iterator[Listing]:
    """Lists, an object a line: what `chunks` wrote, without parsing the objects."""
    head: dict[str, Any] | None = None
    items: list[str] = []
    for line in lines:
        if head is None:
            if line.startswith("{"):
                head, items = _head(line), []
        elif line in ("]}", "]},"):
            yield Listing(
                head["kind"].removesuffix("List"), head["apiVersion"], head["metadata"]["resourceVersion"], tuple(items)
            )
            head = None
        elif line:
            items.append(line.removesuffix(","))
    if head is not None:
        raise ValueError("its end is missing")


def _head(line: str) -> dict[str, Any]:
    if not line.endswith('"items":['):
        raise ValueError("not one object a line")
    head: dict[str, Any] = json.loads(line + "]}")
    return head


def snapshot_of(record: Record) -> Snapshot:
    """The validated facts of a record."""
    reader = Reader()
    for each in record.lists:
        for item in each.items:
            reader.add_object(json.loads(item), each.kind, each.api_version)
    return reader.snapshot()
