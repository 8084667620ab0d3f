"""The signer called automation may move endpoints, and nothing else; whoever wants more needs an approver."""

from __future__ import annotations

import hashlib
import json
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

from tests.lab.program import PROGRAMS
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
    made.mode = mode.split("-")[0]
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


@pytest.fixture
def change(tmp_path: Path, keys: dict[str, Path]) -> Callable[..., Path]:
    """Writes and signs a delta."""

    def make(old: State, new: State, by: str = "automation") -> Path:
        directory = tmp_path / "delta"
        shutil.rmtree(directory, ignore_errors=True)
        write_delta(delta(old, new), new, directory)
        sign_bundle(directory, keys[by])
        return directory

    return make


def rewrite(bundle: Path, name: str, text: str, key: Path) -> None:
    """Put another text into a bundle, and sign that."""
    sign_bundle(replace_file(bundle, name, text), key)


def refused(host: Host, bundle: Path) -> str:
    before = host.rules()
    result = host.akp("apply", bundle, program=PROGRAMS[host.mode])
    assert result.code == 2, result.stdout
    assert host.rules() == before
    return str(result.json["error"])


BEYOND = "signed by automation alone, which may change endpoints only: "
CHANGES: list[Object] = [
    {"externalIPs": ["198.51.100.8"]},
    {"externalIPs": []},
    {"ingress": ("203.0.113.10", "2001:db8::9")},
    {"ports": [port(nodePort=30081)]},
    {"ports": [port(nodePort=30080), port(81, "more")]},
    {"ports": []},
    {"clusterIPs": ["10.96.7.8", "fd00:10:96::77"], "clusterIP": "10.96.7.8"},
    {"loadBalancerSourceRanges": ["192.0.2.0/24"]},
]


def test_endpoints_come_and_go_without_an_approver(host: Host, bundle: Callable[..., Path]) -> None:
    assert "a first bundle needs an approver" in refused(host, bundle("10.244.1.1"))
    host.apply(bundle("10.244.1.1", by="alice"))
    for endpoints in (("10.244.1.1", "10.244.1.2"), (), ("10.244.1.3",)):
        assert host.apply(bundle(*endpoints))["changed"] is True, endpoints


def test_anything_else_needs_one(host: Host, bundle: Callable[..., Path]) -> None:
    host.apply(bundle("10.244.1.1", by="alice"))
    for fields in CHANGES:
        assert BEYOND in refused(host, bundle("10.244.1.1", **fields)), fields
    assert host.apply(bundle("10.244.1.1", by="alice", **CHANGES[0]))["changed"] is True


def test_deltas_are_looked_at_as_well(
    host: Host, mode: str, change: Callable[..., Path], bundle: Callable[..., Path]
) -> None:
    kind = mode.split("-")[0]
    one, two, none = state(kind, "10.244.1.1"), state(kind, "10.244.1.1", "10.244.1.2"), state(kind)
    host.apply(bundle("10.244.1.1", by="alice"))
    for old, new in ((one, two), (two, none), (none, two)):
        answer = host.apply(change(old, new))
        assert (answer["changed"], "need" in answer) == (True, False), answer
    for fields in CHANGES:
        assert BEYOND in refused(host, change(two, state(kind, "10.244.1.1", "10.244.1.2", **fields))), fields


def test_an_approved_delta_is_what_counts_from_then_on(
    host: Host, mode: str, change: Callable[..., Path], bundle: Callable[..., Path]
) -> None:
    kind = mode.split("-")[0]
    more: Object = {"externalIPs": ["198.51.100.7", "198.51.100.8"]}
    host.apply(bundle("10.244.1.1", by="alice"))
    answer = host.apply(change(state(kind, "10.244.1.1"), state(kind, "10.244.1.1", **more), by="alice"))
    assert answer["deltas"] == 1, answer
    one, none = state(kind, "10.244.1.1", **more), state(kind, **more)
    for old, new in ((one, none), (none, one)):
        assert host.apply(change(old, new))["changed"] is True
    # A whole bundle cannot be compared with a log: it is refused, the old frontends and the new ones alike.
    assert BEYOND in refused(host, bundle("10.244.1.1", "10.244.1.2"))
    assert BEYOND in refused(host, bundle("10.244.1.1", "10.244.1.2", **more))
    # Until an approved one has taken the place of snapshot and log.
    host.apply(bundle("10.244.1.1", by="alice", **more))
    assert host.apply(bundle("10.244.1.1", "10.244.1.2", **more))["changed"] is True


