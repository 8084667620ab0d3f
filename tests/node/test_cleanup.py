# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""A host after cleanup is the host before the first apply."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node import bundles
from tests.node.host import Host
from tests.node.shims import path_with, shim
from tests.node.test_apply import FOREIGN, everything

BEFORE = {
    "nothing": "",
    "foreign rules": FOREIGN,
    "one table without built-in chains": "$ipt -N MINE",
    "a native nft table of the same name": "nft 'add table ip nat; add chain ip nat mine { type nat hook prerouting priority 0; }'",
    "counters and sysctls": "nfacct add ct_state_invalid_dropped_pkts; sysctl -w net.ipv4.conf.all.route_localnet=1",
    "kubelet": (
        "$ipt -t mangle -N KUBE-IPTABLES-HINT; $ipt -t nat -N KUBE-KUBELET-CANARY; $ipt -N KUBE-FIREWALL;"
        "$ipt -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP; $ipt -I OUTPUT -j KUBE-FIREWALL"
    ),
    "a firewall chain without kubelet": "$ipt -N KUBE-FIREWALL; $ipt -A KUBE-FIREWALL -s 192.0.2.1 -j DROP; $ipt -A INPUT -j KUBE-FIREWALL",
}  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
def test_cleanup_leaves_what_was_there_before(host: Host, tmp_path: Path, before: str) -> None:
    host.sh(BEFORE[before])
    kernel = host.kernel()
    host.apply(everything(tmp_path / "a"))
    host.apply(bundles.simple(tmp_path / "b", bundles.shop("10.244.7.7:1")))
    assert host.kernel() != kernel
    result = host.akp("cleanup")
    assert (result.code, result.json["changed"], result.json["warnings"]) == (0, True, []), result.stderr
    assert host.kernel() == kernel
    assert not host.state.exists()


@pytest.mark.parametrize("unread", [False, True], ids=["read", "cannot be read"])
def test_cleanup_leaves_what_others_put_into_tables_that_it_made(nft_host: Host, tmp_path: Path, unread: bool) -> None:
    """A chain that cannot be looked at is not taken for an empty one, and an empty one with a policy is somebody's."""
    nft_host.apply(everything(tmp_path / "a"))
    nft_host.sh("$ipt -A INPUT -p tcp --dport 1 -j DROP; $ipt -P FORWARD DROP; $ip6t -t nat -A OUTPUT -p udp -j RETURN")
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in ("iptables-nft", "ip6tables-nft"):
        (directory / tool).write_text(
            f'#!/bin/sh\ncase "$*" in *" -S "*) exit 1 ;; esac\nexec {shutil.which(tool)} "$@"\n'
        )
        (directory / tool).chmod(0o755)
    path = f"{directory}:{nft_host.environment['PATH']}" if unread else nft_host.environment["PATH"]
    result = nft_host.akp("cleanup", PATH=path)
    assert result.code == 0, result.stdout + result.stderr
    kept = nft_host.sh("$ipt -S; $ip6t -t nat -S").splitlines()
    assert {"-P FORWARD DROP", "-A INPUT -p tcp -m tcp --dport 1 -j DROP", "-A OUTPUT -p udp -j RETURN"} <= set(kept)
    assert not any("KUBE-" in line for line in kept)


def test_cleanup_without_the_nft_tool_leaves_no_rule_or_chain(nft_host: Host, tmp_path: Path) -> None:
    hide = ("unshare", "-m", "sh", "-c", 'mount --bind /dev/null "$(command -v nft)" && exec "$@"', "sh")
    bundle = everything(tmp_path / "a")
    assert nft_host.akp("apply", bundle, prefix=hide).code == 0
    assert nft_host.akp("cleanup", prefix=hide).code == 0
    lines = [line.strip() for line in nft_host.sh("nft list ruleset 2>/dev/null").splitlines()]
    assert [line for line in lines if line and not line.startswith(("table", "}"))] == []


def test_a_second_cleanup_has_nothing_to_do(any_flavour: Host, tmp_path: Path) -> None:
    any_flavour.apply(bundles.simple(tmp_path / "a"))
    assert any_flavour.akp("cleanup").json["changed"] is True
    result = any_flavour.akp("cleanup")
    assert (result.code, result.json["changed"]) == (0, False)
    assert not any_flavour.state.exists()


def test_cleanup_removes_a_kube_proxys_rules_too(any_flavour: Host, tmp_path: Path) -> None:
    """Rules as kube-proxy leaves them, never applied by us: no marker, no record."""
    text = bundles.rules(bundles.shop()).replace(bundles.MARKER, "")
    file = tmp_path / "rules"
    file.write_text(text.replace(":KUBE-PROXY-GEN-SHORT - [0:0]\n", ""))
    any_flavour.sh(f"$ipt-restore --noflush <{file}")
    assert any_flavour.akp("status").json["state"] == "foreign"
    assert any_flavour.akp("cleanup").json["changed"] is True
    # Without a record nobody knows who made KUBE-FIREWALL, so it stays, as with kube-proxy --cleanup.
    assert any_flavour.chains("KUBE") == {"KUBE-FIREWALL"}


