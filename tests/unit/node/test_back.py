"""A node that is given back: what was noted of its settings is lost by no run that fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from agentless_kube_proxy.carry.protocol import Command
from agentless_kube_proxy.node.back import _elsewhere

NOTED = "/proc/sys/net/ipv4/ip_forward 0\n"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "before/sysctls"
    file.parent.mkdir()
    file.write_text(NOTED)
    return file


def run(settings: Path, inner: str) -> int:
    text = _elsewhere(Command(inner), str(settings.parents[1])).text
    return subprocess.run(["sh", "-c", text], check=False, stdin=subprocess.DEVNULL).returncode


def test_the_cleanup_is_shown_no_settings_and_they_are_back_if_it_fails(settings: Path) -> None:
    assert run(settings, f"[ ! -s {settings} ] && exit 4") == 4
    assert settings.read_text() == NOTED


def test_a_run_that_was_killed_and_one_that_fails_after_it_lose_nothing(settings: Path) -> None:
    run(settings, "kill -9 $PPID")
    assert settings.read_text() == ""
    assert run(settings, "exit 4") == 4
    assert settings.read_text() == NOTED
