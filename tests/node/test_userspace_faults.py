"""userspace mode when something goes wrong: killed proxies and runs, taken ports, full disks, missing tools."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.controlplane import netns
from tests.unit.build import Object, service, slice_of

from .shims import path_with, shim
from .test_faults import hiding
from .userspace import PODS, World, dns, web

SECOND = "10.96.7.8"


def more() -> list[Object]:
    """Another Service, for which HAProxy has to read its file anew."""
    return [service("more", clusterIP=SECOND), slice_of("more", PODS[0])]


def test_a_killed_proxy_is_seen_and_comes_back(world: World) -> None:
    world.apply(*web(*PODS))
    os.kill(world.pid("haproxy"), signal.SIGKILL)
    assert world.host.akp("status").json["state"] == "partial"
    assert world.host.akp("restore").code == 0
    assert world.host.akp("status").json["state"] == "applied"
    assert world.call() in PODS


def test_a_killed_nginx_is_seen_and_comes_back(world: World) -> None:
    world.apply(*web(*PODS), *dns(PODS[0]))
    os.kill(world.pid("nginx"), signal.SIGKILL)
    assert world.host.akp("status").json["state"] == "partial"
    assert world.host.akp("restore").code == 0
    assert world.ask() == PODS[0]
    assert world.host.akp("status").json["state"] == "applied"


def test_a_killed_worker_is_started_anew_by_the_next_run(world: World) -> None:
    """HAProxy's first process ends all if a worker dies, and leaves the rest to what watches over it."""
    world.apply(*web(*PODS))
    master = world.pid("haproxy")
    (worker,) = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    while world.runs("haproxy"):
        pass
    assert world.host.akp("restore").code == 0
    assert world.call() in PODS


def test_a_run_that_is_killed_while_the_proxy_reloads_is_finished_by_the_next(world: World, tmp_path: Path) -> None:
    world.apply(*web(*PODS))
    with world.open() as held:
        assert held.recv(100)
        killing = shim(world.host, tmp_path / "bin", "iptables-nft-restore", "*", 'kill -9 "$PPID"; exit 1', "-ge 1")
        died = world.host.akp("apply", world.bundle(*web(*PODS), *more()), PATH=path_with(world.host, killing))
        assert died.code == -9
        assert {world.call() for _ in range(6)} == set(PODS), "the rules are the old ones, and the proxy serves both"
        assert world.apply(*web(*PODS), *more())["changed"] is True
        assert world.call(SECOND) == PODS[0]
        held.sendall(b"still here\n")
        assert held.recv(100) == b"still here\n"
    assert world.host.akp("status", "--verify").json["drift"] == 0


@pytest.mark.parametrize("kind", ["delta", "whole"])
@pytest.mark.parametrize(("tool", "words"), [("cp", "*/haproxy.cfg.new"), ("iptables-nft-restore", "*")])
def test_endpoints_of_a_run_that_is_killed_are_gone_after_the_next(
    world: World, tmp_path: Path, kind: str, tool: str, words: str
) -> None:
    """The rules and the record are the old ones then; HAProxy has the new endpoints, and its file perhaps."""
    world.apply(*web(PODS[0]))
    made = world.delta(web(PODS[0]), web(PODS[1])) if kind == "delta" else world.bundle(*web(PODS[1]))
    killing = shim(world.host, tmp_path / "bin", tool, words, 'kill -9 "$PPID"; exit 1')
    assert world.host.akp("apply", made, PATH=path_with(world.host, killing)).code == -9
    assert {world.call() for _ in range(4)} == {PODS[1]}
    assert world.host.akp("status").json["state"] == "partial"
    next_run = world.host.akp("restore").json if tool == "cp" else world.apply(*web(PODS[0]))
    assert (next_run["changed"], next_run["proxies"]) == (True, {"haproxy": "reloaded"})
    assert {world.call() for _ in range(4)} == {PODS[0]}
    assert world.host.akp("status", "--verify").json["drift"] == 0
    assert world.host.apply(made)["proxies"] == {"haproxy": "changed"}
    assert {world.call() for _ in range(4)} == {PODS[1]}


def test_a_proxy_that_a_killed_run_did_not_tell_of_its_new_file_is_told_by_the_next(
    world: World, tmp_path: Path
) -> None:
    world.apply(*web(PODS[0]), *dns(PODS[0]))
    killing = shim(world.host, tmp_path / "bin", "mv", "*/nginx.conf", '"$real" "$@"; kill -9 "$PPID"; exit 1')
    bundle = world.bundle(*web(PODS[0]), *dns(PODS[1]))
    assert world.host.akp("apply", bundle, PATH=path_with(world.host, killing)).code == -9
    assert world.ask() == PODS[0]
    assert world.host.apply(bundle)["proxies"]["nginx"] == "reloaded"
    assert world.ask() == PODS[1]
    assert world.host.akp("status", "--verify").json["drift"] == 0


