"""Changes that go wrong: found before, stopped at the first node, undone by the node, and written down."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import Lab, Node
from tests.lab.program import PROGRAM

from .play import BIN, SHOP, Run, playbook
from .test_sync import ALL, RESTORE, counting, edited_shop, rules, sabotage

BATCHES: dict[str, Any] = {"kube_proxy_batches": [1, "10%", "100%"]}
# What a rule does that locks everybody out who is not connected already.
LOCK_OUT = f"""#!/bin/sh
/usr/sbin/iptables-nft-restore "$@" || exit
iptables -C INPUT -p tcp --dport 22 -m conntrack --ctstate NEW -j DROP 2>/dev/null ||
  iptables -I INPUT -p tcp --dport 22 -m conntrack --ctstate NEW -j DROP
rm -f {RESTORE}
"""


def ledger(work: Path, *arguments: str, check: bool = True) -> str:
    argv = [str(BIN / "akp"), "ledger", *arguments, str(work / "akp" / "ledger.jsonl")]
    return subprocess.run(argv, check=check, capture_output=True, text=True).stdout


def entries(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger(work, "show", "--json").splitlines()]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def kernel(node: Node) -> str:
    """The rules alone: going back leaves one more bundle on the disk."""
    return "\n".join(line for line in rules(node).splitlines() if not line.startswith("/"))


def tried(run: Run) -> set[str]:
    """The hosts that were sent a bundle."""
    return {each.host for each in run.of("node") if "kept" not in each.result}


def test_the_first_node_that_is_not_well_is_the_last(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    log = tmp_path / "ssh.log"
    counted = counting(inventory, nodes, log)
    variables = {**BATCHES, "kube_proxy_reason": "CHG-17"}
    first = playbook("sync-services", counted, tmp_path, variables=variables)
    assert first.changed == dict.fromkeys(ALL, 1)
    assert len(log.read_text().splitlines()) == 12, "asked in vain, asked with the program, given, confirmed"
    assert [each.outcome for each in first.of("summary")].count("ok") == 1
    head = ledger(tmp_path, "verify").split()[-1]
    assert any(head in line for line in first.summary), first.summary
    begun, *done = entries(tmp_path)
    assert (begun["action"], begun["result"], begun["reason"]) == ("sync", "begun", "CHG-17")
    assert set(begun["nodes"]) == set(ALL)
    assert [(list(each["nodes"]), each["result"]) for each in done] == [([host], "ok") for host in ALL]
    assert {each["snapshot"] for each in done} == {begun["snapshot"]}
    assert done[0]["nodes"]["n1"]["after"] == begun["nodes"]["n1"]["after"] == first.node("n1")["generation"]

    before = [kernel(node) for node in nodes.nodes]
    sabotage(nodes.node("n1"))
    changed = {**variables, "kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))}
    stopped = playbook("sync-services", counted, tmp_path, variables=changed, check=False)
    assert stopped.code == 2
    assert tried(stopped) == {"n1"}
    assert stopped.summary[0] == "3 nodes: 0 changed, 0 unchanged, 1 failed, 2 not tried"
    assert "not tried, they keep what they have: n2, n3" in stopped.summary
    nodes.node("n1").run(["rm", RESTORE])
    assert [kernel(node) for node in nodes.nodes] == before
    last = entries(tmp_path)[-1]
    assert (last["result"], last["nodes"]["n1"]["result"]) == ("failed", "failed")
    assert "the kernel refused" in last["nodes"]["n1"]["error"]
    had = first.node("n1")["generation"]
    assert (last["nodes"]["n1"]["before"], last["nodes"]["n1"]["after"]) == (had, had)
    assert f"n1  {had[:12]} -> {had[:12]}  failed: " in ledger(tmp_path, "show", "--last", "1")
    assert ledger(tmp_path, "verify", "--head", head).startswith("intact: ")


@pytest.mark.soak
def test_batches_after_one_that_is_not_well_are_not_begun(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    sabotage(nodes.node("n2"))
    variables: dict[str, Any] = {"kube_proxy_batches": [2, 1]}
    stopped = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
    assert stopped.code == 2
    assert tried(stopped) == {"n1", "n2"}
    assert "1 of 2 nodes of the batches before this one are not well (n2), more than 0 %" in stopped.output
    assert "KUBE-SERVICES" in rules(nodes.node("n1")), "it was well, and keeps what it was given"
    assert "KUBE-SERVICES" not in rules(nodes.node("n3"))
    variables["kube_proxy_max_unhealthy_percent"] = 50
    going_on = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
    assert (going_on.code, going_on.changed["n3"]) == (2, 1)


def test_a_node_that_locked_us_out_goes_back_by_itself(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    content = yaml.safe_load(inventory.read_text())
    content["nodes"]["vars"]["ansible_ssh_common_args"] += " -o ConnectTimeout=1"
    inventory.write_text(yaml.safe_dump(content))
    node = nodes.node("n1")
    before, others = kernel(node), [rules(each) for each in nodes.nodes[1:]]
    node.run(["sh", "-c", f"cat >{RESTORE}; chmod +x {RESTORE}"], input=LOCK_OUT)
    variables = {
        **BATCHES,
        "kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop")),
        "kube_proxy_confirm_within": 6,
    }
    try:
        run = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
        assert run.code == 2
        assert "not confirmed over a new connection: " in run.output
        assert "the node goes back by itself to generation " in run.output
        assert [rules(each) for each in nodes.nodes[1:]] == others
        last = entries(tmp_path)[-1]["nodes"]["n1"]
        assert "not confirmed" in last["error"]
        assert len(last["before"]) == 64
        assert "after" not in last, "it goes back, or does not: nobody has seen it"
        wait_for(lambda: "shop/new" not in kernel(node), "the node did not go back")
    finally:
        node.run(
            [
                "iptables",
                "-D",
                "INPUT",
                "-p",
                "tcp",
                "--dport",
                "22",
                "-m",
                "conntrack",
                "--ctstate",
                "NEW",
                "-j",
                "DROP",
            ]
        )
    wait_for(lambda: kernel(node) == before, "not all of it is back")
    told = json.loads(node.run(["sh", str(PROGRAM), "status"]).stdout.splitlines()[-1])
    assert told["undone"]["reason"] == "not confirmed within 6 s"


LEFT_TO_LATER = """
- hosts: n1
  gather_facts: false
  become: true
  tasks:
    - name: Remove everything
      agentless.kube_proxy.node:
        state: absent
    - name: Apply
      agentless.kube_proxy.node:
        confirm_within: 60
        confirm: false
      register: applied
    - name: Look
      ansible.builtin.raw: cat /var/lib/akp/unconfirmed
      register: looked
    - name: Keep
      agentless.kube_proxy.node:
        state: confirmed
        token: "{{ applied.confirm }}"
        confirm_within: "{{ applied.confirm_within }}"
