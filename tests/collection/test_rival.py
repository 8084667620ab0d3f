"""Nodes that are not ready for us: kube-proxy runs there, or the kernel lacks what a mode needs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, Node

from .control import wait_for
from .play import playbook
from .test_sync import rules

pytestmark = pytest.mark.slow

UNTOUCHED = {"kube_proxy_manage_packages": False, "kube_proxy_hosts": "n1"}


@contextlib.contextmanager
def kube_proxy(node: Node) -> Iterator[int]:
    """Something of that name on a node; its process there."""
    node.run(["sh", "-c", "cp /bin/sleep /usr/local/bin/kube-proxy"])
    with subprocess.Popen(node.enter(["/usr/local/bin/kube-proxy", "600"])) as process:
        wait_for(lambda: node.run(["pgrep", "-x", "kube-proxy"], check=False).stdout != "")
        number = int(node.run(["pgrep", "-x", "kube-proxy"]).stdout)
        try:
            yield number
        finally:
            node.run(["kill", str(number)])
            process.wait(10)


def test_a_sync_stops_for_a_node_where_kube_proxy_runs(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    with kube_proxy(nodes.node("n1")) as process:
        before = rules(nodes.node("n1"))
        looked = playbook("sync-services", inventory, tmp_path, "--check")
        assert looked.summary[0] == "3 nodes: 3 would change, 0 unchanged, 0 failed"
        assert "kube-proxy runs beside: 1" in looked.summary, "only nodes that run in the same network are meant"
        run = playbook("sync-services", inventory, tmp_path, check=False)
        assert run.code == 2
        assert run.summary[0] == "3 nodes: 2 changed, 0 unchanged, 1 failed"
        assert run.summary[1].startswith(f"  n1 failed: kube-proxy runs on n1 (process {process}), and two writers")
        assert "kubectl label node n1 kube-proxy.agentless.io/node=" in run.summary[1]
        assert "delete daemonset" not in run.output
        assert rules(nodes.node("n1")) == before
        state = next(
            each.result for each in playbook("gather_state", inventory, tmp_path).of("node") if each.host == "n1"
        )
        assert state["kube_proxy"] == [f"process {process}"]
        meant = playbook("sync-services", inventory, tmp_path, "-e", "kube_proxy_allow_running=true")
        assert meant.changed == {"n1": 1, "n2": 0, "n3": 0}
        # It is up to date now, but will not stay so.
        assert playbook("sync-services", inventory, tmp_path, check=False).code == 2
    assert playbook("sync-services", inventory, tmp_path).changed == {"n1": 0, "n2": 0, "n3": 0}


def test_a_kube_proxy_that_is_no_process_is_known_by_its_port_and_by_what_it_writes(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    first, second = nodes.node("n1"), nodes.node("n2")
    playbook("sync-services", inventory, tmp_path)
    # As within k3s: nothing is called kube-proxy, but its metrics port is taken. On n2 it has just written a Service.
    chain = "KUBE-SVC-ABCDEFGH234567AB"
    second.run(["iptables", "-t", "nat", "-N", chain])
    listening = first.enter(["busybox", "nc", "-l", "-p", "10249"])
    with subprocess.Popen(listening, stdin=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: ":2809 " in first.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout)
            run = playbook("sync-services", inventory, tmp_path, check=False)
        finally:
            first.run(["kill", first.run(["pgrep", "-f", "[n]c -l -p 10249"]).stdout.split()[0]])
            process.wait(10)
    assert run.code == 2
    assert run.summary[0] == "3 nodes: 0 changed, 1 unchanged, 2 failed"
    assert "no process of that name is seen, but its metrics port 10249 is taken" in run.summary[1]
    assert f"since the last apply, something wrote {chain}" in run.summary[2]
    assert chain in rules(second)
    meant = playbook("sync-services", inventory, tmp_path, "-e", "kube_proxy_allow_running=true")
    assert meant.changed == {"n1": 0, "n2": 1, "n3": 0}
    assert chain not in rules(second)


def test_the_advice_for_a_node_is_about_that_node(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    with kube_proxy(nodes.node("n1")):
        refused = playbook("prepare_nodes", inventory, tmp_path, variables=UNTOUCHED, check=False)
    said = " ".join(refused.output.split())
    assert refused.code == 2
    assert "kubectl label node n1 kube-proxy.agentless.io/node=" in said
    assert "delete daemonset" not in said


def test_a_kernel_that_lacks_modules_of_the_mode_is_an_error_that_names_them(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    node = nodes.node("n1")
    node.run(["rm", "-f", "/etc/modules-load.d/kube-proxy.conf"])
    asked = {**UNTOUCHED, "kube_proxy_modules": ["nf_conntrack", "no_such_thing", "nor-this"]}
    failed = playbook(
        "prepare_nodes", inventory, tmp_path, "-e", "kube_proxy_mode=iptables", variables=asked, check=False
    )
    said = " ".join(failed.output.split())
    assert failed.code == 2
    assert "The kernel of n1 lacks no_such_thing, nor-this, which mode iptables needs" in said
    assert "kube-proxy.conf" not in node.run(["ls", "/etc/modules-load.d"]).stdout, (
        "nothing that would fail at every boot"
    )
    ipvs = playbook(
        "prepare_nodes", inventory, tmp_path, "-e", "kube_proxy_mode=ipvs", variables=UNTOUCHED, check=False
    )
    if node.run(["test", "-e", "/proc/net/ip_vs"], check=False).returncode == 0:
        assert ipvs.code == 0, ipvs.output
    else:
        assert "The kernel of n1 lacks ip_vs, ip_vs_rr, ip_vs_wrr, ip_vs_sh" in " ".join(ipvs.output.split())
    playbook("prepare_nodes", inventory, tmp_path, "-e", "kube_proxy_mode=nftables", variables=UNTOUCHED)
    assert "nf_tables" in node.run(["cat", "/etc/modules-load.d/kube-proxy.conf"]).stdout
