"""From one mode to another in one run: the Services answer all the while, and nothing of the old mode stays."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.bundle.write import write_bundle

from tests.node.host import Host
from tests.node.nftables import NO_SYSCTLS
from tests.node.shims import path_with, shim
from tests.unit.build import port, render, service, slice_of

WAYS = [("iptables", "nftables"), ("nftables", "iptables")]


@pytest.fixture(params=["nft", "legacy"])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host of each flavour of iptables, with an address to send from and an endpoint to answer."""
    made = new_host(request.param)
    made.sh("ip link add d0 type bridge; ip link set d0 up; ip addr add 172.18.0.11/24 dev d0")
    made.sh("ip addr add 10.244.1.1/32 dev d0; ip route add default via 172.18.0.1")
    return made


def shop(mode: str, *extra: object) -> State:
    # The endpoint is an address of the node itself, so one namespace is all that a packet needs.
    web = service(type="NodePort", ports=[port(80, nodePort=31080)])
    facts = {"capabilities": {"nfacct": False}}
    return render(web, slice_of("web", "10.244.1.1"), *extra, mode=mode, conntrack=NO_SYSCTLS, facts=facts)


def write(made: State, directory: Path) -> Path:
    write_bundle(made, directory)
    return directory


def ours(host: Host, mode: str) -> bool:
    """Whether anything of a mode is in the kernel."""
    if mode == "nftables":
        return "table ip kube-proxy" in host.sh("nft list ruleset") or "table ip6 kube-proxy" in host.sh(
            "nft list ruleset"
        )
    saved = host.sh("for t in mangle filter nat; do $ipt-save -t $t; $ip6t-save -t $t; done")
    # KUBE-FIREWALL is kubelet's as well, so a chain that nobody recorded stays, as it does with kube-proxy --cleanup.
    return "KUBE-" in "\n".join(line for line in saved.splitlines() if "KUBE-FIREWALL" not in line)


ANSWER = """
    import socket, sys
    listener = socket.create_server(("10.244.1.1", 8080), backlog=128)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"shop")
        try:
            connection.recv(1)
        except ConnectionResetError:
            pass
        connection.close()
"""
# Ends with a reset: a port that waits for late packets would swallow the next connection that masquerading gives it to.
ASK = """
    import socket, struct
    asked = 0
    print("ready", flush=True)
    while True:
        try:
            with socket.create_connection(("10.96.7.7", 80), timeout=30) as connection:
                assert connection.recv(4) == b"shop"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError as error:
            print("failed", error, flush=True)
        asked += 1
        if asked % 50 == 0:
            print("asked", asked, flush=True)
"""


def lost(host: Host) -> int:
    """How often the first packet of a connection had to be sent again: what a busy machine does not count for."""
    names, values = (line.split() for line in host.sh("grep ^TcpExt /proc/net/netstat").splitlines())
    return int(values[names.index("TCPSynRetrans")])