def test_cleanup_keeps_a_sysctl_that_somebody_changed_since(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(everything(tmp_path / "a"))
    nft_host.sh("sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=1234")
    answer = nft_host.akp("cleanup").json
    assert "nf_conntrack_tcp_timeout_established" in answer["warnings"][0]
    assert nft_host.sh("sysctl -n net.netfilter.nf_conntrack_tcp_timeout_established") == "1234\n"
    assert nft_host.sh("sysctl -n net.ipv4.conf.all.route_localnet") == "0\n"


def test_cleanup_finds_rules_in_the_flavour_they_were_applied_in(new_host: Callable[..., Host], tmp_path: Path) -> None:
    host = new_host("legacy")
    host.apply(bundles.simple(tmp_path / "a"))
    assert host.akp("cleanup", AKP_IPTABLES="").json["flavour"] == "legacy"
    assert host.chains("KUBE") == set()


@pytest.mark.parametrize("what", ["sysctl", "counter"])
def test_what_could_not_be_set_back_is_by_the_next_cleanup(nft_host: Host, tmp_path: Path, what: str) -> None:
    host = nft_host
    sysctls = "net.ipv4.conf.all.route_localnet = 1\nnet.ipv4.ip_forward = 1\n"
    host.sh("sysctl -q -w net.ipv4.ip_forward=0")
    clean = host.kernel()
    host.apply(bundles.simple(tmp_path / "a", sysctls_conf=sysctls, nfacct_rules="ct_state_invalid_dropped_pkts\n"))
    if what == "sysctl":
        tools = shim(host, tmp_path / "bin", "cat", "*/route_localnet", calls="-eq 2")
    else:
        tools = shim(host, tmp_path / "bin", "nfacct", "'delete '*", calls="-gt 0")
    result = host.akp("cleanup", PATH=path_with(host, tools))
    assert (result.code, result.json["asBefore"]) == (4, False), result.stdout + result.stderr
    assert "could not be" in result.json["warnings"][0]
    assert host.akp("status").json["state"] == "absent"
    # Somebody needs it meanwhile: what was set back already is his.
    host.sh("sysctl -q -w net.ipv4.ip_forward=1")
    again = host.akp("cleanup")
    assert (again.code, again.json["warnings"]) == (0, []), again.stdout + again.stderr
    assert host.sh("sysctl -n net.ipv4.ip_forward") == "1\n"
    host.sh("sysctl -q -w net.ipv4.ip_forward=0")
    assert host.kernel() == clean
    assert not host.state.exists()


def test_a_counter_of_a_foreign_rule_is_no_failure(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.apply(bundles.simple(tmp_path / "a", nfacct_rules="ct_state_invalid_dropped_pkts\n"))
    host.sh("$ipt -A INPUT -m nfacct --nfacct-name ct_state_invalid_dropped_pkts")
    result = host.akp("cleanup")
    assert (result.code, "is in use and stays" in result.json["warnings"][0]) == (0, True), result.stdout


def alone(host: Host, program: Path) -> Path:
    """A copy of a program with nothing beside it."""
    place = host.directory / "alone" / "akp-node"
    place.parent.mkdir(exist_ok=True)
    shutil.copy(program, place)
    return place


def test_akp_leave_is_found_by_its_digest_wherever_it_lies(nft_host: Host, tmp_path: Path) -> None:
    kernel = nft_host.kernel()
    bundle = everything(tmp_path / "a")
    program = alone(nft_host, bundle / "akp-node")
    assert nft_host.akp("apply", bundle, program=program).code == 0
    kept = [nft_host.state / "akp-leave.iptables", *nft_host.state.glob("bundles/*/akp-leave")]
    for file in kept:
        file.write_text(f"touch {tmp_path}/escaped\n")
    (program.parent / "akp-leave").write_text(f"touch {tmp_path}/escaped\n")
    result = nft_host.akp("cleanup", program=program)
    assert (result.code, "akp program --part leave" in result.json["error"]) == (3, True), result.stdout
    assert result.json["asBefore"]
    assert nft_host.akp("status", program=program).json["state"] == "applied"
    assert not (tmp_path / "escaped").exists()
    shutil.copy(bundle / "akp-leave", kept[0])
    assert nft_host.akp("cleanup", program=program).code == 0
    assert nft_host.kernel() == kernel


def test_without_akp_leave_a_first_bundle_changes_nothing(nft_host: Host, tmp_path: Path) -> None:
    kernel = nft_host.kernel()
    bundle = bundles.write(tmp_path / "a", {"iptables.rules": bundles.rules(bundles.shop())})
    program = alone(nft_host, bundle / "akp-node")
    (bundle / "akp-leave").write_text("# another\n")
    bundles.replace_file(bundle, "akp-leave", "# another\n")
    result = nft_host.akp("apply", bundle, program=program)
    assert (result.code, result.json["asBefore"]) == (3, True), result.stdout
    assert "missing program: akp-leave" in result.json["error"]
    assert nft_host.kernel() == kernel
    status = nft_host.akp("status", program=program).json
    assert (status["state"], "not looked for" in status["warnings"][0]) == ("absent", True)


@pytest.mark.parametrize("verb", ["apply", "status", "restore"])
def test_a_state_directory_that_others_can_write_to_is_refused(nft_host: Host, tmp_path: Path, verb: str) -> None:
    bundle = bundles.simple(tmp_path / "a")
    if verb != "apply":
        nft_host.apply(bundle)
    nft_host.state.mkdir(exist_ok=True)
    nft_host.state.chmod(0o777)
    result = nft_host.akp(verb, *([bundle] if verb == "apply" else []))
    assert (result.code, result.json["asBefore"]) == (3, True), result.stdout
    assert "can be written by others than root" in result.json["error"]