# A file that automation may bring, and a line that is good to the guard and claims what nobody approved.
CLUSTER_IP = '-d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80'
SVC = "KUBE-SVC-67NZLRHBNDSAWJRO"
CLAIMS = {
    "iptables": [
        ("iptables-2-dispatch.rules", '-A KUBE-SERVICES -d 8.8.8.8/32 -m comment --comment "x" -j KUBE-NODEPORTS'),
        ("iptables-2-dispatch.rules", f"-A KUBE-SERVICES {CLUSTER_IP} -j {SVC}".replace("tcp", "udp")),
        ("iptables-2-dispatch.rules", f"-A KUBE-SERVICES {CLUSTER_IP} -j {SVC}".replace("7.7/", "7.6/")),
        ("iptables-2-dispatch.rules", f"-A KUBE-SERVICES {CLUSTER_IP} -j {SVC}".replace("--dport 80", "--dport 443")),
    ],
    "nftables": [
        (
            "nftables-2-dispatch.nft",
            "add element ip kube-proxy service-ips { 10.96.7.9 . tcp . 80 : goto service-KHN6ECMT-shop/web/tcp/http }",
        ),
        (
            "nftables-2-dispatch.nft",
            'add element ip kube-proxy no-endpoint-services { 8.8.8.8 . udp . 53 comment "x/y:z" : goto reject-chain }',
        ),
        (
            "nftables-2-dispatch.nft",
            "add element ip kube-proxy service-nodeports { tcp . 30081 : goto external-KHN6ECMT-shop/web/tcp/http }",
        ),
    ],
}


def with_line(kind: str, text: str, line: str) -> str:
    """The text of a file with one line more, where it belongs."""
    if kind != "iptables":
        return f"{text}{line}\n"
    chain = " ".join(line.split()[:2])
    first = next(each for each in text.splitlines() if each.startswith(f"{chain} "))
    return text.replace(first, f"{line}\n{first}", 1)


def test_one_line_more_in_the_rules_is_found_out(
    host: Host, mode: str, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    kind = mode.split("-")[0]
    host.apply(bundle("10.244.1.1", by="alice"))
    for name, line in CLAIMS[kind]:
        made = bundle("10.244.1.1", "10.244.1.2")
        rewrite(made, name, with_line(kind, (made / name).read_text(), line), keys["automation"])
        error = refused(host, made)
        assert BEYOND in error, line
        assert "not approved: " in error, line


# Rules that all packets meet; a file, and what one of its lines begins with.
FRAME = {
    "iptables": [
        ("iptables-3-frontends.rules", "-A KUBE-FORWARD -m conntrack --ctstate INVALID"),
        ("ip6tables-3-frontends.rules", "-A KUBE-POSTROUTING -m mark ! --mark"),
    ],
    "nftables": [("nftables-3-frontends.nft", "add rule ip kube-proxy firewall-check ")],
}


def test_what_all_packets_meet_stays(host: Host, mode: str, bundle: Callable[..., Path], keys: dict[str, Path]) -> None:
    kind = mode.split("-")[0]
    host.apply(bundle("10.244.1.1", by="alice"))
    for name, start in FRAME[kind]:
        made = bundle("10.244.1.1")
        lines = (made / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(start)]
        assert len(kept) < len(lines), start
        rewrite(made, name, "".join(kept), keys["automation"])
        assert BEYOND in refused(host, made), start


def test_files_that_automation_must_not_bring(
    host: Host, mode: str, bundle: Callable[..., Path], change: Callable[..., Path], keys: dict[str, Path]
) -> None:
    kind = mode.split("-")[0]
    host.apply(bundle("10.244.1.1", by="alice"))
    for name, text in {
        "akp-node": "#!/bin/sh\ntouch /tmp/escaped\n",
        "sysctls.conf": "net.ipv4.ip_forward = 0\n",
        "health.conf": "period 30\nlisten ipv4 0.0.0.0\ncheck ipv4 31000 shop web\n",
    }.items():
        made = bundle("10.244.1.1", "10.244.1.2")
        rewrite(made, name, text, keys["automation"])
        assert f"{BEYOND}{name} is another" in refused(host, made), name
        made = change(state(kind, "10.244.1.1"), state(kind, "10.244.1.2"))
        rewrite(made, name, text, keys["automation"])
        assert f"{BEYOND}{name} came" in refused(host, made), name


def test_only_the_number_of_endpoints_is_free_in_health_checks(host: Host, bundle: Callable[..., Path]) -> None:
    local = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 31000}
    host.apply(bundle("10.244.1.1", by="alice", **local))
    assert host.apply(bundle("10.244.1.1", "10.244.1.2", **local))["changed"] is True
    assert BEYOND in refused(host, bundle("10.244.1.1", externalTrafficPolicy="Local", healthCheckNodePort=31001))


