"""The signer called automation may move endpoints, and nothing else; whoever wants more needs an approver."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.node.bundles import replace_file
from tests.node.host import Host
from tests.node.signing import allow, etc_of, new_key, release_of, sign_bundle
from tests.unit.build import Object, port, render, service, slice_of

WEB: Object = {
    "type": "LoadBalancer",
    "ingress": ("203.0.113.9", "2001:db8::9"),
    "externalIPs": ["198.51.100.7"],
    "ipFamilies": ["IPv4", "IPv6"],
    "clusterIPs": ["10.96.7.7", "fd00:10:96::77"],
}


def state(mode: str, *endpoints: str, ports: Any = None, **fields: Any) -> State:
    """A Service of every sort of frontend, with these endpoints."""
    wanted = [port(nodePort=30080)] if ports is None else ports
    slices = [slice_of("web", *endpoints)] if endpoints else []
    return render(service(ports=wanted, **{**WEB, **fields}), *slices, mode=mode)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    return {name: new_key(tmp_path / "keys", name) for name in ("alice", "automation")}


@pytest.fixture(params=["iptables-dash", "nftables-busybox"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def host(mode: str, new_host: Callable[..., Host], keys: dict[str, Path]) -> Host:
    made = new_host("nft", mode.split("-")[1])
    allow(etc_of(made), keys["alice"], keys["automation"])
    return made


@pytest.fixture
def bundle(mode: str, tmp_path: Path, keys: dict[str, Path]) -> Callable[..., Path]:
    """Writes and signs a bundle."""

    def make(*endpoints: str, by: str = "automation", **fields: Any) -> Path:
        directory = tmp_path / "bundle"
        write_bundle(state(mode.split("-")[0], *endpoints, **fields), directory)
        sign_bundle(directory, keys[by])
        return directory

    return make


def rewrite(bundle: Path, name: str, text: str, key: Path) -> None:
    """Put another text into a bundle, and sign that."""
    sign_bundle(replace_file(bundle, name, text), key)


def refused(host: Host, bundle: Path) -> str:
    before = host.rules()
    result = host.akp("apply", bundle)
    assert result.code == 2, result.stdout
    assert host.rules() == before
    return str(result.json["error"])


def test_endpoints_come_and_go_without_an_approver(host: Host, bundle: Callable[..., Path]) -> None:
    assert "a first bundle needs an approver" in refused(host, bundle("10.244.1.1"))
    host.apply(bundle("10.244.1.1", by="alice"))
    for endpoints in (("10.244.1.1", "10.244.1.2"), (), ("10.244.1.3",)):
        assert host.apply(bundle(*endpoints))["changed"] is True, endpoints


def test_anything_else_needs_one(host: Host, bundle: Callable[..., Path]) -> None:
    host.apply(bundle("10.244.1.1", by="alice"))
    changes: list[tuple[Object, str]] = [
        ({"externalIPs": ["198.51.100.8"]}, "it serves "),
        ({"externalIPs": []}, "it serves "),
        ({"ingress": ("203.0.113.10", "2001:db8::9")}, "it serves "),
        ({"ports": [port(nodePort=30081)]}, "it serves "),
        ({"ports": [port(nodePort=30080), port(81, "more")]}, "it serves "),
        ({"ports": []}, "it no longer serves "),
        ({"sessionAffinity": "ClientIP"}, "it serves "),
        ({"clusterIPs": ["10.96.7.8", "fd00:10:96::77"], "clusterIP": "10.96.7.8"}, "it serves "),
    ]
    for fields, reason in changes:
        error = refused(host, bundle("10.244.1.1", **fields))
        assert "signed by automation alone, which may change endpoints only: " + reason in error, fields
    assert host.apply(bundle("10.244.1.1", by="alice", **changes[0][0]))["changed"] is True


def test_a_bundle_that_lies_about_what_its_rules_do_is_found_out(
    host: Host, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    honest = bundle("10.244.1.1", by="alice")
    said = (honest / "services.jsonl").read_text()
    host.apply(honest)
    lies: list[Object] = [
        {"externalIPs": ["198.51.100.8"]},
        {"ingress": ("203.0.113.10", "2001:db8::9")},
        {"ingress": ("203.0.113.9", "2001:db8::10")},
        {"ports": [port(nodePort=30081)]},
        {"ports": [port(81, nodePort=30080)]},
    ]
    for fields in lies:
        liar = bundle("10.244.1.1", **fields)
        rewrite(liar, "services.jsonl", said, keys["automation"])
        assert "its rules know the destination " in refused(host, liar), fields


def test_what_stands_behind_the_endpoints_claims_nothing(
    host: Host, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    """Once, that was taken for what the applied bundle serves, by the bundle after it."""
    host.apply(bundle("10.244.1.1", by="alice"))
    for claim in ('"externalIPs":["198.51.100.8"]', '"nodePort":30081'):
        first = bundle("10.244.1.1")
        said = re.sub(r'("endpoints":.*\])}', rf"\1,{claim}}}", (first / "services.jsonl").read_text())
        assert claim in said
        rewrite(first, "services.jsonl", said, keys["automation"])
        host.akp("apply", first)
    second = bundle("10.244.1.1", externalIPs=["198.51.100.8"], ports=[port(nodePort=30081)])
    rewrite(second, "services.jsonl", said, keys["automation"])
    assert "its rules know the destination " in refused(host, second)


# Rules that all packets meet; a file, and what one of its lines begins with.
FRAME = {
    "iptables": [
        ("iptables.rules", "-A KUBE-FIREWALL "),
        ("ip6tables.rules", "-A KUBE-FORWARD -m conntrack --ctstate INVALID"),
        ("iptables.rules", "-I INPUT "),
    ],
    "nftables": [
        ("nftables.nft", "add rule ip kube-proxy firewall-check "),
        ("nftables.nft", "add rule ip6 kube-proxy cluster-ips-check "),
    ],
}


def test_what_all_packets_meet_stays(
    host: Host, mode: str, bundle: Callable[..., Path], keys: dict[str, Path], tmp_path: Path
) -> None:
    kind = mode.split("-")[0]
    host.apply(bundle("10.244.1.1", by="alice"))
    for name, start in FRAME[kind]:
        made = bundle("10.244.1.2")
        lines = (made / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(start)]
        assert len(kept) < len(lines), start
        rewrite(made, name, "".join(kept), keys["automation"])
        assert "it lacks what the applied bundle has for all packets: " + start.strip() in refused(host, made)

    # A delta says as much by a chain that it writes anew.
    old, new = state(kind, "10.244.1.1"), state(kind, "10.244.1.2")
    write_delta(delta(old, new), new, tmp_path / "delta")
    name, before, chain = {
        "iptables": ("iptables.rules", "*filter\n", ":KUBE-FORWARD - [0:0]\n"),
        "nftables": ("nftables.nft", "", "flush chain ip kube-proxy firewall-check\n"),
    }[kind]
    text = (tmp_path / "delta" / name).read_text()
    rewrite(tmp_path / "delta", name, text.replace(before, before + chain, 1), keys["automation"])
    assert "it lacks what the applied bundle has for all packets: " in refused(host, tmp_path / "delta")


def test_health_checks_are_answered_where_they_were(
    host: Host, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    local = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 31000}
    host.apply(bundle("10.244.1.1", by="alice", **local))
    assert host.apply(bundle("10.244.1.1", "10.244.1.2", **local))["changed"] is True, "the number of endpoints is free"
    text = (bundle("10.244.1.1", **local) / "health.conf").read_text()
    assert "check ipv4 31000 shop web 1\n" in text
    for other in (
        text + "listen ipv4 0.0.0.1\n",
        text + "check ipv4 6443 shop web 1\n",
        text.replace("check ipv4 31000 shop web", "check ipv4 31000 shop cart"),
        text.replace("check ipv4 31000 shop web 1\n", ""),
    ):
        made = bundle("10.244.1.1", **local)
        rewrite(made, "health.conf", other, keys["automation"])
        assert "health check: " in refused(host, made), other


def test_nobody_is_locked_out_by_a_counter_of_next_year(
    host: Host, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    made = bundle("10.244.1.1", by="alice")
    host.apply(made)
    sign_bundle(made, keys["automation"], release=release_of(made, after=int(time.time() + 10 * 86400) * 1000))
    assert "is more than a day ahead" in refused(host, made)


def test_what_was_approved_meanwhile_counts(host: Host, bundle: Callable[..., Path], tmp_path: Path) -> None:
    """A bundle that was looked at before it waited for the lock is looked at again."""
    host.apply(bundle("10.244.1.1", by="alice"))
    shutil.copytree(host.state, tmp_path / "before")
    host.apply(bundle("10.244.1.1", by="alice", externalIPs=[]))
    shutil.copytree(host.state, tmp_path / "after")
    shutil.copytree(tmp_path / "before", host.state, dirs_exist_ok=True)
    waiting = bundle("10.244.1.1", "10.244.1.2")
    holder = ["flock", str(host.state / "lock"), "sh", "-c", "echo held; read x"]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held, ThreadPoolExecutor(1) as pool:
        assert held.stdout
        assert held.stdin
        assert held.stdout.readline() == b"held\n"
        result = pool.submit(host.akp, "apply", waiting)
        time.sleep(4)
        assert not result.done()
        shutil.copytree(tmp_path / "after", host.state, dirs_exist_ok=True)
        held.stdin.close()
    assert result.result().code == 2, result.result().stdout
    assert "which may change endpoints only: it serves " in result.result().json["error"]


CLUSTER_IP = '-A KUBE-SERVICES -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80'
SVC = "KUBE-SVC-67NZLRHBNDSAWJRO"
# Lines that are good to the guard, and claim what nobody approved.
CLAIMS = {
    "iptables": [
        '-A KUBE-SERVICES -d 8.8.8.8/32 -m comment --comment "x" -j KUBE-NODEPORTS',
        f"{CLUSTER_IP} -j {SVC}".replace("tcp", "udp"),
        f"{CLUSTER_IP} -j {SVC}".replace("-d 10.96.7.7", "! -d 10.96.7.7"),
        f"{CLUSTER_IP} -j {SVC}".replace("-d 10.96.7.7/32", "-d 10.0.0.0/8"),
        f"{CLUSTER_IP} -j {SVC}".replace("-d 10.96.7.7/32 ", "").replace("--dport 80", "--dport 30080"),
        f"{CLUSTER_IP} -j {SVC}".replace("--dport 80", "--dport 80:90"),
        f'-A KUBE-SERVICES -m comment --comment "x -d 10.96.7.7/32 -p tcp --dport 80 y" -j {SVC}',
        f'-A KUBE-SERVICES -m comment --comment "x\\" -d 10.96.7.7/32 -p tcp --dport 80 \\"y" -j {SVC}',
    ],
    "nftables": [
        "add element ip kube-proxy nodeport-ips { 8.8.8.8 }",
        "add element ip kube-proxy cluster-ips { 8.8.8.8 }",
        'add element ip kube-proxy service-ips { 10.96.7.7 . udp . 80 comment "x" : drop }',
        "add rule ip kube-proxy services ip daddr 8.8.8.8 goto service-KHN6ECMT-shop/web/tcp/http",
        "add rule ip kube-proxy services goto service-KHN6ECMT-shop/web/tcp/http",
    ],
}


def test_one_line_more_in_the_rules_is_found_out(
    host: Host, mode: str, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    host.apply(bundle("10.244.1.1", by="alice"))
    kind = mode.split("-")[0]
    name, before = {"iptables": ("iptables.rules", "# all services\n"), "nftables": ("nftables.nft", "# IPv6\n")}[kind]
    for line in CLAIMS[kind]:
        made = bundle("10.244.1.1", "10.244.1.2")
        text = (made / name).read_text()
        assert text.count(before) == 1
        text = text.replace(before, f"{before}{line}\n" if kind == "iptables" else f"{line}\n{before}")
        rewrite(made, name, text, keys["automation"])
        error = refused(host, made)
        assert "signed by automation alone, which may change endpoints only: " in error, line


def test_deltas_are_looked_at_as_well(host: Host, mode: str, keys: dict[str, Path], tmp_path: Path) -> None:
    kind = mode.split("-")[0]
    one, two = state(kind, "10.244.1.1"), state(kind, "10.244.1.1", "10.244.1.2")
    more = state(kind, "10.244.1.1", "10.244.1.2", externalIPs=["198.51.100.8"])
    write_bundle(one, tmp_path / "one")
    sign_bundle(tmp_path / "one", keys["alice"])
    host.apply(tmp_path / "one")
    for name, old, new in (("good", one, two), ("bad", two, more)):
        write_delta(delta(old, new), new, tmp_path / name)
        sign_bundle(tmp_path / name, keys["automation"])
    assert host.apply(tmp_path / "good")["changed"] is True
    assert "it serves " in refused(host, tmp_path / "bad")

    # What goes must be there: an invented frontend that goes and comes would be served from then on.
    three = state(kind, "10.244.1.1", "10.244.1.3")
    write_delta(delta(two, three), three, tmp_path / "invented")
    name = "services.jsonl.diff"
    line = next(line for line in (tmp_path / "invented" / name).read_text().splitlines() if line.startswith("-"))
    line = line.replace("10.96.7.7", "10.96.7.8").replace("fd00:10:96::77", "fd00:10:96::78")
    text = f"{(tmp_path / 'invented' / name).read_text()}{line}\n+{line[1:]}\n"
    rewrite(tmp_path / "invented", name, text, keys["automation"])
    assert "which would go" in refused(host, tmp_path / "invented")


def test_a_bundle_that_nobody_signed_yet_can_be_looked_at(host: Host, bundle: Callable[..., Path]) -> None:
    made = bundle("10.244.1.1", by="alice")
    for file in made.glob("release*"):
        file.unlink()
    assert host.akp("check", "--unsigned", made).json["changed"] is True
    assert "unsigned" in str(host.akp("apply", "--unsigned", made).json["error"])
