"""The process that carries: tasks run beside each other, fail alone, and are waited for at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.carry import time_limit as limits
from agentless_kube_proxy.carry.workers import Carrier, CarrierGone


class Tasks:
    """What stands in for Ansible: the arguments say what happens."""

    forks = 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0

    def execute(
        self, host: str, arguments: Mapping[str, Any], about: Mapping[str, Any], line: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        (self._folder / f"{host}.begun").touch()
        if arguments.get("raise"):
            raise RuntimeError("no such luck")
        if arguments.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        while wanted := arguments.get("until"):
            if (self._folder / wanted).exists():
                break
            time.sleep(0.01)
        (self._folder / f"{host}.done").touch()
        return {
            "changed": True,
            "host": host,
            "pid": os.getpid(),
            "read": self._read,
            "line": {"from": host},
            "had": line,
            "about": dict(about),
            "large": "x" * int(arguments.get("large", 0)),
        }

    def settings(self) -> dict[str, dict[str, Any]]:
        return {"n1": {"read": self._read}}

    def refresh(self) -> None:
        self._read += 1
        if self._read == 2:
            raise ValueError("line 3: what is this?")


@pytest.fixture
def carrier(tmp_path: Path) -> Iterator[Carrier]:
    made = Carrier(Tasks(tmp_path), os.setsid)
    answers = made.answers()
    assert next(answers) == {"settings": {"n1": {"read": 0}}}
    made.told = answers  # type: ignore[attr-defined]
    yield made
    made.close(0.1)


def told(carrier: Carrier) -> dict[str, Any]:
    return dict(next(carrier.told))  # type: ignore[attr-defined]


def test_a_result_comes_back_whole(carrier: Carrier) -> None:
    carrier.submit("n1", {"large": 1_000_000})
    answer = told(carrier)
    assert answer["host"] == "n1"
    assert len(answer["result"]["large"]) == 1_000_000


def test_one_that_hangs_holds_nobody_up(carrier: Carrier, tmp_path: Path) -> None:
    carrier.submit("slow", {"until": "go"})
    for name in ("n1", "n2", "n3"):
        carrier.submit(name, {})
    assert [told(carrier)["host"] for _ in range(3)] == ["n1", "n2", "n3"]
    (tmp_path / "go").touch()
    assert told(carrier)["host"] == "slow"


def test_what_is_not_urgent_waits(carrier: Carrier, tmp_path: Path) -> None:
    for name in ("a", "b"):
        carrier.submit(name, {"until": "go"})
    carrier.submit("check", {}, patience=60)
    carrier.submit("push", {})
    (tmp_path / "go").touch()
    order = [told(carrier)["host"] for _ in range(4)]
    assert order.index("push") < order.index("check")


def test_what_can_wait_does_not_run_beside_what_cannot(carrier: Carrier, tmp_path: Path) -> None:
    carrier.submit("push", {"until": "go"})
    carrier.submit("confirmation", {}, patience=60)
    time.sleep(0.3)
    assert not (tmp_path / "confirmation.done").exists()
    (tmp_path / "go").touch()
    assert [told(carrier)["host"] for _ in range(2)] == ["push", "confirmation"]


def test_patience_ends(carrier: Carrier, tmp_path: Path) -> None:
    carrier.submit("push", {"until": "go"})
    carrier.submit("confirmation", {}, patience=0.1)
    assert told(carrier)["host"] == "confirmation"
    (tmp_path / "go").touch()
    assert told(carrier)["host"] == "push"


def test_a_process_runs_task_after_task_while_the_inventory_is_the_same(carrier: Carrier) -> None:
    results = []
    for name in ("n1", "n2", "n3"):
        carrier.submit(name, {})
        results.append(told(carrier)["result"])
    assert len({each["pid"] for each in results}) == 1
    carrier.refresh()
    assert "settings" in told(carrier)
    carrier.submit("n1", {})
    result = told(carrier)["result"]
    assert result["read"] == 1, "one that knows the old inventory"
    assert result["pid"] != results[0]["pid"]


def test_what_a_result_leaves_for_the_next_task_of_its_host_is_given_to_that_while_the_inventory_is_the_same(
    carrier: Carrier,
) -> None:
    def had(host: str) -> Any:
        carrier.submit(host, {})
        result = told(carrier)["result"]
        assert "line" not in result
        return result["had"]

    assert had("n1") is None
    assert had("n2") is None
    assert had("n1") == {"from": "n1"}
    carrier.refresh()
    told(carrier)
    assert had("n1") is None


def test_what_has_not_begun_can_be_taken_back(carrier: Carrier, tmp_path: Path) -> None:
    for name in ("a", "b"):
        carrier.submit(name, {"until": "go"})
    while len(list(tmp_path.glob("*.begun"))) < 2:
        time.sleep(0.01)
    carrier.submit("c", {})
    carrier.cancel()
    assert told(carrier) == {"host": "c", "result": {"cancelled": True}}
    (tmp_path / "go").touch()
    assert {told(carrier)["host"] for _ in range(2)} == {"a", "b"}
    assert not (tmp_path / "c.done").exists()


def test_workers_end_with_the_process_that_carries(carrier: Carrier) -> None:
    carrier.submit("n1", {})
    worker = told(carrier)["result"]["pid"]
    os.kill(carrier._pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while _runs(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("arguments", "said"), [({"raise": 1}, "no such luck"), ({"die": 1}, "without a result")])
def test_a_task_that_ends_badly_is_a_failure_of_its_host(
    carrier: Carrier, arguments: dict[str, Any], said: str
) -> None:
    carrier.submit("n1", arguments)
    result = told(carrier)["result"]
    assert result["failed"] is True
    assert said in result["msg"]
    carrier.submit("n1", {})
    assert told(carrier)["result"]["changed"] is True


def test_a_task_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task has a limit of its own; this one is for what does not keep to it."""
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(Tasks, "settings", lambda _self: {"n1": {"task_timeout": "0", "confirm_within": 0}})
    made = Carrier(Tasks(tmp_path), os.setsid)
    answers = made.answers()
    next(answers)
    made.submit("n1", {"until": "never"})
    assert "no answer within" in next(answers)["result"]["msg"]
    made.close(5)


def test_the_inventory_is_read_again_and_a_bad_one_changes_nothing(carrier: Carrier) -> None:
    carrier.refresh()
    assert told(carrier) == {"settings": {"n1": {"read": 1}}}
    carrier.refresh()
    assert told(carrier) == {"error": "the inventory cannot be read: line 3: what is this?"}


def test_the_end_waits_for_what_is_under_way_and_not_for_what_waits(carrier: Carrier, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        carrier.submit(name, {"until": "go"})
    carrier.submit("n1", {})
    carrier.submit("n2", {})
    time.sleep(0.3)
    if os.fork() == 0:
        time.sleep(0.5)
        (tmp_path / "go").touch()
        os._exit(0)
    carrier.close(60)
    os.wait()
    assert {each.name for each in tmp_path.glob("*.done")} == {"a.done", "b.done"}
    assert {told(carrier)["host"] for _ in range(2)} == {"a", "b"}
    with pytest.raises(CarrierGone):
        told(carrier)


def test_the_end_does_not_wait_for_ever(carrier: Carrier) -> None:
    carrier.submit("a", {"until": "never"})
    began = time.monotonic()
    carrier.close(0.5)
    assert time.monotonic() - began < 30
