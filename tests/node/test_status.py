# ruff: noqa: E501 -- a rule stands on one line, as it would be typed.
"""status, check, facts, rollback and restore."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from agentless_kube_proxy.cluster.snapshot import Node
from agentless_kube_proxy.proxy.facts import node_facts

from tests.node import bundles
from tests.node.host import Host
from tests.node.shims import path_with, shim
from tests.node.test_apply import everything, host_generation

STATES = {
    "applied": "",
    "flushed": "nft flush ruleset",
    "partial": "$ipt -t nat -F",
    "partial by a jump": '$ipt -t nat -D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    "partial by a family": "nft delete table ip6 nat",
    "partial by all of a family": "nft flush ruleset ip6",
    "foreign": f"$ipt -t nat -N KUBE-PROXY-GEN-{'0' * 13}; $ipt -t nat -A KUBE-PROXY-GEN-{'0' * 13} -m comment --comment {'0' * 64}; $ipt -F INPUT",
}


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "absent"])
def test_what_cannot_be_read_is_not_called_missing(any_flavour: Host, tmp_path: Path, applied: bool) -> None:
    host = any_flavour
    if applied:
        host.apply(bundles.simple(tmp_path / "a"))
    else:
        host.sh("$ipt -t nat -N FOREIGN")
    failing = "echo no memory >&2; exit 1"
    tools = shim(host, tmp_path / "bin", f"iptables-{host.flavour}-save", "*", failing, calls="-gt 0")
    result = host.akp("status", "--verify", PATH=path_with(host, tools))
    assert (result.code, result.json["asBefore"]) == (4, True), result.stdout
    assert "what the kernel has is not known: no memory" in result.json["error"]
    assert host.akp("status", "--verify").code == 0


def test_differences_that_cannot_be_counted_are_not_none(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(bundles.simple(tmp_path / "a"))
    nft_host.sh("$ipt -t filter -F KUBE-FORWARD")
    tools = shim(nft_host, tmp_path / "bin", "cat", "*/detail*")
    assert nft_host.akp("status", "--verify", PATH=path_with(nft_host, tools)).code == 3


def test_an_answer_is_whole_or_an_error(nft_host: Host, tmp_path: Path) -> None:
    """An awk that dies while the answer is put together."""
    nft_host.apply(bundles.simple(tmp_path / "a"))
    tools = shim(nft_host, tmp_path / "bin", "awk", "*kind*sysctl*")
    result = nft_host.akp("status", "--verify", PATH=path_with(nft_host, tools))
    assert (result.code, len(result.stdout.splitlines())) == (3, 1), result.stdout
    assert result.json["ok"] is False


@pytest.mark.parametrize("known", [True, False])
def test_ask_says_why_it_cannot_tell(nft_host: Host, tmp_path: Path, known: bool) -> None:
    nft_host.apply(bundles.simple(tmp_path / "a"))
    key = nft_host.akp("ask").json["key"]
    failing = "echo no memory >&2; exit 1"
    tools = shim(nft_host, tmp_path / "bin", "iptables-nft-save", "*", failing, calls="-gt 0")
    options = ("--known", key) if known else ()
    result = nft_host.akp("ask", "--verify", *options, PATH=path_with(nft_host, tools))
    assert (result.code, result.json["verb"]) == (4, "ask"), result.stdout
    assert "what the kernel has is not known: no memory" in result.json["error"]


@pytest.mark.parametrize("case", STATES)
def test_status_tells_at_a_glance(nft_host: Host, tmp_path: Path, case: str) -> None:
    bundle = everything(tmp_path / "a")
    nft_host.apply(bundle)
    nft_host.sh(STATES[case])
    before = nft_host.kernel()
    status = nft_host.akp("status").json
    assert status["state"] == case.split()[0]
    assert status["generation"] == host_generation(bundle)
    assert status["node"] == "n1"
    assert nft_host.kernel() == before


def test_status_of_a_host_that_never_had_a_bundle(host: Host) -> None:
    assert host.akp("status").json["state"] == "absent"
    assert host.akp("status", "--verify").json["state"] == "absent"
    host.sh("$ipt -t nat -N KUBE-SERVICES")
    assert host.akp("status").json["state"] == "foreign"
    assert not host.state.exists()


def test_check_says_what_apply_then_does(host: Host, tmp_path: Path) -> None:
    first, second = everything(tmp_path / "a"), bundles.simple(tmp_path / "b", bundles.shop("10.244.7.7:1"))
    same = ("changed", "chains", "sysctls", "counters", "flows", "generation", "previous")
    for bundle in (first, second, first):
        before = host.kernel(), sorted(host.state.rglob("*"))
        said = host.akp("check", bundle).json
        assert (host.kernel(), sorted(host.state.rglob("*"))) == before
        done = host.apply(bundle)
        assert {key: said[key] for key in same} == {key: done[key] for key in same}
        assert host.akp("check", bundle).json["changed"] is False


def test_check_names_what_would_change(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(bundles.simple(tmp_path / "a"))
    service = bundles.shop()[0]
    second = bundles.simple(tmp_path / "b", bundles.shop(*service.endpoints[:2]))
    differences = nft_host.akp("check", "--verify", second).json["differences"]
    gone = service.endpoint_chain(service.endpoints[2])
    assert {"family": "ipv4", "kind": "stale-chain", "table": "nat", "chain": gone} in differences
    assert {d["chain"] for d in differences if d["kind"] == "missing-rule"} == {service.chain}


def test_facts_are_what_the_engine_reads(host: Host) -> None:
    host.sh(
        "ip link add eth0 type veth peer name eth1; ip addr add 192.0.2.10/24 dev eth0; ip addr add fd00::10/64 dev eth0 nodad"
    )
    before = host.kernel()
    facts = host.akp("facts").json
    assert host.kernel() == before
    assert facts["hostname"] == socket.gethostname()
    assert {"interface": "eth0", "address": "192.0.2.10", "prefix": 24} in facts["addresses"]
    assert {"interface": "lo", "address": "::1", "prefix": 128} in facts["addresses"]
    capabilities = facts["capabilities"]
    assert (capabilities["ipv4"], capabilities["ipv6"], capabilities["nfacct"]) == (True, True, True)
    assert capabilities["iptables"]["flavour"] == host.flavour
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", capabilities["iptables"]["version"])
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", capabilities["nft"])
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", capabilities["ipset"])
    assert capabilities["ipvs"] is Path("/proc/net/ip_vs").exists()
    assert facts["tcpBeLiberal"] == 0
    assert facts["tools"]["iptables"] is True
    node = Node(name="n1", addresses=(), zone="", pod_cidrs=(), cpus=None, labels=(), ready=True)
    read = node_facts(node, facts)
    assert {"127.0.0.1", "::1", "192.0.2.10", "fd00::10"} <= set(read.interface_addresses)
    assert read.cpus == facts["cpus"] > 0
    assert read.nfacct is True


def test_facts_without_a_counter_match_say_so(nft_host: Host) -> None:
    hide = ("unshare", "-m", "sh", "-c", 'mount --bind /dev/null "$(command -v nfacct)" && exec "$@"', "sh")
    facts = nft_host.akp("facts", prefix=hide).json
    assert facts["capabilities"]["nfacct"] is False
    assert facts["tools"]["nfacct"] is False


def test_facts_tell_tcp_be_liberal(nft_host: Host) -> None:
    nft_host.sh("sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1")
    assert nft_host.akp("facts").json["tcpBeLiberal"] == 1


def test_rollback_goes_back_one_bundle_and_forth_by_name(host: Host, tmp_path: Path) -> None:
    steps = [bundles.simple(tmp_path / f"{i}", bundles.shop(f"10.244.7.{i}:1")) for i in range(4)]
    names = [host_generation(step) for step in steps]
    rules = []
    for step in steps:
        host.apply(step)
        rules.append(host.rules())
    assert host.akp("status").json["kept"] == names[1:]  # three are kept
    for i in (2, 1):
        answer = host.akp("rollback").json
        assert (answer["changed"], answer["generation"]) == (True, names[i])
        assert host.rules() == rules[i]
    assert "before the recorded one is not kept" in host.akp("rollback").json["error"]
    assert "is not kept" in host.akp("rollback", names[0]).json["error"]
    assert "is not a generation" in host.akp("rollback", "x").json["error"]
    assert host.akp("rollback", names[3][:12]).json["generation"] == names[3]
    assert host.rules() == rules[3]
    assert host.akp("status").json["kept"] == names[1:]


def test_restore_needs_nothing_but_the_host(host: Host, tmp_path: Path) -> None:
    bundle = everything(tmp_path / "a")
    host.apply(bundle)
    rules = host.rules()
    for file in bundle.iterdir():
        file.unlink()
    host.sh("$ipt -F; $ipt -t nat -F; $ip6t -F; $ip6t -t nat -F; sysctl -w net.ipv4.conf.all.route_localnet=0")
    answer = host.akp("restore").json
    assert answer["changed"] is True
    assert host.rules() == rules
    assert host.akp("restore").json["changed"] is False


def test_a_kept_bundle_that_was_tampered_with_is_refused(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(bundles.simple(tmp_path / "a"))
    (file,) = nft_host.state.glob("bundles/*/iptables-1-endpoints.rules")
    file.write_text(file.read_text() + "# more\n")
    nft_host.sh("$ipt -F")
    assert "the digest does not match" in nft_host.akp("restore").json["error"]


def test_every_answer_is_one_line_of_json(nft_host: Host, tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    for arguments in (
        ["check", bundle],
        ["apply", bundle],
        ["status", "--verify"],
        ["facts"],
        ["restore"],
        ["cleanup"],
    ):
        result = nft_host.akp(*arguments)
        assert len(result.stdout.splitlines()) == 1
        assert json.loads(result.stdout)["verb"] == arguments[0]


def test_kubelets_chains_come_and_go_but_its_name_hides_no_rule(any_flavour: Host, tmp_path: Path) -> None:
    host = any_flavour
    made = host.apply(bundles.simple(tmp_path / "a"))["generation"]
    first = host.akp("ask").json["status"]
    assert (first["state"], first["kept"]) == ("applied", [made])
    host.sh("$ipt -t mangle -N KUBE-KUBELET-CANARY; $ipt -t mangle -N KUBE-IPTABLES-HINT")
    exact = host.akp("ask", "--verify").json["status"]
    assert (exact["drift"], exact["kept"]) == (0, [made])
    host.sh("$ipt -t nat -I KUBE-SERVICES 1 -d 10.96.0.10/32 -m comment --comment KUBELET-CANARY -j ACCEPT")
    found = host.akp("ask", "--verify").json["status"]
    assert found["drift"] == 1
    assert "KUBELET-CANARY" in found["differences"][0]["rule"]
