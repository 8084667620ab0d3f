"""One tool dies, once, where its answer decides: what cannot be told is not taken for what is not there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import State

from tests.node import bundles, nftables
from tests.node.bundles import Service
from tests.node.host import Host
from tests.node.shims import called, path_with, shim
from tests.unit.build import node, port, render, service, slice_of

KUBELET = """\
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-I INPUT -j KUBE-FIREWALL
-I OUTPUT -j KUBE-FIREWALL
COMMIT
"""


class Dying:
    """A tool that is killed at one of the calls whose words fit a pattern of the shell."""

    def __init__(self, host: Host, tool: str, pattern: str, nth: int = 1) -> None:
        self._tool = tool
        self._directory = shim(host, host.directory / f"dying-{tool}", tool, pattern, calls=f"-eq {nth}")
        self.path = path_with(host, self._directory)

    @property
    def happened(self) -> bool:
        return bool(called(self._directory, self._tool))


def test_a_kernel_without_a_jump_is_not_what_was_applied(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.apply(bundles.simple(tmp_path / "a"))
    before = host.rules()
    host.sh("nft flush chain ip nat PREROUTING")
    dying = Dying(host, "awk", "*' in there'*")
    assert host.akp("restore", PATH=dying.path).code == 0
    assert (dying.happened, host.rules()) == (True, before)


def test_sysctls_that_cannot_be_read_are_not_as_they_should_be(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    made = bundles.simple(tmp_path / "a", sysctls_conf="net.ipv4.conf.all.route_localnet = 1\n")
    host.apply(made)
    host.sh("sysctl -w net.ipv4.conf.all.route_localnet=0")
    dying = Dying(host, "awk", "*'/proc/sys/'*")
    host.akp("apply", made, PATH=dying.path)
    assert dying.happened
    assert host.sh("sysctl -n net.ipv4.conf.all.route_localnet") == "1\n"


def test_a_delta_that_was_applied_is_looked_for(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    states = [with_endpoints("iptables", "10.244.1.2"), with_endpoints("iptables", "10.244.1.2", "10.244.1.3")]
    host.apply(nftables.write(states[0], tmp_path / "a"))
    change = nftables.write_change(states[0], states[1], tmp_path / "b")
    host.apply(change)
    host.sh("nft flush chain ip nat PREROUTING")
    dying = Dying(host, "awk", "*' in there'*")
    assert host.akp("apply", change, PATH=dying.path).json.get("need") == "full"
    assert dying.happened


def test_a_family_that_cannot_be_listed_is_not_removed(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    made = nftables.write(nftables.shop("10.244.1.2"), tmp_path / "a")
    host.apply(made)
    before = host.sh("nft list tables")
    dying = Dying(host, "nft", "'list table ip6 kube-proxy'", 2)
    result = host.akp("apply", "--verify", made, PATH=dying.path)
    assert dying.happened
    assert (result.code, result.json["asBefore"]) == (3, True), result.stdout
    assert host.sh("nft list tables") == before


@pytest.mark.slow
def test_a_large_switch_is_made_or_not(nft_host: Host, tmp_path: Path) -> None:
    """So many chains that a listing is put before them, which makes iptables faster; a version may refuse it."""
    host = nft_host
    services = list(bundles.many(1100, 2))
    host.apply(bundles.simple(tmp_path / "a", services))
    moved = [Service(each.name, each.ip, each.endpoints, port=81) for each in services]
    made = bundles.simple(tmp_path / "b", moved)
    text = tmp_path / "text"
    refuse = f'cat >{text}; ! grep -q \'^-S$\' {text} || exit 2; exec "$real" "$@" <{text}'
    tools = shim(host, tmp_path / "bin", "iptables-nft-restore", "*", refuse, calls="-gt 0")
    assert host.akp("apply", made, PATH=path_with(host, tools)).code == 0
    loads = called(tools, "iptables-nft-restore")
    assert len(loads) == 2  # with the listing, and without
    assert "--dport 80 " not in host.rules()
    assert host.akp("status", "--verify").json["drift"] == 0


def without_firewall(*endpoints: str) -> str:
    lines = bundles.rules(bundles.shop(*endpoints)).splitlines()
    return "\n".join(line for line in lines if "KUBE-FIREWALL" not in line) + "\n"


@pytest.mark.parametrize("rules", [without_firewall, lambda *ips: bundles.rules(bundles.shop(*ips))])
def test_what_kubelet_has_stays_kubelets(nft_host: Host, tmp_path: Path, rules: Callable[..., str]) -> None:
    host = nft_host
    host.apply(bundles.write(tmp_path / "a", {"iptables.rules": rules()}))
    (tmp_path / "kubelet").write_text(KUBELET)
    host.sh(f"$ipt-restore --noflush <{tmp_path}/kubelet")
    count = "$ipt-save -t filter | grep -c KUBE-FIREWALL"
    before = host.sh(count)
    dying = Dying(host, "awk", """*'see("kubelet")'*""")
    result = host.akp(
        "apply", bundles.write(tmp_path / "b", {"iptables.rules": rules("10.244.1.99:80")}), PATH=dying.path
    )
    assert dying.happened
    assert (result.code, result.json["asBefore"]) == (4, True), result.stdout
    assert host.sh(count) == before


def test_what_was_in_the_firewall_chain_is_noted_or_nothing_is_done(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.sh("$ipt -N KUBE-FIREWALL; $ipt -A KUBE-FIREWALL -d 127.0.0.0/8 -j DROP; $ipt -I INPUT -j KUBE-FIREWALL")
    before = host.rules()
    dying = Dying(host, "sed", "*'/^:KUBE-FIREWALL /p'*")
    made = bundles.write(tmp_path / "a", {"iptables.rules": without_firewall()})
    result = host.akp("apply", made, PATH=dying.path)
    assert dying.happened
    assert (result.code, result.json["asBefore"], host.rules()) == (4, True, before), result.stdout
    host.apply(made)
    host.akp("cleanup")
    assert host.rules() == before


def unconfirmed(host: Host, made: Path) -> str:
    """A change whose term has passed and that nobody undoes; its token."""
    host.apply(made, "--confirm-within", "2")
    os.kill(int((host.state / "undo.pid").read_text()), 9)
    time.sleep(2.5)
    noted = (host.state / "unconfirmed").read_text()
    return dict(line.split("=", 1) for line in noted.splitlines())["token"]


def test_what_another_proxy_had_comes_back_or_is_tried_again(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    others = bundles.rules(bundles.shop()).replace(bundles.MARKER, "").replace(":KUBE-PROXY-GEN-SHORT - [0:0]\n", "")
    (tmp_path / "others").write_text(others)
    host.sh(f"$ipt-restore --noflush <{tmp_path}/others")
    before = host.rules()
    token = unconfirmed(host, bundles.simple(tmp_path / "a", bundles.shop("10.244.1.99:8080")))
    dying = Dying(host, "awk", "*foreign/iptables.4*")
    result = host.akp("undo", token, PATH=dying.path)
    assert (dying.happened, result.code) == (True, 4), result.stdout
    assert host.akp("undo", token).code == 0
    assert host.rules() == before


def test_the_tables_of_another_proxy_come_back_or_are_tried_again(nft_host: Host, tmp_path: Path) -> None:
    host = nft_host
    host.apply(nftables.write(nftables.shop("10.244.1.2"), tmp_path / "a"))
    shutil.rmtree(host.state)
    for family in ("ip", "ip6"):
        host.sh(f"nft delete chain {family} kube-proxy gen-{nftables.shop('10.244.1.2').generation}")
    before = nftables.listing(host)
    token = unconfirmed(host, nftables.write(nftables.shop("10.244.1.3"), tmp_path / "b"))
    dying = Dying(host, "cat", "*foreign/nft*")
    result = host.akp("undo", token, PATH=dying.path)
    assert (dying.happened, result.code) == (True, 4), result.stdout
    assert host.akp("undo", token).code == 0
    assert nftables.listing(host) == before


def with_endpoints(mode: str, *ips: str) -> State:
    ports = [port(), port(53, "dns", "UDP")]
    objects = (node("n1", "172.18.0.11"), service(ports=ports), slice_of("web", *ips, ports=ports))
    return render(*objects, mode=mode, conntrack=nftables.NO_SYSCTLS)


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_a_rollback_goes_through_deltas_one_by_one(nft_host: Host, tmp_path: Path, mode: str) -> None:
    host = nft_host
    states = [with_endpoints(mode, *(f"10.244.1.{i}" for i in range(1, n))) for n in range(2, 7)]
    host.apply(nftables.write(states[0], tmp_path / "0"))
    for i in range(1, 5):
        host.apply(nftables.write_change(states[i - 1], states[i], tmp_path / str(i)))
    assert host.akp("status").json["kept"] == [each.generation for each in states[2:]]
    for expected in (3, 2):
        answer = host.akp("rollback").json
        assert answer["generation"] == states[expected].generation, expected
        assert host.akp("status", "--verify").json["drift"] == 0
    assert "before the recorded one is not kept" in host.akp("rollback").json["error"]
    assert host.akp("rollback", states[4].generation).json["generation"] == states[4].generation


@pytest.mark.parametrize(
    ("tool", "pattern", "code"),
    [
        ("sha256sum", "*iptables*", 4),  # what cannot be verified is not replayed
        ("awk", "*/log/1/iptables*", 3),
    ],
)
def test_snapshot_and_log_are_replayed_or_stay_what_they_are(
    nft_host: Host, tmp_path: Path, tool: str, pattern: str, code: int
) -> None:
    host = nft_host
    states = [with_endpoints("iptables", *(f"10.244.1.{i}" for i in range(1, n))) for n in range(2, 5)]
    host.apply(nftables.write(states[0], tmp_path / "0"))
    for i in (1, 2):
        host.apply(nftables.write_change(states[i - 1], states[i], tmp_path / str(i)))
    before = host.rules()
    dying = Dying(host, tool, pattern)
    result = host.akp("restore", "--verify", PATH=dying.path)
    assert dying.happened
    assert (result.code, result.json["asBefore"], host.rules()) == (code, True, before), result.stdout
    host.sh("nft flush ruleset")
    assert host.akp("restore").code == 0
    assert host.rules() == before
    assert host.akp("rollback").json["generation"] == states[1].generation
