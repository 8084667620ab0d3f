# ruff: noqa: E501 -- a command stands on one line, as it would be typed.
"""Commands that a node refuses to run, whoever made the bundle, each with the message that an operator needs."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.node.bundles import replace_file
from tests.node.guarding import HERE, Verdict, guarded
from tests.node.host import Host
from tests.node.nftables import shop, state, write, write_change
from tests.unit.build import service, slice_of
from tests.unit.clusters import cluster

MADE = shop("10.244.1.1", "10.244.1.2")
STICKY = shop("10.244.1.1", sticky=("10.244.1.7", "10.244.1.8"))
Text = Callable[[str], str]


@pytest.fixture(scope="module", params=HERE)
def awk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def changed(bundle: Path, file: str, edit: Text) -> Path:
    """The bundle with another text in a file, and a manifest that fits it."""
    text = (bundle / file).read_text()
    assert edit(text) != text
    return replace_file(bundle, file, edit(text))


def more(command: str) -> Text:
    return lambda text: f"{text}{command}\n"


def swap(old: str, new: str) -> Text:
    return lambda text: text.replace(old, new, 1)


def without(pattern: str) -> Text:
    return lambda text: "".join(line for line in text.splitlines(True) if not re.search(pattern, line))


CHAIN = "service-KHN6ECMT-shop/web/tcp/http"
EXTERNAL = CHAIN.replace("service", "external")
ONE, TWO, THREE, DROP = (f"nftables-{kind}.nft" for kind in ("1-endpoints", "2-dispatch", "3-frontends", "4-drop"))
UNLIKE = "not a line of nftables-"  # and file, line
FORBIDDEN: dict[str, tuple[str, Text, str]] = {
    "another table": (ONE, more("add table inet filter"), UNLIKE),
    "another table of the family": (ONE, more("add table ip filter"), UNLIKE),
    "a rule elsewhere": (THREE, more("add rule ip filter input accept"), UNLIKE),
    "a table with a longer name": (THREE, more("add chain ip kube-proxy-x services"), UNLIKE),
    "everything flushed": (ONE, more("flush ruleset"), UNLIKE),
    "the table deleted": (ONE, more("delete table ip kube-proxy"), UNLIKE),
    "the table flushed": (THREE, more("flush table ip kube-proxy"), UNLIKE),
    "another file": (ONE, more('include "/etc/passwd"'), UNLIKE),
    "a variable": (ONE, more("define x = 1"), UNLIKE),
    "two commands on a line": (THREE, more("add chain ip kube-proxy services ; add table ip x"), UNLIKE),
    "a command that goes on": (THREE, more("add chain ip kube-proxy services \\"), UNLIKE),
    "a chain of another name": (THREE, more("add chain ip kube-proxy mine"), UNLIKE),
    "a base chain": (THREE, more("add chain ip kube-proxy mine { type filter hook input priority -300 ; }"), UNLIKE),
    "another priority": (THREE, swap("hook input priority 0", "hook input priority 1"), UNLIKE),
    "a policy": (THREE, swap("hook input priority 0 ;", "hook input priority 0 ; policy drop ;"), UNLIKE),
    "accept": (ONE, more(f"add rule ip kube-proxy {CHAIN} accept"), UNLIKE),
    "accept before the rest": (THREE, more("add rule ip kube-proxy filter-input accept"), UNLIKE),
    "a jump to a foreign place": (THREE, more("add rule ip kube-proxy filter-input jump services"), UNLIKE),
    "a rule in front": (THREE, more("insert rule ip kube-proxy services reject"), UNLIKE),
    "an expression": (ONE, more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 10.0.0.1:80 log"), UNLIKE),
    "another map": (THREE, swap("vmap @service-ips", "vmap @firewall-ips"), UNLIKE),
    "an element that accepts": (TWO, more("add element ip kube-proxy service-ips { 10.0.0.1 . tcp . 22 : accept }"), UNLIKE),
    "two elements": (THREE, more("add element ip kube-proxy cluster-ips { 10.0.0.1 , 10.0.0.2 }"), UNLIKE),
    "a range": (THREE, more("add element ip kube-proxy cluster-ips { 10.0.0.0/8 }"), UNLIKE),
    "an address of the other family": (THREE, more("add element ip kube-proxy cluster-ips { fd00::1 }"), UNLIKE),
    "a type of the other family": (ONE, swap("cluster-ips { type ipv4_addr", "cluster-ips { type ipv6_addr"), UNLIKE),
    "a word that is no address": (THREE, more("add element ip kube-proxy cluster-ips { example }"), UNLIKE),
    "a comment that ends early": (TWO, swap('comment "shop/cart', 'comment "x" : accept, "'), UNLIKE),
    "a comment that is too long": (TWO, swap('comment "shop/cart', f'comment "{"x" * 192}'), UNLIKE),
    "a mark of every bit": (THREE, swap("0x00004000", "0xffffffff"), UNLIKE),
    "a mark of another bit": (THREE, swap("0x00004000", "0x00008000"), UNLIKE),
    "a mark of no bit": (TWO, swap("0x00004000", "0x00000000"), UNLIKE),
    "a mark of another length": (THREE, swap("0x00004000", "0x4000"), UNLIKE),
    "a word that stands for an address": (THREE, more("add element ip kube-proxy cluster-ips { <VIP> }"), UNLIKE),
    "another loopback": (THREE, swap("ip6 daddr != ::1", "ip6 daddr != fd00::1"), UNLIKE),
    "a list that is open": (ONE, lambda text: re.sub(r" \}$", " , }", text, count=1, flags=re.M), UNLIKE),
    "an empty list": (ONE, lambda text: re.sub(r"map \{ .* \}$", "map { }", text, count=1, flags=re.M), UNLIKE),
    "a list with a stranger": (ONE, lambda text: re.sub(r" , 1 : .*? \}$", " , 1 : accept }", text, count=1, flags=re.M), UNLIKE),
    "another marker": (TWO, lambda text: re.sub("gen-[0-9a-f]+", f"gen-{'0' * 64}", text, count=1), UNLIKE),
    "no marker": (TWO, without("ip6 kube-proxy gen-"), "no line: add chain ip6 kube-proxy gen-"),
    "a marker with rules": (TWO, lambda text: re.sub("add chain (ip kube-proxy gen-.*)", r"add rule \1 accept", text), UNLIKE),
    "deltas' commands": (THREE, more("delete element ip kube-proxy cluster-ips { 10.96.7.7 }"), UNLIKE),
    "a chain deleted": (ONE, more(f"delete chain ip kube-proxy {CHAIN}"), UNLIKE),
    "a character": (ONE, more("add chain ip kube-proxy services\u00a0"), "a character that is not printable ASCII"),
    "a tab": (ONE, more("add chain ip kube-proxy\tservices"), "a character that is not printable ASCII"),
    "two blanks": (THREE, more("add chain ip  kube-proxy services"), ""),
    "a null byte": (ONE, more("add chain ip kube-proxy services\0"), ""),
    "a dispatch among the endpoints": (ONE, more(f"add element ip kube-proxy service-ips {{ 10.96.7.7 . tcp . 80 : goto {CHAIN} }}"), UNLIKE),
    "external traffic among the endpoints": (ONE, more(f"add chain ip kube-proxy {EXTERNAL}"), UNLIKE),
    "a firewall among the dispatch": (TWO, more(f"add chain ip kube-proxy {CHAIN.replace('service', 'firewall')}"), UNLIKE),
    "a static rule among the dispatch": (TWO, more("add rule ip kube-proxy reject-chain reject"), UNLIKE),
    "endpoints among the frontends": (THREE, more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 10.0.0.1:80"), UNLIKE),
    "a port with a zero in front": (ONE, more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 10.0.0.1:080"), UNLIKE),
    "an octet beyond all octets": (ONE, more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 10.0.0.256:80"), UNLIKE),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    folder = tmp_path_factory.mktemp("commands")
    cases = enumerate(FORBIDDEN.values())
    made = [changed(write(MADE, folder / str(number)), file, edit) for number, (file, edit, _message) in cases]
    return dict(zip(FORBIDDEN, guarded(made, awk), strict=True))


@pytest.mark.parametrize("case", FORBIDDEN)
def test_a_command_that_kube_proxy_would_not_run_is_refused(refused: dict[str, Verdict], case: str) -> None:
    file, _edit, message = FORBIDDEN[case]
    assert refused[case].code == 2
    assert message in refused[case].reason
    # A bit that is not that of another file is found where the second one stands.
    assert refused[case].reason.startswith(("nftables-",) if "bit" in case else (f"{file} line ", f"{file}: "))


DELTAS: dict[str, tuple[str, Text, str]] = {
    "another base": (ONE, lambda text: re.sub("delete chain ip kube-proxy gen-.*", f"delete chain ip kube-proxy gen-{'0' * 64}", text), UNLIKE),
    "no base": (ONE, without("delete chain ip6 kube-proxy gen-"), "no line: delete chain ip6 kube-proxy gen-"),
    "no marker": (ONE, without("add chain ip kube-proxy gen-"), "no line: add chain ip kube-proxy gen-"),
    "the table": (ONE, more("delete table ip kube-proxy"), UNLIKE),
    "a map emptied": (ONE, more("flush map ip kube-proxy service-ips"), UNLIKE),
    "a map made": (ONE, more('add map ip kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; comment "NodePort traffic" ; }'), UNLIKE),
    "a static chain emptied": (ONE, more("flush chain ip kube-proxy services"), UNLIKE),
    "a dispatch that goes": (ONE, more("delete element ip kube-proxy service-ips { 10.96.7.7 . tcp . 80 }"), UNLIKE),
    "sessions of others": (ONE, more("delete set ip kube-proxy cluster-ips"), UNLIKE),
    "a static chain dropped": (DROP, more("delete chain ip kube-proxy services"), UNLIKE),
    "a marker dropped": (DROP, more(f"delete chain ip kube-proxy gen-{'0' * 64}"), UNLIKE),
    "a rule in what is dropped": (DROP, more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 10.0.0.1:80"), UNLIKE),
    "endpoints that lead to the node": (ONE, more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 127.0.0.1:22"), "127.0.0.1 is no address for a destination"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused_deltas(awk: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    folder = tmp_path_factory.mktemp("deltas")
    cases = enumerate(DELTAS.values())
    made = [
        changed(write_change(STICKY, MADE, folder / str(number)), file, edit)
        for number, (file, edit, _message) in cases
    ]
    return dict(zip(DELTAS, guarded(made, awk), strict=True))


@pytest.mark.parametrize("case", DELTAS)
def test_a_delta_that_reaches_further_is_refused(refused_deltas: dict[str, Verdict], case: str) -> None:
    assert refused_deltas[case].code == 2
    assert DELTAS[case][2] in refused_deltas[case].reason


@pytest.mark.parametrize("file", [ONE, TWO, THREE])
def test_a_bundle_without_one_of_its_files_is_refused(awk: str, tmp_path: Path, file: str) -> None:
    bundle = write(MADE, tmp_path / "b")
    (bundle / file).unlink()
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(re.sub(rf'    "{file}": .*\n', "", text))
    (verdict,) = guarded([bundle], awk)
    assert (verdict.code, f"{file}: " in verdict.reason) == (2, True)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_engine_writes_is_allowed(awk: str, tmp_path: Path, seed: int) -> None:
    fields: dict[str, Any] = [
        {},
        {"nodePortAddresses": ["0.0.0.0/0", "::/0"]},
        {"nftables": {"masqueradeAll": True, "masqueradeBit": 31}},
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "br-1.2_3"}},
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
        {"featureGates": {"KubeProxyNFTablesLocalhostNodePorts": True}, "nodePortAddresses": ["localhost"]},
    ][seed % 6]
    for mode in ("nftables", "iptables", "ipvs"):
        one, two = (state(*cluster(10, number), **{"mode": mode, **fields}) for number in (seed, seed + 50))
        made = [write(one, tmp_path / f"{mode}-a"), write_change(one, two, tmp_path / f"{mode}-d")]
        assert guarded(made, awk) == [Verdict(0, "")] * 2


def test_source_ranges_may_be_anything_that_a_range_can_be(awk: str, tmp_path: Path) -> None:
    ranges = ["127.0.0.0/8", "10.0.0.1/32", "::1/128", "172.18.0.0/16"]
    balanced = service(type="LoadBalancer", ingress=("198.51.100.9", "2001:db8::9"), loadBalancerSourceRanges=ranges)
    bundle = write(state(balanced, slice_of("web", "10.244.1.1")), tmp_path / "a")
    assert guarded([bundle], awk) == [Verdict(0, "")]


def test_a_refusal_is_the_answer_of_check_and_apply(tmp_path: Path) -> None:
    file, edit, message = FORBIDDEN["accept before the rest"]
    bundle = changed(write(MADE, tmp_path / "b"), file, edit)
    host = Host(tmp_path, mode="nftables")
    try:
        for verb in ("check", "apply"):
            result = host.akp(verb, bundle)
            assert result.code == 2
            assert message in result.json["error"]
        assert host.sh("nft list ruleset") == ""
        assert not host.state.exists() or {file.name for file in host.state.iterdir()} <= {"lock"}
    finally:
        host.close()


def test_time_grows_with_the_length_of_a_line_and_no_faster(awk: str, tmp_path: Path) -> None:
    """A Service with forty thousand endpoints is one line of a megabyte."""

    def seconds(endpoints: int) -> float:
        choices = " , ".join(f"{i} : 10.1.{i // 250}.{i % 250} . 8080" for i in range(endpoints))
        rule = f"meta l4proto tcp dnat ip addr . port to numgen random mod {endpoints} map {{ {choices} }}"
        made = changed(write(MADE, tmp_path / str(endpoints)), ONE, more(f"add rule ip kube-proxy {CHAIN} {rule}"))
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        assert guarded([made], awk) == [Verdict(0, "")]
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    # Ten times the work would be a hundred times the time if it were quadratic.
    assert seconds(40000) < 30 * max(seconds(4000), 0.1)
