"""akp watch from its first question to its end, with a carrier whose nodes do what a test tells them to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.carry.workers import CarrierGone
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.locks import Lock
from agentless_kube_proxy.watch.loop import Locked

from ..build import node, service, slice_of, snapshot
from .fakes import DEADLINE, FakeNode, Running, held


def cluster(*addresses: str, services: int = 1) -> Snapshot:
    more = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, services)]
    nodes = [node("n1"), node("n2", "172.18.0.12")]
    return snapshot(service(), *more, slice_of("web", *(addresses or ("10.244.1.1",))), *nodes)


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def nodes() -> dict[str, FakeNode]:
    return {"n1": FakeNode(), "n2": FakeNode()}


def test_every_host_gets_its_bundle_and_then_what_changes(tmp_path: Path, nodes: dict[str, FakeNode]) -> None:
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        assert running.wait("settled") == {"hosts": 2}
        first = {name: each.has for name, each in nodes.items()}
        change = running.watch.tell(cluster("10.244.1.1", "10.244.1.2"))
        told = running.wait("change", what=change)
        assert told["hosts"] == 2
        assert told["confirmed"] >= told["seconds"] > 0
        change = running.watch.tell(cluster("10.244.1.1", "10.244.1.2"))
        assert running.wait("change", what=change) == {"what": change, "hosts": 0}, "nothing that a host would see"
    assert {name: each.has for name, each in nodes.items()}.items().isdisjoint(first.items())
    for name in nodes:
        assert [each for each in running.carrier.what(name) if each != "gathered"] == ["applied", "delta"]
    assert 'akp_node_last_run_failed{cluster="default",node="n2"} 0' in (tmp_path / "akp_default.prom").read_text()


def test_rules_come_before_confirmations_and_a_waiting_change_hurries_them(
    tmp_path: Path, nodes: dict[str, FakeNode]
) -> None:
    for each in nodes.values():
        each.confirm_within = 100.0
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        running.wait("settled")
        assert {patience for _host, what, patience in running.carrier.tasks if what == "confirmed"} == {15.0}
        place = len(running.carrier.tasks)
        with held(nodes["n2"]):
            running.watch.tell(cluster(services=2))
            eventually(lambda: any(task[:2] == ("n2", "delta") for task in running.carrier.tasks[place:]))
            change = running.watch.tell(cluster(services=3))
            time.sleep(0.2)
        running.wait("change", what=change, hosts=2)
        urgent = [task for task in running.carrier.tasks[place:] if task[:2] == ("n2", "confirmed")]
        assert urgent[0] == ("n2", "confirmed", 0.0)
    assert all(each.going_back_to is None for each in nodes.values())


def test_what_was_applied_is_confirmed_before_the_end(tmp_path: Path, nodes: dict[str, FakeNode]) -> None:
    nodes["n1"].confirm_within = nodes["n2"].confirm_within = 60.0
    with Running(tmp_path, nodes) as running, held(nodes["n2"]):
        running.watch.tell(cluster())
        eventually(lambda: bool(nodes["n1"].has))
        nodes["n2"].held_up.set()  # type: ignore[union-attr]
        eventually(lambda: "applied" in running.carrier.what("n2"))
        running.stop()
    assert all(each.has and each.going_back_to is None for each in nodes.values())


def test_a_host_that_is_away_holds_up_no_other_and_gets_all_of_it_later(
    tmp_path: Path, nodes: dict[str, FakeNode]
) -> None:
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        running.wait("settled")
        nodes["n2"].away = True
        place = running.place
        changes = [running.watch.tell(cluster(f"10.244.1.{i}")) for i in range(2, 5)]
        running.wait("failed", place, host="n2", problem="unreachable: no route to host")
        eventually(lambda: nodes["n1"].has != "" and len(running.told("pushed", place)) >= 1)
        assert running.told("change", place) == [], "n2 waits for it"
        nodes["n2"].away = False
        assert running.wait("change", place, what=changes[-1])["hosts"] == 2
    assert [each["how"] for each in running.told("pushed", place) if each["host"] == "n2"] == ["bundle"]


def test_a_node_that_lost_its_rules_is_found_and_gets_its_bundle(tmp_path: Path, nodes: dict[str, FakeNode]) -> None:
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        running.wait("settled")
        had, nodes["n1"].has = nodes["n1"].has, ""
        assert running.wait("drift", host="n1")["state"] == "absent"
        eventually(lambda: nodes["n1"].has == had)


def test_a_delta_on_another_base_is_refused_by_the_node_which_gets_its_bundle(
    tmp_path: Path, nodes: dict[str, FakeNode]
) -> None:
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        running.wait("settled")
        nodes["n1"].has = "something-else"
        change = running.watch.tell(cluster("10.244.1.2"))
        assert running.wait("whole", host="n1")["problem"] == "the node has another generation"
        running.wait("change", what=change, hosts=2)
        assert running.carrier.what("n1")[-3:] == ["delta", "gathered", "applied"]


def test_while_a_scheduled_run_goes_on_nothing_is_pushed_and_then_every_host_is_asked(
    tmp_path: Path, nodes: dict[str, FakeNode]
) -> None:
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        running.wait("settled")
        lock = Lock(running.directory.path / "schedule" / "lock")
        eventually(lock.take)
        place = len(running.carrier.tasks)
        change = running.watch.tell(cluster("10.244.1.2"))
        assert "a scheduled run goes on" in running.wait("waiting")["problem"]
        time.sleep(0.3)
        assert {what for _host, what, _patience in running.carrier.tasks[place:]} <= {"gathered"}
        place = len(running.carrier.tasks)
        lock.give_back()
        running.wait("change", what=change, hosts=2)
        for name in nodes:
            what = [what for host, what, _patience in running.carrier.tasks[place:] if host == name]
            assert what[: what.index("delta")].count("gathered") >= 1


def test_hosts_come_and_go_with_the_inventory(tmp_path: Path, nodes: dict[str, FakeNode]) -> None:
    carried = {"n1": nodes["n1"]}
    with Running(tmp_path, carried) as running:
        running.watch.tell(cluster())
        assert running.wait("settled") == {"hosts": 1}
        running.carrier.nodes["n2"] = nodes["n2"]
        running.follower.reload()
        running.wait("host", host="n2", what="new in the inventory")
        eventually(lambda: bool(nodes["n2"].has))
        with held(nodes["n1"]):
            running.watch.tell(cluster("10.244.1.2"))
            eventually(lambda: "delta" in running.carrier.what("n1"))
            node_one = running.carrier.nodes.pop("n1")
            running.follower.reload()
            running.wait("host", host="n1", what="is not in the inventory any more")
        assert node_one is nodes["n1"]
        # Its answer comes after it has gone, and hurts nothing.
        change = running.watch.tell(cluster("10.244.1.3"))
        assert running.wait("change", what=change)["hosts"] == 1


def test_settings_that_cannot_be_used_are_named_and_the_old_ones_stay(
    tmp_path: Path, nodes: dict[str, FakeNode]
) -> None:
    with Running(tmp_path, nodes) as running:
        running.watch.tell(cluster())
        running.wait("settled")
        running.carrier.variables["max_removed_percent"] = "many"
        running.follower.reload()
        assert "many" in running.wait("configuration")["problem"]
        running.carrier.say({"error": "the inventory cannot be read: no"})
        running.wait("inventory", problem="the inventory cannot be read: no")
        running.wait("change", what=running.watch.tell(cluster("10.244.1.2")), hosts=2)


def test_it_ends_with_an_error_when_nothing_can_be_carried_any_more(tmp_path: Path, nodes: dict[str, FakeNode]) -> None:
    running = Running(tmp_path, nodes)
    with running:
        running.watch.tell(cluster())
        running.wait("settled")
        running.carrier.close(0)
        assert isinstance(running.ended(), CarrierGone)


def test_two_with_one_directory_are_one_too_many(tmp_path: Path, nodes: dict[str, FakeNode]) -> None:
    with Running(tmp_path, nodes) as first:
        first.watch.tell(cluster())
        first.wait("settled")
        second = Running(tmp_path, nodes)
        with second:
            assert isinstance(second.ended(), Locked)
