"""A node with a kernel of its own is a node like any other, and has what ipvs mode needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import Lab, LabError, Reply

SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh")


def test_it_runs_another_kernel_than_the_machine(uml_lab: Lab) -> None:
    kernels = [node.run(["uname", "-r"]).stdout for node in uml_lab.nodes]
    assert kernels[0] == kernels[1] == f"{os.uname().release}\n"
    assert kernels[2] != kernels[0]


def test_it_has_ip_vs_with_all_schedulers(uml_lab: Lab) -> None:
    node = uml_lab.node("n3")
    node.run(["modprobe", "-a", "ip_vs", *(f"ip_vs_{name}" for name in SCHEDULERS), "xt_set", "xt_ipvs", "dummy"])
    modules = node.run(["lsmod"]).stdout
    assert [name for name in SCHEDULERS if f"ip_vs_{name} " not in modules] == []


def test_commands_get_input_and_environment_and_fail_with_their_words(uml_lab: Lab) -> None:
    node = uml_lab.node("n3")
    assert node.run(["sh", "-c", 'cat; echo "$A"'], input="in ", env={"A": "two  words"}).stdout == "in two  words\n"
    assert node.run(["sh", "-c", "exit 3"], check=False).returncode == 3
    with pytest.raises(LabError, match="no-such-file"):
        node.run(["cat", "/no-such-file"])


def test_what_it_writes_stays_in_the_lab(uml_lab: Lab) -> None:
    node = uml_lab.node("n3")
    node.run(["sh", "-c", "echo x >/etc/akp-lab-was-here; echo x >/var/lib/akp-lab-was-here"])
    assert not Path("/etc/akp-lab-was-here").exists()
    assert not Path("/var/lib/akp-lab-was-here").exists()
    assert node.run(["touch", "/usr/bin/akp-lab-was-here"], check=False).returncode != 0


def test_ssh_and_ansible_reach_it(uml_lab: Lab, tmp_path: Path) -> None:
    assert uml_lab.node("n3").ssh("cat; hostname", input="sent ").stdout == "sent n3\n"
    inventory = uml_lab.inventory(tmp_path / "hosts.yml")
    ansible = f"{Path(sys.executable).parent}/ansible"
    argv = [ansible, "-i", str(inventory), "nodes", "-m", "ansible.builtin.raw", "-a", "uname -n"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "ANSIBLE_NOCOLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line in {"n1", "n2", "n3"}) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_packets_to_and_from_it_and_its_pods_keep_their_source(uml_lab: Lab, family: int) -> None:
    lab, node = uml_lab, uml_lab.node("n3")
    # The lab is every test's, and so are the names of its pods.
    own = lab.add_pod(f"uml-own-{family}", "n3", serve=[("tcp", 80), ("udp", 80)])
    neighbour = lab.add_pod(f"uml-neighbour-{family}", "n3")
    far = lab.add_pod(f"uml-far-{family}", "n1", serve=[("tcp", 80)])
    callers = {place: place.addresses[family] for place in (own, neighbour, far, lab.outside, lab.node("n1"))}
    callers[node] = node.pod_gateways[family]
    for proto in ("tcp", "udp"):
        seen = {place: place.call(proto, own.addresses[family], 80) for place in callers}
        assert seen == {place: Reply(own.name, source) for place, source in callers.items()}
    assert node.call("tcp", far.addresses[family], 80) == Reply(far.name, node.addresses[family])


def test_it_keeps_its_disk_and_pods_over_a_reboot_and_nothing_else(uml_lab: Lab) -> None:
    lab, node = uml_lab, uml_lab.node("n3")
    pod = lab.add_pod("uml-stays", "n3", serve=[("tcp", 80)])
    node.run(["sh", "-c", "echo kept >/var/lib/kept; echo lost >/run/lost; ip link add lost type dummy"])
    lab.reboot("n3")
    assert node.run(["cat", "/var/lib/kept"]).stdout == "kept\n"
    assert node.run(["sh", "-c", "ls /run/lost; ip link show lost"], check=False).stdout == ""
    assert lab.node("n1").call("tcp", pod.addresses[0], 80).who == "uml-stays"
    assert node.call("tcp", pod.addresses[1], 80).who == "uml-stays"
