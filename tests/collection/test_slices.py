"""Many nodes shared out among several runs, which must not disagree about the cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.lab import Lab

from .play import BIN, SHOP, Run, ansible_environment, playbook
from .test_sync import edited_shop


def taken(tmp_path: Path, inventory: Path) -> dict[str, Any]:
    """The variables that snapshot-services hands on, of the shop as it is."""
    run = playbook("snapshot_services", inventory, tmp_path / "snapshot")
    (result,) = run.of("snapshot")
    return {"kube_proxy_snapshot": result.result["path"], "kube_proxy_snapshot_digest": result.result["digest"]}


def test_slices_see_the_cluster_that_was_read_for_all_of_them(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    pinned = taken(tmp_path, inventory)
    # By the time they start the cluster has moved on; nobody may see that.
    variables = {
        **pinned,
        "kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop")),
        "kube_proxy_dir": str(tmp_path / "akp"),
    }

    def slice_of(limit: str) -> Run:
        return playbook("sync-services", inventory, tmp_path / limit, "--limit", limit, variables=variables)

    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(slice_of, ("n1", "n2", "n3")))
    assert [run.changed for run in runs] == [{"n1": 1}, {"n2": 1}, {"n3": 1}]
    assert not [each for run in runs for each in run.of("snapshot") if each.outcome == "ok"]
    whole = playbook("sync-services", inventory, tmp_path / "whole", variables={"kube_proxy_dir": str(tmp_path / "a")})
    assert whole.changed == dict.fromkeys(("n1", "n2", "n3"), 0), "together they did what one run would have done"
    assert nodes.nodes


def test_another_snapshot_than_the_pinned_one_is_refused(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    pinned = taken(tmp_path, inventory)
    moved = {
        "kube_proxy_snapshot_digest": pinned["kube_proxy_snapshot_digest"],
        "kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop")),
    }
    reading = playbook("sync-services", inventory, tmp_path, "--limit", "n1", variables=moved, check=False)
    assert reading.code == 2
    assert "this is not the cluster that the other runs see" in reading.output
    given = {**pinned, "kube_proxy_snapshot_digest": "0" * 64}
    handed = playbook("sync-services", inventory, tmp_path, "--limit", "n1", variables=given, check=False)
    assert handed.code == 2
    assert "this is not the cluster that the other runs see" in handed.output
    assert "KUBE-SERVICES" not in nodes.node("n1").run(["iptables-save"]).stdout


def test_a_slice_runs_where_ansible_runner_sends_it(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    """transmit | worker | process, as AWX does it: nothing is shared but what travels with the job."""
    pinned = taken(tmp_path, inventory)
    sent, remote = tmp_path / "sent", tmp_path / "remote"
    for folder in ("project", "inventory", "env"):
        (sent / folder).mkdir(parents=True)
    remote.mkdir()
    shutil.copy(inventory, sent / "inventory" / "hosts.yml")
    shutil.copy(SHOP / "kube-proxy.yaml", sent / "project")
    shutil.copy(pinned["kube_proxy_snapshot"], sent / "project" / "snapshot.json")
    # Paths are those of the place where the job runs, which is the project's folder there.
    variables = {
        "kube_proxy_snapshot": "snapshot.json",
        "kube_proxy_snapshot_digest": pinned["kube_proxy_snapshot_digest"],
        "kube_proxy_config": "kube-proxy.yaml",
        "kube_proxy_dir": "akp",
    }
    (sent / "env" / "extravars").write_text(yaml.safe_dump(variables))
    runner = str(BIN / "ansible-runner")
    playbook_name = "agentless.kube_proxy.sync_services"

    def ansible_runner(*arguments: str, stdin: bytes | None = None) -> bytes:
        done = subprocess.run(
            [runner, *arguments],
            input=stdin or b"",
            capture_output=True,
            check=False,
            env=ansible_environment(tmp_path / "record.jsonl"),
            cwd=tmp_path,
        )
        assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    job = ansible_runner("transmit", str(sent), "--playbook", playbook_name, "--limit", "n1,n2", "--ident", "a")
    result = ansible_runner("worker", "--private-data-dir", str(remote), stdin=job)
    said = ansible_runner("process", str(sent), "--ident", "a", stdin=result).decode()
    assert "2 nodes: 2 changed, 0 unchanged, 0 failed" in said
    (artifacts,) = (sent / "artifacts").iterdir()
    assert (artifacts / "rc").read_text() == "0"
    events = [json.loads(file.read_text()) for file in (artifacts / "job_events").glob("*.json")]
    pushed = [each for each in events if (each["event_data"].get("res") or {}).get("chains")]
    assert {each["event_data"]["host"] for each in pushed} == {"n1", "n2"}
    assert "KUBE-SERVICES" in nodes.node("n2").run(["iptables-save"]).stdout
    assert "KUBE-SERVICES" not in nodes.node("n3").run(["iptables-save"]).stdout