"""


def test_confirming_can_be_left_to_a_later_task(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    (tmp_path / "later.yml").write_text(LEFT_TO_LATER)
    run = playbook(str(tmp_path / "later.yml"), inventory, tmp_path)
    _absent, applied, confirmed = [each.result for each in run.of("node")]
    (looked,) = [each.result["stdout"] for each in run.results if each.task == "Look"]
    assert f"token={applied['confirm']}" in looked
    assert (confirmed["changed"], confirmed["generation"]) == (True, applied["generation"])
    last, before = entries(tmp_path)[:-3:-1]
    assert (last["action"], last["nodes"]["n1"]["after"]) == ("sync", applied["generation"])
    assert before["action"] == "cleanup", "one entry, when it was certain"
    status = json.loads(nodes.node("n1").run(["sh", str(PROGRAM), "status"]).stdout.splitlines()[-1])
    assert (status["generation"], status["unconfirmed"]) == (applied["generation"], None)


@pytest.fixture
def probed(tmp_path: Path) -> Path:
    """The shop, and a Service with a node port that is served by one pod."""
    folder = edited_shop(tmp_path / "probed")
    labels = {"kubernetes.io/service-name": "probed"}
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "shop", "name": "probed"},
            "spec": {
                "type": "NodePort",
                "clusterIP": "10.96.10.77",
                "ports": [{"name": "tcp", "port": 80, "nodePort": 30099}],
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"namespace": "shop", "name": "probed-1", "labels": labels},
            "addressType": "IPv4",
            "ports": [{"name": "tcp", "port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["10.244.1.201"], "nodeName": "n1", "conditions": {"ready": True}}],
        },
    ]
    (folder / "probed.yaml").write_text(yaml.safe_dump_all(objects))
    return folder


@pytest.mark.soak
def test_a_change_is_kept_if_the_probes_answer_and_taken_back_if_not(
    nodes: Lab, inventory: Path, tmp_path: Path, probed: Path
) -> None:
    # Probes come from where ansible-playbook runs; in the lab that is the controller.
    agent = (nodes.state / "agent.pid").read_text().strip()
    inside = ["nsenter", f"--net=/proc/{agent}/ns/net"]
    playbook("sync-services", inventory, tmp_path)
    before = [kernel(node) for node in nodes.nodes]
    good = {"name": "shop", "port": 30099}
    from_node = {"port": 80, "address": "10.96.10.77", "from": "node"}
    variables: dict[str, Any] = {
        **BATCHES,
        "kube_proxy_cluster_dir": str(probed),
        "kube_proxy_probes": [good, from_node],
    }
    nobody = [good, {"type": "http", "port": 30098, "timeout": 1}]
    run = playbook(
        "sync-services",
        inventory,
        tmp_path,
        variables={**variables, "kube_proxy_probes": nobody},
        prefix=inside,
        check=False,
    )
    assert run.code == 2
    assert "not confirmed: probe shop (tcp 172.18.0.11:30099): " in run.output, "there is no pod yet"
    assert "the node went back to generation " in run.output
    assert [kernel(node) for node in nodes.nodes] == before
    if "probed" not in nodes.pods:
        nodes.add_pod("probed", "n1", addresses=["10.244.1.201"], serve=[("tcp", 8080)])
    variables["kube_proxy_probes"] = [good, {**from_node, "port": 81, "timeout": 1}]
    run = playbook("sync-services", inventory, tmp_path, variables=variables, prefix=inside, check=False)
    assert "not confirmed: probe tcp 10.96.10.77:81: does not answer from the node; the node went back" in run.output
    variables["kube_proxy_probes"] = [good, from_node]
    run = playbook("sync-services", inventory, tmp_path, variables=variables, prefix=inside)
    assert run.changed == dict.fromkeys(ALL, 1)


@pytest.mark.soak
def test_addresses_of_others_are_told_left_out_or_refused(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    shop = tmp_path / "claims"
    shutil.copytree(SHOP, shop)
    thief = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "thief"},
        "spec": {"clusterIP": "10.96.10.66", "externalIPs": ["172.18.0.12", "192.0.2.9"], "ports": [{"port": 22}]},
    }
    (shop / "thief.yaml").write_text(yaml.safe_dump(thief))
    variables: dict[str, Any] = {"kube_proxy_cluster_dir": str(shop), "kube_proxy_vip_policy": "refuse"}
    claim = "Service/shop/thief: externalIPs 172.18.0.12 is an address of the node n2"
    refused = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
    assert refused.code == 2
    assert f"refused, and no node was touched: {claim}" in refused.output
    assert tried(refused) == set()
    omitted = playbook("sync-services", inventory, tmp_path, variables={**variables, "kube_proxy_vip_policy": "omit"})
    assert f"  {claim}; it is left out" in omitted.summary
    assert "-d 172.18.0.12/32" not in rules(nodes.node("n1"))
    assert "-d 192.0.2.9/32" in rules(nodes.node("n1"))
    # Its Node object does not tell, but n3 was asked: that concerns n3 alone.
    nodes.node("n3").run(["ip", "addr", "add", "192.0.2.9/24", "dev", "eth0"])
    try:
        omitting = {**variables, "kube_proxy_vip_policy": "omit"}
        omitted = playbook("sync-services", inventory, tmp_path, variables=omitting)
        own = "externalIPs 192.0.2.9 is an address of an interface of the node n3; it is left out there"
        assert f"  Service/shop/thief: {own}" in omitted.summary
        assert "-d 192.0.2.9/32" in rules(nodes.node("n1"))
        assert "-d 192.0.2.9/32" not in rules(nodes.node("n3"))
    finally:
        nodes.node("n3").run(["ip", "addr", "del", "192.0.2.9/24", "dev", "eth0"])
    variables |= {"kube_proxy_vip_policy": "warn", "kube_proxy_external_ip_cidrs": ["198.51.100.0/24"]}
    warned = playbook("sync-services", inventory, tmp_path, "--check", variables=variables)
    assert f"  {claim}" in warned.summary
    assert "  Service/shop/thief: externalIPs 192.0.2.9 is not in 198.51.100.0/24" in warned.summary


def meddle(node: Node) -> None:
    """One rule of one Service leads nowhere, and one is there that nobody ordered."""
    chain = next(
        line.split()[1]
        for line in node.run(["iptables-save", "-t", "nat"]).stdout.splitlines()
        if line.startswith("-A KUBE-SVC-") and "shop/catalog" in line
    )
    node.run(["iptables", "-t", "nat", "-D", chain, "1"])
    node.run(["iptables", "-A", "KUBE-FORWARD", "-j", "ACCEPT"])


def test_what_somebody_changed_is_named_by_service_and_put_right_if_that_is_wanted(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    # Of an earlier kube-proxy: the configuration of the shop has no node ports on localhost.
    nodes.node("n3").run(["sysctl", "-w", "net.ipv4.conf.all.route_localnet=1"])
    config = {**yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()), "iptables": {"localhostNodePorts": False}}
    variables = {"kube_proxy_config": config}
    generation = playbook("sync-services", inventory, tmp_path, variables=variables).node("n2")["generation"]
    good = playbook("verify_services", inventory, tmp_path)
    assert good.changed == dict.fromkeys(ALL, 0)
    assert f"n2 is as generation {generation} left it at 20" in " ".join(good.output.split())
    assert "n3: net.ipv4.conf.all.route_localnet is 1" in " ".join(good.output.split())
    assert "n1: net.ipv4.conf.all.route_localnet" not in good.output
    nodes.node("n3").run(["sysctl", "-w", "net.ipv4.conf.all.route_localnet=0"])
    before = [kernel(node) for node in nodes.nodes]
    meddle(nodes.node("n2"))
    changed = [kernel(node) for node in nodes.nodes]
    page = tmp_path / "found.html"
    alarm = playbook("verify_services", inventory, tmp_path, "-e", f"kube_proxy_report={page}", check=False)
    assert alarm.code == 2
    assert {host for host, counts in alarm.recap.items() if counts["failed"]} == {"n2"}
    assert "n2: drift" in page.read_text()
    assert "(shop/catalog" in page.read_text()
    assert f"n2 is not as generation {generation} left it at 20" in alarm.output
    assert "(shop/catalog" in alarm.output
    assert "extra rule: ipv4 filter KUBE-FORWARD: -A KUBE-FORWARD -j ACCEPT" in alarm.output
    assert [kernel(node) for node in nodes.nodes] == changed, "an alarm changes nothing"
    # As people type it: Ansible takes false and true of key=value for words.
    alarm = playbook("verify_services", inventory, tmp_path, "-e", "kube_proxy_heal=false", check=False)
    assert {host for host, counts in alarm.recap.items() if counts["failed"]} == {"n2"}
    assert [kernel(node) for node in nodes.nodes] == changed
    put_right = ("-e", "kube_proxy_heal=true", "-e", f"kube_proxy_report={page}")
    healed = playbook("verify_services", inventory, tmp_path, *put_right)
    assert healed.changed == {"n1": 0, "n2": 1, "n3": 0}
    assert "All 3 nodes as intended." in page.read_text()
    assert "(shop/catalog" in healed.output
    assert [kernel(node) for node in nodes.nodes] == before
    last = entries(tmp_path)[-1]
    assert (last["action"], list(last["nodes"])) == ("heal", ["n2"])
    assert f"entry {last['number']}, head {last['hash']}" in healed.output


def test_a_node_that_has_nothing_any_more_is_found_out_and_healed(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    fresh = playbook("verify_services", inventory, tmp_path)
    assert fresh.changed == dict.fromkeys(ALL, 0), "where nothing was applied, nothing is missing"
    assert "n1 has nothing applied, and nothing of ours in its kernel" in fresh.output
    generation = playbook("sync-services", inventory, tmp_path).node("n2")["generation"]
    before = kernel(nodes.node("n2"))
    lose = "sh /var/lib/akp/bundles/*/akp-node cleanup >/dev/null; rm -rf /var/lib/akp; iptables-save | grep KUBE || :"
    assert nodes.node("n2").run(["sh", "-c", lose]).stdout == ""
    for _again in range(2):
        alarm = playbook("verify_services", inventory, tmp_path, check=False)
        assert {host for host, counts in alarm.recap.items() if counts["failed"]} == {"n2"}
        assert f"n2 has lost generation {generation}" in alarm.output
    (gathered,) = (
        each.result for each in playbook("gather_state", inventory, tmp_path).of("node") if each.host == "n2"
    )
    assert (gathered["state"], gathered["intact"]) == ("absent", False)
    heal = ("verify_services", inventory, tmp_path, "-e", "kube_proxy_heal=true")
    assert playbook(*heal, "--check").changed == {"n1": 0, "n2": 1, "n3": 0}
    assert playbook(*heal).changed == {"n1": 0, "n2": 1, "n3": 0}
    assert kernel(nodes.node("n2")) == before
    last = entries(tmp_path)[-1]
    assert (last["action"], last["nodes"]["n2"]["after"]) == ("heal", generation)
    assert playbook(*heal).changed == dict.fromkeys(ALL, 0)

    # What is not here any more cannot be given; and what was cleaned up from here is not missing.
    nodes.node("n2").run(["sh", "-c", lose])
    shutil.rmtree(tmp_path / "akp" / "bundles" / "n2")
    helpless = playbook(*heal, check=False)
    assert "n2 has lost generation" in helpless.output
    assert "a run of sync_services gives it the present one" in " ".join(helpless.output.split())
    cleaned = playbook("cleanup_services", inventory, tmp_path)
    last = entries(tmp_path)[-1]
    assert f"entry {last['number']}, head {last['hash']}" in cleaned.output
    assert playbook("verify_services", inventory, tmp_path).changed == dict.fromkeys(ALL, 0)
