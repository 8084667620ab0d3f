"""Deltas on a real kernel: what they change, when they are not taken, and what is recorded."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.lab.program import PROGRAMS
from tests.node.bundles import replace_file
from tests.node.host import Host
from tests.node.nftables import NO_SYSCTLS
from tests.unit.build import node, port, render, service, slice_of
from tests.unit.clusters import cluster

UDP = port(53, "dns", "UDP")


@pytest.fixture(params=["nftables-busybox", "iptables-dash"])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host of each mode and of each shell; its mode is the first word of the parameter."""
    mode, shell = request.param.split("-")
    made = new_host("nft", shell)
    made.mode = mode
    return made


def state(host: Host, *objects: Any, **fields: Any) -> State:
    return render(*objects, **{"mode": host.mode, "conntrack": NO_SYSCTLS, **fields})


def shop(host: Host, *ips: str, extra: tuple[Any, ...] = (), **fields: Any) -> State:
    web = service(type="NodePort", ports=[port(nodePort=31080), UDP])
    cart = service("cart", clusterIP="10.96.7.8", sessionAffinity="ClientIP")
    slices = slice_of("web", *ips, ports=[port(8080), UDP]), slice_of("cart", *ips)
    return state(host, node("n1", "172.18.0.11"), web, cart, *slices, *extra, **fields)


def write(made: State, directory: Path) -> Path:
    write_bundle(made, directory)
    return directory


def change(old: State, new: State, directory: Path) -> Path:
    write_delta(delta(old, new), new, directory)
    return directory


def kernel(host: Host) -> list[str]:
    """Everything that the kernel holds, in no order."""
    rules = host.sh("nft list ruleset; nfacct list | sed 's/.* = //'; iptables-legacy-save; ip6tables-legacy-save")
    return sorted(line.strip(" \t,") for line in rules.splitlines() if not line.startswith("#"))


def recorded(host: Host) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (host.state / "record").read_text().splitlines())


# ------------------------------------------------------------------ taken


@pytest.mark.parametrize("seed", range(5))
def test_deltas_one_after_another_lead_where_the_whole_bundle_leads(
    host: Host, new_host: Callable[..., Host], tmp_path: Path, seed: int
) -> None:
    states = [state(host, *cluster(7, seed * 10 + i)) for i in range(4)]
    host.apply(write(states[0], tmp_path / "0"))
    for i, (old, new) in enumerate(itertools.pairwise(states), 1):
        answer = host.apply(change(old, new, tmp_path / f"d{i}"))
        assert (answer["changed"], answer["generation"], answer["previous"]) == (True, new.generation, old.generation)
    alone = new_host()
    alone.apply(write(states[-1], tmp_path / "last"))
    assert kernel(host) == kernel(alone)
    answer = host.akp("status", "--verify").json
    assert (answer["state"], answer["generation"], answer["drift"]) == ("applied", states[-1].generation, 0)


