"""The ledger off the host: a file elsewhere, or syslog, and what they prove against who holds the control host."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy import ledger_copy
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.ledger import BrokenLedger, append, verify
from agentless_kube_proxy.ledger_copy import copy_to, verify_copy
from agentless_kube_proxy.plan.audit import TaskAuditor
from agentless_kube_proxy.tasks.directory import WorkDirectory

from .test_ledger import fields


class Syslog:
    """A syslog that writes what it gets into a file, as daemons do, among the lines of others."""

    def __init__(self, path: Path, file: Path) -> None:
        self.file = file
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.longest = 0

    def _serve(self) -> None:
        while message := self._socket.recv(100_000):
            self.longest = max(self.longest, len(message))
            with self.file.open("ab") as stream:
                stream.write(b"Nov 17 19:00:00 control sshd[1]: Accepted publickey\n")
                stream.write(b"Nov 17 19:00:00 control " + message.partition(b">")[2] + b"\n")

    def close(self) -> None:
        """Everything that was sent is in the file after this."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.connect(self._socket.getsockname())
            link.send(b"")
        self._thread.join(10)
        self._socket.close()


@pytest.fixture
def syslog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Syslog:
    monkeypatch.setattr(ledger_copy, "_SOCKET", str(tmp_path / "log"))
    return Syslog(tmp_path / "log", tmp_path / "auth.log")


def filled(path: Path, copy: str, count: int = 5, start: int = 1) -> Path:
    for number in range(start, start + count):
        append(path, fields(number), copy_to(copy))
    return path


def test_a_file_elsewhere_has_the_same_lines(tmp_path: Path) -> None:
    ledger, copy = tmp_path / "ledger.jsonl", tmp_path / "elsewhere" / "copy.jsonl"
    filled(ledger, str(copy))
    assert copy.read_bytes() == ledger.read_bytes()
    assert verify(copy) == verify(ledger), "a copy is a ledger"
    assert main(["ledger", "verify", str(ledger), "--copy", str(copy)]) == 0


def test_a_file_gets_what_was_written_before_it_was_there(tmp_path: Path) -> None:
    ledger, copy = filled(tmp_path / "ledger.jsonl", ""), tmp_path / "copy.jsonl"
    filled(ledger, str(copy), 1, 6)
    assert copy.read_bytes() == ledger.read_bytes()
    filled(ledger, "", 2, 7)
    filled(ledger, str(copy), 1, 9)
    assert copy.read_bytes() == ledger.read_bytes()


def test_a_new_ledger_follows_the_one_that_was_moved_away(tmp_path: Path) -> None:
    ledger, copy = tmp_path / "ledger.jsonl", tmp_path / "copy.jsonl"
    filled(ledger, str(copy), 3)
    ledger.unlink()
    filled(ledger, str(copy), 2, 11)
    assert [list(chain.entries) for chain in ledger_copy.chains(copy)] == [[1, 2, 3], [1, 2]]
    assert main(["ledger", "verify", str(ledger), "--copy", str(copy)]) == 0


def test_one_file_is_not_the_copy_of_two_ledgers(tmp_path: Path) -> None:
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))
    filled(one, str(copy))
    filled(two, "", start=11)
    with pytest.raises(BrokenLedger, match="copy of another ledger"):
        filled(two, str(copy), 1, 6)


def rewritten(ledger: Path) -> None:
    """All of it anew, with hashes that are right."""
    ledger.unlink()
    for number in range(1, 6):
        append(ledger, {**fields(number), "who": {"user": "mallory"}})


def cut(ledger: Path) -> None:
    ledger.write_text("".join(f"{line}\n" for line in ledger.read_text().splitlines()[:-2]))


def other_end(ledger: Path) -> None:
    cut(ledger)
    filled(ledger, "", 2, 40)