def test_nobody_is_locked_out_by_a_counter_of_next_year(
    host: Host, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    made = bundle("10.244.1.1", by="alice")
    host.apply(made)
    sign_bundle(made, keys["automation"], release=release_of(made, after=int(time.time() + 10 * 86400) * 1000))
    assert "is more than a day ahead" in refused(host, made)


def test_what_was_approved_meanwhile_counts(host: Host, bundle: Callable[..., Path], tmp_path: Path) -> None:
    """A bundle that waited for the lock is compared with what is recorded then."""
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
    assert BEYOND in result.result().json["error"]


def test_a_bundle_that_nobody_signed_yet_can_be_looked_at(host: Host, bundle: Callable[..., Path]) -> None:
    made = bundle("10.244.1.1", by="alice")
    for file in made.glob("release*"):
        file.unlink()
    assert host.akp("check", "--unsigned", made).json["changed"] is True
    assert "unsigned" in str(host.akp("apply", "--unsigned", made).json["error"])


# ipvs mode: what the node decides from files and the record alone. No kernel here has ip_vs: what is allowed ends
# later, with another code.


@pytest.fixture(params=["dash", "busybox"])
def ipvs_host(
    request: pytest.FixtureRequest, new_host: Callable[..., Host], keys: dict[str, Path], tmp_path: Path
) -> Host:
    """A host with a recorded bundle of ipvs mode that has one endpoint."""
    made = new_host("nft", request.param)
    made.mode = "ipvs"
    allow(etc_of(made), keys["alice"], keys["automation"])
    directory = tmp_path / "recorded"
    write_bundle(state("ipvs", "10.244.1.1"), directory)
    text = (directory / "manifest.json").read_bytes()
    digest, manifest = hashlib.sha256(text).hexdigest(), json.loads(text)
    shutil.copytree(directory, made.state / "bundles" / digest)
    (made.state / "record").write_text(
        f"snapshot={digest}\ndeltas=0\ngeneration={manifest['generation']}\nmode=ipvs\nnode=n1\nflavour=nft\n"
        f"time=1\nports=1\nendpoints=1\nunset=\nkept={digest} 0 {manifest['generation']}\n"
    )
    return made


def judged(host: Host, bundle: Path, key: Path) -> str:
    """Why automation's signature is not enough, or nothing."""
    sign_bundle(bundle, key)
    result = host.akp("check", bundle, program=PROGRAMS["ipvs"])
    error = str(result.json.get("error", ""))
    return error if BEYOND in error else ""


def test_ipvs_endpoints_come_and_go_and_nothing_else(
    ipvs_host: Host, change: Callable[..., Path], keys: dict[str, Path], tmp_path: Path
) -> None:
    old = state("ipvs", "10.244.1.1")
    for endpoints in (("10.244.1.1", "10.244.1.2"), (), ("10.244.1.3",)):
        new = state("ipvs", *endpoints)
        write_bundle(new, tmp_path / "whole")
        assert judged(ipvs_host, tmp_path / "whole", keys["automation"]) == "", endpoints
        assert judged(ipvs_host, change(old, new), keys["automation"]) == "", endpoints
    for fields in CHANGES:
        new = state("ipvs", "10.244.1.1", **fields)
        write_bundle(new, tmp_path / "whole")
        assert judged(ipvs_host, tmp_path / "whole", keys["automation"]), fields
        assert judged(ipvs_host, change(old, new), keys["automation"]), fields


def test_ipvs_real_servers_are_of_recorded_virtual_servers(
    ipvs_host: Host, change: Callable[..., Path], keys: dict[str, Path]
) -> None:
    """Others on the host have virtual servers, too."""
    for line in ("-a -t 192.0.2.1:80 -r 10.244.1.1:8080 -m -w 1", "-d -u 10.96.7.7:80 -r 10.244.1.1:8080"):
        made = change(state("ipvs", "10.244.1.1"), state("ipvs", "10.244.1.2"))
        name = "ipvs-2-endpoints.rules"
        rewrite(made, name, f"{(made / name).read_text()}{line}\n", keys["automation"])
        assert "not approved: real servers of " in judged(ipvs_host, made, keys["automation"]), line


def test_ipvs_rules_differ_by_the_marker_only(
    ipvs_host: Host, change: Callable[..., Path], keys: dict[str, Path], tmp_path: Path
) -> None:
    name = "iptables.rules"
    rule = "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n"
    for new in (state("ipvs", "10.244.1.2"), state("ipvs")):
        write_bundle(new, tmp_path / "whole")
        for made in (tmp_path / "whole", change(state("ipvs", "10.244.1.1"), new)):
            text = (made / name).read_text()
            # Without the rule all packets are masqueraded.
            other = (
                text.replace(rule, "") if rule in text else text.replace("*nat\n", "*nat\n:KUBE-POSTROUTING - [0:0]\n")
            )
            assert other != text
            rewrite(made, name, other, keys["automation"])
            assert name in judged(ipvs_host, made, keys["automation"])
