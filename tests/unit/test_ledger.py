"""The ledger: entries that follow each other, and what happens to those who meddle with them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.ledger import START, BrokenLedger, append, entries, seal, verify


def fields(number: int) -> dict[str, Any]:
    return {
        "who": {"user": "alice", "host": "control"},
        "action": "sync",
        "run": "r1",
        "nodes": {f"n{number}": {"before": "a" * 64, "after": "b" * 64, "result": "changed"}},
        "result": "ok",
    }


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    file = tmp_path / "akp" / "ledger.jsonl"
    for number in range(1, 6):
        append(file, fields(number))
    return file


def test_entries_are_numbered_and_each_names_its_predecessor(ledger: Path) -> None:
    found = list(entries(ledger))
    assert [each["number"] for each in found] == [1, 2, 3, 4, 5]
    assert [each["previous"] for each in found] == [START, *(each["hash"] for each in found[:-1])]
    assert ledger.stat().st_mode & 0o777 == 0o600
    assert verify(ledger).hash == found[-1]["hash"]


def edit(lines: list[str]) -> list[str]:
    return [*lines[:2], lines[2].replace("alice", "mallo"), *lines[3:]]


def edit_and_seal(lines: list[str]) -> list[str]:
    entry = json.loads(lines[2])
    del entry["hash"]
    return [*lines[:2], seal({**entry, "result": "failed"}).decode().rstrip("\n"), *lines[3:]]


def delete(lines: list[str]) -> list[str]:
    return [*lines[:2], *lines[3:]]


def delete_the_first(lines: list[str]) -> list[str]:
    return lines[1:]


def swap(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


def repeat(lines: list[str]) -> list[str]:
    return [*lines, lines[-1]]


def insert(lines: list[str]) -> list[str]:
    return [*lines[:2], "", *lines[2:]]


@pytest.mark.parametrize("meddle", [edit, edit_and_seal, delete, delete_the_first, swap, repeat, insert])
def test_meddling_is_found_and_the_line_named(meddle: Any, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = meddle(ledger.read_text().splitlines())
    ledger.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(BrokenLedger, match=r"line [0-9]+ "):
        verify(ledger)
    assert main(["ledger", "verify", str(ledger)]) == 1
    assert capsys.readouterr().out.startswith("broken: ")
    assert main(["ledger", "show", str(ledger)]) == 1


def test_every_single_byte_counts(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    for number in (1, 2):
        append(file, fields(number))
    data = file.read_bytes()
    for position in range(len(data)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(BrokenLedger):
            verify(file)


def test_an_end_that_was_cut_off_is_found_by_who_knows_the_head(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = verify(ledger).hash
    append(ledger, fields(6))
    assert main(["ledger", "verify", "--head", head, str(ledger)]) == 0, "it may have grown since"
    assert capsys.readouterr().out.startswith("intact: 6 entries, head ")
    ledger.write_text("".join(f"{line}\n" for line in ledger.read_text().splitlines()[:-2]))
    assert verify(ledger).number == 4, "by itself it looks like a ledger that never was longer"
    assert main(["ledger", "verify", "--head", head, str(ledger)]) == 1
    assert "cut off" in capsys.readouterr().out


def test_a_ledger_written_anew_is_found_by_who_knows_the_head(ledger: Path) -> None:
    head = verify(ledger).hash
    ledger.unlink()
    for number in range(1, 6):
        append(ledger, {**fields(number), "who": {"user": "mallory", "host": "control"}})
    with pytest.raises(BrokenLedger):
        verify(ledger, head)


def test_a_writer_that_died_in_the_middle_costs_its_own_entry_only(ledger: Path) -> None:
    with ledger.open("ab") as stream:
        stream.write(seal({"number": 6})[:30])
    with pytest.raises(BrokenLedger, match="has no end"):
        verify(ledger)
    append(ledger, fields(6))
    assert verify(ledger).number == 6
    assert list(entries(ledger))[-1]["torn"] == 30


def test_an_entry_that_lacks_nothing_but_its_end_is_kept(ledger: Path) -> None:
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:-1])
    assert verify(ledger).number == 5
    append(ledger, fields(6))
    assert ledger.read_bytes().startswith(whole)
    assert verify(ledger).number == 6
    assert "torn" not in list(entries(ledger))[-1]
    # The same of the first entry of all, and of one that was changed: its hash is not that of its text.
    first = whole.splitlines(keepends=True)[0]
    ledger.write_bytes(first[:-1])
    append(ledger, fields(2))
    assert [each["number"] for each in entries(ledger)] == [1, 2]
    ledger.write_bytes(whole[:-1].replace(b"n5", b"n6"))
    append(ledger, fields(5))
    assert list(entries(ledger))[-1]["torn"] == len(whole.splitlines()[-1])


def test_nothing_is_added_to_an_entry_that_was_changed(ledger: Path) -> None:
    text = ledger.read_text()
    ledger.write_text(text.replace("n5", "n6"))
    with pytest.raises(BrokenLedger, match=r"was changed.* Move the file away .* the next run begins a new one"):
        append(ledger, fields(6))


def test_lines_are_shown_as_they_are(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", "--json", "--last", "2", str(ledger)]) == 0
    assert capsys.readouterr().out == "".join(ledger.read_text().splitlines(keepends=True)[-2:])


def test_a_number_that_is_none_is_a_mistake_in_the_command(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", "--last", "-1", str(ledger)]) == 2
    assert "--last -1: is no number of entries" in capsys.readouterr().err


def test_what_is_not_known_of_a_failure_is_called_so(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {
        "refused": {"before": "a" * 64, "after": "a" * 64, "result": "failed", "error": "no"},
        "away": {"before": "a" * 64, "result": "failed", "error": "unreachable"},
        "new": {"before": None, "result": "failed", "error": "unreachable"},
    }
    append(ledger, {**fields(6), "nodes": nodes, "result": "failed"})
    assert main(["ledger", "show", "--last", "1", str(ledger)]) == 0
    shown = capsys.readouterr().out
    assert f"refused  {'a' * 12} -> {'a' * 12}  failed: no" in shown
    assert f"away  {'a' * 12} -> unknown  failed: unreachable" in shown
    assert "new  nothing -> unknown  failed: unreachable" in shown


def many(file: Path, first: int) -> None:
    for number in range(first, first + 25):
        append(file, {**fields(number), "note": "x" * (number * 97 % 9000)})


def test_many_writers_at_once_make_one_chain(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=many, args=(file, 100 * index)) for index in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert verify(file).number == 100


def test_it_is_shown_to_people(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", "--node", "n3", str(ledger)]) == 0
    shown = capsys.readouterr().out
    assert "alice@control  sync  ok" in shown
    assert "n3  aaaaaaaaaaaa -> bbbbbbbbbbbb  changed" in shown
    assert "n2" not in shown
    assert main(["ledger", "show", "--json", "--last", "2", str(ledger)]) == 0
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [4, 5]


def test_what_is_no_ledger_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "verify", str(tmp_path / "none")]) == 2
    assert "there is no ledger" in capsys.readouterr().err
    file = tmp_path / "ledger.jsonl"
    append(file, fields(1))
    assert main(["ledger", "verify", "--head", "abc", str(file)]) == 2
    assert "is no hash" in capsys.readouterr().err
