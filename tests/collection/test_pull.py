"""Nodes that pull, from a real nginx by a real cron, and nodes that come back after a reboot."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.ledger import entries

from tests.lab import Lab, Node
from tests.lab.addresses import CONTROLLER
from tests.lab.publisher import Publisher
from tests.lab.web import WebServer

from .play import SHOP, Run, playbook
from .test_sync import edited_shop

WITHIN = 120.0  # seconds: cron starts things when a minute begins
PULL_FILES = {
    *("/etc/akp/allowed_signers", "/etc/akp/node.conf", "/etc/cron.d/akp-pull"),
    *("/usr/local/sbin/akp-node", "/usr/local/sbin/akp-leave"),
    *("/usr/local/sbin/akp-pull", "/usr/local/sbin/akp-verify"),
}
BOOT_FILES = {"/etc/cron.d/akp-restore", "/usr/local/sbin/akp-node", "/usr/local/sbin/akp-leave"}
OURS = "find /etc/akp /etc/cron.d /etc/systemd/system /usr/local/sbin -name '*akp*' -o -path '/etc/akp/*' 2>/dev/null"


@pytest.fixture
def web(nodes: Lab) -> Iterator[WebServer]:
    agent = (nodes.state / "agent.pid").read_text().strip()
    with WebServer(["nsenter", f"--target={agent}", "--net", "--"], CONTROLLER[0]) as server:
        yield server


@pytest.fixture
def inventory(nodes: Lab, tmp_path: Path) -> Path:
    """Without Python on the nodes."""
    path = nodes.inventory(tmp_path / "hosts.yml")
    hosts = yaml.safe_load(path.read_text())
    (group,) = hosts.values()
    group.setdefault("vars", {})["ansible_python_interpreter"] = "/nonexistent"
    path.write_text(yaml.safe_dump(hosts))
    return path


@pytest.fixture
def start_cron() -> Iterator[Callable[[Node], None]]:
    """Starts a cron daemon on a node; gone after the test, or with the node."""
    started: list[subprocess.Popen[bytes]] = []

    def start(node: Node) -> None:
        started.append(subprocess.Popen(node.enter(["cron", "-f"]), stdin=subprocess.DEVNULL, cwd="/"))

    yield start
    for process in started:
        process.terminate()
        process.wait()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def ours(node: Node) -> set[str]:
    """Files that the roles put there."""
    return set(node.run(["sh", "-c", OURS], check=False).stdout.split()) - {"/etc/akp"}


def status(node: Node, *options: str) -> dict[str, Any]:
    done = node.run(["sh", "/usr/local/sbin/akp-node", "status", *options])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_nodes_pull_by_cron_and_nothing_else_is_on_them(
    nodes: Lab, inventory: Path, web: WebServer, tmp_path: Path, start_cron: Callable[[Node], None]
) -> None:
    another, publisher = (Publisher(tmp_path / name, web.www) for name in ("another", "publisher"))
    publishing = {
        "kube_proxy_cluster_name": "shop",
        "kube_proxy_publish_path": str(web.www),
        "kube_proxy_publish_keys": [str(publisher.key)],
        "kube_proxy_reason": "CHG-18",
    }
    pulling = {
        "kube_proxy_cluster_name": "shop",
        "kube_proxy_pull_url": web.url,
        "kube_proxy_pull_jitter": 0,
        "kube_proxy_pull_signers": [another.allowed_signers, publisher.allowed_signers],
        "kube_proxy_pull_report": f"{web.url}/reports/",
    }
    n1 = nodes.node("n1")

    def pull_services(*arguments: str, **more: str) -> Run:
        return playbook(
            "pull_services", inventory, tmp_path / "work", "--limit", "n1", *arguments, variables={**pulling, **more}
        )

    assert pull_services("--check").changed == {"n1": 1}
    assert ours(n1) == set()
    assert pull_services().changed == {"n1": 1}
    assert ours(n1) == PULL_FILES
    assert pull_services().changed == {"n1": 0}

    # The facts that nodes gave when they were set up are those that bundles are made for.
    first = playbook("publish_services", inventory, tmp_path / "work", "--check", variables=publishing)
    assert first.changed == {"localhost": 1}
    assert list(web.www.glob("*.release")) == []
    published = playbook("publish_services", inventory, tmp_path / "work", variables=publishing)
    again = playbook("publish_services", inventory, tmp_path / "work", variables=publishing)
    assert (published.changed, again.changed) == ({"localhost": 1}, {"localhost": 0})
    ledger = tmp_path / "work" / "akp" / "ledger.jsonl"
    begun, done = entries(ledger)
    assert f"ledger: {ledger}, entry 2, head {done['hash']}" in published.output
    assert "ledger: " not in first.output + again.output, "a run that changes nothing writes nothing"
    assert (begun["result"], done["action"], done["result"]) == ("begun", "publish", "ok")
    assert (done["reason"], done["nodes"]["n1"]["before"]) == ("CHG-18", None)
    assert {each["snapshot"] for each in (begun, done)} == {next(first.of("snapshot")).result["digest"]}
    nobody = tmp_path / "nobody"
    nobody.mkdir()
    shutil.copy(SHOP / "nodes.yaml", nobody)
    emptied = {**publishing, "kube_proxy_cluster_dir": str(nobody)}
    refused = playbook("publish_services", inventory, tmp_path / "work", "--check", variables=emptied, check=False)
    assert refused.code == 2
    assert "service ports would be removed, more than 50 %" in refused.output
    stolen = edited_shop(tmp_path / "stolen")
    thief = yaml.safe_load((stolen / "new.yaml").read_text())
    thief["spec"]["externalIPs"] = [n1.addresses[0]]
    (stolen / "new.yaml").write_text(yaml.safe_dump(thief))
    proving = {**publishing, "kube_proxy_cluster_dir": str(stolen), "kube_proxy_prove": True}
    refused = playbook("publish_services", inventory, tmp_path / "work", variables=proving, check=False)
    assert refused.code == 2
    assert f"not proved: {n1.addresses[0]} is external IP of Service shop/new and an address of node n1" in " ".join(
        refused.output.split()
    )
    settings = json.loads((tmp_path / "work" / "akp" / "published" / "1" / "settings.json").read_text())
    assert settings["facts"]["n1"]["hostname"] == "n1"

    start_cron(n1)
    wait_for(lambda: (web.www / "reports" / "n1.json").exists())
    report = json.loads((web.www / "reports" / "n1.json").read_text())
    assert (report["ok"], report["changed"]) == (True, True), report
    assert status(n1, "--verify")["drift"] == 0
    assert status(n1)["generation"] == publisher.release("n1").bundles[0].generation

    assert pull_services(kube_proxy_pull_state="absent").changed == {"n1": 1}
    assert ours(n1) == set()
    assert "KUBE-SERVICES" in n1.run(["iptables-save"]).stdout
    assert pull_services(kube_proxy_pull_state="absent").changed == {"n1": 0}


def test_a_rebooted_node_has_its_rules_back_without_any_help(
    nodes: Lab, inventory: Path, tmp_path: Path, start_cron: Callable[[Node], None]
) -> None:
    n2 = nodes.node("n2")
    playbook("sync-services", inventory, tmp_path / "work", "--limit", "n2")
    rules = n2.run(["sh", "-c", "iptables-save | grep KUBE"]).stdout
    boot = ("boot_services", inventory, tmp_path / "work", "--limit", "n2")
    variables = {"kube_proxy_boot_check_minutes": 1}
    assert playbook(*boot, "--check", variables=variables).changed == {"n2": 1}
    assert playbook(*boot, variables=variables).changed == {"n2": 1}
    assert playbook(*boot, variables=variables).changed == {"n2": 0}
    assert ours(n2) == BOOT_FILES

    nodes.reboot("n2")
    assert "KUBE" not in n2.run(["iptables-save"]).stdout
    # One command is enough, and takes no longer than a restore.
    answer = json.loads(n2.run(["sh", "/usr/local/sbin/akp-node", "restore"]).stdout.splitlines()[-1])
    assert (answer["ok"], answer["changed"]) == (True, True)
    assert n2.run(["sh", "-c", "iptables-save | grep KUBE"]).stdout == rules
    # And cron gives it: at boot, and every minute.
    nodes.reboot("n2")
    start_cron(n2)
    wait_for(lambda: n2.run(["sh", "-c", "iptables-save | grep KUBE"], check=False).stdout == rules)
    lines = n2.run(["cat", "/etc/cron.d/akp-restore"]).stdout.splitlines()
    _, command = next(line for line in lines if line.startswith("* * * * * root ")).split(" root ")
    n2.run(["nft", "flush", "ruleset"])
    n2.run(["sh", "-c", command])
    assert n2.run(["sh", "-c", "iptables-save | grep KUBE"]).stdout == rules

    assert playbook(*boot, variables={"kube_proxy_boot_state": "absent"}).changed == {"n2": 1}
    assert ours(n2) == set()


def test_what_is_missing_is_said_before_anything_is_done(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    run = playbook("pull_services", inventory, tmp_path, "--limit", "n1", check=False)
    assert run.code != 0
    assert "Set kube_proxy_pull_url" in run.output
    run = playbook("publish_services", inventory, tmp_path, check=False)
    assert "Set kube_proxy_publish_path" in run.output
    variables = {
        "kube_proxy_pull_url": "http://127.0.0.1",
        "kube_proxy_pull_signers": "x",
        "kube_proxy_pull_jitter": 60,
    }
    run = playbook("pull_services", inventory, tmp_path, "--limit", "n1", variables=variables, check=False)
    assert "not less than the 1 minutes" in " ".join(run.output.split())
    assert ours(nodes.node("n1")) == set()
