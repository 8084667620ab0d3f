"""The role that has health checks answered: settings on the node, and what follows from them."""

from __future__ import annotations

from pathlib import Path

from tests.lab import Lab

from .play import playbook


def test_health_checks_are_switched_on_and_off(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    node = nodes.node("n1")
    only = ("--limit", "n1", "-e", "kube_proxy_healthz=127.0.0.1:10256")
    assert playbook("sync-services", inventory, tmp_path, "--limit", "n1").changed == {"n1": 1}
    assert playbook("health_services", inventory, tmp_path, *only, "--check").changed == {"n1": 1}
    assert playbook("health_services", inventory, tmp_path, *only).changed == {"n1": 1}
    settings = node.run(["cat", "/etc/akp/node.conf"]).stdout
    assert {"health systemd", "healthz 127.0.0.1:10256"} <= set(settings.splitlines())
    assert playbook("health_services", inventory, tmp_path, *only).changed == {"n1": 0}
    assert node.run(["test", "-x", "/usr/local/sbin/akp-health"], check=False).returncode == 0
    # There is no systemd on this node, and a sync says so.
    program = "sh /var/lib/akp/bundles/$(sed -n 's/^snapshot=//p' /var/lib/akp/record)/akp-node restore --verify"
    assert "systemd does not run here" in node.run(["sh", "-c", program]).stdout
    off = ("--limit", "n1", "-e", "kube_proxy_health_state=absent")
    assert playbook("health_services", inventory, tmp_path, *off).changed == {"n1": 2}
    assert node.run(["test", "-e", "/usr/local/sbin/akp-health"], check=False).returncode == 1
    assert "health" not in node.run(["sh", "-c", "cat /etc/akp/node.conf 2>/dev/null || :"]).stdout
    node.run(["rm", "-rf", "/etc/akp"])
