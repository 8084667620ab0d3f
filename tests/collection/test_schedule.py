"""The schedule of a control host: what it leaves there, what its runs do, and that nothing of it stays."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab

from .control import ControlHost, control_host, wait_for
from .play import SHOP, Run, playbook
from .test_sync import sabotage

VARIABLES = {"kube_proxy_cluster_dir": str(SHOP), "kube_proxy_config": str(SHOP / "kube-proxy.yaml")}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ControlHost]:
    with control_host(tmp_path / "control") as made:
        yield made


def schedule(host: ControlHost, inventory: Path, *arguments: str, **variables: Any) -> Run:
    """Makes the schedule, or removes it."""
    chosen = {
        "kube_proxy_dir": "",
        "kube_proxy_schedule_with": "cron",
        "kube_proxy_schedule_minutes": 1,
        "kube_proxy_schedule_jitter": 0,
        "kube_proxy_schedule_variables": VARIABLES,
        "kube_proxy_schedule_environment": host.environment,
        **variables,
    }
    return playbook(
        "schedule_services",
        inventory,
        host.home / "play",
        *arguments,
        variables=chosen,
        environment=host.environment,
        prefix=host.command([]),
    )


def changed(run: Run) -> int:
    return run.changed["localhost"]


def files(host: ControlHost) -> set[str]:
    folder = host.home / ".akp" / "default" / "schedule"
    return {each.name for each in folder.iterdir()} if folder.exists() else set()


def test_a_schedule_is_one_line_for_cron_and_one_directory_and_goes_without_a_trace(
    host: ControlHost, nodes: Lab, inventory: Path
) -> None:
    assert changed(schedule(host, inventory, "--check")) > 0
    assert files(host) == set()
    assert host.run("crontab", "-l", check=False) == ""
    assert changed(schedule(host, inventory)) > 0
    assert files(host) == {"run", "variables.json"}
    run = host.home / ".akp" / "default" / "schedule" / "run"
    assert f"* * * * * {run}\n" in host.run("crontab", "-l")
    assert (run.parent / "variables.json").stat().st_mode & 0o777 == 0o600
    assert subprocess.run(["shellcheck", run], check=False).returncode == 0
    assert changed(schedule(host, inventory)) == 0
    assert changed(schedule(host, inventory, kube_proxy_schedule_state="absent")) == 2
    assert files(host) == set()
    assert host.run("crontab", "-l", check=False) == ""
    assert nodes.nodes


def status(host: ControlHost) -> dict[str, Any]:
    """How the last run ended, once one has."""
    file = host.home / ".akp" / "default" / "schedule" / "status.json"
    wait_for(file.exists, 180)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_run_leaves_its_log_and_status_and_never_meets_another(
    host: ControlHost, nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    sabotage(nodes.node("n3"))
    textfile = tmp_path / "textfile"
    textfile.mkdir()
    variables = {**VARIABLES, "kube_proxy_textfile": str(textfile)}
    schedule(host, inventory, kube_proxy_schedule_variables=variables, kube_proxy_schedule_log_size=100)
    folder = host.home / ".akp" / "default" / "schedule"
    argv = host.command(["sh", str(folder / "run")])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as first:
        wait_for((folder / "log").exists)
        for _ in range(2):
            assert host.run("sh", str(folder / "run")) == ""
        said, _nothing = first.communicate()
    assert first.returncode == 2
    assert said == f"akp-sync-default: ended with 2, see {folder}/log\n"
    ended = status(host)
    assert (ended["rc"], ended["skipped"], ended["changed"], ended["unchanged"]) == (2, 2, ["n1", "n2"], [])
    assert list(ended["failed"]) == ["n3"]
    assert ended["failed"]["n3"].startswith("the kernel refused")
    assert ended["started"] <= ended["ended"] <= time.time()
    log = (folder / "log").read_text()
    assert log.count("skipped: the run before still goes on") == 2
    assert "3 nodes: 2 changed, 0 unchanged, 1 failed" in log
    assert 'akp_node_last_run_failed{cluster="default",node="n3"} 1' in (textfile / "akp_default.prom").read_text()
    # ssh keeps its connections for a while; that must not keep the next run from beginning.
    nodes.node("n3").run(["sh", "-c", "rm /usr/local/sbin/*"])
    host.run("sh", str(folder / "run"))
    assert status(host) | {"started": 0, "ended": 0} == {
        "started": 0,
        "ended": 0,
        "rc": 0,
        "skipped": 0,
        "changed": ["n3"],
        "unchanged": ["n1", "n2"],
        "failed": {},
        "untried": [],
    }
    assert files(host) == {"run", "variables.json", "lock", "log", "log.1", "status.json"}
    assert (folder / "log.1").read_text() == log


@pytest.mark.soak
def test_a_run_that_cannot_begin_or_does_not_end_says_so(host: ControlHost, nodes: Lab, inventory: Path) -> None:
    folder = host.home / ".akp" / "default" / "schedule"
    schedule(host, inventory, kube_proxy_schedule_playbook="agentless.kube_proxy.no_such")
    assert "ended with 1" in host.run("sh", str(folder / "run"), check=False)
    assert status(host)["failed"] is None
    slow = host.home / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 300\n")
    slow.chmod(0o755)
    schedule(host, inventory, kube_proxy_schedule_command=str(slow), kube_proxy_schedule_timeout=1)
    assert "ended with 124" in host.run("sh", str(folder / "run"), check=False)
    assert status(host)["rc"] == 124
    assert nodes.nodes


def reached(ended: dict[str, Any]) -> list[str]:
    """The nodes of a run; by the time somebody looks it may be the second one already, which changes nothing."""
    assert (ended["rc"], ended["failed"]) == (0, {})
    return [*ended["changed"], *ended["unchanged"]]


@pytest.mark.soak
def test_cron_and_systemd_begin_runs_by_themselves(host: ControlHost, nodes: Lab, inventory: Path) -> None:
    """Both daemons at once, each with a cluster of its own, until the next full minute."""
    limit = ["--limit", "n1"]
    with host.cron(), host.systemd():
        schedule(host, inventory, kube_proxy_schedule_arguments=limit)
        assert changed(schedule(host, inventory, kube_proxy_schedule_arguments=limit)) == 0
        other = {"kube_proxy_cluster_name": "other", "kube_proxy_schedule_with": "systemd_user"}
        other_limit = ["--limit", "n2"]
        assert changed(schedule(host, inventory, kube_proxy_schedule_arguments=other_limit, **other)) > 0
        assert changed(schedule(host, inventory, kube_proxy_schedule_arguments=other_limit, **other)) == 0
        assert "akp-sync-other.timer" in host.run("systemctl", "--user", "list-timers")
        assert reached(status(host)) == ["n1"]
        file = host.home / ".akp" / "other" / "schedule" / "status.json"
        wait_for(file.exists, 180)
        assert reached(json.loads(file.read_text())) == ["n2"]
        # The other way round: what started it before is gone.
        by_cron = {"kube_proxy_cluster_name": "other", "kube_proxy_schedule_arguments": other_limit}
        assert changed(schedule(host, inventory, **by_cron)) > 0
        assert "akp-sync-other" not in host.run("systemctl", "--user", "list-timers", "--all")
        assert host.run("crontab", "-l").count("akp-sync-") == 2
        hourly = {"kube_proxy_schedule_minutes": 60, "kube_proxy_schedule_arguments": limit}
        assert changed(schedule(host, inventory, **hourly)) == 1
        assert "\n0 * * * * " in host.run("crontab", "-l")
        for name in ("default", "other"):
            schedule(host, inventory, kube_proxy_cluster_name=name, kube_proxy_schedule_state="absent")
        assert host.run("crontab", "-l", check=False) == ""
    for node in ("n1", "n2"):
        assert "KUBE-SERVICES" in nodes.node(node).run(["iptables-save"]).stdout
    assert "KUBE-SERVICES" not in nodes.node("n3").run(["iptables-save"]).stdout
