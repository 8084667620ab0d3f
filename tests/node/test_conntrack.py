"""Which UDP flows an apply ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.node import bundles
from tests.node.host import Host
from tests.node.shims import path_with, shim
from tests.node.test_confirm import shop

FRONTENDS = """\
ipv4 10.96.0.10 53 10.244.1.3:53,10.244.2.4:53
ipv4 * 30053 10.244.1.3:53,10.244.2.4:53
ipv4 10.96.0.11 53 -
ipv4 * 30054 -
ipv6 fd00:96::10 53 [fd00:244::3]:53
ipv6 * 30053 [fd00:244::3]:53
"""

# Who asked what, who answers, and whether the flow survives.
FLOWS = [
    ("10.0.0.5", "10.96.0.10", 53, "10.244.1.3", 53, True, "to an endpoint that is still there"),
    ("10.0.0.6", "10.96.0.10", 53, "10.244.9.9", 53, False, "to an endpoint that went"),
    ("10.0.0.7", "10.96.0.10", 53, "10.244.9.9", 53, False, "another to that endpoint"),
    ("10.0.0.8", "10.96.0.10", 53, "10.244.1.3", 5353, False, "to another port of an endpoint"),
    ("10.0.0.5", "10.96.0.10", 54, "10.244.9.9", 53, True, "to another port of the service IP"),
    ("10.0.0.5", "10.96.0.11", 53, "10.96.0.11", 53, False, "to a service without endpoints, not translated"),
    ("10.0.0.5", "10.96.0.99", 53, "10.244.9.9", 53, True, "to a service that was deleted"),
    ("10.0.0.5", "192.0.2.1", 30053, "10.244.9.9", 53, False, "to a node port, endpoint went"),
    ("10.0.0.5", "192.0.2.2", 30053, "10.244.2.4", 53, True, "to a node port, endpoint is there"),
    ("10.0.0.5", "198.51.100.7", 30053, "198.51.100.7", 30053, False, "to a foreign host at that port"),
    ("10.0.0.5", "192.0.2.1", 30054, "10.244.9.9", 53, True, "to a node port without endpoints"),
    ("10.0.0.5", "8.8.8.8", 53, "8.8.8.8", 53, True, "to the outside"),
    ("fd00::5", "fd00:96::10", 53, "fd00:244::3", 53, True, "IPv6, endpoint is there"),
    ("fd00::5", "fd00:96::10", 53, "fd00:244::9", 53, False, "IPv6, endpoint went"),
    ("fd00::5", "fd00::1", 30053, "fd00:244::9", 53, False, "IPv6 node port, endpoint went"),
]
TCP = ("10.0.0.5", "10.96.0.10", 53, "10.244.9.9", 53)


def insert(host: Host) -> None:
    """Put the flows into the kernel's table; each has its own client port."""
    for i, (client, target, port, answerer, answer_port, _, _) in enumerate(FLOWS):
        host.sh(
            f"conntrack -I -p udp -s {client} -d {target} --sport {4000 + i} --dport {port} -t 600"
            f" --reply-src {answerer} --reply-dst {client} --reply-port-src {answer_port} --reply-port-dst {4000 + i}"
        )
    client, target, port, answerer, answer_port = TCP
    host.sh(
        f"conntrack -I -p tcp -s {client} -d {target} --sport 5000 --dport {port} -t 600 --state ESTABLISHED"
        f" --reply-src {answerer} --reply-dst {client} --reply-port-src {answer_port} --reply-port-dst 5000"
    )


def surviving(host: Host) -> set[str]:
    listing = host.sh("conntrack -L -f ipv4; conntrack -L -f ipv6")
    ports = {int(port) for port in re.findall(r"^udp .*? sport=(\d+)", listing, re.M)}
    assert re.search(r"^tcp .* sport=5000 ", listing, re.M), "a TCP flow is never touched"
    return {flow[6] for i, flow in enumerate(FLOWS) if 4000 + i in ports}


STAY = {flow[6] for flow in FLOWS if flow[5]}
ALL = {flow[6] for flow in FLOWS}


@pytest.mark.parametrize("shell", ["dash", "busybox"])
def test_flows_answered_from_where_the_bundle_no_longer_sends_them_end(
    new_host: Callable[..., Host], tmp_path: Path, shell: str
) -> None:
    host = new_host("nft", shell)
    insert(host)
    bundle = bundles.simple(tmp_path / "a", conntrack_udp=FRONTENDS)
    assert host.akp("check", bundle).json["flows"] == len(ALL - STAY)
    assert surviving(host) == ALL
    assert host.apply(bundle)["flows"] == len(ALL - STAY)
    assert surviving(host) == STAY


