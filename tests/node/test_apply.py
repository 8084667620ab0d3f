"""What apply makes of a kernel, and what it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node import bundles
from tests.node.host import Host

SYSCTLS = "net.ipv4.conf.all.route_localnet = 1\nnet.netfilter.nf_conntrack_tcp_timeout_established = 86400\n"
COUNTERS = "ct_state_invalid_dropped_pkts\nlocalhost_nps_accepted_pkts\n"
INVALID = "-A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP"
FOREIGN = """
$ipt -N MINE
$ipt -A MINE -s 192.0.2.7 -m comment --comment "it's mine" -j DROP
$ipt -A INPUT -p tcp --dport 22 -j MINE
$ipt -P FORWARD DROP
$ipt -t nat -A POSTROUTING -s 172.16.0.0/12 -j MASQUERADE
$ipt -t nat -N KUBE-MINE
$ipt -t mangle -A PREROUTING -j MARK --set-mark 0x7
$ip6t -A INPUT -s fd00::7 -j DROP
"""


def everything(directory: Path) -> Path:
    """A bundle that uses every file of the mode."""
    first = bundles.rules(bundles.shop()).replace("-A KUBE-FORWARD", f"{INVALID}\n-A KUBE-FORWARD", 1)
    return bundles.simple(directory, iptables_rules=first, sysctls_conf=SYSCTLS, nfacct_rules=COUNTERS)


def wanted(bundle: Path) -> list[str]:
    """Rules of a bundle as the kernel lists them; jumps appear in reverse order of insertion."""
    lines = "".join(p.read_text() for p in sorted(bundle.glob("iptables-*.rules"))).splitlines()
    jumps = [f"-A{line[2:]}" for line in reversed(lines) if line.startswith("-I")]
    return sorted([line for line in lines if line.startswith("-A")] + jumps)


def actual(host: Host) -> list[str]:
    text = host.sh("for t in mangle filter nat; do $ipt-save -t $t; done").replace("--nfacct-name  ", "--nfacct-name ")
    return sorted(line for line in text.splitlines() if line.startswith("-A"))


def test_the_kernel_holds_exactly_the_rules_of_the_bundle(host: Host, tmp_path: Path) -> None:
    bundle = everything(tmp_path / "a")
    answer = host.apply(bundle)
    assert answer["changed"] is True
    assert answer["previous"] is None
    assert answer["flavour"] == host.flavour
    assert answer["chains"]["ipv4"] == {"added": 21, "changed": 0, "removed": 0, "same": 0, "jumps": 14}
    assert answer["chains"]["ipv6"] == {"added": 15, "changed": 0, "removed": 0, "same": 0, "jumps": 14}
    assert (answer["sysctls"], answer["counters"], answer["warnings"]) == (2, 2, [])
    assert actual(host) == wanted(bundle)


def test_a_virgin_table_has_the_jumps_in_kube_proxys_order(any_flavour: Host, tmp_path: Path) -> None:
    any_flavour.apply(bundles.simple(tmp_path / "a"))
    targets = {
        chain: re.findall(rf"^-A {chain} .*-j (\S+)", any_flavour.sh(f"$ipt -S {chain}"), re.M)
        for chain in ("INPUT", "FORWARD", "OUTPUT")
    }
    assert targets == {
        "INPUT": ["KUBE-FIREWALL", "KUBE-PROXY-FIREWALL", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES"],
        "FORWARD": ["KUBE-PROXY-FIREWALL", "KUBE-FORWARD", "KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES"],
        "OUTPUT": ["KUBE-FIREWALL", "KUBE-PROXY-FIREWALL", "KUBE-SERVICES"],
    }


def test_a_second_apply_writes_nothing(host: Host, tmp_path: Path) -> None:
    bundle = everything(tmp_path / "a")
    host.apply(bundle)
    before = host.kernel(), stamps(host.state)
    answer = host.apply(bundle)
    assert answer["changed"] is False
    assert (host.kernel(), stamps(host.state)) == before
    answer = host.apply(bundle, "--verify")
    assert answer["changed"] is False
    assert answer["chains"]["ipv4"] == {"added": 0, "changed": 0, "removed": 0, "same": 21, "jumps": 0}
    assert (host.kernel(), stamps(host.state)) == before


def stamps(directory: Path) -> dict[str, int]:
    """When each file was written; the directory itself holds what comes for as long as it is looked at."""
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_one_bundle_after_another_leaves_what_the_second_alone_would(
    host: Host, new_host: Callable[..., Host], tmp_path: Path
) -> None:
    first = everything(tmp_path / "a")
    moved = bundles.Service("shop/web:http", "10.96.7.7", ("10.244.9.9:8080", "10.244.1.2:8080"))
    second = bundles.simple(tmp_path / "b", (moved, bundles.Service("shop/new:http", "10.96.7.9", ("10.244.3.3:80",))))
    fresh = new_host(host.flavour, host.shell)
    fresh.apply(second)
    host.apply(first)
    answer = host.apply(second)
    assert answer["previous"] == host_generation(first)
    assert host.rules() == fresh.rules()
    chains = answer["chains"]["ipv4"]
    # The markers count: one chain each in nat and filter.
    assert chains["added"] == 2 + 3  # the new service, its endpoint, and the new endpoint of the old service
    assert chains["removed"] == 2 + 4  # the service that went with its endpoint, and two endpoints of the old one


def host_generation(bundle: Path) -> str:
    found = re.search(r'"generation": "(\w+)"', (bundle / "manifest.json").read_text())
    assert found
    return found[1]


def test_a_family_without_rules_in_the_new_bundle_is_left_empty(any_flavour: Host, tmp_path: Path) -> None:
    any_flavour.apply(bundles.simple(tmp_path / "a"))
    only = bundles.write(tmp_path / "b", {"iptables.rules": bundles.rules(bundles.shop())})
    answer = any_flavour.apply(only)
    assert answer["chains"]["ipv6"]["removed"] == 15
    assert "KUBE" not in any_flavour.sh("$ip6t-save -t filter; $ip6t-save -t nat; $ip6t-save -t mangle")
    assert any_flavour.apply(only)["changed"] is False


def test_foreign_rules_survive_byte_for_byte(host: Host, tmp_path: Path) -> None:
    host.sh(FOREIGN)

    def foreign() -> list[str]:
        lines = host.sh("for t in mangle filter nat; do $ipt-save -c -t $t; $ip6t-save -c -t $t; done").splitlines()
        ours = r"^#|^:KUBE-(?!MINE)|-A KUBE-(?!MINE)| -j KUBE-(?!MINE)"
        return [line for line in lines if not re.search(ours, line)]

    before = foreign()
    assert any("it\\'s mine" in line for line in before)
    host.apply(everything(tmp_path / "a"))
    assert foreign() == before
    host.apply(bundles.simple(tmp_path / "b", bundles.shop("10.244.7.7:1")))
    assert foreign() == before
    assert host.akp("cleanup").code == 0
    assert foreign() == before


def test_rules_that_differ_are_found_by_verify_and_repaired(host: Host, tmp_path: Path) -> None:
    bundle = everything(tmp_path / "a")
    host.apply(bundle)
    good = host.rules()
    host.sh(
        "$ipt -t nat -D KUBE-SERVICES 1; $ipt -t nat -F KUBE-MARK-MASQ; $ipt -t nat -N KUBE-SEP-AAAAAAAAAAAAAAAA;"
        "$ipt -I KUBE-FORWARD -s 192.0.2.9 -j ACCEPT; $ip6t -D INPUT -j KUBE-FIREWALL"
    )
    assert host.akp("status").json["state"] == "partial"  # the missing jump shows at a glance
    status = host.akp("status", "--verify").json
    found = {(d["family"], d["kind"], d["table"], d.get("chain")) for d in status["differences"]}
    assert found == {
        ("ipv4", "missing-rule", "nat", "KUBE-SERVICES"),
        ("ipv4", "missing-rule", "nat", "KUBE-MARK-MASQ"),
        ("ipv4", "stale-chain", "nat", "KUBE-SEP-AAAAAAAAAAAAAAAA"),
        ("ipv4", "extra-rule", "filter", "KUBE-FORWARD"),
        ("ipv6", "missing-jump", "filter", None),
    }
    assert status["drift"] == 5
    answer = host.apply(bundle, "--verify")
    assert answer["changed"] is True
    assert answer["chains"]["ipv4"]["changed"] == 3
    assert host.rules() == good
    assert host.akp("status", "--verify").json["drift"] == 0


def test_rules_in_another_order_are_a_difference(any_flavour: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    any_flavour.apply(bundle)
    good = any_flavour.rules()
    first = any_flavour.sh("$ipt -t nat -S KUBE-SERVICES 1").strip().removeprefix("-A")
    any_flavour.sh(f"$ipt -t nat -D KUBE-SERVICES 1; $ipt -t nat -A {first}")
    (difference,) = any_flavour.akp("status", "--verify").json["differences"]
    assert (difference["kind"], difference["chain"]) == ("order", "KUBE-SERVICES")
    any_flavour.apply(bundle, "--verify")
    assert any_flavour.rules() == good


def test_a_jump_that_is_there_twice_is_there_once_afterwards(host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    host.apply(bundle)
    host.sh(
        "$ipt -I INPUT -j KUBE-FIREWALL; $ipt -A INPUT -j KUBE-FIREWALL;"
        '$ipt -t nat -A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
    )
    answer = host.apply(bundle, "--verify")
    assert answer["chains"]["ipv4"] == {"added": 0, "changed": 0, "removed": 0, "same": 21, "jumps": 3}
    assert host.sh("$ipt-save -t filter").count("-A INPUT -j KUBE-FIREWALL") == 1
    assert host.sh("$ipt-save -t nat").count("-A OUTPUT ") == 1


@pytest.mark.parametrize(
    "flush", ["$ipt -t nat -F", "$ipt -F", "$ip6t -F", "$ipt -F INPUT", "$ipt -t nat -F PREROUTING"]
)
def test_a_flush_by_somebody_else_is_healed_by_a_plain_apply(any_flavour: Host, tmp_path: Path, flush: str) -> None:
    bundle = everything(tmp_path / "a")
    any_flavour.apply(bundle)
    good = any_flavour.rules()
    any_flavour.sh(flush)
    assert any_flavour.rules() != good
    assert any_flavour.apply(bundle)["changed"] is True
    assert any_flavour.rules() == good


def test_a_sysctl_changed_by_somebody_else_is_set_again(nft_host: Host, tmp_path: Path) -> None:
    bundle = everything(tmp_path / "a")
    nft_host.apply(bundle)
    nft_host.sh("sysctl -w net.ipv4.conf.all.route_localnet=0")
    (difference,) = nft_host.akp("status", "--verify").json["differences"]
    assert difference == {"kind": "sysctl", "name": "net.ipv4.conf.all.route_localnet", "wanted": "1", "actual": "0"}
    assert nft_host.apply(bundle)["sysctls"] == 1
    assert nft_host.sh("sysctl -n net.ipv4.conf.all.route_localnet") == "1\n"


def test_a_sysctl_whose_old_value_cannot_be_noted_keeps_it(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(bundles.simple(tmp_path / "a"))
    nft_host.sh(f"rm {nft_host.state}/before/sysctls; mkdir {nft_host.state}/before/sysctls")
    bundle = bundles.simple(tmp_path / "b", sysctls_conf="net.ipv4.conf.all.route_localnet = 1\n")
    result = nft_host.akp("apply", bundle)
    assert (result.code, "is the disk full" in result.json["error"]) == (3, True), result.stdout
    assert nft_host.sh("sysctl -n net.ipv4.conf.all.route_localnet") == "0\n"


def test_a_sysctl_of_the_initial_namespace_is_a_warning(nft_host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a", sysctls_conf="net.netfilter.nf_conntrack_max = 77777\n")
    answer = nft_host.apply(bundle)
    assert answer["sysctls"] == 0
    assert "net.netfilter.nf_conntrack_max" in answer["warnings"][0]
    assert nft_host.apply(bundle)["changed"] is False


def test_kubelets_firewall_chain_keeps_its_rules(any_flavour: Host, tmp_path: Path) -> None:
    any_flavour.sh(
        "$ipt -t mangle -N KUBE-IPTABLES-HINT; $ipt -t mangle -N KUBE-KUBELET-CANARY; $ipt -N KUBE-FIREWALL;"
        "$ipt -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP; $ipt -I INPUT -j KUBE-FIREWALL"
    )
    bundle = bundles.simple(tmp_path / "a")
    assert any_flavour.apply(bundle)["chains"]["ipv4"]["jumps"] == 13
    assert "0x8000" in any_flavour.sh("$ipt -S KUBE-FIREWALL")
    assert any_flavour.akp("status", "--verify").json["drift"] == 0
    assert any_flavour.akp("cleanup").code == 0
    assert any_flavour.chains("KUBE") == {"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY", "KUBE-FIREWALL"}
    assert any_flavour.sh("$ipt-save -t filter").count("-j KUBE-FIREWALL") == 1


def test_a_rule_of_ours_in_the_firewall_chain_goes_with_the_next_bundle(any_flavour: Host, tmp_path: Path) -> None:
    rule = '-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP'  # noqa: E501
    with_rule = bundles.rules(bundles.shop(), extra={"filter": [rule]})
    any_flavour.apply(bundles.simple(tmp_path / "a", iptables_rules=with_rule))
    assert "localnet" in any_flavour.sh("$ipt -S KUBE-FIREWALL")
    any_flavour.apply(bundles.simple(tmp_path / "b"))
    assert "localnet" not in any_flavour.sh("$ipt -S KUBE-FIREWALL")


def test_a_stale_chain_that_a_foreign_rule_uses_is_emptied_and_named(host: Host, tmp_path: Path) -> None:
    host.apply(bundles.simple(tmp_path / "a"))
    gone = bundles.shop()[1]
    host.sh(f"$ipt -t nat -N MINE; $ipt -t nat -A MINE -j {gone.chain}")
    answer = host.apply(bundles.simple(tmp_path / "b", bundles.shop()[:1]))
    assert gone.chain in answer["warnings"][0]
    assert host.sh(f"$ipt -t nat -S {gone.chain}") == f"-N {gone.chain}\n"
    assert f"-A MINE -j {gone.chain}" in host.sh("$ipt -t nat -S MINE")


def test_the_rules_stay_in_the_flavour_where_kube_chains_are(new_host: Callable[..., Host], tmp_path: Path) -> None:
    host = new_host("legacy")
    host.sh("iptables-legacy -t mangle -N KUBE-IPTABLES-HINT")
    answer = host.akp("apply", bundles.simple(tmp_path / "a"), AKP_IPTABLES="").json
    assert answer["flavour"] == "legacy"
    assert host.sh("nft list ruleset") == ""


def test_after_a_reboot_the_recorded_flavour_is_used_again(new_host: Callable[..., Host], tmp_path: Path) -> None:
    host = new_host("legacy")
    host.apply(bundles.simple(tmp_path / "a"))
    rebooted = new_host("legacy")
    answer = rebooted.akp("restore", AKP_IPTABLES="", AKP_STATE=str(host.state)).json
    assert (answer["changed"], answer["flavour"]) == (True, "legacy")


def test_looking_at_a_host_creates_no_legacy_table(nft_host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    for verb in (["status"], ["facts"], ["check", bundle], ["apply", bundle], ["status", "--verify"], ["cleanup"]):
        assert nft_host.akp(*verb, AKP_IPTABLES="").code == 0
        assert nft_host.sh("cat /proc/net/ip_tables_names /proc/net/ip6_tables_names 2>/dev/null || :") == ""


@pytest.mark.parametrize("override", ["", "nft", "legacy"])
def test_a_host_with_kube_chains_in_both_flavours_is_refused(nft_host: Host, tmp_path: Path, override: str) -> None:
    nft_host.sh("iptables-legacy -t nat -N KUBE-SERVICES; iptables-nft -t nat -N KUBE-SERVICES")
    before = nft_host.kernel()
    result = nft_host.akp("apply", bundles.simple(tmp_path / "a"), AKP_IPTABLES=override)
    assert result.code == 3
    assert "iptables-nft and in iptables-legacy" in result.json["error"]
    assert nft_host.kernel() == before


def test_kubelet_in_the_other_flavour_needs_a_word_from_the_operator(nft_host: Host, tmp_path: Path) -> None:
    nft_host.sh("iptables-legacy -t mangle -N KUBE-IPTABLES-HINT; iptables-nft -t nat -N KUBE-SERVICES")
    bundle = bundles.simple(tmp_path / "a")
    result = nft_host.akp("apply", bundle, AKP_IPTABLES="")
    assert (result.code, "AKP_IPTABLES" in result.json["error"]) == (3, True)
    assert nft_host.akp("apply", bundle, AKP_IPTABLES="nft").json["flavour"] == "nft"


def test_many_services_go_in_by_chunks_and_out_again(nft_host: Host, tmp_path: Path) -> None:
    """Enough chains for several staging transactions, a long switch and a separate removal."""
    large = bundles.simple(tmp_path / "a", bundles.many(600, 4))
    assert nft_host.apply(large)["chains"]["ipv4"]["added"] == 15 + 600 * 5
    assert actual(nft_host) == wanted(large)
    moved = [bundles.Service(s.name, s.ip, tuple(f"{e[:-1]}1" for e in s.endpoints)) for s in bundles.many(600, 4)]
    second = bundles.simple(tmp_path / "b", moved)
    assert nft_host.apply(second)["chains"]["ipv4"] == {
        "added": 2402, "changed": 600, "removed": 2402, "same": 13, "jumps": 0
    }  # fmt: skip
    assert actual(nft_host) == wanted(second)
    nft_host.apply(bundles.simple(tmp_path / "c"))
    assert len(nft_host.chains("KUBE-S[EV][PC]-")) == 6