def test_a_reload_that_fails_leaves_the_old_process_serving(world: World, tmp_path: Path) -> None:
    """The rules are refused once the proxy has its new file: it gets the old one back."""
    world.apply(*web(PODS[0]))
    failing = shim(world.host, tmp_path / "bin", "iptables-nft-restore", "*", "exit 1", "-ge 1")
    refused = world.host.akp("apply", world.bundle(*web(PODS[1]), *more()), PATH=path_with(world.host, failing))
    assert (refused.code, refused.json["asBefore"]) == (4, True), refused.stdout
    assert {world.call() for _ in range(4)} == {PODS[0]}
    assert world.host.akp("status", "--verify").json["drift"] == 0


def test_a_port_that_another_program_has_is_named_and_all_stays_as_it_was(world: World) -> None:
    before = world.host.rules()
    with netns.entered(world.host.name), socket.create_server(("0.0.0.0", 24919)):
        refused = world.host.akp("apply", world.bundle(*web(*PODS)))
    assert (refused.code, refused.json["asBefore"]) == (4, True)
    assert "port 24919 is taken by another program" in refused.json["error"]
    assert world.host.rules() == before
    assert not world.host.proxies.exists()


def test_a_port_that_is_taken_when_a_service_comes_changes_nothing(world: World) -> None:
    world.apply(*web(*PODS))
    bundle = world.bundle(*web(*PODS), *more())
    taken = next(line.split()[1] for line in (bundle / "ports.map").read_text().splitlines() if "more" in line)
    with netns.entered(world.host.name), socket.create_server(("0.0.0.0", int(taken))):
        refused = world.host.akp("apply", bundle)
    assert (refused.code, refused.json["asBefore"]) == (4, True)
    assert f"port {taken} is taken by another program" in refused.json["error"]
    assert world.host.akp("status", "--verify").json["drift"] == 0
    assert world.call() in PODS


def test_a_delta_that_the_rules_do_not_take_is_undone_in_the_proxy(world: World, tmp_path: Path) -> None:
    world.apply(*web(PODS[0]))
    failing = shim(world.host, tmp_path / "bin", "iptables-nft-restore", "*", "exit 1", "-eq 1")
    made = world.delta(web(PODS[0]), web(PODS[1]))
    refused = world.host.akp("apply", made, PATH=path_with(world.host, failing))
    assert (refused.json["need"], refused.json["asBefore"]) == ("full", True), refused.stdout
    assert {world.call() for _ in range(4)} == {PODS[0]}
    assert world.host.akp("status", "--verify").json["drift"] == 0
    world.host.apply(made)
    assert {world.call() for _ in range(4)} == {PODS[1]}


@pytest.mark.parametrize("where", ["run", "proxies"])
def test_a_full_disk_changes_nothing(world: World, where: str) -> None:
    world.apply(*web(*PODS))
    many = [service(f"many-{i}", clusterIP=f"10.96.8.{i}") for i in range(1, 200)]
    bundle, proxies = world.bundle(*web(*PODS), *many), world.host.proxies
    if where == "run":
        small = world.host.directory / "small"
        small.mkdir()
        script = f"mount -t tmpfs -o size=64k none {small}; export AKP_RUN={small}"
    else:
        # What the proxies write stays where it is.
        script = (
            f"d=$(mktemp -d); cp {proxies}/haproxy.cfg {proxies}/generation $d; mkdir $d/run;"
            f"mount --bind {proxies}/run $d/run; mount -t tmpfs -o size=12k none {proxies}; mkdir {proxies}/run;"
            f"mount --bind $d/run {proxies}/run; cp $d/haproxy.cfg $d/generation {proxies}"
        )
    prefix = ("unshare", "-m", "sh", "-euc", f'{script}; exec "$@"', "sh")
    refused = world.host.akp("apply", bundle, prefix=prefix)
    assert (refused.code in (3, 4), refused.json["asBefore"]) == (True, True), refused.stdout
    assert "is the disk full" in refused.json["error"]
    assert {world.call() for _ in range(6)} == set(PODS)
    assert world.host.akp("status", "--verify").json["drift"] == 0
    assert world.host.apply(bundle)["changed"] is True


@pytest.mark.parametrize(("tool", "package"), [("haproxy", "haproxy"), ("nginx", "nginx")])
def test_a_proxy_that_is_not_installed_is_named(world: World, tool: str, package: str) -> None:
    refused = world.host.akp("apply", world.bundle(*web(*PODS), *dns(PODS[0])), prefix=hiding(tool))
    assert (refused.code, refused.json["error"]) == (3, f"missing tool: {tool} (package {package})")
