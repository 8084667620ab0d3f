"""A plan on its way to its hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.cluster.record import peek, record_of
from agentless_kube_proxy.plan.approval import approved_clusters
from agentless_kube_proxy.plan.bundles import target
from agentless_kube_proxy.plan.progress import approved_frontends, begin, conclude, followed_now
from agentless_kube_proxy.plan.removal_limit import Frontends
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json

from tests.unit.build import render, service, slice_of

OLD = render(service("web"))
NEW = render(service("web"), service("new", clusterIP="10.96.7.8"))
MOVED = render(service("web"), service("new", clusterIP="10.96.7.8"), slice_of("web", "10.244.1.1"))


@pytest.fixture
def directory(tmp_path: Path) -> WorkDirectory:
    return WorkDirectory(tmp_path).make()


@pytest.fixture
def frontends(directory: WorkDirectory) -> Frontends:
    found = Frontends(directory.frontends)
    for each in (OLD, NEW, MOVED):
        found.learn(each, "")
    return found


def cluster(directory: WorkDirectory, name: str, *objects: dict[str, Any]) -> Path:
    file = directory.path / name
    record_of(list(objects), "test").write(file)
    return file


def has(directory: WorkDirectory, host: str, state: State) -> None:
    status = {"state": "applied", "generation": state.generation}
    write_json(directory.answer_file(host), {"host": host, "node": host, "facts": {}, "status": status})


def plan(*hosts: str) -> dict[str, Any]:
    return {"digest": "d" * 64, "hosts": {host: {"generation": NEW.generation} for host in hosts}}


def test_a_plan_is_carried_out_once_all_of_its_hosts_have_it(directory: WorkDirectory, frontends: Frontends) -> None:
    snapshot = cluster(directory, "cluster.json", service("web"), service("new"))
    for host in ("n1", "n2"):
        has(directory, host, OLD)
    assert conclude(directory, frontends) == [], "there is none"
    begin(directory, plan("n1", "n2"), snapshot, frontends)
    assert conclude(directory, frontends) == ["n1", "n2"]
    has(directory, "n1", NEW)
    assert conclude(directory, frontends) == ["n2"]
    assert not directory.approved.exists()
    assert approved_frontends(directory) == frozenset()
    # Endpoints that came meanwhile are no reason to begin again.
    has(directory, "n1", MOVED)
    has(directory, "n2", NEW)
    assert conclude(directory, frontends) == []
    assert peek(directory.approved) == peek(snapshot)
    assert followed_now(directory) is None
    assert approved_frontends(directory) == {frontends.name(NEW.generation)}


def test_hosts_that_were_never_heard_of_do_not_have_it(directory: WorkDirectory, frontends: Frontends) -> None:
    snapshot = cluster(directory, "cluster.json", service("web"))
    entry = {"generation": "f" * 64}
    begin(directory, {"digest": "d", "hosts": {"n1": entry}}, snapshot, frontends)
    assert conclude(directory, frontends) == ["n1"]


def test_each_host_gets_endpoints_with_the_services_that_it_has(directory: WorkDirectory, frontends: Frontends) -> None:
    web = service("web")
    cluster(directory, "approved.json", web)
    planned = cluster(directory, "cluster.json", web, service("new"))
    now = cluster(directory, "snapshot.json", web, service("new"), service("newer"), slice_of("web", "10.244.1.1"))
    has(directory, "n1", MOVED)
    has(directory, "n2", OLD)
    targets = [target(directory, host, "") for host in ("n1", "n2", "n3")]
    clusters, waiting = approved_clusters(directory, now, targets, frontends)
    assert [[each.host for each in its or ()] for _file, its in clusters] == [["n1", "n2", "n3"]]
    assert waiting == (
        ("waiting for approval", "Service/shop/new: is new, and waits for approval"),
        ("waiting for approval", "Service/shop/newer: is new, and waits for approval"),
    )
    begin(directory, plan("n1", "n2"), planned, frontends)
    clusters, _waiting = approved_clusters(directory, now, targets, frontends)
    slices = slice_of("web", "10.244.1.1")
    expected = {
        ("n2", "n3"): cluster(directory, "a.json", web, slices),
        ("n1",): cluster(directory, "b.json", web, service("new"), slices),
    }
    found = {tuple(each.host for each in its or ()): file for file, its in clusters}
    assert {hosts: peek(file) for hosts, file in found.items()} == {hosts: peek(f) for hosts, f in expected.items()}
    alone, _waiting = approved_clusters(directory, now, targets[:1], frontends)
    assert [[each.host for each in its or ()] for _file, its in alone] == [["n1"]]
