"""Nodes that answer what they like, through real runs: each hurts itself, and the others are served."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.bundle.program import node_program
from agentless_kube_proxy.ledger import entries

from tests.unit import build

from .play import Run, playbook

GOOD: dict[str, Any] = {
    "verb": "ask",
    "ok": True,
    "key": "boot.iptables",
    "addresses": [{"interface": "eth0", "address": "172.18.0.12", "prefix": 16}],
    "tcpBeLiberal": 0,
    "routeLocalnetLeft": False,
    "facts": {"kernel": "6.1.0", "cpus": 2, "capabilities": {"ipv4": True, "ipv6": True, "nfacct": True}},
    "status": {"state": "absent", "generation": None},
}
MARK = "{{ lookup('pipe', 'touch MARK') }}"


def facts(**changes: Any) -> str:
    return json.dumps({**GOOD, "facts": {**GOOD["facts"], **changes}})


def lines(*before: str) -> str:
    return "\n".join((*before, json.dumps(GOOD)))


# What a node prints, whatever it is asked.
SAID: dict[str, str] = {
    "kernel": facts(kernel="6.².0"),
    "digits": json.dumps(GOOD).replace('"cpus": 2', '"cpus": ' + "9" * 5000),
    "null": facts(kernel="\x00"),
    "surrogate": facts(kernel="\ud800", hostname="\udfff"),
    "types": facts(cpus="many", capabilities=[], addresses={}),
    "deep": '{"ok": true, "x": ' + "[" * 5000 + "]" * 5000 + "}",
    "liar": json.dumps({**GOOD, "addresses": [{"interface": "eth0", "address": "203.0.113.9", "prefix": 24}]}),
    "template": json.dumps({"ok": False, "error": MARK, "asBefore": True}),
    "template-state": json.dumps({**GOOD, "status": {"state": MARK, "generation": MARK}}),
    "path": json.dumps({**GOOD, "status": {"state": "applied", "generation": "../../../x"}}),
    "escape": json.dumps({"ok": False, "error": "\x1b]0;x\x07\u009b2J\u202e"}),
    "nothing": "",
    "text": "Last login: \x1b[2J\nok",
    "list": "[1, 2]",
    "empty": "{}",
    "service-lines": lines('+{"service": ' + "9" * 5000 + "}", "-{", "+{}"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An inventory of one good node and many that are not, and a cluster that has them all."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "akp-node").write_text(node_program("iptables"))
    hosts: dict[str, Any] = {"good": f"unshare --net env AKP_STATE={folder}/state sh {folder}/akp-node"}
    for name, text in {**SAID, "hang": ""}.items():
        (folder / f"{name}.json").write_bytes(
            text.replace("MARK", str(folder / "mark")).encode("utf-8", "surrogatepass")
        )
        script = f"#!/bin/sh\ncat >/dev/null\n{'sleep 600' if name == 'hang' else f'cat {folder}/{name}.json'}\n"
        (folder / name).write_text(script)
        hosts[f"h-{name}"] = f"sh {folder}/{name}"
    inventory = {
        name: {"ansible_connection": "local", "kube_proxy_command": command} for name, command in hosts.items()
    }
    (folder / "inventory.yml").write_text(yaml.safe_dump({"nodes": {"hosts": inventory}}))
    (folder / "cluster").mkdir()
    nodes = [build.node(name, f"172.18.1.{number}") for number, name in enumerate(hosts, 1)]
    objects = [build.service(externalIPs=["203.0.113.9"]), build.slice_of("web", "10.244.1.5"), *nodes]
    (folder / "cluster" / "all.yaml").write_text(yaml.safe_dump_all(objects))
    return folder


def run(site: Path, name: str, *arguments: str) -> Run:
    settings = {
        "kube_proxy_cluster_dir": str(site / "cluster"),
        "kube_proxy_task_timeout": 20,
        "kube_proxy_confirm_within": 0,
        "kube_proxy_batches": ["100%"],
        "kube_proxy_max_unhealthy_percent": 100,
        "kube_proxy_vip_policy": "omit",
        "kube_proxy_config": {"clusterCIDR": "10.244.0.0/16", "conntrack": {"maxPerCore": 0}},
    }
    return playbook(
        name, site / "inventory.yml", site / "work", "--forks", "20", *arguments, variables=settings, check=False
    )


@pytest.mark.slow
def test_whatever_nodes_answer_the_good_one_is_served(site: Path) -> None:
    began = time.monotonic()
    done = run(site, "sync_services")
    took = time.monotonic() - began
    assert done.recap["good"]["failed"] == 0, done.output
    assert done.node("good")["changed"] is True
    assert took < 200, "a node that never answers is not waited for"
    assert "h-hang did not answer within 20 s (kube_proxy_task_timeout)" in done.output
    for name, counts in done.recap.items():
        if name.startswith("h-") and name not in ("h-liar", "h-kernel"):
            assert counts["failed"] or counts["unreachable"], (name, done.output)
    # A lie about one's own addresses takes nothing from others.
    rules = (site / "work" / "akp" / "bundles" / "good" / "iptables-2-dispatch.rules").read_text()
    assert "203.0.113.9" in rules
    assert not (site / "mark").exists()
    assert "\x1b]0;" not in done.output
    assert "\u009b" not in done.output
    assert "\u202e" not in done.output
    told = [each.result["msg"] for each in done.of("node") if each.host == "h-template" and "msg" in each.result]
    assert any("{{ lookup('pipe'" in text for text in told), "it is shown as it is"
    summary = "\n".join(done.summary)
    assert summary.isprintable() or all(line.isprintable() for line in done.summary)


@pytest.mark.slow
def test_the_error_of_a_node_that_is_healed_is_no_template(site: Path) -> None:
    answers = {"ask": {**GOOD, "status": {"state": "partial", "generation": "a" * 64, "drift": 1}}}
    answers["restore"] = {"ok": False, "error": MARK.replace("MARK", str(site / "healed")), "warnings": [MARK]}
    for verb, answer in answers.items():
        (site / f"heal-{verb}.json").write_text(json.dumps(answer))
    (site / "empty").write_text(f"#!/bin/sh\ncat >/dev/null\ncat {site}/heal-$1.json\n")
    done = run(site, "verify_services", "--limit", "h-empty", "-e", "kube_proxy_heal=true")
    assert done.recap["h-empty"]["failed"] == 1
    assert not (site / "healed").exists()
    (failed,) = [each.result for each in done.of("node") if "msg" in each.result]
    assert failed["msg"] == answers["restore"]["error"]
    ledger = site / "work" / "akp" / "ledger.jsonl"
    assert ledger.read_bytes().isascii()
    assert list(entries(ledger))[-1]["nodes"]["h-empty"]["error"] == answers["restore"]["error"]


@pytest.mark.slow
def test_a_node_that_names_the_address_of_another_gets_nothing_and_changes_nothing_there(tmp_path: Path) -> None:
    """Who owns a node can write the addresses of its Node object: the control host then comes to another machine."""
    (tmp_path / "akp-node").write_text(node_program("iptables"))
    (tmp_path / "cluster").mkdir()
    objects = [build.service(), build.slice_of("web", "10.244.1.5"), build.node("n1"), build.node("n2", "172.18.0.12")]
    (tmp_path / "cluster" / "all.yaml").write_text(yaml.safe_dump_all(objects))
    command = f"unshare --net env AKP_STATE={tmp_path}/state sh {tmp_path}/akp-node"
    host = {"ansible_connection": "local", "kube_proxy_command": command}

    def sync(*hosts: str) -> Run:
        (tmp_path / "inventory.yml").write_text(yaml.safe_dump({"nodes": {"hosts": dict.fromkeys(hosts, host)}}))
        return run(tmp_path, "sync_services")

    assert sync("n1").recap["n1"]["failed"] == 0
    done = sync("n1", "n2")
    assert done.recap["n2"]["failed"] == 1
    assert "n2 leads to the machine that has the rules of the node n1, which is the host n1" in done.output
    assert done.recap["n1"]["failed"] == 0
    kept = [json.loads(file.read_text())["node"] for file in (tmp_path / "state").rglob("manifest.json")]
    assert kept
    assert set(kept) == {"n1"}
