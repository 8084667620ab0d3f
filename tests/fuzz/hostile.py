"""Answers of nodes and of API servers that mean harm: what becomes of them, and of everybody else."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agentless_kube_proxy.bundle.compare import Change
from agentless_kube_proxy.bundle.owners import Owners
from agentless_kube_proxy.carry.answers import Answer, NoAnswer, parse_answer
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.api import Api
from agentless_kube_proxy.cluster.record import Record, snapshot_of
from agentless_kube_proxy.cluster.refusals import ApiError
from agentless_kube_proxy.cluster.resources import NODES, RESOURCES, SERVICES, Resource
from agentless_kube_proxy.cluster.store import read_listing
from agentless_kube_proxy.cluster.watch import Watch
from agentless_kube_proxy.engine import Engine
from agentless_kube_proxy.plan.held import replayed
from agentless_kube_proxy.plan.report import diff_text, drift_lines, service_changes
from agentless_kube_proxy.proxy.facts import InvalidFacts, UnusableNode
from agentless_kube_proxy.tasks.trust import untrusted

from tests.unit.build import document, node, service, slice_of, snapshot
from tests.unit.watch.test_loop import Following

NODES_OF_SHOP = (node("n1"), node("n2", "172.18.0.12"))
SHOP = snapshot(service(externalIPs=["203.0.113.2"]), slice_of("web", "10.244.1.1"), *NODES_OF_SHOP)
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]")
URL = "https://api.invalid"


@cache
def _desired(mode: str) -> Engine:
    config = document(mode=mode, clusterCIDR="10.244.0.0/16", conntrack={"maxPerCore": 100})
    made = Engine(Choices.of({"config": config, "vip_policy": "omit"}))
    made.update(SHOP)
    return made


@cache
def _honest(mode: str) -> str:
    return _desired(mode).state("n1").generation


def answer(file: Path) -> None:
    """What a node printed, and all that a run makes of it."""
    said = parse_answer(0, file.read_bytes().decode("utf-8", "surrogateescape"), "\x1b[31mwhatever")
    json.dumps(untrusted(said.result), ensure_ascii=False).encode()
    _texts(said)
    told = said.result.get("addresses")
    facts = {**(said.result.get("facts") or {}), "addresses": told if isinstance(told, list) else []}
    for mode in ("iptables", "nftables", "ipvs"):
        desired = _desired(mode)
        with contextlib.suppress(UnusableNode, InvalidFacts):
            desired.state("n2", facts)
            desired.warnings_of("n2", facts)
        assert desired.state("n1").generation == _honest(mode), "another node got other rules"


def _texts(said: Answer) -> None:
    """What people are shown of it is printable, line by line."""
    status = said.result.get("status") or {}
    lines = drift_lines("n2", status, "a" * 64)
    changes: list[Change] = []
    differences = status.get("differences") or ()
    with contextlib.suppress(KeyError, ValueError, RecursionError):  # which the action turns into words
        changes = service_changes((), replayed(said.lines))
        differences = Owners(replayed(said.lines)).named(differences)
    lines += diff_text(changes, differences, said.result.get("warnings") or ()).splitlines()
    lines += said.error.splitlines()
    for line in lines:
        assert line.replace("\t", "").isprintable() or not any(
            ord(each) < 32 or 127 <= ord(each) < 160 for each in line
        )
    for word in (status.get("generation"), said.result.get("generation"), said.result.get("confirm")):
        assert word is None or "/" not in word


def result(file: Path) -> None:
    """What a task says of a host, told to a watch with another host: that one is served."""
    try:
        said = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return  # between the processes of a watch goes nothing but JSON that Python wrote
    # Each has a directory of its own: a watch holds a lock there.
    following = Following(Path(tempfile.mkdtemp(dir=file.parent)), "n1", "n2", max_removed_percent=100)
    following.hosts.answers["n2"] = said
    following.cluster(SHOP)
    first = following.hosts.applied["n1"]
    assert first, "the other host was not served"
    more = [service(), service("new", clusterIP="10.96.3.3"), slice_of("web", "10.244.1.1"), *NODES_OF_SHOP]
    following.cluster(snapshot(*more))
    assert following.hosts.applied["n1"] not in ("", first), "the other host was not served any more"
    assert following.failing <= {"n2"}
    for event, fields in following.said:
        json.dumps({"event": event, **fields})


class Transport:
    """A connection on which an API server says what it is told to."""

    url = URL

    def __init__(self, data: bytes, path: str) -> None:
        self._data, self._path = data, path

    def get(self, url: str, _timeout: float) -> tuple[int, dict[str, str], bytes]:
        for resource in RESOURCES:
            if url.startswith(f"{resource.path}?"):
                empty = {"kind": f"{resource.kind}List", "metadata": {"resourceVersion": "1"}, "items": []}
                return 200, {}, self._data if resource.path == self._path else json.dumps(empty).encode()
        raise AssertionError(url)

    @contextlib.contextmanager
    def stream(self, _url: str, _timeout: float) -> Iterator[tuple[int, Iterator[bytes]]]:
        yield 200, (line for line in self._data.split(b"\n") if line)

    def close(self) -> None:
        """Nothing to close."""


def _api(data: bytes, resource: Resource) -> Api:
    transport: Any = Transport(data, resource.path)
    return Api(transport, sleep=lambda _seconds: None)


def events(file: Path) -> None:
    """A watch that an API server tells this: it is read, or all is listed again."""
    for resource in RESOURCES[:3]:
        watch = Watch(lambda: _api(b"", SERVICES))
        watch._wire._api = _api(file.read_bytes(), resource)
        watch._events(resource, "1")
        unforeseen = watch.last_malformed.startswith(f"{resource.name}: ")
        assert not unforeseen, watch.last_malformed
        watch._store.take()
        watch._store.digest().encode()
        _serve(watch._store.snapshot())


def listed(file: Path) -> None:
    """A list of an API server, as a run reads and keeps it."""
    for resource in (SERVICES, NODES, RESOURCES[1]):
        record: Record = _api(file.read_bytes().replace(b"KIND", resource.kind.encode()), resource).record()
        record.write(file.parent / "snapshot.json")
        for listing in record.lists:
            read_listing(listing)  # as a watch does
        _serve(snapshot_of(record))


def _serve(found: Any) -> None:
    """A cluster that was read so can be served, to a node that it has."""
    for problem in found.problems:
        assert str(problem).isprintable()
    desired = Engine(Choices.of({"config": document(clusterCIDR="10.244.0.0/16"), "vip_policy": "omit"}))
    desired.update(found)
    for each in found.nodes[:3]:
        with contextlib.suppress(UnusableNode, InvalidFacts):
            desired.state(each.name)
    json.dumps(untrusted({"labels": [dict(each.labels) for each in found.nodes]}), ensure_ascii=False).encode()


ANSWER_ERRORS = (NoAnswer,)
API_ERRORS = (ApiError,)
