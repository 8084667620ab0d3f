"""sync-services.yml on real nodes over real ssh, with a cluster from files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import Lab, Node

from .play import BIN, ROOT, SHOP, ansible_environment, playbook

pytestmark = pytest.mark.slow

ALL = ["n1", "n2", "n3"]


RULES = "iptables-save; ip6tables-save; find /var/lib/akp /usr/local -type f ! -name queued 2>/dev/null | sort"
BROKEN = "#!/bin/sh\ncat >/dev/null\necho 'iptables-restore: line 7 failed' >&2\nexit 1\n"
RESTORE = "/usr/local/sbin/iptables-nft-restore"


def rules(node: Node) -> str:
    """Everything that could have been changed, as text."""
    lines = node.run(["sh", "-c", RULES]).stdout.splitlines()
    return "\n".join(line.split("[")[0] for line in lines if not line.startswith("#"))


def sabotage(node: Node) -> None:
    """The node's kernel refuses everything from now on."""
    node.run(["sh", "-c", f"cat >{RESTORE}; chmod +x {RESTORE}"], input=BROKEN)


def edited_shop(folder: Path, **changes: Any) -> Path:
    """The shop with one pod less, one Service more and one Service less."""
    shutil.copytree(SHOP, folder)
    catalog = list(yaml.safe_load_all((folder / "catalog.yaml").read_text()))
    for obj in catalog:
        if obj["kind"] == "EndpointSlice":
            obj["endpoints"] = obj["endpoints"][:-1]
    (folder / "catalog.yaml").write_text(yaml.safe_dump_all(catalog))
    (folder / "metrics.yaml").unlink()
    new = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "new", **changes},
        "spec": {"clusterIP": "10.96.10.99", "ports": [{"port": 80}]},
    }
    (folder / "new.yaml").write_text(yaml.safe_dump(new))
    return folder


def test_the_first_run_programs_all_and_the_second_changes_nothing(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    first = playbook("sync-services", inventory, tmp_path)
    assert first.changed == {"n1": 1, "n2": 1, "n3": 1}
    assert first.summary[0] == "3 nodes: 3 changed, 0 unchanged, 0 failed"
    assert first.node("n1")["services"]["added"] == 8
    assert "KUBE-SERVICES" in rules(nodes.node("n2"))
    before = [rules(node) for node in nodes.nodes]
    second = playbook("sync-services", inventory, tmp_path)
    assert second.changed == {"n1": 0, "n2": 0, "n3": 0}
    assert second.summary[0] == "3 nodes: 0 changed, 3 unchanged, 0 failed"
    assert [rules(node) for node in nodes.nodes] == before


def test_nftables_mode_works_the_same(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    config = {**yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()), "mode": "nftables"}
    variables: dict[str, Any] = {"kube_proxy_config": config}
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 1)
    assert "shop/frontend" in nodes.node("n1").run(["nft", "list", "ruleset"]).stdout
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 0)
    nodes.node("n2").run(["nft", "delete", "table", "ip", "kube-proxy"])
    repaired = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert repaired.changed == {"n1": 0, "n2": 1, "n3": 0}
    assert playbook("cleanup_services", inventory, tmp_path).changed == dict.fromkeys(ALL, 1)


def counting(inventory: Path, lab: Lab, log: Path) -> Path:
    """The inventory, with an ssh that writes a line for every command it starts on a node."""
    content = yaml.safe_load(inventory.read_text())
    wrapper = inventory.parent / "counting-ssh"
    wrapper.write_text(
        "#!/bin/sh\n"
        # In one write: several run at once.
        f'case $* in *"-O "*) ;; *) line=$(printf "%s" "$*" | tr "\\n" " "); echo "$line" >>{log} ;; esac\n'
        f'exec {lab.state}/ssh "$@"\n'
    )
    wrapper.chmod(0o755)
    content["nodes"]["vars"]["ansible_ssh_executable"] = str(wrapper)
    inventory.write_text(yaml.safe_dump(content))
    return inventory


