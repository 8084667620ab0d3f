"""The examples of restricted access, installed as they tell the reader to, allow the node program and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.lab import Lab, Node
from tests.lab.program import PROGRAM

from .play import ROOT, playbook
from .test_rival import kube_proxy

ACCESS = ROOT / "examples" / "access"
SUDO = "sudo -n /usr/local/sbin/akp-node"


@pytest.fixture
def account(nodes: Lab) -> Node:
    """n1 with the program installed and an account akp that may use it by sudo."""
    node = nodes.node("n1")
    key = (nodes.state / "id_ed25519.pub").read_text()
    script = f"""
install -m 0755 {PROGRAM.with_name("akp-leave")} /usr/local/sbin/akp-leave
install -m 0755 {PROGRAM} /usr/local/sbin/akp-node
install -m 0755 {ACCESS}/akp-ssh /usr/local/sbin/akp-ssh
install -m 0440 {ACCESS}/sudoers.shell /etc/sudoers.d/akp
id akp >/dev/null 2>&1 || useradd --home-dir /var/akp --create-home --shell /bin/sh akp
usermod --password '*' akp
mkdir -p /var/akp/.ssh
cat >/var/akp/.ssh/authorized_keys
chown -R akp: /var/akp
chmod 700 /var/akp/.ssh
"""
    node.run(["sh", "-eu", "-c", script], input=key)
    return node


def forced(lab: Lab, node: Node) -> None:
    """The key of the control host in the line of the example."""
    (line,) = [each for each in (ACCESS / "authorized_keys").read_text().splitlines() if not each.startswith("#")]
    options = line.split(" ssh-ed25519 ")[0]
    kind, key, *_comment = (lab.state / "id_ed25519.pub").read_text().split()
    node.run(["install", "-m", "0440", str(ACCESS / "sudoers"), "/etc/sudoers.d/akp"])
    node.run(["sh", "-c", "cat >/var/akp/.ssh/authorized_keys"], input=f"{options} {kind} {key}\n")


def as_akp(lab: Lab, node: Node, command: str) -> subprocess.CompletedProcess[str]:
    argv = [str(lab.state / "ssh"), "-F", str(lab.state / "ssh_config"), f"akp@{node.addresses[0]}", command]
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=60)


def for_akp(inventory: Path, command: str) -> Path:
    content = yaml.safe_load(inventory.read_text())
    content["nodes"]["hosts"]["n1"] |= {
        "ansible_user": "akp",
        "kube_proxy_command": command,
        # A connection that was made before the key was restricted would not be.
        "ansible_ssh_args": "-o ControlMaster=no -o ControlPath=none",
    }
    inventory.write_text(yaml.safe_dump(content))
    return inventory


def test_an_account_with_the_sudoers_line_can_sync_and_do_nothing_else(
    nodes: Lab, account: Node, inventory: Path, tmp_path: Path
) -> None:
    hosts = for_akp(inventory, SUDO)
    first = playbook("sync-services", hosts, tmp_path, "--limit", "n1")
    assert first.changed == {"n1": 1}
    assert "kube_proxy_keep has no effect" not in " ".join(first.output.split())
    vain = playbook("sync-services", hosts, tmp_path, "--limit", "n1", "-e", "kube_proxy_keep=5")
    assert vain.changed == {"n1": 0}
    assert "kube_proxy_keep has no effect with kube_proxy_command" in " ".join(vain.output.split())
    assert "KUBE-SERVICES" in account.run(["iptables-save"]).stdout
    for command in ("sudo -n id", "sudo -n sh -c id", "sudo -n iptables-save", "sudo -n -u daemon id"):
        done = as_akp(nodes, account, command)
        assert done.returncode != 0, command
        assert "password is required" in done.stderr or "not allowed" in done.stderr, done.stderr
    assert playbook("cleanup_services", hosts, tmp_path, "--limit", "n1").changed == {"n1": 1}


def test_a_key_with_the_forced_command_can_sync_and_do_nothing_else(
    nodes: Lab, account: Node, inventory: Path, tmp_path: Path
) -> None:
    forced(nodes, account)
    hosts = for_akp(inventory, "akp-node")
    assert playbook("sync-services", hosts, tmp_path, "--limit", "n1", "--check").changed == {"n1": 1}
    assert playbook("sync-services", hosts, tmp_path, "--limit", "n1").changed == {"n1": 1}
    assert playbook("sync-services", hosts, tmp_path, "--limit", "n1").changed == {"n1": 0}
    for command in (
        "id",
        "akp-node",
        "akp-node; id",
        "akp-node status; id",
        "akp-node status $(id)",
        "akp-node status `id`",
        "akp-node apply /etc",
        "akp-node apply ../x",
        "akp-node undo",
        "akp-node status\nid",
        "scp -t /tmp",
        "/usr/lib/openssh/sftp-server",
    ):
        done = as_akp(nodes, account, command)
        assert done.returncode != 0, command
        assert "uid=" not in done.stdout, command
    assert '"state": "applied"' in as_akp(nodes, account, "akp-node status").stdout
    with kube_proxy(account) as process:
        stopped = playbook("sync-services", hosts, tmp_path, "--limit", "n1", check=False)
    assert f"kube-proxy runs on n1 (process {process})" in stopped.summary[1]
    assert playbook("cleanup_services", hosts, tmp_path, "--limit", "n1").changed == {"n1": 1}
