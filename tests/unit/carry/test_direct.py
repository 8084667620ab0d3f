"""The short way to a host: what a delta leaves behind there, and when a task has to do it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from agentless_kube_proxy.bundle.archive import archive
from agentless_kube_proxy.carry import direct, mux
from agentless_kube_proxy.carry.direct import Line
from agentless_kube_proxy.ledger import entries
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json
from agentless_kube_proxy.tasks.notes import About

DELTA = archive([("manifest.json", b'{"mode": "nftables"}\n'), ("nftables-1-endpoints.nft", b"add rule\n")])
TAKEN = {"ok": True, "changed": True, "generation": "b", "previous": "a", "deltas": 3}
ABOUT = About("of now")
Say = Callable[[Any], None]


@pytest.fixture
def line(tmp_path: Path) -> Line:
    directory = WorkDirectory(tmp_path / "akp").make()
    answer = {"node": "node-1", "facts": {"cpus": 2}, "key": "k", "recorded": "a", "status": {"generation": "a"}}
    write_json(directory.answer_file("n1"), answer)
    return Line(
        socket=str(tmp_path / "socket"),
        commands={"nftables": "sh akp-node apply -"},
        node="node-1",
        directory=str(directory.path),
        seconds=30.0,
        ledger={},
        variables={"kube_proxy_reason": "a test"},
    )


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, line: Line) -> Say:
    """What the host answers to a delta, or what becomes of the session."""

    def set_answer(answer: Any) -> None:
        def run(path: Path, command: str, stdin: BinaryIO) -> tuple[int, bytes, bytes]:
            assert (str(path), command, stdin.read()) == (line.socket, line.commands["nftables"], DELTA)
            if isinstance(answer, Exception):
                raise answer
            if callable(answer):
                answer()
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            return 0, text + b"\n", b""

        monkeypatch.setattr(mux, "run", run)

    return set_answer


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    file = tmp_path / "delta"
    file.write_bytes(DELTA)
    return file


def test_a_delta_that_was_taken_is_remembered_and_entered(line: Line, says: Say, delta: Path) -> None:
    says(TAKEN)
    given = direct.give(line, "n1", delta, ABOUT)
    directory = WorkDirectory(Path(line.directory))
    (entry,) = entries(directory.ledger)
    assert entry["nodes"] == {"n1": {"node": "node-1", "before": "a", "after": "b", "result": "changed"}}
    assert (entry["action"], entry["result"], entry["reason"]) == ("sync", "ok", "a test")
    assert entry["snapshot"] == "of now"
    assert given is not None
    assert f"entry 1, head {entry['hash']}" in given.pop("ledger")
    assert given == {"changed": True, "node": "node-1", "generation": "b", "previous": "a", "deltas": 3}
    answer = directory.answer("n1") or {}
    assert (answer["recorded"], answer["status"]["generation"], answer["facts"]) == ("b", "b", {"cpus": 2})


def test_a_host_that_had_it_is_not_entered(line: Line, says: Say, delta: Path) -> None:
    says({**TAKEN, "changed": False})
    assert (direct.give(line, "n1", delta, ABOUT) or {})["changed"] is False
    assert not WorkDirectory(Path(line.directory)).ledger.exists()


@pytest.mark.parametrize(
    "answer",
    [
        mux.NoSession("no such file"),
        mux.LostSession("closed"),
        {"ok": True, "need": "full", "reason": "another base"},
        {"ok": False, "need": "program"},
        {"ok": False, "code": 2, "error": "locked"},
        {"ok": True, "changed": True},
        b"",
        b"\xff\x00",
        b"[]",
    ],
    ids=str,
)
def test_what_does_not_go_well_is_left_to_a_task(line: Line, says: Say, delta: Path, answer: Any) -> None:
    says(answer)
    assert direct.give(line, "n1", delta, ABOUT) is None
    directory = WorkDirectory(Path(line.directory))
    assert not directory.ledger.exists()
    assert (directory.answer("n1") or {})["recorded"] == "a"


def test_a_mode_that_it_knows_no_command_for_is_left_to_a_task(line: Line, says: Say, delta: Path) -> None:
    says(TAKEN)
    delta.write_bytes(archive([("manifest.json", b'{"mode": "ipvs"}\n')]))
    assert direct.give(line, "n1", delta, ABOUT) is None


@pytest.mark.timeout(60, method="thread")  # the other method has the timer that is tested
def test_a_host_that_does_not_answer_in_time_failed(line: Line, says: Say, delta: Path) -> None:
    says(lambda: time.sleep(60))
    given = direct.give(dataclasses.replace(line, seconds=0.2), "n1", delta, ABOUT) or {}
    assert given["failed"] is True
    assert "did not answer within 0.2 s" in given["msg"]
    (entry,) = entries(WorkDirectory(Path(line.directory)).ledger)
    assert entry["result"] == "failed"
    assert entry["nodes"]["n1"]["before"] == "a"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"state": "applied", "delta": "/d", "confirm_within": 0}, True),
        ({"state": "applied", "delta": "/d"}, False),
        ({"state": "applied", "delta": "/d", "confirm_within": 60}, False),
        ({"state": "applied", "confirm_within": 0}, False),
        ({"state": "gathered"}, False),
    ],
)
def test_only_deltas_that_nothing_has_to_be_confirmed_of_go_there(arguments: dict[str, Any], expected: bool) -> None:
    assert direct.takes(arguments) is expected