@pytest.mark.parametrize("meddle", [rewritten, cut, other_end])
@pytest.mark.parametrize("place", ["file", "syslog"])
def test_a_ledger_that_was_written_anew_is_found_by_its_copy(
    meddle: Any, place: str, tmp_path: Path, syslog: Syslog, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, copy = tmp_path / "ledger.jsonl", tmp_path / "copy.jsonl"
    filled(ledger, "syslog" if place == "syslog" else str(copy))
    syslog.close()
    copy = syslog.file if place == "syslog" else copy
    assert main(["ledger", "verify", str(ledger), "--copy", str(copy)]) == 0
    meddle(ledger)
    assert main(["ledger", "verify", str(ledger)]) == 0, "by itself it is intact"
    assert main(["ledger", "verify", str(ledger), "--copy", str(copy)]) == 1
    assert "broken: " in capsys.readouterr().out
    ledger.unlink()
    assert main(["ledger", "verify", str(ledger), "--copy", str(copy)]) == 0, "the copy alone is enough"
    assert "5 entries" in capsys.readouterr().out


def test_syslog_gets_long_entries_in_parts(tmp_path: Path, syslog: Syslog) -> None:
    ledger = tmp_path / "ledger.jsonl"
    many = {f"n{number}": {"before": "a" * 64, "after": "b" * 64} for number in range(100)}
    for _each in range(2):
        append(ledger, {**fields(1), "nodes": many}, copy_to("syslog"))
    syslog.close()
    assert syslog.longest < 1000
    assert len(verify_copy(syslog.file)) == 1
    assert verify_copy(syslog.file, ledger) == [
        f"2 entries of ledger {ledger_copy.chains(syslog.file)[0].name} are in {ledger}"
    ]


def test_what_syslog_lost_is_named(tmp_path: Path, syslog: Syslog) -> None:
    ledger = filled(tmp_path / "ledger.jsonl", "syslog")
    syslog.close()
    text = [line for line in syslog.file.read_text().splitlines() if " 3 1/" not in line]
    # The same line twice is what collectors do.
    syslog.file.write_text("".join(f"{line}\n" for line in [*text, text[-1]]))
    with pytest.raises(BrokenLedger, match=r"entries are missing of ledger [0-9a-f]{8}: 3"):
        verify_copy(syslog.file)
    assert verify_copy(syslog.file, ledger)[-1].endswith(": 3")


@pytest.mark.parametrize("place", ["syslog", "/proc/nowhere/copy"])
def test_nothing_is_done_without_the_copy(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_copy, "_SOCKET", str(tmp_path / "nothing"))
    with pytest.raises(OSError, match=r"syslog|nowhere"):
        append(tmp_path / "ledger.jsonl", fields(1), copy_to(place))


def test_the_entries_of_a_task_are_copied(tmp_path: Path) -> None:
    directory = WorkDirectory(tmp_path / "akp").make()
    TaskAuditor(directory, {"ledger": None, "ledger_copy": str(tmp_path / "copy")}, {}).write("sync", "ok", {"n1": {}})
    assert (tmp_path / "copy").read_bytes() == directory.ledger.read_bytes()


def test_a_ledger_shows_no_line_that_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What nodes say is in it, and so are reasons that people give."""
    ledger = tmp_path / "ledger.jsonl"
    said = "x\n     9  2026-01-01T00:00:00Z  root@control  sync  ok\x1b[2K\x1b]0;title\x07\u009b1m\u202e\u2028\r"
    entry = {**fields(1), "reason": said, "error": said, "approvers": [said], "run": said}
    append(ledger, {**entry, "nodes": {said: {"error": said, "result": said, "before": said}}})
    append(ledger, {**fields(2), "nodes": [said], "who": said, "time": said})
    for arguments in ([], ["--json"]):
        main(["ledger", "show", str(ledger), *arguments])
        out = capsys.readouterr().out
        assert out.replace("\n", "").isprintable()
        assert not [line for line in out.splitlines() if line.startswith("     9")]
    assert len(ledger.read_bytes().splitlines()) == 2
    assert ledger.read_bytes().isascii()