@contextmanager
def running(host: Host, program: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as out:
        started = subprocess.Popen(
            ["ip", "netns", "exec", host.name, sys.executable, "-c", textwrap.dedent(program)], stdout=out, stderr=out
        )
        try:
            deadline = time.monotonic() + 20
            while "ready" not in output.read_text():
                assert started.poll() is None, output.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield started
        finally:
            started.kill()
            started.wait()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_switch_drops_no_connection_and_leaves_nothing(host: Host, tmp_path: Path, before: str, after: str) -> None:
    many = [service(f"s{i}", clusterIP=f"10.96.8.{i}") for i in range(100)]
    slices = [slice_of(f"s{i}", "10.244.2.1", "10.244.2.2") for i in range(100)]
    host.apply(write(shop(before, *many, *slices), tmp_path / "a"))
    asked = tmp_path / "asked"
    with running(host, ANSWER, tmp_path / "answers"), running(host, ASK, asked):
        time.sleep(0.3)
        answer = host.apply(write(shop(after, *many, *slices), tmp_path / "b"))
        time.sleep(0.3)
    assert answer["mode"] == after
    lines = asked.read_text().splitlines()
    assert not [line for line in lines if line.startswith("failed")]
    assert any(line.startswith("asked") for line in lines)
    assert lost(host) == 0
    assert ours(host, after)
    assert not ours(host, before)
    status = host.akp("status", "--verify").json
    assert (status["state"], status["mode"], status["drift"]) == ("applied", after, 0)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_rollback_goes_back_to_the_other_mode(host: Host, tmp_path: Path, before: str, after: str) -> None:
    host.apply(write(shop(before), tmp_path / "a"))
    host.apply(write(shop(after), tmp_path / "b"))
    assert host.akp("rollback").json["mode"] == before
    assert ours(host, before)
    assert not ours(host, after)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_kube_proxy_left_in_the_other_mode_goes(host: Host, tmp_path: Path, before: str, after: str) -> None:
    host.apply(write(shop(before), tmp_path / "a"))
    (host.state / "record").unlink()
    subprocess.run(["rm", "-r", host.state / "before", host.state / "bundles"], check=True)
    host.apply(write(shop(after), tmp_path / "b"))
    assert ours(host, after)
    assert not ours(host, before)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_cleanup_after_a_switch_leaves_the_host_as_it_was(host: Host, tmp_path: Path, before: str, after: str) -> None:
    was = host.kernel()
    host.apply(write(shop(before), tmp_path / "a"))
    host.apply(write(shop(after), tmp_path / "b"))
    assert host.akp("cleanup").json["changed"] is True
    assert host.kernel() == was


def test_kubelets_chains_stay_when_iptables_mode_is_left(host: Host, tmp_path: Path) -> None:
    host.sh(
        "$ipt -t mangle -N KUBE-KUBELET-CANARY; $ipt -N KUBE-FIREWALL; $ipt -A INPUT -j KUBE-FIREWALL;"
        "$ipt -A KUBE-FIREWALL -d 127.0.0.0/8 ! -s 127.0.0.0/8 -j DROP"
    )
    was = host.rules()
    host.apply(write(shop("iptables"), tmp_path / "a"))
    host.apply(write(shop("nftables"), tmp_path / "b"))
    saved = host.rules()
    # Its rules were replaced in iptables mode, as kube-proxy does; kubelet puts them back by itself.
    for line in was.splitlines():
        if "KUBELET" in line or ("KUBE-FIREWALL" in line and not line.startswith("-A KUBE-FIREWALL")):
            assert line in saved
    assert "KUBE-SERVICES" not in saved


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_what_is_left_of_the_old_mode_is_told_and_removed_next_time(
    host: Host, tmp_path: Path, old: str, new: str
) -> None:
    """The new mode is in force, but the run did not do all it should: it says so, and the same bundle ends it."""
    host.apply(write(shop(old), tmp_path / "a"))
    there = write(shop(new), tmp_path / "b")
    tools = [f"{ip}tables-{host.flavour}-restore" for ip in ("ip", "ip6")] if old == "iptables" else ["nft"]
    (tmp_path / "bin").mkdir()
    for tool in tools:
        script = tmp_path / "bin" / tool
        script.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *nft.leave*) fails=1 ;; *) fails={int(old == "iptables")} ;; esac\n'
            f'[ $fails = 0 ] || {{ echo "{tool}: Cannot allocate memory" >&2; exit 1; }}\n'
            f'exec "$(PATH=/usr/sbin:/sbin:/usr/bin:/bin command -v {tool})" "$@"\n'
        )
        script.chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
    result = host.akp("apply", "--confirm-within", "600", there, PATH=path)
    assert (result.code, "the new state is in force" in result.json["error"]) == (4, True), result.stdout
    assert result.json["asBefore"] is False
    assert "Cannot allocate memory" in result.json["warnings"][-1]
    assert ours(host, old)
    assert ours(host, new)
    status = host.akp("status").json
    assert (status["state"], status["unconfirmed"]["generation"]) == ("partial", status["generation"])
    host.apply(there)
    assert host.akp("confirm").code == 0
    assert not ours(host, old)
    assert host.akp("status").json["state"] == "applied"


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_who_goes_back_after_a_switch_that_was_cut_short_finds_what_it_left(
    nft_host: Host, tmp_path: Path, old: str, new: str
) -> None:
    nft_host.apply(write(shop(old), tmp_path / "old"))
    kill = '"$real" "$@"; kill -s KILL "$PPID"; exit'
    tool, words = {"iptables": ("iptables-nft-restore", "*"), "nftables": ("nft", "-f*/nft/switch")}[new]
    tools = shim(nft_host, tmp_path / "bin", tool, words, kill)
    killed = nft_host.akp("apply", write(shop(new), tmp_path / "new"), PATH=path_with(nft_host, tools))
    assert (killed.code, ours(nft_host, new)) == (-9, True), killed.stdout
    assert nft_host.akp("restore").code == 0
    assert (ours(nft_host, old), ours(nft_host, new)) == (True, False)
    assert nft_host.akp("status", "--verify").json["drift"] == 0
