"""Commands that a node refuses to run, whoever made the bundle, each with the message that an operator needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.bundles import replace_file
from tests.node.host import Host
from tests.node.nftables import shop, state, write, write_change
from tests.unit.build import service, slice_of
from tests.unit.clusters import cluster

MADE = shop("10.244.1.1", "10.244.1.2")


@pytest.fixture(scope="module", params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One namespace for all: nothing of these bundles reaches it."""
    each = Host(tmp_path_factory.mktemp("host"), "nft", request.param)
    yield each
    assert each.sh("nft list ruleset") == ""
    assert not each.state.exists()
    each.close()


def changed(directory: Path, edit: Callable[[str], str]) -> Path:
    """The bundle with another nftables.nft, and a manifest that fits it."""
    file = write(MADE, directory) / "nftables.nft"
    text = edit(file.read_text())
    assert text != file.read_text()
    return replace_file(directory, file.name, text)


def refusal(host: Host, bundle: Path) -> str:
    """The message with which a bundle is refused, the same by apply and check."""
    messages = set()
    for verb in ("check", "apply"):
        result = host.akp(verb, bundle)
        assert result.code == 2, result.stdout + result.stderr
        messages.add(result.json["error"])
    assert len(messages) == 1
    return str(messages.pop())


def more(command: str) -> Callable[[str], str]:
    return lambda text: f"{text}{command}\n"


def swap(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


CHAIN = "service-KHN6ECMT-shop/web/tcp/http"
NOT_OURS = "is not ours"
NOT_KUBE_PROXY = "not a command that kube-proxy would run"
FORBIDDEN = {
    "another table": (more("add table inet filter"), "not a command for table kube-proxy"),
    "another table of the family": (more("add table ip filter"), NOT_OURS),
    "a rule elsewhere": (more("add rule ip filter input accept"), NOT_OURS),
    "everything flushed": (more("flush ruleset"), "not a command for table kube-proxy"),
    "the table deleted": (more("delete table ip kube-proxy"), NOT_KUBE_PROXY),
    "another file": (more('include "/etc/passwd"'), "not a command for table kube-proxy"),
    "a variable": (more("define x = 1"), "not a command for table kube-proxy"),
    "two commands on a line": (more("add chain ip kube-proxy services ; add table ip x"), NOT_KUBE_PROXY),
    "a command that goes on": (more("add chain ip kube-proxy services \\"), NOT_KUBE_PROXY),
    "a chain of another name": (more("add chain ip kube-proxy mine"), NOT_KUBE_PROXY),
    "a base chain": (
        more("add chain ip kube-proxy mine { type filter hook input priority -300 ; }"),
        NOT_KUBE_PROXY,
    ),
    "another priority": (swap("hook input priority 0", "hook input priority 1"), NOT_KUBE_PROXY),
    "a policy": (swap("hook input priority 0 ;", "hook input priority 0 ; policy drop ;"), NOT_KUBE_PROXY),
    "accept": (more(f"add rule ip kube-proxy {CHAIN} accept"), NOT_KUBE_PROXY),
    "accept before the rest": (more("add rule ip kube-proxy filter-input accept"), NOT_KUBE_PROXY),
    "a jump to a foreign place": (more("add rule ip kube-proxy filter-input jump services"), NOT_KUBE_PROXY),
    "a rule in front": (more("insert rule ip kube-proxy services reject"), NOT_KUBE_PROXY),
    "an expression": (more(f"add rule ip kube-proxy {CHAIN} meta l4proto tcp dnat to 10.0.0.1:80 log"), NOT_KUBE_PROXY),
    "another map": (swap("vmap @service-ips", "vmap @firewall-ips"), NOT_KUBE_PROXY),
    "an element that accepts": (
        more("add element ip kube-proxy service-ips { 10.0.0.1 . tcp . 22 : accept }"),
        NOT_KUBE_PROXY,
    ),
    "a range": (more("add element ip kube-proxy cluster-ips { 10.0.0.0/8 }"), NOT_KUBE_PROXY),
    "an address of the other family": (more("add element ip kube-proxy cluster-ips { fd00::1 }"), NOT_KUBE_PROXY),
    "a word that is no address": (more("add element ip kube-proxy cluster-ips { example }"), NOT_KUBE_PROXY),
    "a comment that ends early": (swap('comment "shop/cart', 'comment "x" : accept, "'), NOT_KUBE_PROXY),
    "a comment that is too long": (swap('comment "shop/cart', f'comment "{"x" * 130}'), NOT_KUBE_PROXY),
    "a mark of every bit": (swap("0x00004000", "0xffffffff"), NOT_KUBE_PROXY),
    "a word that stands for an address": (more("add element ip kube-proxy cluster-ips { ADDR }"), NOT_KUBE_PROXY),
    "a mark of another length": (swap("0x00004000", "0x4000"), NOT_KUBE_PROXY),
    "another loopback": (swap("ip6 daddr != ::1", "ip6 daddr != fd00::1"), NOT_KUBE_PROXY),
    "another marker": (
        swap(MADE.generation + '" ;', "0" * 64 + '" ;'),
        "the marker is not the generation of the manifest",
    ),
    "no marker": (
        lambda text: "".join(line for line in text.splitlines(True) if "ip6 kube-proxy-generation" not in line),
        "no marker for family ip6",
    ),
    "deltas' commands": (more("delete element ip kube-proxy cluster-ips { 10.96.7.7 }"), NOT_KUBE_PROXY),
    "a character": (more("add chain ip kube-proxy services\u00a0"), "a character that is not printable ASCII"),
    "a tab": (more("add chain ip kube-proxy\tservices"), "a character that is not printable ASCII"),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_a_command_that_kube_proxy_would_not_run_is_refused(host: Host, tmp_path: Path, case: str) -> None:
    edit, message = FORBIDDEN[case]
    error = refusal(host, changed(tmp_path / "b", edit))
    assert error.startswith("nftables.nft ")
    assert message in error


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_engine_writes_is_allowed(host: Host, tmp_path: Path, seed: int) -> None:
    fields = [
        {},
        {"nodePortAddresses": ["0.0.0.0/0", "::/0"]},
        {"nftables": {"masqueradeAll": True, "masqueradeBit": 31}},
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "br-1.2_3"}},
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
        {"featureGates": {"KubeProxyNFTablesLocalhostNodePorts": True}, "nodePortAddresses": ["localhost"]},
    ][seed % 6]
    one, two = (state(*cluster(10, number), **fields) for number in (seed, seed + 50))
    assert host.akp("check", write(one, tmp_path / "a")).code == 0
    # A delta that cannot be taken is looked at all the same.
    result = host.akp("check", write_change(one, two, tmp_path / "d"))
    assert (result.code, result.json.get("need")) == (0, "full"), result.stdout


def test_source_ranges_may_be_anything_that_a_range_can_be(host: Host, tmp_path: Path) -> None:
    ranges = ["127.0.0.0/8", "10.0.0.1/32", "::1/128", "172.18.0.0/16"]
    balanced = service(type="LoadBalancer", ingress=("198.51.100.9", "2001:db8::9"), loadBalancerSourceRanges=ranges)
    assert host.akp("check", write(state(balanced, slice_of("web", "10.244.1.1")), tmp_path / "a")).code == 0
