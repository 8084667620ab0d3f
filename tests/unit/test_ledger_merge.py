"""Ledgers of several control hosts as one: nothing is lost, nothing comes twice, and tampering shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.ledger import BrokenLedger, append, entries, unmerged, verify
from agentless_kube_proxy.ledger_copy import copy_to, verify_copy
from agentless_kube_proxy.ledger_merge import hashes, merge

from .test_ledger import fields as common


def fields(number: int) -> dict[str, Any]:
    return {**common(number), "run": f"run-{number}"}


def filled(path: Path, *numbers: int) -> Path:
    for number in numbers:
        append(path, fields(number))
    return path


def told(path: Path) -> list[str]:
    """What entries say, merged ones included."""
    return [str(list(unmerged(entry))[-1]["run"]) for entry in entries(path)]


def runs(*numbers: int) -> list[str]:
    return [f"run-{number}" for number in numbers]


def test_a_host_that_has_none_continues_the_ledger_of_another(tmp_path: Path) -> None:
    first = filled(tmp_path / "first.jsonl", 1, 2, 3)
    second = tmp_path / "new" / "second.jsonl"
    assert merge(second, first) == 3
    assert second.read_bytes() == first.read_bytes()
    filled(second, 4)
    assert verify(second).number == 4
    assert merge(first, second) == 1, "and back again"
    assert first.read_bytes() == second.read_bytes()


def test_ledgers_that_went_apart_are_one_again(tmp_path: Path) -> None:
    first = filled(tmp_path / "first.jsonl", 1, 2)
    second = tmp_path / "second.jsonl"
    merge(second, first)
    filled(first, 3, 4)
    filled(second, 5)
    head = verify(first)
    assert merge(second, first) == 2
    assert told(second) == runs(1, 2, 5, 3, 4)
    assert verify(second, head.hash).number == 5, "a head that the first host printed"
    assert merge(second, first) == 0, "twice does no harm"
    assert merge(first, second) == 1, "what came from here does not come back"
    assert told(first) == runs(1, 2, 3, 4, 5)
    assert set(told(first)) == set(told(second))
    filled(first, 6)
    assert merge(second, first) == 1
    assert told(second)[-1] == runs(6)[0]


def test_three_hosts_learn_of_each_other_by_way_of_one(tmp_path: Path) -> None:
    ledgers = [filled(tmp_path / f"{i}.jsonl", i, i + 10) for i in range(3)]
    merge(ledgers[1], ledgers[0])
    assert merge(ledgers[2], ledgers[1]) == 4
    assert sorted(told(ledgers[2])) == sorted(runs(0, 10, 1, 11, 2, 12))
    assert merge(ledgers[2], ledgers[0]) == 0
    assert set(hashes(ledgers[0])) <= set(hashes(ledgers[2]))


def test_a_copy_of_the_other_ledger_proves_that_its_entries_are_still_there(tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    first, second = tmp_path / "first.jsonl", filled(tmp_path / "second.jsonl", 9)
    for number in range(3):
        append(first, fields(number), copy_to(str(copy)))
    merge(second, first)
    assert verify_copy(copy, second) == [f"3 entries are in {second}"]
    append(first, fields(4), copy_to(str(copy)))
    with pytest.raises(BrokenLedger, match="entry 4"):
        verify_copy(copy, second)


@pytest.mark.parametrize("whose", ["other", "ours"])
def test_nothing_is_merged_from_or_into_a_ledger_that_was_changed(tmp_path: Path, whose: str) -> None:
    ours, other = filled(tmp_path / "ours.jsonl", 1, 2), filled(tmp_path / "other.jsonl", 3, 4)
    broken = {"ours": ours, "other": other}[whose]
    broken.write_bytes(broken.read_bytes().replace(b'"number":1', b'"number":7', 1))
    before = ours.read_bytes()
    with pytest.raises(BrokenLedger):
        merge(ours, other)
    assert ours.read_bytes() == before


def test_what_was_merged_cannot_be_changed_either(tmp_path: Path) -> None:
    ours, other = filled(tmp_path / "ours.jsonl", 1), filled(tmp_path / "other.jsonl", 3, 4)
    merge(ours, other)
    text = ours.read_text()
    for old, new in (("merged", "merger"), ("run-4", "run-5")):
        assert old in text
        ours.write_text(text.replace(old, new))
        with pytest.raises(BrokenLedger):
            verify(ours)


def test_as_a_user_does_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, other = filled(tmp_path / "ours.jsonl", 1), filled(tmp_path / "other.jsonl", 3)
    head = verify(other).hash
    assert main(["ledger", "merge", "--into", str(ours), str(other)]) == 0
    assert main(["ledger", "verify", "--head", head, str(ours)]) == 0
    assert main(["ledger", "show", "--json", "--last", "1", str(ours)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{ours}: 1 entries of {other} added"
    assert out[1].startswith("intact: 2 entries")
    assert json.loads(out[2])["merged"]
    assert main(["ledger", "show", "--run", "run-3", str(ours)]) == 0
    assert capsys.readouterr().out.count("\n") >= 1
    assert main(["ledger", "merge", "--into", str(ours), str(tmp_path / "none")]) == 2
    other.write_text("{}\n")
    assert main(["ledger", "merge", "--into", str(ours), str(other)]) == 1
