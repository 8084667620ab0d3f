"""What a user can mend is told apart from a bug by one base class, and locks are taken in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.errors import described
from agentless_kube_proxy.locks import Lock
from agentless_kube_proxy.proxy.config import InvalidConfig

ENGINE = Path(__file__).parents[2] / "plugins" / "plugin_utils"
# Each is caught by the package that raises it, or becomes the failure of one host.
INTERNAL = {
    "InvalidHns",
    "Failed",
    "InvalidObject",
    "LostSession",
    "NoAnswer",
    "NoSession",
    "NotDone",
    "ProbeFailed",
    "Skipped",
    "TransportError",
    "UnknownRule",
    "UnreadableArchive",
    "UserError",
}


def test_an_exception_is_one_that_a_user_can_mend_or_does_not_leave_the_engine() -> None:
    found = {
        name
        for file in ENGINE.rglob("*.py")
        for name in re.findall(r"^class ([A-Z]\w*)\((?:Exception|\w*Error)\):", file.read_text(), re.MULTILINE)
        if name not in re.findall(r"^class (\w+)\((?:UserError|ApiError)\):", file.read_text(), re.MULTILINE)
    }
    assert found == INTERNAL


def test_what_a_user_can_mend_is_a_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["render", "--cluster", str(tmp_path), "--config", str(tmp_path / "none"), "--output", str(tmp_path)]
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"akp: {tmp_path}/none: No such file or directory\n"


def test_errors_are_described_in_one_line() -> None:
    wrong = InvalidConfig(["mode: is wrong", "clusterCIDR: too"])
    assert described(wrong) == "the KubeProxyConfiguration is not valid: mode: is wrong; clusterCIDR: too"
    assert described(FileNotFoundError(2, "No such file", "/x")) == "/x: No such file"
    assert described(OSError()) == "OSError"


def test_a_lock_is_had_by_one_and_given_back(tmp_path: Path) -> None:
    first, second = (Lock(tmp_path / "a" / "lock") for _each in range(2))
    with first:
        assert first.take()
        assert first.take(), "it is ours already"
        assert not second.take()
    assert second.take(wait=True)
    second.give_back()


def test_locks_are_taken_in_one_place() -> None:
    assert [file.name for file in ENGINE.rglob("*.py") if "import fcntl" in file.read_text()] == ["locks.py"]
