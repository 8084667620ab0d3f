# ruff: noqa: E501 -- a line stands on one line, as it would be typed.
"""Bundles of ipvs mode that a node refuses, and tools it must have; no kernel with ip_vs is needed for that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.node.bundles import replace_file
from tests.node.guarding import HERE, Verdict, guarded
from tests.node.host import Host
from tests.node.test_faults import hiding
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


Text = Callable[[str], str]
IPSET, LOOPS = "ipset-1-frontends.rules", "ipset-2-endpoints.rules"
IPVS, REAL = "ipvs-1-frontends.rules", "ipvs-2-endpoints.rules"
NOT_RULE = "tables.rules, table "  # and the line
NOT_IPSET, NOT_IPVS, NOT_REAL = (f"not a line of {name}" for name in (IPSET, IPVS, REAL))
ACCEPT = NOT_RULE


@pytest.fixture(scope="module", params=HERE)
def awk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def edit(bundle: Path, name: str, change: Text) -> Path:
    """Change a file and sign again, as somebody with the right tools would."""
    text = (bundle / name).read_text()
    changed = change(text)
    assert changed != text
    return replace_file(bundle, name, changed)


def swap(old: str, new: str) -> Text:
    return lambda text: text.replace(old, new, 1)


def add(line: str) -> Text:
    return lambda text: f"{text}{line}\n"


def before_marker(line: str) -> Text:
    return lambda text: text.replace("-A KUBE-PROXY-GEN-", f"{line}\n-A KUBE-PROXY-GEN-", 1)


CASES: dict[str, tuple[str, Text, str]] = {
    # iptables: nothing but the rules of this mode, each in its chain
    "a rule that accepts all": ("iptables.rules", swap("-A KUBE-SOURCE-RANGES-FIREWALL -j DROP", "-A KUBE-SOURCE-RANGES-FIREWALL -j ACCEPT"), ACCEPT),
    "another set": ("iptables.rules", swap("KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT", "KUBE-NODE-PORT-TCP dst -j ACCEPT"), ACCEPT),
    "a set of the other family": ("iptables.rules", swap("--match-set KUBE-IPVS-IPS", "--match-set KUBE-6-IPVS-IPS"), NOT_RULE),
    "a foreign set": ("ip6tables.rules", swap("--match-set KUBE-6-IPVS-IPS", "--match-set THEIRS"), NOT_RULE),
    "a mark of two bits": ("iptables.rules", swap("0x4000/0x4000 -j ACCEPT", "0x4000/0x6000 -j ACCEPT"), ACCEPT),
    "a foreign chain": ("iptables.rules", swap(":KUBE-FORWARD - [0:0]", ":DOCKER-USER - [0:0]"), NOT_RULE),
    "a rule in a built-in chain": ("iptables.rules", before_marker("-A INPUT -j ACCEPT"), NOT_RULE),
    "a jump twice": ("iptables.rules", swap("-I FORWARD", '-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD\n-I FORWARD'), "a line twice"),
    "a chain in two parts": ("iptables.rules", before_marker("-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ"), "do not stand together"),
    "a jump of another mode": ("iptables.rules", swap('-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT', "-I INPUT -j KUBE-NODE-PORT"), NOT_RULE),
    "a word that stands for a mark": ("iptables.rules", swap("0x4000/0x4000 -j ACCEPT", "0x<BIT>/0x<BIT> -j ACCEPT"), ACCEPT),
    "another marker": ("iptables.rules", lambda text: re.sub("(-A KUBE-PROXY-GEN-.*) --comment .", r"\1 --comment x", text), NOT_RULE),
    "another table": ("iptables.rules", swap("*nat", "*raw"), "table raw is not ours"),
    "no end": ("ip6tables.rules", lambda text: text.rpartition("COMMIT")[0], "has no COMMIT"),
    "a comment that ends too early": ("iptables.rules", swap('"kubernetes forwarding rules" -m mark', '"kubernetes" -j ACCEPT; " -m mark'), NOT_RULE),
    # ipset
    "a set that is not ours": (IPSET, add("create THEIRS hash:ip family inet hashsize 1024 maxelem 65536"), NOT_IPSET),
    "an entry of a set that is not ours": (IPSET, add("add THEIRS 192.0.2.1"), NOT_IPSET),
    "a set of another type": (IPSET, swap("create KUBE-IPVS-IPS hash:ip ", "create KUBE-IPVS-IPS hash:net "), NOT_IPSET),
    "a set with more options": (IPSET, swap("maxelem 65536", "maxelem 65536 timeout 5"), NOT_IPSET),
    "a set twice": (IPSET, add("create KUBE-NODE-PORT-TCP bitmap:port range 0-65535"), "KUBE-NODE-PORT-TCP twice"),
    "an entry of another shape": (IPSET, swap("add KUBE-CLUSTER-IP 10.96.7.7,tcp:80", "add KUBE-CLUSTER-IP 10.96.7.7"), NOT_IPSET),
    "an entry of the other family": (IPSET, swap("add KUBE-CLUSTER-IP 10.96.7.7,tcp:80", "add KUBE-CLUSTER-IP fd00::1,tcp:80"), NOT_IPSET),
    "a system port as a health check": (IPSET, swap("add KUBE-HEALTH-CHECK-NODE-PORT 32000", "add KUBE-HEALTH-CHECK-NODE-PORT 22"), NOT_IPSET),
    "a port that begins with a 0": (IPSET, swap("add KUBE-HEALTH-CHECK-NODE-PORT 32000", "add KUBE-HEALTH-CHECK-NODE-PORT 01174"), NOT_IPSET),
    "a flush": (IPSET, add("flush"), NOT_IPSET),
    "a deletion": (IPSET, add("del KUBE-IPVS-IPS 10.96.7.7"), NOT_IPSET),
    # ipvsadm
    "a real server on its own": (REAL, add("-a -t 10.96.9.9:80 -r 10.244.1.5:80 -m -w 1"), "not made in this bundle"),
    "a firewall mark": (IPVS, add("-A -f 1 -s rr"), NOT_IPVS),
    "another way to forward": (REAL, swap("-m -w 1", "-g -w 1"), NOT_REAL),
    "a real server of the other family": (REAL, swap("-r 10.244.1.5:8080", "-r [fd00::1]:8080"), NOT_REAL),
    "a persistence engine": (IPVS, swap("-s rr", "-s rr --pe sip"), NOT_IPVS),
    "a virtual server twice": (IPVS, add("-A -t 10.96.7.7:80 -s rr"), "-t 10.96.7.7:80 twice"),
    "a deletion of a virtual server": (IPVS, add("-D -t 10.96.7.7:80"), NOT_IPVS),
    "a flush of all": (IPVS, add("-C"), NOT_IPVS),
    "a real server among the virtual ones": (IPVS, add("-a -t 10.96.7.7:80 -r 10.244.1.5:8080 -m -w 1"), NOT_IPVS),
    "a virtual server among the real ones": (REAL, add("-A -t 10.96.7.77:80 -s rr"), NOT_REAL),
    "a real server on loopback": (REAL, swap("-r 10.244.1.5:", "-r 127.0.0.1:"), "127.0.0.1 is no address for a destination"),
    "a virtual server on loopback": (IPVS, add("-A -t 127.0.0.1:80 -s rr"), "127.0.0.1 is no address for a frontend"),
    "a port with a zero in front": (IPVS, add("-A -t 10.96.7.77:080 -s rr"), NOT_IPVS),
    "a cluster IP among the loop-backs": (LOOPS, add("add KUBE-CLUSTER-IP 10.96.7.7,tcp:80"), "not a line of ipset-2-endpoints.rules"),
    "a loop-back of two pods": (IPSET, add("add KUBE-LOOP-BACK 10.244.1.5,tcp:80,10.244.1.5"), NOT_IPSET),
    "a comment": (IPSET, add("# x"), NOT_IPSET),
    # ip
    "another device": ("ip.batch", swap("dev kube-ipvs0", "dev eth0"), "not a line of ip.batch"),
    "a network": ("ip.batch", swap("/32 dev", "/8 dev"), "not a line of ip.batch"),
    "a link up": ("ip.batch", add("link set kube-ipvs0 up"), "not a line of ip.batch"),
    "a route": ("ip.batch", add("route add default via 192.0.2.1"), "not a line of ip.batch"),
    "loopback": ("ip.batch", add("addr add 127.0.0.5/32 dev kube-ipvs0"), "127.0.0.5 is no address for a frontend"),
    # settings
    "another setting": ("ipvs.conf", add("sync master"), "not a line of ipvs.conf"),
    "an escape": ("ipvs.conf", add("exclude \x1b[0m"), "a character that is not printable ASCII"),
}  # fmt: skip


def verdicts(
    folder: Path, awk: str, cases: dict[str, tuple[str, Text, str]], write: Callable[[Path], Path]
) -> dict[str, Verdict]:
    made = [
        edit(write(folder / str(number)), name, change) for number, (name, change, _text) in enumerate(cases.values())
    ]
    return dict(zip(cases, guarded(made, awk), strict=True))


def whole(directory: Path) -> Path:
    write_bundle(state(), directory)
    return directory


def change(directory: Path) -> Path:
    old, new = state(), state("10.244.1.6")
    write_delta(delta(old, new), new, directory)
    return directory


@pytest.fixture(scope="module")
def refused(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    return verdicts(tmp_path_factory.mktemp("lines"), awk, CASES, whole)


@pytest.mark.parametrize("case", CASES)
def test_a_line_that_does_not_fit_is_refused(refused: dict[str, Verdict], case: str) -> None:
    name, _change, expected = CASES[case]
    assert refused[case].code == 2
    assert refused[case].reason.startswith(f"{name} line "), refused[case]
    assert expected in refused[case].reason


@pytest.mark.parametrize("name", [IPSET, LOOPS, IPVS, REAL, "ip.batch"])
def test_a_bundle_without_one_of_its_files_is_refused(awk: str, tmp_path: Path, name: str) -> None:
    bundle = whole(tmp_path / "b")
    (bundle / name).unlink()
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(re.sub(rf'    "{re.escape(name)}": .*\n', "", text))
    (verdict,) = guarded([bundle], awk)
    assert verdict.code == 2
    # Entries of sets that are not made are found first.
    assert verdict.reason == f"{name}: not in the bundle" or "not made in this bundle" in verdict.reason


DELTA_CASES: dict[str, tuple[str, Text, str]] = {
    "a foreign set": (LOOPS, add("del THEIRS 192.0.2.1"), "not a line of ipset-2-endpoints.rules"),
    "a swap": (LOOPS, add("swap KUBE-LOOP-BACK KUBE-CLUSTER-IP"), "not a line of ipset-2-endpoints.rules"),
    "a set destroyed": (LOOPS, add("destroy KUBE-LOOP-BACK"), "not a line of ipset-2-endpoints.rules"),
    "a frontend among endpoints": (LOOPS, add("add KUBE-CLUSTER-IP 10.96.9.9,tcp:22"), "not a line of ipset-2-endpoints.rules"),
    "a real server with a weight": (REAL, add("-d -t 10.96.7.7:80 -r 10.244.1.5:8080 -m -w 0"), NOT_REAL),
    "a virtual server that goes": (REAL, add("-D -t 10.96.7.7:80"), NOT_REAL),
    "a real server on loopback": (REAL, add("-a -t 10.96.7.7:80 -r 127.0.0.1:22 -m -w 1"), "127.0.0.1 is no address for a destination"),
    "everything": (REAL, add("-C"), NOT_REAL),
    "another base": ("iptables.rules", lambda text: re.sub("-X KUBE-PROXY-GEN-.*", f"-X KUBE-PROXY-GEN-{'0' * 13}", text), NOT_RULE),
    "no base": ("ip6tables.rules", lambda text: re.sub("-X KUBE-PROXY-GEN-.*\n", "", text), "no line: -X KUBE-PROXY-GEN-"),
    "a jump inserted": ("iptables.rules", swap("-C INPUT", "-I INPUT"), NOT_RULE),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused_deltas(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    return verdicts(tmp_path_factory.mktemp("deltas"), awk, DELTA_CASES, change)


@pytest.mark.parametrize("case", DELTA_CASES)
def test_a_line_of_a_delta_that_does_not_fit_is_refused(refused_deltas: dict[str, Verdict], case: str) -> None:
    assert refused_deltas[case].code == 2
    assert DELTA_CASES[case][2] in refused_deltas[case].reason


def test_what_is_right_passes(awk: str, tmp_path: Path) -> None:
    assert guarded([whole(tmp_path / "a"), change(tmp_path / "d")], awk) == [Verdict(0, "")] * 2


@pytest.fixture(params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    each = Host(tmp_path, "nft", request.param, "ipvs")
    try:
        yield each
        assert each.sh("nft list ruleset; ipset list") == ""
    finally:
        each.close()


def test_a_refusal_is_the_answer_of_check_and_apply(host: Host, tmp_path: Path) -> None:
    bundle = edit(whole(tmp_path / "b"), *CASES["another way to forward"][:2])
    for verb in ("check", "apply"):
        result = host.akp(verb, bundle)
        assert (result.code, NOT_REAL in result.json["error"]) == (2, True)


@pytest.mark.parametrize(("tool", "package"), [("ipvsadm", "ipvsadm"), ("ipset", "ipset"), ("ip", "iproute2")])
def test_a_missing_tool_is_named_with_its_package(host: Host, tmp_path: Path, tool: str, package: str) -> None:
    write_bundle(state(), tmp_path / "b")
    result = host.akp("apply", tmp_path / "b", prefix=hiding(tool))
    assert (result.code, result.json["error"]) == (3, f"missing tool: {tool} (package {package})")
