"""What is known of a fleet, in a terminal and for programs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.plan.metrics import Freshness
from agentless_kube_proxy.report.nodes import Known, Place
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json

from tests.page.fleet import fleet


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> WorkDirectory:
    return fleet(tmp_path_factory.mktemp("akp"), time.time()).directory


# A run of the tests in the background ignores SIGINT, and what it starts would, too.
AKP = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from agentless_kube_proxy.cli import main; sys.exit(main())"
)


def test_the_worst_node_comes_first_and_what_waits_is_told(
    directory: WorkDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["status", "--dir", str(directory.path)]) == 1
    first, _blank, head, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("production: 1 of 3 nodes as intended   known at ")
    assert head.split() == [
        "state",
        "node",
        "mode",
        "generation",
        "behind",
        "confirmed",
        "drift",
        "what",
        "is",
        "known",
    ]
    assert [row.split("   ")[0] for row in rows[:3]] == ["◆ drift", "○ not reached", "● as intended"]
    assert rows[0].endswith("1   missing rule: ipv4 nat KUBE-SVC-I5LIAMPLWKMBJ54B (shop/cart:http)")
    assert rows[1].endswith("Connection timed out during banner exchange")
    assert rows[4].endswith("Z")
    assert "waits for approval, 1 signature so far; good until " in rows[4]
    assert rows[-1].endswith("verify_services -e kube_proxy_heal=true --limit n2")


def test_an_inventory_tells_the_hosts_and_where_runs_write(
    directory: WorkDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory = tmp_path / "inventory"
    lines = ["[nodes]", "n1", "other kube_proxy_node_name=n4", "[elsewhere]", "n9", "[nodes:vars]"]
    inventory.write_text("\n".join([*lines, f"kube_proxy_dir={directory.path}", "kube_proxy_cluster_name=shop"]))
    assert main(["status", "-i", str(inventory), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "shop"
    assert [(each["node"], each["host"], each["state"]) for each in found["nodes"]] == [
        ("n4", "other", "unknown"),
        ("n1", "n1", "current"),
    ]
    assert found["nodes"][1]["generation"] == found["nodes"][1]["wanted"]


def test_a_fleet_of_which_nothing_is_known_is_no_good_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--dir", str(tmp_path / "staging")]) == 2
    assert capsys.readouterr().out.startswith("staging: nothing is known yet\n")
    assert main(["status"]) == 2
    assert "say which fleet: -i INVENTORY, or --dir DIR" in capsys.readouterr().err


def test_many_good_nodes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = WorkDirectory(tmp_path / "fleet").make()
    with Freshness(directory, "fleet") as fresh:
        for number in range(30):
            fresh.confirmed(f"n{number}", f"n{number}", "a" * 64, time.time())
    assert main(["status", "--dir", str(directory.path)]) == 0
    out = capsys.readouterr().out
    assert "fleet: All 30 nodes as intended" in out
    assert "30 nodes, all confirmed within" in out
    assert main(["status", "--dir", str(directory.path), "--all"]) == 0
    rows = [line.split()[3] for line in capsys.readouterr().out.splitlines() if line.startswith("●")]
    assert rows == [f"n{number}" for number in range(30)], "n2 comes before n10"


def test_a_node_is_behind_since_something_else_was_computed_for_it(tmp_path: Path) -> None:
    directory = WorkDirectory(tmp_path / "fleet").make()
    now = time.time()
    with Freshness(directory, "fleet") as fresh:
        fresh.confirmed("n1", "n1", "a" * 64, now - 600)
    write_json(directory.index, {"nodes": {"n1": {"generation": "b" * 64}}})
    os.utime(directory.index, (now - 120, now - 120))
    row = Known(directory, now).row(Place("n1"))
    assert (row.state, round(row.behind), row.wanted) == ("behind", 120, "b" * 64)
    os.utime(directory.index, (now - 900, now - 900))
    row = Known(directory, now).row(Place("n1"))
    assert (row.state, row.behind) == ("current", 0), "what was computed before the last confirmation is over"


def test_what_is_followed_is_printed_again_when_it_changes(tmp_path: Path) -> None:
    directory = WorkDirectory(tmp_path / "fleet").make()
    argv = [sys.executable, "-c", AKP]
    argv += ["status", "--dir", str(directory.path), "--follow", "--every", "0.05", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        try:
            assert json.loads(follower.stdout.readline())["nodes"] == []
            for number in (1, 2):
                with Freshness(directory, "fleet") as fresh:
                    fresh.confirmed(f"n{number}", f"n{number}", "a" * 64, time.time())
                told = json.loads(follower.stdout.readline())
                assert [each["node"] for each in told["nodes"]] == [f"n{each}" for each in range(1, number + 1)]
            time.sleep(0.5)
        finally:
            follower.send_signal(signal.SIGINT)
        assert follower.stdout.read() == "", "nothing has changed, so nothing is printed again"
        assert follower.wait(10) == 130


def test_a_terminal_is_redrawn(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-c", AKP]
    argv += ["status", "--dir", str(tmp_path / "fleet"), "--follow", "--every", "0.05"]
    with subprocess.Popen(argv, stdout=theirs, stdin=theirs) as follower:
        os.close(theirs)
        drawn = b""
        try:
            while drawn.count(b"\x1b[H\x1b[2J") < 3:
                drawn += os.read(ours, 4096)
        finally:
            follower.send_signal(signal.SIGINT)
            os.close(ours)
    assert drawn.count(b"fleet: nothing is known yet") >= 2
