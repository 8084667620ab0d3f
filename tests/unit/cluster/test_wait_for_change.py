"""Waiting: what matters to a rule ends it, everything else does not."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agentless_kube_proxy.cluster import watch as watch_module
from agentless_kube_proxy.cluster.access import Access
from agentless_kube_proxy.cluster.api import Api, connect
from agentless_kube_proxy.cluster.record import Record
from agentless_kube_proxy.cluster.refusals import ApiError, Forbidden, Unreachable
from agentless_kube_proxy.cluster.watch import ObjectChange, Watch, wait_for_change

from tests.unit.apiserver import Answer, Object, Server, serving, status

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        yield served


def base(server: Server) -> Record:
    with connect(Access(host=server.url, api_key="x"), timeout=5) as api:
        return api.record()


def connected(server: Server) -> Api:
    api = connect(Access(host=server.url, api_key="x"), timeout=5)
    api._sleep = lambda _seconds: None
    return api


def wait(
    server: Server, known: Record | None, *, timeout: float = 5.0, settle: float = 0.0
) -> tuple[list[ObjectChange], float]:
    started = time.monotonic()
    found = wait_for_change(lambda: connected(server), known, timeout=timeout, settle=settle)
    return found, time.monotonic() - started


def later(seconds: float, action: Callable[[], None]) -> None:
    threading.Timer(seconds, action).start()


def changed(obj: Object, **fields: Any) -> Object:
    return {**copy.deepcopy(obj), **fields}


def test_nothing_happens_until_the_time_is_over(server: Server) -> None:
    found, seconds = wait(server, base(server), timeout=1.0)
    assert found == []
    assert 0.9 < seconds < 3


def test_a_change_of_an_endpoint_ends_the_wait_at_once(server: Server) -> None:
    known = base(server)
    obj = changed(server.objects[SLICES][0], endpoints=[{"addresses": ["10.0.0.1"]}])
    later(0.3, lambda: server.tell(SLICES, "MODIFIED", obj))
    found, seconds = wait(server, known, timeout=20)
    assert found == [ObjectChange("EndpointSlice", "shop", "web-0", "changed")]
    assert seconds < 5


@pytest.mark.parametrize(
    ("path", "kind", "change"),
    [
        (SERVICES, "MODIFIED", lambda obj: obj["metadata"].update({"annotations": {"note": "new"}})),
        (SERVICES, "MODIFIED", lambda obj: obj["spec"].update({"selector": {"app": "other"}})),
        (SLICES, "MODIFIED", lambda obj: obj["metadata"].update({"generation": 7})),
        (NODES, "MODIFIED", lambda obj: obj["status"].update({"conditions": [{"type": "Ready", "status": "False"}]})),
        (NODES, "MODIFIED", lambda obj: obj["metadata"].update({"labels": {"disk": "ssd"}})),
        (SERVICES, "BOOKMARK", lambda obj: obj.update({"spec": {}})),
        (SERVICES, "ADDED", lambda obj: obj.update({"spec": {"clusterIP": "None"}})),
    ],
    ids=["annotation", "selector", "generation", "readiness", "label", "bookmark", "headless"],
)
def test_what_no_rule_depends_on_does_not_end_it(server: Server, path: str, kind: str, change: Any) -> None:
    known = base(server)
    obj = copy.deepcopy(server.objects[path][0])
    change(obj)
    if kind == "ADDED":
        obj["metadata"]["name"] = "new"
    server.tell(path, kind, obj)
    assert wait(server, known, timeout=1.0)[0] == []


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (SERVICES, lambda obj: obj["spec"].update({"sessionAffinity": "ClientIP"})),
        (SERVICES, lambda obj: obj["spec"]["ports"][0].update({"port": 81})),
        (NODES, lambda obj: obj["status"].update({"addresses": [{"type": "InternalIP", "address": "192.0.2.9"}]})),
        (NODES, lambda obj: obj["metadata"].update({"labels": {"topology.kubernetes.io/zone": "b"}})),
        (SERVICES, lambda obj: obj["spec"]["ports"][0].update({"port": 70000})),
    ],
    ids=["affinity", "port", "node address", "zone", "no longer usable"],
)
def test_what_a_rule_depends_on_ends_it(server: Server, path: str, change: Any) -> None:
    known = base(server)
    obj = copy.deepcopy(server.objects[path][0])
    change(obj)
    server.tell(path, "MODIFIED", obj)
    found, _seconds = wait(server, known, timeout=20)
    assert [each.name for each in found] == [obj["metadata"]["name"]]


def test_added_and_removed_objects_are_told_apart(server: Server) -> None:
    known = base(server)
    gone = server.objects[SERVICES][1]
    new = changed(server.objects[SERVICES][0], metadata={"namespace": "shop", "name": "new"})
    server.tell(SERVICES, "DELETED", gone)
    server.tell(SERVICES, "ADDED", new)
    found, _seconds = wait(server, known, timeout=20, settle=0.5)
    assert found == [
        ObjectChange("Service", "shop", "new", "added"),
        ObjectChange("Service", "shop", "web-1", "removed"),
    ]


def test_a_rollout_is_one_change(server: Server) -> None:
    known = base(server)
    for i in range(4):
        obj = changed(server.objects[SLICES][0], endpoints=[{"addresses": [f"10.0.0.{i + 1}"]}])
        later(0.2 + 0.3 * i, lambda obj=obj: server.tell(SLICES, "MODIFIED", obj))
    found, seconds = wait(server, known, timeout=20, settle=0.6)
    assert len(found) == 1
    assert seconds > 0.2 + 0.9 + 0.6


def test_a_change_that_is_taken_back_is_none(server: Server) -> None:
    known = base(server)
    obj = server.objects[SLICES][0]
    server.tell(SLICES, "MODIFIED", changed(obj, endpoints=[{"addresses": ["10.0.0.1"]}]))
    server.tell(SLICES, "MODIFIED", obj)
    assert wait(server, known, timeout=2, settle=0.5)[0] == []


def test_what_happened_while_nobody_watched_is_found(server: Server) -> None:
    known = base(server)
    server.objects[SERVICES] = server.objects[SERVICES][1:]
    server.version = 500

    def forget(path: str, query: dict[str, str]) -> Answer | None:
        if path == SERVICES and query.get("watch") and int(query["resourceVersion"]) < 500:
            return status(410, "too old resource version")
        return None

    server.trouble.append(forget)
    found, _seconds = wait(server, known, timeout=20)
    assert found == [ObjectChange("Service", "shop", "web-0", "removed")]


def test_an_expiry_in_the_middle_of_a_watch_is_survived(server: Server) -> None:
    known = base(server)
    expired = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "expired"}}
    server.tell(SLICES, "BOOKMARK", server.objects[SLICES][0])
    server.events[SLICES].put(expired)
    obj = changed(server.objects[SLICES][0], endpoints=[{"addresses": ["10.0.0.1"]}])
    later(0.5, lambda: server.tell(SLICES, "MODIFIED", obj))
    assert len(wait(server, known, timeout=20)[0]) == 1


def test_a_watch_that_the_server_ends_goes_on(server: Server) -> None:
    known = base(server)
    server.events.setdefault(SLICES, queue.Queue()).put(None)
    obj = changed(server.objects[SLICES][0], endpoints=[{"addresses": ["10.0.0.1"]}])
    later(0.5, lambda: server.tell(SLICES, "MODIFIED", obj))
    assert len(wait(server, known, timeout=20)[0]) == 1


def test_a_missing_right_is_an_error_at_once(server: Server) -> None:
    known = base(server)

    def refuse(path: str, query: dict[str, str]) -> Answer | None:
        return status(403, "no watch for you") if query.get("watch") and path == NODES else None

    server.trouble.append(refuse)
    with pytest.raises(Forbidden, match='verb "watch" on the resource "nodes"'):
        wait(server, known, timeout=60)


def test_a_server_that_stays_away_is_an_error_in_the_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "RETRY_SECONDS", 0.1)
    known = base(server)
    server.once(status(503, "away"), times=100000)
    with pytest.raises(Unreachable, match="503"):
        wait(server, known, timeout=1.5)


def test_without_a_record_the_beginning_is_what_was_known(server: Server) -> None:
    obj = changed(server.objects[SLICES][0], endpoints=[{"addresses": ["10.0.0.1"]}])
    later(1.0, lambda: server.tell(SLICES, "MODIFIED", obj))
    assert len(wait(server, None, timeout=20)[0]) == 1


GOOD = {"namespace": "shop", "name": "web-0", "resourceVersion": "200"}
MALFORMED: dict[str, Any] = {
    "a number": 7,
    "a list": [],
    "nothing": b"null",
    "no type": {"object": {"metadata": GOOD}},
    "no object": {"type": "MODIFIED"},
    "a type that is none": {"type": "EXPLODED", "object": {"metadata": GOOD}},
    "a type that is a list": {"type": ["MODIFIED"], "object": {"metadata": GOOD}},
    "an object that is text": {"type": "MODIFIED", "object": "x"},
    "an object that is null": {"type": "MODIFIED", "object": None},
    "metadata that is text": {"type": "MODIFIED", "object": {"metadata": "x"}},
    "metadata that is a list": {"type": "DELETED", "object": {"metadata": [1]}},
    "no metadata": {"type": "MODIFIED", "object": {}},
    "a name that is a number": {"type": "MODIFIED", "object": {"metadata": {**GOOD, "name": 7}}},
    "a name that is a mapping": {"type": "ADDED", "object": {"metadata": {**GOOD, "name": {}}}},
    "a namespace that is a list": {"type": "ADDED", "object": {"metadata": {**GOOD, "namespace": ["x"]}}},
    "a version that is a list": {"type": "MODIFIED", "object": {"metadata": {**GOOD, "resourceVersion": [1]}}},
    "another kind": {"type": "MODIFIED", "object": {"kind": "Status", "metadata": GOOD}},
    "an error that is none": {"type": "ERROR", "object": {"code": ["x"], "message": {"a": 1}}},
    "a bookmark of nothing": {"type": "BOOKMARK", "object": {"metadata": "x"}},
    "no JSON": b"{",
    "deep": b'{"type": "MODIFIED", "object": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"type": "MODIFIED", "object": {"metadata": {"name": ' + b"9" * 5000 + b"}}}",
    "bytes": b"\xff\xfe\x00",
}
HOSTILE: dict[str, Any] = {
    "a surrogate": {"spec": {"clusterIP": "\ud800"}},
    "labels that are text": {"metadata": {**GOOD, "labels": "x"}},
    "ports that are text": {"spec": {"clusterIP": "10.96.0.1", "ports": "x"}},
    "a large number": {"spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 10**300}]}},
    "a number that is none": {"spec": {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 1e308}}}},
    "annotations that are lists": {"metadata": {**GOOD, "annotations": {"kube-proxy.agentless.io/x": [[]]}}},
}


def watched_after(server: Server, event: Any) -> Watch:
    """A watch that goes on after an event: what changes then is noticed."""
    with Watch(lambda: connected(server), seconds=30) as watch:
        assert watch.next(20) is not None
        server.events.setdefault(SERVICES, queue.Queue()).put(event)
        obj = changed(server.objects[SERVICES][1])
        obj["spec"]["ports"] = [{"port": 81}]
        server.objects[SERVICES][1] = obj
        server.tell(SERVICES, "MODIFIED", obj)
        found: set[str] = set()
        deadline = time.monotonic() + 20
        while "web-1" not in found and time.monotonic() < deadline:
            update = watch.next(1.0)
            found |= {each.name for each in update.changes} if update else set()
            # A real server tells a new watch what an old one missed.
            server.tell(SERVICES, "MODIFIED", obj)
        assert "web-1" in found
        return watch


@pytest.mark.parametrize("sort", MALFORMED)
def test_an_event_that_is_none_does_not_end_the_watch(server: Server, sort: str) -> None:
    watch = watched_after(server, MALFORMED[sort])
    lists = len([path for path, query in server.asked if path == SERVICES and "watch" not in query])
    assert lists <= 2, "one list at the beginning, and one more at most"
    if lists == 2:
        assert watch.malformed == 1
        assert watch.last_malformed.isprintable()


@pytest.mark.parametrize("sort", HOSTILE)
def test_an_object_that_cannot_be_read_does_not_end_the_watch(server: Server, sort: str) -> None:
    obj = {**server.objects[SERVICES][0], **HOSTILE[sort]}
    obj["metadata"] = {**GOOD, **obj["metadata"]}
    watched_after(server, {"type": "MODIFIED", "object": obj})


@pytest.mark.parametrize(
    "page",
    [
        {"items": 7},
        {"items": [7]},
        {"items": [{"metadata": {"name": 7}}, {"metadata": {"name": "x"}}]},
        {"items": [{"metadata": {"name": "x", "namespace": ["x"]}}]},
        {"metadata": {"continue": ["x"]}},
        {"metadata": []},
        {"kind": ["x"]},
        b"[" * 100_000,
        b"9" * 10_000,
        b"\xff",
        b"null",
    ],
)
def test_a_list_that_is_none_is_an_error_in_words_and_the_next_one_counts(server: Server, page: Any) -> None:
    body = page if isinstance(page, bytes) else {"kind": "ServiceList", "metadata": {"resourceVersion": "7"}, **page}
    server.once(Answer(body=body), SERVICES, times=99)
    api = connected(server)
    with pytest.raises(ApiError, match="services"):
        api.record()
    server.trouble.clear()
    assert api.record().counts["Service"] == 5