def test_flows_are_left_alone_while_the_frontends_stay_the_same(nft_host: Host, tmp_path: Path) -> None:
    nft_host.apply(bundles.simple(tmp_path / "a", conntrack_udp=FRONTENDS))
    insert(nft_host)
    answer = nft_host.apply(bundles.simple(tmp_path / "b", bundles.shop("10.244.7.7:1"), conntrack_udp=FRONTENDS))
    assert (answer["changed"], answer["flows"]) == (True, 0)
    assert surviving(nft_host) == ALL
    answer = nft_host.apply(bundles.simple(tmp_path / "c", conntrack_udp=FRONTENDS + "ipv4 10.96.0.12 53 -\n"))
    assert answer["flows"] == len(ALL - STAY)
    assert surviving(nft_host) == STAY


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("what", ["-L", "-D"])
def test_flows_that_could_not_be_ended_are_ended_by_the_next_run(
    nft_host: Host, tmp_path: Path, mode: str, what: str
) -> None:
    host = nft_host
    old, new = (shop(mode, f"10.244.1.{i}") for i in (1, 2))
    write_bundle(old, tmp_path / "old")
    write_bundle(new, tmp_path / "new")
    write_delta(delta(old, new), new, tmp_path / "delta")
    frontend = next(
        line.split()[1]
        for line in (tmp_path / "old" / "conntrack.udp").read_text().splitlines()
        if "10.244.1.1:" in line
    )
    for change in ("new", "delta"):
        host.apply(tmp_path / "old")
        host.sh(
            f"conntrack -I -p udp -s 10.0.0.5 -d {frontend} --sport 4000 --dport 53 -t 600"
            " --reply-src 10.244.1.1 --reply-dst 10.0.0.5 --reply-port-src 53 --reply-port-dst 4000"
        )
        tools = shim(host, tmp_path / f"bin-{change}", "conntrack", f"*{what}*")
        failed = host.akp("apply", tmp_path / change, PATH=path_with(host, tools))
        assert (failed.code, failed.json["asBefore"]) == (4, False), failed.stdout + failed.stderr
        assert "UDP flows" in failed.json["warnings"][0]
        assert host.akp("status").json["state"] == "partial"
        assert host.apply(tmp_path / "new")["flows"] == 1
        assert "sport=4000" not in host.sh("conntrack -L -p udp")
        assert host.akp("status").json["state"] == "applied"


def test_flows_that_ended_by_themselves_are_no_failure(nft_host: Host, tmp_path: Path) -> None:
    insert(nft_host)
    gone = '"$real" "$@"; "$real" -D -p udp >/dev/null; exit 0'
    tools = shim(nft_host, tmp_path / "bin", "conntrack", "*-L*ipv4*", gone)
    bundle = bundles.simple(tmp_path / "a", conntrack_udp=FRONTENDS)
    result = nft_host.akp("apply", bundle, PATH=path_with(nft_host, tools))
    assert (result.code, result.json["warnings"]) == (0, []), result.stderr


def test_a_kernel_that_shows_nobody_its_flows_is_a_warning(nft_host: Host, tmp_path: Path) -> None:
    """As one without ctnetlink answers; a run that would fail each time helps nobody."""
    refuse = "echo 'conntrack v1.4.7 (conntrack-tools): Operation failed: Invalid argument' >&2; exit 1"
    tools = shim(nft_host, tmp_path / "bin", "conntrack", "*-L*", refuse, calls="-ge 1")
    bundle = bundles.simple(tmp_path / "a", conntrack_udp=FRONTENDS)
    result = nft_host.akp("apply", bundle, PATH=path_with(nft_host, tools))
    assert result.code == 0, result.stdout
    assert "the UDP flows of ipv4 cannot be listed" in result.json["warnings"]
    assert nft_host.akp("status").json["state"] == "applied"


def test_an_apply_that_was_killed_before_it_ended_flows_does_it_the_next_time(nft_host: Host, tmp_path: Path) -> None:
    """The rules are in the kernel, the record is not: as after a crash between the two."""
    bundle = bundles.simple(tmp_path / "a", conntrack_udp=FRONTENDS)
    nft_host.apply(bundle)
    insert(nft_host)
    (nft_host.state / "record").unlink()
    assert nft_host.apply(bundle)["flows"] == len(ALL - STAY)
    assert surviving(nft_host) == STAY
