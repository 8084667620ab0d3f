# ruff: noqa: E501 -- a line stands on one line, as it would be typed.
"""Bundles of ipvs mode that a node refuses, and tools it must have; no kernel with ip_vs is needed for that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.manifest import manifest_text
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.node.bundles import replace_file
from tests.node.host import Host
from tests.node.test_faults import hiding
from tests.node.test_guard import refusal
from tests.unit.build import dual_stack, endpoint, node, port, render, slice_of

SERVICE: dict[str, Any] = {
    "type": "LoadBalancer",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 32000,
    "externalIPs": ["192.0.2.7"],
    "ingress": ("203.0.113.7",),
    "loadBalancerSourceRanges": ["198.51.100.0/24"],
    "ports": [port(80, nodePort=30080), port(81, "s", "SCTP", nodePort=30081)],
}


def state(*addresses: str) -> State:
    return render(
        node("n1", "172.18.0.11"),
        dual_stack(**SERVICE),
        slice_of("web", *(endpoint(ip) for ip in addresses or ("10.244.1.5",))),
        mode="ipvs",
        ipvs={"tcpTimeout": "1h", "excludeCIDRs": ["10.1.0.0/16"]},
    )


@pytest.fixture(scope="module", params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One namespace for all: nothing of these bundles reaches it."""
    each = Host(tmp_path_factory.mktemp("host"), "nft", request.param)
    try:
        yield each
        assert each.sh("nft list ruleset; ipset list") == ""
    finally:
        each.close()


def edit(bundle: Path, name: str, change: Callable[[str], str]) -> Path:
    """Change a file and sign again, as somebody with the right tools would."""
    text = (bundle / name).read_text()
    changed = change(text)
    assert changed != text
    return replace_file(bundle, name, changed)


