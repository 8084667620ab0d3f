"""A cluster that is watched: what is known is current, whatever happens to connections and credentials."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cluster.access import Access
from agentless_kube_proxy.cluster.api import Api, connect
from agentless_kube_proxy.cluster.refusals import Forbidden
from agentless_kube_proxy.cluster.watch import ObjectChange, Update, Watch

from tests.unit.apiserver import Answer, Object, Server, serving, status

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"
LONG = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        yield served


def connected(server: Server) -> Api:
    api = connect(Access(host=server.url, api_key="x"), timeout=5)
    api._sleep = lambda _seconds: None
    return api


@pytest.fixture
def watch(server: Server) -> Iterator[Watch]:
    """One that has told of the beginning."""
    with Watch(lambda: connected(server), seconds=2.0, grace=1.0) as started:
        first = started.next(LONG)
        assert first is not None
        assert first.initial
        yield started


def endpoints(server: Server, address: str, number: int = 0, **annotations: str) -> Object:
    obj = copy.deepcopy(server.objects[SLICES][number])
    obj["endpoints"] = [{"addresses": [address]}]
    obj["metadata"]["annotations"] = annotations
    return obj


def told(watch: Watch) -> Update:
    update = watch.next(LONG)
    assert update is not None
    return update


def addresses(update: Update) -> list[str]:
    return [endpoint.address for each in update.snapshot.slices for endpoint in each.endpoints]


def asked(server: Server, path: str) -> list[dict[str, str]]:
    return [query for known, query in server.asked if known == path]


def test_the_beginning_is_all_four_lists(server: Server) -> None:
    with Watch(lambda: connected(server)) as watch:
        first = told(watch)
    assert (first.initial, first.changes) == (True, ())
    assert [len(each) for each in (first.snapshot.services, first.snapshot.slices, first.snapshot.nodes)] == [5, 3, 2]


def test_an_update_holds_everything_since_the_last_one(server: Server, watch: Watch) -> None:
    server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1"))
    server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.2"))
    server.tell(SERVICES, "DELETED", server.objects[SERVICES][4])
    deadline = time.monotonic() + LONG
    while not (server.events[SLICES].empty() and server.events[SERVICES].empty()) and time.monotonic() < deadline:
        time.sleep(0.01)
    update = watch.next(LONG, settle=0.5)
    assert update is not None
    assert update.changes == (
        ObjectChange("EndpointSlice", "shop", "web-0", "changed"),
        ObjectChange("Service", "shop", "web-4", "removed"),
    )
    assert addresses(update) == ["10.0.0.2"]
    assert watch.next(0.3) is None


def test_an_update_has_the_digest_that_a_record_of_now_has(server: Server, watch: Watch) -> None:
    assert watch.url == server.url
    digests = {connected(server).record().digest}
    for path, obj in ((SLICES, endpoints(server, "10.0.0.1")), (NODES, copy.deepcopy(server.objects[NODES][0]))):
        if path == NODES:
            obj["spec"] = {"podCIDRs": ["10.244.9.0/24"], "taints": [{"key": "anything"}]}
        server.objects[path][0] = obj
        server.tell(path, "MODIFIED", obj)
        assert told(watch).digest == connected(server).record().digest
        digests.add(connected(server).record().digest)
    assert len(digests) == 3


def test_noise_is_no_update(server: Server, watch: Watch) -> None:
    node = copy.deepcopy(server.objects[NODES][0])
    node["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    server.tell(NODES, "MODIFIED", node)
    assert watch.next(1.0) is None


def test_when_a_change_of_endpoints_began_is_told(server: Server, watch: Watch) -> None:
    noted = {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05Z"}
    server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1", **noted))
    assert told(watch).triggered == {("shop", "web-0"): 1767323045.0}


def test_a_watch_goes_on_from_where_it_was(server: Server, watch: Watch) -> None:
    server.tell(SLICES, "BOOKMARK", server.objects[SLICES][0])
    version = str(server.version)
    server.events[SLICES].put(None)  # the server ends it
    server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1"))
    assert addresses(told(watch)) == ["10.0.0.1"]
    watches = [query["resourceVersion"] for query in asked(server, SLICES) if query.get("watch")]
    assert watches[:2] == ["100", version]
    assert len([query for query in asked(server, SLICES) if "limit" in query]) == 1, "listed again without need"


def test_what_was_missed_is_found_by_a_new_list(server: Server, watch: Watch) -> None:
    server.objects[SLICES][1] = endpoints(server, "10.0.0.9", 1)
    server.events.setdefault(SLICES, queue.Queue()).put(
        {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
    )
    update = told(watch)
    assert update.changes == (ObjectChange("EndpointSlice", "shop", "web-1", "changed"),)
    assert addresses(update) == ["10.0.0.9"]


def test_a_connection_that_is_silent_for_too_long_is_made_anew(server: Server) -> None:
    server.silent = True
    with Watch(lambda: connected(server), seconds=1.0, grace=0.5) as watch:
        told(watch)
        deadline = time.monotonic() + LONG
        while len(asked(server, SLICES)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        server.silent = False
        server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1"))
        assert addresses(told(watch)) == ["10.0.0.1"]


def test_a_server_that_was_away_for_a_while(server: Server, watch: Watch) -> None:
    server.once(status(503, "etcd is away"), times=12)
    server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1"))
    assert addresses(told(watch)) == ["10.0.0.1"]
    deadline = time.monotonic() + LONG
    while watch.trouble and time.monotonic() < deadline:
        time.sleep(0.05)
    assert watch.trouble == ""


def kubeconfig(server: Server, token: Path) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"tokenFile": str(token)}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def test_a_token_that_was_rotated_is_read_again(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    good = ["Bearer old"]

    def check(_path: str, _query: dict[str, str]) -> Answer | None:
        return None if server.headers[-1].get("Authorization") in good else status(401, "token expired")

    server.trouble.append(check)
    access = Access(kubeconfig=kubeconfig(server, token))
    with Watch(lambda: connect(access, timeout=5), seconds=1.0) as watch:
        told(watch)
        token.write_text("new")
        good[:] = ["Bearer new"]
        for events in list(server.events.values()):
            events.put(None)
        server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1"))
        assert addresses(told(watch)) == ["10.0.0.1"]


def test_a_right_that_is_missing_is_an_error_at_the_beginning_and_waited_for_later(server: Server) -> None:
    refused = [True]

    def refuse(path: str, query: dict[str, Any]) -> Answer | None:
        return status(403, "no") if path == NODES and refused[0] and (query.get("watch") or "limit" in query) else None

    server.trouble.append(refuse)
    with Watch(lambda: connected(server)) as watch, pytest.raises(Forbidden, match='"list" on the resource "nodes"'):
        watch.next(LONG)
    refused[0] = False
    with Watch(lambda: connected(server), seconds=1.0) as watch:
        told(watch)
        refused[0] = True
        deadline = time.monotonic() + LONG
        while "403" not in watch.trouble and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "RBAC does not grant" in watch.trouble
        server.tell(SLICES, "MODIFIED", endpoints(server, "10.0.0.1"))
        assert addresses(told(watch)) == ["10.0.0.1"]
        refused[0] = False


def test_closed_from_elsewhere_a_wait_ends(server: Server) -> None:
    with Watch(lambda: connected(server)) as watch:
        told(watch)
        threading.Timer(0.3, watch.close).start()
        assert watch.next(LONG) is None