def test_a_run_without_news_is_one_command_per_node(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    log = tmp_path / "ssh.log"
    counted = counting(inventory, nodes, log)
    playbook("sync-services", counted, tmp_path)
    log.unlink()
    playbook("sync-services", counted, tmp_path)
    commands = log.read_text().splitlines()
    assert len(commands) == 3, "\n".join(commands)
    assert all(len(command) < 2000 for command in commands)


def test_check_and_diff_predict_exactly_what_the_run_then_does(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    before = [rules(node) for node in nodes.nodes]
    variables = {"kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))}
    plan = playbook("sync-services", inventory, tmp_path, "--check", "--diff", variables=variables)
    assert [rules(node) for node in nodes.nodes] == before, "check mode changes nothing"
    assert "- endpoint 10.244.3.51:8080" in plan.output
    assert "+ shop/new tcp IPv4" in plan.output
    assert "- shop/metrics:metrics udp IPv4" in plan.output
    run = playbook("sync-services", inventory, tmp_path, "--diff", variables=variables)
    same = ("changed", "changes", "chains", "generation", "previous", "services", "endpoints", "diff")
    for host in ALL:
        predicted, done = plan.node(host), run.node(host)
        assert {key: predicted[key] for key in same} == {key: done[key] for key in same}
    assert plan.changed == run.changed
    assert run.summary[1] == ("Services: 1 added, 1 changed, 1 removed; endpoints: 0 added, 2 removed")
    again = playbook("sync-services", inventory, tmp_path, "--check", "--diff", variables=variables)
    assert again.changed == {"n1": 0, "n2": 0, "n3": 0}


def test_a_plan_that_was_approved_is_followed_and_nothing_else(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    plan = playbook("plan_services", inventory, tmp_path)
    assert "+ shop/frontend:http tcp IPv4" in plan.output
    assert all("KUBE-SERVICES" not in rules(node) for node in nodes.nodes)
    (told,) = plan.of("summary")
    approved = {"kube_proxy_plan": told.result["plan"], "kube_proxy_plan_digest": told.result["plan_digest"]}
    wrong = playbook(
        "sync-services", inventory, tmp_path, variables={**approved, "kube_proxy_plan_digest": "0" * 64}, check=False
    )
    assert wrong.code != 0
    assert "was approved" in wrong.output
    other = {**approved, "kube_proxy_config": {"clusterCIDR": "10.99.0.0/16"}}
    stopped = playbook("sync-services", inventory, tmp_path, variables=other, check=False)
    assert "the plan says" in stopped.output
    assert all("KUBE-SERVICES" not in rules(node) for node in nodes.nodes)
    # By now the cluster has moved on; the plan is about the cluster as it was.
    moved = {**approved, "kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))}
    run = playbook("sync-services", inventory, tmp_path, variables=moved)
    assert {host: run.node(host)["generation"] for host in ALL} == {host: plan.node(host)["generation"] for host in ALL}


def test_somebody_who_meddles_is_found_out_and_undone(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    before = rules(nodes.node("n2"))
    nodes.node("n2").run(["iptables", "-t", "nat", "-D", "KUBE-SERVICES", "2"])
    nodes.node("n2").run(["iptables", "-A", "KUBE-FORWARD", "-j", "ACCEPT"])
    run = playbook("sync-services", inventory, tmp_path, "--diff")
    assert run.changed == {"n1": 0, "n2": 1, "n3": 0}
    assert {each["kind"] for each in run.node("n2")["differences"]} == {"missing-rule", "extra-rule"}
    assert "! not as it was left:" in run.output
    assert "extra rule: ipv4 filter KUBE-FORWARD: -A KUBE-FORWARD -j ACCEPT" in run.output
    (missing,) = [each for each in run.node("n2")["differences"] if each["kind"] == "missing-rule"]
    assert f'--comment "{missing["service"]} ' in missing["rule"]
    assert f"missing rule: ipv4 nat KUBE-SERVICES ({missing['service']}): " in run.output
    assert "  n2 was not as it was left, 2 differences" in run.summary
    assert rules(nodes.node("n2")) == before


def test_a_node_that_fails_is_named_keeps_its_state_and_stops_nobody(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    playbook("sync-services", inventory, tmp_path)
    before = rules(nodes.node("n2"))
    sabotage(nodes.node("n2"))
    variables = {"kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))}
    run = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
    assert run.code == 2
    assert run.recap["n2"]["failed"] == 1
    assert (run.changed["n1"], run.changed["n3"]) == (1, 1)
    assert any(line.startswith("  n2 failed: the kernel refused") for line in run.summary), run.summary
    nodes.node("n2").run(["rm", RESTORE])
    assert rules(nodes.node("n2")) == before
    healed = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert healed.changed == {"n1": 0, "n2": 1, "n3": 0}


def test_hosts_that_cannot_be_reached_are_unreachable_as_ever(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(inventory.read_text())
    content["nodes"]["hosts"]["n3"]["ansible_host"] = "172.18.0.99"
    content["nodes"]["vars"]["ansible_ssh_common_args"] += " -o ConnectTimeout=1"
    inventory.write_text(yaml.safe_dump(content))
    run = playbook("sync-services", inventory, tmp_path, check=False)
    assert run.code == 4
    assert run.recap["n3"]["unreachable"] == 1
    assert (run.changed["n1"], run.changed["n2"]) == (1, 1)
    assert any(line.startswith("  n3 failed: unreachable: ") for line in run.summary)
    assert nodes.node("n3").run(["iptables-save"]).stdout.count("KUBE-") == 0


def test_limit_is_ansibles_and_the_rest_goes_in_batches(inventory: Path, tmp_path: Path) -> None:
    limited = playbook("sync-services", inventory, tmp_path, "--limit", "n2")
    assert limited.changed == {"n2": 1}
    run = playbook("sync-services", inventory, tmp_path, variables={"kube_proxy_batches": 1})
    assert run.changed == {"n1": 1, "n2": 0, "n3": 1}
    assert [each.outcome for each in run.of("snapshot")].count("ok") == 1, "all batches see the same cluster"
    assert run.summary[0] == "3 nodes: 2 changed, 1 unchanged, 0 failed"


def test_a_killed_run_leaves_old_or_new_and_the_next_one_heals(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    old = {node.name: rules(node) for node in nodes.nodes}
    variables = {"kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))}
    argv = [
        *(str(BIN / "ansible-playbook"), "-i", str(inventory), str(ROOT / "playbooks" / "sync-services.yml")),
        *("-e", f"kube_proxy_dir={tmp_path}/akp", "-e", f"kube_proxy_cluster_dir={tmp_path}/shop"),
        *("-e", f"kube_proxy_config={SHOP}/kube-proxy.yaml"),
    ]
    environment = ansible_environment(tmp_path / "killed.jsonl")
    with subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        pushed = tmp_path / "akp" / "bundles" / "n1" / "manifest.json"
        was, deadline = pushed.stat().st_mtime_ns, time.monotonic() + 60
        while pushed.stat().st_mtime_ns == was and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    for node in nodes.nodes:
        wait_until_idle(node)
    new = playbook("sync-services", inventory, tmp_path, variables=variables)
    after = {node.name: rules(node) for node in nodes.nodes}
    assert all(counts["failed"] == 0 for counts in new.recap.values())
    assert all(after[name] != old[name] for name in ALL)
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 0)


def wait_until_idle(node: Node) -> None:
    """Until whatever the killed run had started there has ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if node.run(["pgrep", "-f", "[a]kp-node"], check=False).returncode != 0:
            return
        time.sleep(0.05)
    pytest.fail("the node program does not end")


def test_a_run_that_would_remove_most_services_stops_and_asks(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    before = [rules(node) for node in nodes.nodes]
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(SHOP / "nodes.yaml", empty)
    variables: dict[str, Any] = {"kube_proxy_cluster_dir": str(empty)}
    for arguments in ((), ("--check",)):
        run = playbook("sync-services", inventory, tmp_path, *arguments, variables=variables, check=False)
        assert run.code == 2
        assert "refused, and no node was touched: on n1, n2, n3, " in run.output
        assert "service ports would be removed, more than 50 %: " in run.output
        assert "kube_proxy_max_removed_percent=100" in run.output
        assert not list(run.of("node", node="n1", changed=True))
    assert [rules(node) for node in nodes.nodes] == before
    meant = playbook(
        "sync-services", inventory, tmp_path, variables={**variables, "kube_proxy_max_removed_percent": 100}
    )
    assert meant.changed == dict.fromkeys(ALL, 1)


def test_a_run_that_cannot_be_proved_stops_with_an_example(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    proving: dict[str, Any] = {"kube_proxy_prove": True}
    playbook("sync-services", inventory, tmp_path, variables=proving)
    before = [rules(node) for node in nodes.nodes]
    shop = edited_shop(tmp_path / "shop")
    thief = yaml.safe_load((shop / "new.yaml").read_text())
    thief["spec"]["externalIPs"] = [nodes.node("n2").addresses[0]]
    (shop / "new.yaml").write_text(yaml.safe_dump(thief))
    variables = {**proving, "kube_proxy_cluster_dir": str(shop)}
    for book in ("sync-services", "plan_services"):
        run = playbook(book, inventory, tmp_path, variables=variables, check=False)
        told = " ".join(run.output.split())
        assert run.code == 2
        assert (
            f"refused, and no node was touched: not proved: {nodes.node('n2').addresses[0]} is external IP of Service "
            "shop/new and an address of node n2" in told
        )
    assert [rules(node) for node in nodes.nodes] == before


def test_a_cluster_without_endpoints_is_no_better_than_one_without_services(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    playbook("sync-services", inventory, tmp_path)
    before = [rules(node) for node in nodes.nodes]
    shop = tmp_path / "shop"
    shutil.copytree(SHOP, shop)
    for file in shop.glob("*.yaml"):
        objects = [each for each in yaml.safe_load_all(file.read_text()) if each.get("kind") != "EndpointSlice"]
        file.write_text(yaml.safe_dump_all(objects))
    variables: dict[str, Any] = {"kube_proxy_cluster_dir": str(shop)}
    run = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
    told = " ".join(run.output.split())
    assert "service ports that have endpoints would be removed or have none left, more than 50 %: " in told
    assert "shop/frontend:http tcp IPv4 (no endpoints left)" in told
    assert [rules(node) for node in nodes.nodes] == before
    variables["kube_proxy_max_removed_percent"] = 100
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 1)


def test_new_addresses_of_a_node_change_its_rules(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    config = {**yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()), "nodePortAddresses": ["192.0.2.0/24"]}
    playbook("sync-services", inventory, tmp_path, variables={"kube_proxy_config": config})
    nodes.node("n1").run(["ip", "addr", "add", "192.0.2.77/32", "dev", "lo"])
    try:
        run = playbook("sync-services", inventory, tmp_path, variables={"kube_proxy_config": config})
    finally:
        nodes.node("n1").run(["ip", "addr", "del", "192.0.2.77/32", "dev", "lo"])
    assert run.changed == {"n1": 1, "n2": 0, "n3": 0}
    assert "-d 192.0.2.77/32" in rules(nodes.node("n1"))


def test_the_installed_program_is_used_and_removed(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    variables = {"kube_proxy_install": True}
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 1)
    stat = nodes.node("n1").run(["stat", "-c", "%U %a", "/usr/local/sbin/akp-node"]).stdout.split()
    assert stat == ["root", "755"]
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 0)
    assert playbook("cleanup_services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 1)
    assert nodes.node("n1").run(["ls", "/usr/local/sbin"]).stdout == ""


def test_cleanup_takes_all_of_it_away(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    before = [rules(node) for node in nodes.nodes]
    playbook("sync-services", inventory, tmp_path)
    check = playbook("cleanup_services", inventory, tmp_path, "--check", "--diff")
    assert check.changed == dict.fromkeys(ALL, 1)
    assert "- shop/frontend:http tcp IPv4" in check.output
    assert "KUBE-SERVICES" in rules(nodes.node("n1"))
    assert playbook("cleanup_services", inventory, tmp_path).changed == dict.fromkeys(ALL, 1)
    assert [rules(node) for node in nodes.nodes] == before
    assert playbook("cleanup_services", inventory, tmp_path).changed == dict.fromkeys(ALL, 0)


def test_a_node_goes_back_to_what_it_had(inventory: Path, tmp_path: Path) -> None:
    first = playbook("sync-services", inventory, tmp_path).node("n1")["generation"]
    variables = {"kube_proxy_cluster_dir": str(edited_shop(tmp_path / "shop"))}
    second = playbook("sync-services", inventory, tmp_path, variables=variables).node("n1")["generation"]
    play = [
        {
            "hosts": "n1",
            "gather_facts": False,
            "tasks": [{"agentless.kube_proxy.node": {"state": "rolled_back", "generation": first[:12]}}],
        }
    ]
    (tmp_path / "back.yml").write_text(yaml.safe_dump(play))
    check = playbook(str(tmp_path / "back.yml"), inventory, tmp_path, "--check")
    back = playbook(str(tmp_path / "back.yml"), inventory, tmp_path)
    for run in (check, back):
        assert (run.node("n1")["previous"], run.node("n1")["generation"]) == (second, first)
    assert back.node("n1")["endpoints"] == {"added": 2, "removed": 0}
    assert playbook(str(tmp_path / "back.yml"), inventory, tmp_path).changed == {"n1": 0}
    play[0]["tasks"] = [{"agentless.kube_proxy.node": {"state": "rolled_back", "generation": "0000"}}]
    (tmp_path / "back.yml").write_text(yaml.safe_dump(play))
    nowhere = playbook(str(tmp_path / "back.yml"), inventory, tmp_path, check=False)
    (told,) = (each.result["msg"] for each in nowhere.of("node"))
    assert told.startswith("generation 0000 is not kept here; those that are: ")
    assert {first, second} == set(json.loads("[" + told.partition(" are: ")[2] + "]"))
    (gathered,) = (each.result for each in playbook("gather_state", inventory, tmp_path, "--limit", "n1").of("node"))
    assert set(gathered["kept"]) == {first, second}


def test_gathering_says_what_is_there_and_changes_nothing(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    nodes.node("n3").run(["iptables", "-t", "nat", "-F", "KUBE-MARK-MASQ"])
    before = [rules(node) for node in nodes.nodes]
    run = playbook("gather_state", inventory, tmp_path)
    drift = {each.host: each.result["drift"] for each in run.of("node")}
    assert drift["n3"] == 1
    assert not drift["n1"]
    assert run.changed == dict.fromkeys(ALL, 0)
    assert [rules(node) for node in nodes.nodes] == before


def test_a_connection_that_cannot_send_input_works_too(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    # With su as the method to become root, Ansible itself does not trust a connection with input either.
    variables = {"ansible_become_method": "su"}
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 1)
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 0)
    assert nodes.node("n1").run(["sh", "-c", "ls /root/.ansible/tmp 2>/dev/null || :"]).stdout == ""


def test_playbooks_are_found_by_the_name_of_the_collection(inventory: Path, tmp_path: Path) -> None:
    run = playbook("agentless.kube_proxy.sync_services", inventory, tmp_path)
    assert run.changed == dict.fromkeys(ALL, 1)


def test_strings_of_the_api_are_never_templates(inventory: Path, tmp_path: Path) -> None:
    evil = "{{ lookup('ansible.builtin.pipe', 'touch " + str(tmp_path / "pwned") + "') }}"
    shop = edited_shop(tmp_path / "shop", annotations={"kube-proxy.agentless.io/note": evil}, labels={"x": evil})
    bad = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": evil},
        "spec": {"clusterIP": evil, "ports": [{"port": 80, "name": evil}]},
    }
    (shop / "bad.yaml").write_text(yaml.safe_dump(bad))
    play = [
        {
            "hosts": "nodes",
            "gather_facts": False,
            "tasks": [
                {"agentless.kube_proxy.snapshot": None, "run_once": True, "register": "taken"},
                {
                    "agentless.kube_proxy.bundle": {"hosts": "{{ ansible_play_hosts }}"},
                    "run_once": True,
                    "register": "made",
                },
                {"ansible.builtin.debug": {"msg": "{{ taken.problems }} {{ made.problems | join }}"}},
                {"ansible.builtin.set_fact": {"copied": "{{ made.problems[0] }}"}},
                {"ansible.builtin.debug": {"msg": "{{ copied }}"}},
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    variables = {"kube_proxy_cluster_dir": str(shop)}
    run = playbook(str(tmp_path / "play.yml"), inventory, tmp_path, variables=variables)
    assert "lookup('ansible.builtin.pipe'" in run.output, "it is shown as it is"
    synced = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert any("lookup(" in line for line in synced.summary)
    assert not (tmp_path / "pwned").exists()