def swap(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


def add(line: str) -> Callable[[str], str]:
    return lambda text: f"{text}{line}\n"


def before_marker(line: str) -> Callable[[str], str]:
    return lambda text: text.replace("-A KUBE-PROXY-GENERATION", f"{line}\n-A KUBE-PROXY-GENERATION", 1)


CASES = {
    # iptables: nothing but the rules of this mode, each in its chain
    "a rule that accepts all": ("iptables.rules", swap("-A KUBE-SOURCE-RANGES-FIREWALL -j DROP", "-A KUBE-SOURCE-RANGES-FIREWALL -j ACCEPT"), "not a rule that belongs in KUBE-SOURCE-RANGES-FIREWALL"),
    "another set": ("iptables.rules", swap("KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT", "KUBE-NODE-PORT-TCP dst -j ACCEPT"), "not a rule that belongs in KUBE-NODE-PORT"),
    "a set of the other family": ("iptables.rules", swap("--match-set KUBE-IPVS-IPS", "--match-set KUBE-6-IPVS-IPS"), "not a rule that belongs in KUBE-IPVS-FILTER"),
    "a foreign set": ("ip6tables.rules", swap("--match-set KUBE-6-IPVS-IPS", "--match-set THEIRS"), "not a rule that belongs in KUBE-IPVS-FILTER"),
    "a mark of two bits": ("iptables.rules", swap("0x4000/0x4000 -j ACCEPT", "0x4000/0x6000 -j ACCEPT"), "not a rule that belongs in KUBE-FORWARD"),
    "a foreign chain": ("iptables.rules", swap(":KUBE-FORWARD - [0:0]", ":DOCKER-USER - [0:0]"), "chain DOCKER-USER in table filter is not ours"),
    "a rule in a built-in chain": ("iptables.rules", before_marker("-A INPUT -j ACCEPT"), "chain INPUT in table filter is not ours"),
    "a jump of another mode": ("iptables.rules", swap('-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT', "-I INPUT -j KUBE-NODE-PORT"), "not a jump rule of kube-proxy in table filter"),
    "a jump twice": ("iptables.rules", swap("-I FORWARD", '-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD\n-I FORWARD'), "a jump rule twice"),
    "a word that stands for a mark": ("iptables.rules", swap("0x4000/0x4000 -j ACCEPT", "MARK/MARK -j ACCEPT"), "not a rule that belongs in KUBE-FORWARD"),
    "another marker": ("iptables.rules", swap("-A KUBE-PROXY-GENERATION -m comment --comment ", "-A KUBE-PROXY-GENERATION -m comment --comment 0"), "the marker is not the generation of the manifest"),
    "another table": ("iptables.rules", swap("*nat", "*raw"), "table raw is not ours"),
    "no end": ("ip6tables.rules", lambda text: text.rpartition("COMMIT")[0], "has no COMMIT"),
    "a comment that ends too early": ("iptables.rules", swap('"kubernetes forwarding rules" -m mark', '"kubernetes" -j ACCEPT; " -m mark'), "not a rule that belongs in KUBE-FORWARD"),
    "a chain in two parts": ("iptables.rules", before_marker("-A KUBE-SOURCE-RANGES-FIREWALL -j DROP"), "do not stand together"),
    # ipset
    "a set that is not ours": ("ipset.rules", add("create THEIRS hash:ip family inet hashsize 1024 maxelem 65536"), "set THEIRS is not ours"),
    "an entry of a set that is not ours": ("ipset.rules", add("add THEIRS 192.0.2.1"), "set THEIRS is not ours"),
    "a set of another type": ("ipset.rules", swap("create KUBE-IPVS-IPS hash:ip ", "create KUBE-IPVS-IPS hash:net "), "not how set KUBE-IPVS-IPS is created"),
    "a set with more options": ("ipset.rules", swap("maxelem 65536", "maxelem 65536 timeout 5"), "not how set KUBE-LOOP-BACK is created"),
    "a set twice": ("ipset.rules", add("create KUBE-NODE-PORT-TCP bitmap:port range 0-65535"), "set KUBE-NODE-PORT-TCP is created twice"),
    "an entry of another shape": ("ipset.rules", swap("add KUBE-CLUSTER-IP 10.96.7.7,tcp:80", "add KUBE-CLUSTER-IP 10.96.7.7"), "not an entry of a set of type hash:ip,port"),
    "an entry of the other family": ("ipset.rules", swap("add KUBE-CLUSTER-IP 10.96.7.7,tcp:80", "add KUBE-CLUSTER-IP fd00::1,tcp:80"), "not an entry of a set of type hash:ip,port"),
    "a system port as a health check": ("ipset.rules", swap("add KUBE-HEALTH-CHECK-NODE-PORT 32000", "add KUBE-HEALTH-CHECK-NODE-PORT 22"), "health check port 22 is not one of 1024-65535"),
    "a port that begins with a 0": ("ipset.rules", swap("add KUBE-HEALTH-CHECK-NODE-PORT 32000", "add KUBE-HEALTH-CHECK-NODE-PORT 01174"), "not an entry of a set of type bitmap:port"),
    "a flush": ("ipset.rules", add("flush"), "not a line of ipset.rules"),
    "a deletion": ("ipset.rules", add("del KUBE-IPVS-IPS 10.96.7.7"), "not a line of ipset.rules"),
    # ipvsadm
    "a real server on its own": ("ipvs.rules", add("-a -t 10.96.9.9:80 -r 10.244.1.5:80 -m -w 1"), "a real server that does not follow its virtual server"),
    "a firewall mark": ("ipvs.rules", add("-A -f 1 -s rr"), "not a protocol of a virtual server"),
    "another way to forward": ("ipvs.rules", swap("-m -w 1", "-g -w 1"), "not how a real server is added"),
    "a real server of the other family": ("ipvs.rules", swap("-r 10.244.1.5:8080", "-r [fd00::1]:8080"), "not how a real server is added"),
    "a persistence engine": ("ipvs.rules", swap("-s rr", "-s rr --pe sip"), "not how a virtual server is made"),
    "a virtual server twice": ("ipvs.rules", add("-A -t 10.96.7.7:80 -s rr"), "virtual server -t 10.96.7.7:80 twice"),
    "a deletion of a virtual server": ("ipvs.rules", add("-D -t 10.96.7.7:80"), "not a line of ipvs.rules"),
    "a flush of all": ("ipvs.rules", add("-C"), "not a protocol of a virtual server"),
    # ip
    "another device": ("ip.batch", swap("dev kube-ipvs0", "dev eth0"), "not an address for kube-ipvs0"),
    "a network": ("ip.batch", swap("/32 dev", "/8 dev"), "not an address for kube-ipvs0"),
    "a link up": ("ip.batch", add("link set kube-ipvs0 up"), "not an address for kube-ipvs0"),
    "a route": ("ip.batch", add("route add default via 192.0.2.1"), "not an address for kube-ipvs0"),
    # settings
    "another setting": ("ipvs.conf", add("sync master"), "not a line of ipvs.conf"),
    "an escape": ("ipvs.conf", add("exclude \x1b[0m"), "a character that is not printable ASCII"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_line_that_does_not_fit_is_refused(host: Host, tmp_path: Path, case: str) -> None:
    name, change, expected = CASES[case]
    write_bundle(state(), tmp_path / "b")
    message = refusal(host, edit(tmp_path / "b", name, change))
    assert message.startswith(f"{name} line "), message
    assert expected in message


@pytest.mark.parametrize("name", ["ipset.rules", "ipvs.rules", "ip.batch"])
def test_a_bundle_without_one_of_its_files_is_refused(host: Host, tmp_path: Path, name: str) -> None:
    bundle = tmp_path / "b"
    write_bundle(state(), bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["apiVersion"], manifest["digest"], manifest["files"][name]
    (bundle / name).unlink()
    (bundle / "manifest.json").write_text(manifest_text(manifest))
    assert refusal(host, bundle) == f"{name}: not in the bundle"


DELTA_CASES = {
    "a foreign set": ("ipset.rules", "del THEIRS 192.0.2.1", "set THEIRS is not ours"),
    "a swap": ("ipset.rules", "swap KUBE-LOOP-BACK KUBE-CLUSTER-IP", "not a line of ipset.rules"),
    "a system port as a health check": ("ipset.rules", "add KUBE-HEALTH-CHECK-NODE-PORT 22", "health check port 22"),
    "a real server with a weight": ("ipvs.rules", "-d -t 10.96.7.7:80 -r 10.244.1.5:8080 -m -w 0", "not how a real server is deleted"),
    "everything": ("ipvs.rules", "-C", "not a protocol of a virtual server"),
}  # fmt: skip


@pytest.mark.parametrize("case", DELTA_CASES)
def test_a_line_of_a_delta_that_does_not_fit_is_refused(host: Host, tmp_path: Path, case: str) -> None:
    name, line, expected = DELTA_CASES[case]
    old, new = state(), state("10.244.1.6")
    write_delta(delta(old, new), new, tmp_path / "d")
    result = host.akp("check", edit(tmp_path / "d", name, add(line)))
    assert result.code == 2
    assert expected in result.json["error"]


@pytest.mark.parametrize(("tool", "package"), [("ipvsadm", "ipvsadm"), ("ipset", "ipset"), ("ip", "iproute2")])
def test_a_missing_tool_is_named_with_its_package(host: Host, tmp_path: Path, tool: str, package: str) -> None:
    write_bundle(state(), tmp_path / "b")
    result = host.akp("apply", tmp_path / "b", prefix=hiding(tool))
    assert (result.code, result.json["error"]) == (3, f"missing tool: {tool} (package {package})")