def test_a_delta_is_as_small_as_the_change(host: Host, tmp_path: Path) -> None:
    many = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(200)]
    slices = [slice_of(f"s{i}", f"10.244.2.{i}") for i in range(1, 200)]
    old, new = (state(host, *many, *slices, slice_of("s0", ip)) for ip in ("10.244.3.1", "10.244.3.2"))
    whole, small = write(old, tmp_path / "a"), change(old, new, tmp_path / "d")
    sizes = {each: sum(f.stat().st_size for f in each.iterdir() if f.name != "akp-node") for each in (whole, small)}
    assert sizes[small] < 6000 < sizes[whole] / 10
    host.apply(whole)
    host.apply(small)
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_delta_that_was_applied_changes_nothing(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    bundle = change(old, new, tmp_path / "d")
    assert host.akp("check", bundle).json["changed"] is True
    assert host.apply(bundle)["changed"] is True
    before = kernel(host)
    answer = host.apply(bundle)
    assert (answer["changed"], answer["generation"]) == (False, new.generation)
    assert host.akp("check", bundle).json["changed"] is False
    assert kernel(host) == before


def test_the_whole_bundle_of_where_a_delta_led_changes_nothing(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    host.apply(change(old, new, tmp_path / "d"))
    whole = write(new, tmp_path / "b")
    assert host.akp("check", whole).json["changed"] is False
    assert host.apply(whole)["changed"] is False
    digest = hashlib.sha256((whole / "manifest.json").read_bytes()).hexdigest()
    assert (recorded(host)["snapshot"], recorded(host)["deltas"]) == (digest, "0")


def test_stale_udp_flows_of_changed_services_go(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    flow = "-p udp --orig-src 10.244.9.9 --orig-dst 10.96.7.7 --sport 4000 --dport 53 --reply-src 10.244.1.1"
    host.sh(f"conntrack -I {flow} --reply-dst 10.244.9.9 --reply-port-src 53 --reply-port-dst 4000 --timeout 600")
    assert host.apply(change(old, new, tmp_path / "d"))["flows"] == 1
    assert "10.96.7.7" not in host.sh("conntrack -L -p udp 2>/dev/null")


def test_sysctls_of_a_delta_are_set(host: Host, tmp_path: Path) -> None:
    old = shop(host, "10.244.1.1")
    new = shop(host, "10.244.1.1", conntrack={**NO_SYSCTLS, "udpTimeout": "77s"})
    host.apply(write(old, tmp_path / "a"))
    assert host.apply(change(old, new, tmp_path / "d"))["sysctls"] == 1
    assert host.sh("cat /proc/sys/net/netfilter/nf_conntrack_udp_timeout").strip() == "77"
    assert host.akp("status", "--verify").json["drift"] == 0


def test_how_many_service_ports_may_go_is_limited(host: Host, tmp_path: Path) -> None:
    old = shop(host, "10.244.1.1")
    new = state(host, node("n1", "172.18.0.11"), service(ports=[UDP]), slice_of("web", "10.244.1.1", ports=[UDP]))
    host.apply(write(old, tmp_path / "a"))
    bundle = change(old, new, tmp_path / "d")
    refused = host.akp("apply", "--max-removed", "50", bundle)
    assert refused.code == 2
    assert "2 of 3 service ports would be removed, more than 50 %" in refused.json["error"]
    assert "--max-removed 100 (kube_proxy_max_removed_percent)" in refused.json["error"]
    assert host.akp("apply", "--max-removed", "90", bundle).json["changed"] is True


def test_an_answer_that_nobody_reads_leaves_nothing_undone(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    shell = "busybox ash" if host.shell == "busybox" else "dash"
    for made, directory in (old, write(old, tmp_path / "a")), (new, change(old, new, tmp_path / "d")):
        host.sh(f"{shell} {PROGRAMS[host.mode]} apply {directory} 2>/dev/null | :", check=False)
        status = host.akp("ask").json["status"]
        assert (status["state"], status["generation"]) == ("applied", made.generation)
        assert not {"queued", "unsettled"} & {file.name for file in host.state.iterdir()}
        assert [*(host.directory / "run").iterdir()] == [*host.state.glob("in.*")] == []


def test_a_delta_comes_on_stdin_too(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    whole = write(old, tmp_path / "a")
    host.apply(whole)
    bundle = change(old, new, tmp_path / "d")
    packed = tmp_path / "packed"
    files = sorted(each for each in bundle.iterdir())
    packed.write_text(
        "".join(f"== {each.name} {each.read_text().count(chr(10))}\n{each.read_text()}" for each in files) + "==\n"
    )
    subprocess.run(["gzip", packed], check=True)
    answer = host.sh(f"sh {whole}/akp-node apply - <{packed}.gz")
    assert json.loads(answer)["generation"] == new.generation


# ------------------------------------------------------------------ not taken

ELSEWHERE: dict[str, Callable[[Host], object]] = {
    "nothing was applied": lambda host: host.akp("cleanup"),
    "the kernel was flushed": lambda host: host.sh("nft flush ruleset"),
    "the marker is another": lambda host: host.sh(
        f"nft rename chain ip kube-proxy gen-{recorded(host)['generation']} gen-{'0' * 64}"
        if host.mode == "nftables"
        else f"$ipt -t nat -E KUBE-PROXY-GEN-{recorded(host)['generation'][:13].upper()} KUBE-PROXY-GEN-{'0' * 13}"
    ),
    "a run was cut short": lambda host: (host.state / "unsettled").touch(),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_delta_without_its_base_asks_for_the_whole_bundle(host: Host, tmp_path: Path, case: str) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    ELSEWHERE[case](host)
    before = kernel(host)
    bundle = change(old, new, tmp_path / "d")
    for verb in ("check", "apply"):
        result = host.akp(verb, bundle)
        assert result.code == 0, result.stdout + result.stderr
        assert (result.json["ok"], result.json["changed"], result.json["need"]) == (True, False, "full")
        assert result.json["reason"]
    assert kernel(host) == before
    host.apply(write(new, tmp_path / "b"))
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_delta_of_another_generation_asks_for_the_whole_bundle(host: Host, tmp_path: Path) -> None:
    one, two, three = (shop(host, f"10.244.1.{i}") for i in (1, 2, 3))
    host.apply(write(one, tmp_path / "a"))
    answer = host.apply(change(two, three, tmp_path / "d"))
    assert answer["need"] == "full"
    assert answer["generation"] == one.generation


def test_a_delta_of_another_mode_asks_for_the_whole_bundle(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    host.mode = "iptables" if host.mode == "nftables" else "nftables"
    other = change(shop(host, "10.244.1.1"), shop(host, "10.244.1.2"), tmp_path / "d")
    assert host.apply(other)["need"] == "full"
    host.mode = "iptables" if host.mode == "nftables" else "nftables"
    assert host.apply(change(old, new, tmp_path / "e"))["changed"] is True


def test_a_delta_that_the_kernel_refuses_leaves_the_base_and_asks_for_the_whole_bundle(
    host: Host, tmp_path: Path
) -> None:
    old = shop(host, "10.244.1.1", extra=(service("gone", clusterIP="10.96.7.9"), slice_of("gone", "10.244.1.9")))
    new = shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    # Somebody's rule holds a chain (iptables), or an element is gone that the delta deletes (nftables).
    if host.mode == "nftables":
        host.sh("nft delete element ip kube-proxy cluster-ips '{ 10.96.7.9 }'")
    else:
        rules = (host.state / "bundles" / recorded(host)["snapshot"] / "iptables-1-endpoints.rules").read_text()
        group = rules.partition("# shop/gone:http tcp\n:")[2]
        host.sh(f"iptables -t nat -A PREROUTING -s 192.0.2.1 -j {group.split()[0]}")
    before = kernel(host)
    result = host.akp("apply", change(old, new, tmp_path / "d"))
    assert result.code == 0, result.stdout + result.stderr
    assert result.json["need"] == "full"
    assert "the kernel refused" in result.json["reason"]
    assert kernel(host) == before
    assert recorded(host)["generation"] == old.generation
    assert recorded(host)["deltas"] == "0"
    assert list(host.state.glob("bundles/*/log/*")) == list(host.state.glob("in.*")) == []
    # which finds out what is wrong
    host.apply(write(new, tmp_path / "b"))
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_delta_that_was_tampered_with_is_refused(host: Host, tmp_path: Path) -> None:
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    bundle = change(old, new, tmp_path / "d")
    with (bundle / "services.jsonl.diff").open("a") as file:
        file.write("+{}\n")
    assert host.akp("apply", bundle).code == 2


# ------------------------------------------------------------------ what is recorded


def test_rollback_goes_back_one_delta_at_a_time(host: Host, tmp_path: Path) -> None:
    states = [shop(host, f"10.244.1.{i}") for i in range(1, 4)]
    host.apply(write(states[0], tmp_path / "a"))
    kernels = [kernel(host)]
    for i in (1, 2):
        host.apply(change(states[i - 1], states[i], tmp_path / f"d{i}"))
        kernels.append(kernel(host))
    told = host.akp("rollback", "--dry-run").json
    assert (told["changed"], told["generation"]) == (True, states[1].generation)
    assert kernel(host) == kernels[2]
    assert host.akp("rollback").json["generation"] == states[1].generation
    assert kernel(host) == kernels[1]
    assert host.akp("rollback").json["generation"] == states[0].generation
    assert kernel(host) == kernels[0]
    assert host.akp("rollback", states[2].generation[:12]).json["changed"] is True
    assert kernel(host) == kernels[2]


def test_restore_after_a_reboot_brings_back_what_deltas_led_to(host: Host, tmp_path: Path) -> None:
    one, two, three = (shop(host, f"10.244.1.{i}", f"10.244.2.{i}") for i in (1, 2, 3))
    host.apply(write(one, tmp_path / "a"))
    host.apply(change(one, two, tmp_path / "d1"))
    host.apply(change(two, three, tmp_path / "d2"))
    before = kernel(host)
    host.sh("nft flush ruleset; nfacct flush")
    assert host.akp("restore").json["generation"] == three.generation
    assert kernel(host) == before


def test_many_deltas_are_replaced_by_a_whole_bundle_that_leaves_the_kernel_alone(host: Host, tmp_path: Path) -> None:
    states = [shop(host, f"10.244.1.{i}") for i in (1, 2)]
    whole = write(states[0], tmp_path / "a")
    host.apply(whole)
    there = change(states[0], states[1], tmp_path / "there")
    back = change(states[1], states[0], tmp_path / "back")
    program = tmp_path / "akp-node"
    program.write_text((whole / "akp-node").read_text().replace("MAX_LOG=1000 ", "MAX_LOG=6 "))
    for i in range(6):
        result = host.akp("apply", back if i % 2 else there, program=program)
        assert result.json["changed"] is True, result.stdout + result.stderr
    assert host.akp("apply", there, program=program).json["need"] == "full"
    before = kernel(host)
    assert recorded(host)["deltas"] == "6"
    assert host.akp("status", "--verify").json["drift"] == 0
    assert host.apply(whole)["changed"] is False
    assert (recorded(host)["deltas"], kernel(host)) == ("0", before)
    assert host.akp("status", "--verify").json["drift"] == 0


def test_cleanup_after_deltas_leaves_nothing(host: Host, tmp_path: Path) -> None:
    before = host.kernel()
    old, new = shop(host, "10.244.1.1"), shop(host, "10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    host.apply(change(old, new, tmp_path / "d"))
    assert host.akp("cleanup").json["changed"] is True
    assert host.kernel() == before
    assert not host.state.exists()


def test_a_delta_does_not_write_a_chain_that_kubelet_may_fill(nft_host: Host, tmp_path: Path) -> None:
    old, new = shop(nft_host, "10.244.1.1"), shop(nft_host, "10.244.1.2")
    nft_host.apply(write(old, tmp_path / "old"))
    made = change(old, new, tmp_path / "new")
    text = "*filter\n:KUBE-FIREWALL - [0:0]\nCOMMIT\n"
    result = nft_host.akp("apply", replace_file(made, "iptables-3-frontends.rules", text))
    assert (result.code, "KUBE-FIREWALL" in result.json["error"]) == (2, True), result.stdout
