"""Commit-confirmed where systemd runs: it keeps the undo, whatever becomes of the session that asked for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.write import write_bundle

from tests.lab.program import PROGRAM
from tests.lab.systemd import SystemdHost
from tests.node.test_confirm import shop

UNITS = "systemctl list-units --plain --no-legend --all 'akp-undo-*'"
# Comes back from the kernel, and never to the program.
STUCK = """#!/bin/sh
/usr/sbin/iptables-nft-restore "$@" || exit
case $* in *--test*) exit ;; esac
: >{reached}
exec sleep 1000
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdHost]:
    with SystemdHost(f"n1-{os.getpid()}") as made:
        yield made


@pytest.fixture
def host(machine: SystemdHost, tmp_path: Path) -> Iterator[SystemdHost]:
    """A host that has one bundle."""
    akp(machine, "apply", bundle(tmp_path / "a", "10.244.1.1"))
    yield machine
    akp(machine, "cleanup")


def bundle(directory: Path, ip: str) -> Path:
    write_bundle(shop("iptables", ip), directory)
    return directory


def akp(host: SystemdHost, *arguments: str | Path) -> dict[str, Any]:
    done = host.run(["sh", str(PROGRAM), *map(str, arguments)])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rules(host: SystemdHost) -> list[str]:
    """Those of both families; chains are listed by age."""
    lines = host.sh("iptables-save; ip6tables-save").splitlines()
    return sorted(line.partition(" [")[0] for line in lines if not line.startswith("#"))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.1)


def session(host: SystemdHost, script: str) -> subprocess.Popen[str]:
    """A session as logind makes it for a login: a scope, whose end is that of all its processes."""
    argv = host.enter(["systemd-run", "--quiet", "--scope", "--unit=session-1", "sh", "-c", script])
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def kill(host: SystemdHost, login: subprocess.Popen[str]) -> None:
    host.sh("systemctl kill --signal=KILL --kill-whom=all session-1.scope")
    assert login.wait(60) == -9
    wait_for(lambda: host.sh("systemctl is-active session-1.scope || :").strip() != "active")
    host.sh("systemctl reset-failed session-1.scope 2>/dev/null || :")


def undone(host: SystemdHost, was: list[str], generation: str) -> None:
    """Wait for what only the unit can do now, and see that it did all of it and is gone."""
    wait_for(lambda: host.sh("[ -e /var/lib/akp/unconfirmed ] || echo undone"))
    assert rules(host) == was
    status = akp(host, "status", "--verify")
    assert (status["state"], status["drift"], status["unconfirmed"]) == ("applied", 0, None)
    assert status["undone"]["generation"] == generation
    wait_for(lambda: host.sh(UNITS) == "")


def test_the_undo_outlives_the_session_that_is_killed_after_the_change(host: SystemdHost, tmp_path: Path) -> None:
    was = rules(host)
    arguments = ["sh", str(PROGRAM), "apply", "--confirm-within", "10", str(bundle(tmp_path / "b", "10.244.1.2"))]
    with session(host, f"{shlex.join(arguments)}; exec sleep 1000") as login:
        assert login.stdout
        answer = json.loads(login.stdout.readline())
        assert f"akp-undo-{answer['confirm']}.service loaded active running" in host.sh(UNITS)
        assert rules(host) != was
        kill(host, login)
    undone(host, was, answer["generation"])


def test_the_undo_outlives_the_session_that_is_killed_within_the_change(host: SystemdHost, tmp_path: Path) -> None:
    was = rules(host)
    stuck, reached = tmp_path / "bin" / "iptables-nft-restore", tmp_path / "reached"
    stuck.parent.mkdir()
    stuck.write_text(STUCK.format(reached=reached))
    stuck.chmod(0o755)
    changed = bundle(tmp_path / "b", "10.244.1.2")
    arguments = ["sh", str(PROGRAM), "apply", "--confirm-within", "2", str(changed)]
    with session(host, f"AKP_PATH={stuck.parent} exec {shlex.join(arguments)}") as login:
        wait_for(reached.exists)
        assert rules(host) != was
        # The undo has the tools of the run that armed it.
        stuck.unlink()
        kill(host, login)
    undone(host, was, shop("iptables", "10.244.1.2").generation)


def test_what_is_confirmed_stays_and_the_unit_ends(host: SystemdHost, tmp_path: Path) -> None:
    answer = akp(host, "apply", "--confirm-within", "600", bundle(tmp_path / "b", "10.244.1.2"))
    unit = f"akp-undo-{answer['confirm']}.service"
    assert unit in host.sh(UNITS)
    pid = host.sh(f"systemctl show -P MainPID {unit}").strip()
    assert pid == host.sh("cat /var/lib/akp/undo.pid").strip()
    changed = rules(host)
    assert akp(host, "confirm", answer["confirm"])["changed"] is True
    wait_for(lambda: host.sh(UNITS) == "")
    assert host.sh(f"[ ! -e /proc/{pid} ] || echo there") == ""
    assert rules(host) == changed
    status = akp(host, "status", "--verify")
    assert (status["generation"], status["drift"], status["undone"]) == (answer["generation"], 0, None)
