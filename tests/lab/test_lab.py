"""The lab keeps its promises: real packets, a real sshd, nothing on the machine, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import unused_prefix
from tests.lab import REFUSED, TIMEOUT, UNREACHABLE, Lab, LabError, Reply, record

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def machine() -> dict[str, str]:
    """What a lab must never change on the machine."""
    commands = {
        "links": "ip -o link | cut -d' ' -f2",
        "addresses": "ip -o addr | awk '{print $2, $3, $4}'",
        "routes": "ip route; ip -6 route",
        "rules": "iptables-save 2>&1 | grep -v '^#'; nft list ruleset",
        "mounts": "grep -v /run/netns /proc/self/mounts",
        "namespaces of ours": "ls /run/netns | grep -E '^(n[0-9]+|outside|pod-.*)$'",
        "hostname": "hostname",
        "forwarding": "cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding",
    }
    return {
        what: subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
        for what, command in commands.items()
    }


def processes_mentioning(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in line and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def assert_gone(prefix: str) -> None:
    """No process, no file: namespaces live only as long as a process or a mount holds them."""
    deadline = time.monotonic() + 5
    while processes_mentioning(f"/run/akp-lab/{prefix}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_mentioning(f"/run/akp-lab/{prefix}") == []
    assert prefix not in record.labs()


def test_the_machine_is_the_same_while_a_lab_is_up_and_after(make_lab: Callable[..., Lab]) -> None:
    before = machine()
    lab = make_lab(nodes=2)
    lab.add_pod("web", "n1", serve=[("tcp", 80)])
    lab.node("n1").run(
        ["sh", "-c", "echo x >/etc/akp-lab-was-here; echo x >/var/lib/akp-lab-was-here; hostname changed"]
    )
    lab.node("n1").run(["iptables", "-A", "FORWARD", "-s", "192.0.2.1", "-j", "ACCEPT"])
    assert machine() == before
    assert not Path("/etc/akp-lab-was-here").exists()
    assert not Path("/var/lib/akp-lab-was-here").exists()
    lab.close()
    assert machine() == before
    assert_gone(lab.prefix)


def test_nodes_do_not_see_each_other(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(nodes=2)
    n1, n2 = lab.nodes
    n1.run(["sh", "-c", "echo mine >/etc/mine; echo mine >/run/mine; sysctl -qw net.ipv4.conf.all.route_localnet=1"])
    n1.run(["nft", "add", "table", "ip", "mine"])
    assert n2.run(["ls", "/etc/mine", "/run/mine"], check=False).returncode == 2
    assert n2.run(["nft", "list", "tables"]).stdout == ""
    assert n2.run(["cat", "/proc/sys/net/ipv4/conf/all/route_localnet"]).stdout == "0\n"
    assert n1.run(["hostname"]).stdout + n2.run(["hostname"]).stdout == "n1\nn2\n"
    assert n1.run(["pgrep", "-c", "sshd"]).stdout == "1\n"


def test_a_node_cannot_write_to_the_machines_disk(make_lab: Callable[..., Lab]) -> None:
    done = make_lab(nodes=1).node("n1").run(["touch", "/usr/bin/akp-lab-was-here"], check=False)
    assert "Read-only file system" in done.stderr


def test_ssh_reaches_every_node_and_checks_its_key(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(nodes=2)
    assert [node.ssh("cat; hostname", input="sent ").stdout for node in lab.nodes] == ["sent n1\n", "sent n2\n"]
    known = lab.state / "known_hosts"
    first, second = known.read_text().splitlines()
    known.write_text(f"{first.split()[0]} {' '.join(second.split()[1:])}\n")
    with pytest.raises(LabError, match="Host key verification failed"):
        lab.node("n1").ssh("true")


def test_ansible_reaches_every_node_from_the_machine(lab: Lab, tmp_path: Path) -> None:
    inventory = lab.inventory(tmp_path / "hosts.yml")
    argv = [
        f"{Path(sys.executable).parent}/ansible",
        "-i",
        str(inventory),
        "nodes",
        "-m",
        "ansible.builtin.raw",
        "-a",
        "hostname",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "ANSIBLE_NOCOLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line in {"n1", "n2", "n3"}) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("proto", ["tcp", "udp"])
def test_packets_between_all_places_keep_their_source(lab: Lab, proto: str, family: int) -> None:
    server = lab.add_pod("server", "n2", serve=[(proto, 8080)])
    client, neighbour = lab.add_pod("client", "n1"), lab.add_pod("neighbour", "n2")
    expected = {
        client: client.addresses[family],
        neighbour: neighbour.addresses[family],
        server: server.addresses[family],
        lab.node("n1"): lab.node("n1").addresses[family],
        lab.node("n2"): lab.node("n2").pod_gateways[family],
        lab.outside: lab.outside.addresses[family],
        lab.controller: lab.controller.addresses[family],
    }
    seen = {place: place.call(proto, server.addresses[family], 8080) for place in expected}
    assert seen == {place: Reply("server", source) for place, source in expected.items()}


def test_refused_timeout_and_unreachable_are_told_apart(lab: Lab) -> None:
    server, client = lab.add_pod("server", "n2", serve=[("tcp", 80), ("udp", 80)]), lab.add_pod("client", "n1")
    address = server.addresses[0]
    assert [client.call(proto, address, 81) for proto in ("tcp", "udp")] == [REFUSED, REFUSED]
    lab.node("n2").run(["iptables", "-A", "FORWARD", "-d", address, "-j", "DROP"])
    assert [client.call(proto, address, 80, timeout=0.2) for proto in ("tcp", "udp")] == [TIMEOUT, TIMEOUT]
    lab.node("n1").run(["ip", "route", "add", "unreachable", "192.0.2.0/24"])
    assert client.call("tcp", "192.0.2.1", 80) == UNREACHABLE


def test_a_connection_stays_with_its_server_until_that_closes(lab: Lab) -> None:
    pod = lab.add_pod("server", "n1")
    server = pod.serve("tcp", 80)
    with lab.node("n3").open("tcp", pod.addresses[0], 80) as connection:
        first, second = connection.ask(), connection.ask()
        assert (first.who, first.port) == (second.who, second.port)
        server.close()
        assert connection.ask() == REFUSED


def test_a_rebooted_node_keeps_its_disk_and_pods_but_not_its_rules(lab: Lab) -> None:
    pod = lab.add_pod("server", "n2", serve=[("tcp", 80)])
    node = lab.node("n2")
    node.run(["sh", "-c", "echo kept >/var/lib/kept; echo lost >/run/lost; nft add table ip lost"])
    lab.reboot("n2")
    assert node.run(["cat", "/var/lib/kept"]).stdout == "kept\n"
    assert node.run(["sh", "-c", "ls /run/lost; nft list tables"], check=False).stdout == ""
    assert node.ssh("hostname").stdout == "n2\n"
    assert lab.node("n1").call("tcp", pod.addresses[0], 80).who == "server"


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_lab_uses_the_iptables_it_was_told(make_lab: Callable[..., Lab], variant: str) -> None:
    version = make_lab(nodes=1, iptables=variant).node("n1").run(["iptables", "--version"]).stdout
    assert ("nf_tables" if variant == "nft" else "legacy") in version


def test_nothing_is_left_after_an_exception() -> None:
    prefix = unused_prefix()

    def fail() -> None:
        with Lab(prefix, nodes=2) as lab:
            lab.node("n1").ssh("sleep 1000 >/dev/null 2>&1 &")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_gone(prefix)


def test_nothing_is_left_when_making_a_lab_fails() -> None:
    prefix = unused_prefix()
    with pytest.raises(LabError, match="iptables-imaginary"):
        Lab(prefix, nodes=1, iptables="imaginary")
    assert_gone(prefix)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_lab_ends_with_its_owner_and_its_name_is_free_again(number: signal.Signals) -> None:
    prefix = unused_prefix()
    script = (
        f"import time; from tests.lab import Lab; lab = Lab('{prefix}', 1); print('up', flush=True); time.sleep(99)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    agent = int((record.HOME / prefix / "agent.pid").read_text())
    with pytest.raises(LabError, match=f"in use by process {owner.pid}"):
        Lab(prefix)
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 5
    while record.start_time(agent) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record.start_time(agent) == 0
    Lab(prefix, nodes=0).close()
    assert_gone(prefix)


def test_a_lab_by_hand_stays_until_it_is_taken_down() -> None:
    prefix = unused_prefix()

    def lab(*argv: str) -> str:
        done = subprocess.run([sys.executable, "-m", "tests.lab", *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "n1 172.18.0.11" in lab("up", prefix, "--nodes", "1")
        assert f"{prefix}\t1 nodes\tstays\talive\n" in lab("list")
        assert lab("run", prefix, "n1", "hostname") == "n1\n"
    finally:
        lab("down", prefix)
    assert prefix not in lab("list")
    assert_gone(prefix)


@pytest.mark.parametrize(("nodes", "seconds"), [(3, 1.0), (50, 5.0)])
def test_labs_are_quick_to_make(make_lab: Callable[..., Lab], nodes: int, seconds: float) -> None:
    """The quickest of three, as the machine may be busy with other things."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        lab = make_lab(nodes=nodes)
        took.append(time.monotonic() - began)
        assert lab.nodes[-1].ssh("hostname").stdout == f"n{nodes}\n"
        if min(took) < seconds:
            return
        lab.close()
    assert min(took) < seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
