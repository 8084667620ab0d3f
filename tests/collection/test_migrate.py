"""Nodes that move from kube-proxy and back: what is looked at before, and where a node stands when a step fails.

That no connection notices is shown with a real kube-proxy, in tests/conformance/test_migration.py. Here its part is
played by a process of that name and by rules that nothing on the node has a record of.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, Node

from .control import wait_for
from .play import Run, playbook

pytestmark = pytest.mark.slow

RESTORE = "/etc/cron.d/akp-restore"


@contextlib.contextmanager
def kube_proxy(node: Node) -> Iterator[str]:
    """A node as kube-proxy has it, and the command that stops it there."""
    node.run(["sh", "-c", "cp /bin/sleep /usr/local/bin/kube-proxy"])
    with subprocess.Popen(node.enter(["/usr/local/bin/kube-proxy", "600"])) as process:
        wait_for(lambda: runs(node))
        stop = ["kill", node.run(["pgrep", "-x", "kube-proxy"]).stdout.strip()]
        try:
            yield shlex.join(node.enter(stop))
        finally:
            node.run(stop, check=False)
            process.wait(10)


def runs(node: Node) -> bool:
    return node.run(["pgrep", "-x", "kube-proxy"], check=False).returncode == 0


def rules(node: Node) -> list[str]:
    """Those of the table nat in IPv4; order counts."""
    lines = node.run(["iptables-save", "-t", "nat"]).stdout.splitlines()
    return [line.split("[")[0] for line in lines if not line.startswith("#")]


def has(node: Node, path: str) -> bool:
    return node.run(["test", "-e", path], check=False).returncode == 0


@pytest.fixture
def first(nodes: Lab, inventory: Path, tmp_path: Path) -> Node:
    """A node with rules that it has no record of."""
    playbook("sync-services", inventory, tmp_path / "other", "--limit", "n1")
    node = nodes.node("n1")
    node.run(["sh", "-c", f"rm -rf /var/lib/akp {RESTORE}"])
    return node


def migrate(inventory: Path, work: Path, *arguments: str, **variables: object) -> Run:
    chosen = {"kube_proxy_migrate_wait": 1, **variables}
    return playbook("migrate_nodes", inventory, work, "--limit", "n1", *arguments, variables=chosen, check=False)


def told(run: Run) -> str:
    return " ".join(run.output.split())


def test_a_node_keeps_its_kube_proxy_if_a_packet_would_notice_the_move(
    first: Node, inventory: Path, tmp_path: Path
) -> None:
    service = next(line for line in rules(first) if line.startswith("-A KUBE-SERVICES -d"))
    words = shlex.split(service)[2:]
    first.run(["iptables", "-t", "nat", "-D", "KUBE-SERVICES", *words])
    with kube_proxy(first) as stop:
        refused = migrate(inventory, tmp_path, kube_proxy_stop_command=stop)
        assert refused.code == 2
        assert "What kube-proxy wrote on n1 differs from what the node would be given in 1 place" in told(refused)
        assert "missing rule: ipv4 nat KUBE-SERVICES (kube-system/kube-dns:dns)" in told(refused)
        assert "kube-proxy runs there as before" in told(refused)
        # A missing tool is found while kube-proxy runs as well.
        first.run(["mount", "--bind", "/dev/null", "/usr/sbin/nft"])
        try:
            other = {"kube_proxy_config": {"mode": "nftables"}, "kube_proxy_stop_command": stop}
            lacking = migrate(inventory, tmp_path, **other)
        finally:
            first.run(["umount", "/usr/sbin/nft"])
        assert lacking.code == 2
        assert "missing tool: nft (package nftables)" in told(lacking)
        # kube-proxy writes Services in any order.
        first.run(["iptables", "-t", "nat", "-I", "KUBE-SERVICES", "2", *words])
        looked = migrate(inventory, tmp_path, "--check", kube_proxy_stop_command=stop)
        assert looked.code == 0, looked.output
        assert [each.result["differing"] for each in looked.of("node") if "differing" in each.result] == [0]
        assert "n1: no differences between what kube-proxy wrote" in told(looked)
        assert runs(first)
    assert not has(first, "/var/lib/akp")
    assert not has(first, RESTORE)
    assert not (tmp_path / "akp" / "ledger.jsonl").exists()


def test_a_node_moves_once_kube_proxy_is_gone_and_goes_back_once_it_runs(
    first: Node, inventory: Path, tmp_path: Path
) -> None:
    before = rules(first)
    with kube_proxy(first) as stop:
        waited = migrate(inventory, tmp_path, kube_proxy_stop_command="true")
        assert waited.code == 2
        assert "n1 has not moved to the end" in told(waited)
        assert "kubectl label node n1 kube-proxy.agentless.io/node- brings kube-proxy back" in told(waited)
        assert rules(first) == before
        assert not has(first, "/var/lib/akp/record")

        moved = migrate(inventory, tmp_path, kube_proxy_stop_command=stop, kube_proxy_migrate_wait=10)
        assert moved.code == 0, moved.output
        assert moved.summary[0] == "1 node: 1 changed, 0 unchanged, 0 failed"
        assert not runs(first)
    assert has(first, "/var/lib/akp/record")
    assert has(first, RESTORE)
    again = migrate(inventory, tmp_path)
    assert again.summary[0] == "1 node: 0 changed, 1 unchanged, 0 failed"
    assert again.changed == {"n1": 0}

    asked = migrate(inventory, tmp_path, kube_proxy_migrate_state="back")
    assert asked.code == 2
    assert "kubectl label node n1 kube-proxy.agentless.io/node-" in told(asked)
    assert has(first, "/var/lib/akp/record")
    held = rules(first)
    with kube_proxy(first):
        looked = migrate(inventory, tmp_path, "--check", kube_proxy_migrate_state="back")
        assert "n1 would be given to kube-proxy, with the rules of generation" in told(looked)
        back = migrate(inventory, tmp_path, kube_proxy_migrate_state="back")
        assert back.code == 0, back.output
    assert rules(first) == held
    assert not has(first, "/var/lib/akp/record")
    assert not has(first, RESTORE)
    entries = [json.loads(line) for line in (tmp_path / "akp" / "ledger.jsonl").read_text().splitlines()]
    assert [each["action"] for each in entries if each["result"] != "begun"] == ["sync", "release"]
