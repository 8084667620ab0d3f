"""userspace mode on a host: turns, affinity, pods that refuse or are silent, held connections, deltas."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.manifest import manifest_text

from tests.controlplane import netns
from tests.unit.build import port, service, slice_of

from .signing import allow, etc_of, new_key, sign_bundle
from .userspace import DARK, DNS, NODE, PODS, REFUSING, World, dns, web


def test_pods_are_taken_in_turn_behind_cluster_ip_and_node_port(world: World) -> None:
    entry = [port(nodePort=30080)]
    answer = world.apply(*web(*PODS[:2], type="NodePort", ports=entry), *dns(PODS[2]))
    assert answer["proxies"] == {"haproxy": "started", "nginx": "started"}
    assert Counter(world.call() for _ in range(20)) == {PODS[0]: 10, PODS[1]: 10}
    assert Counter(world.call(NODE, 30080) for _ in range(4)) == {PODS[0]: 2, PODS[1]: 2}
    assert world.ask() == PODS[2]
    again = world.apply(*web(*PODS[:2], type="NodePort", ports=entry), *dns(PODS[2]))
    assert (again["changed"], again["proxies"]) == (False, {})
    less = world.apply(*web(*PODS[:2]))
    assert less["proxies"]["nginx"] == "stopped"
    assert not world.runs("nginx")


def test_a_client_keeps_its_pod_until_it_was_away_for_long_enough(world: World) -> None:
    sticky = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 2}}}
    world.apply(*web(*PODS, **sticky))
    first = {world.call() for _ in range(12)}
    assert len(first) == 1
    later = set()
    for _ in range(3):
        time.sleep(2.5)
        later.add(world.call())
    assert len(later) > 1


def test_the_first_calls_of_a_client_share_a_pod_even_if_they_come_at_once(world: World) -> None:
    world.apply(*web(*PODS, sessionAffinity="ClientIP"))
    calls = [world.open() for _ in range(60)]
    assert len({call.recv(100) for call in calls}) == 1
    for call in calls:
        call.close()


@pytest.mark.soak
def test_a_client_keeps_its_pod_over_a_reload(world: World) -> None:
    sticky = {"sessionAffinity": "ClientIP"}
    world.apply(*web(*PODS, **sticky))
    first = world.call()
    time.sleep(7)  # a younger HAProxy has nothing to hand over yet
    more = [service("more", clusterIP="10.96.7.8"), slice_of("more", PODS[0])]
    assert world.apply(*web(*PODS, **sticky), *more)["proxies"] == {"haproxy": "reloaded"}
    time.sleep(1)
    assert {world.call() for _ in range(9)} == {first}


def test_a_pod_that_refuses_and_one_that_is_silent_cost_no_call(world: World) -> None:
    world.apply(*web(PODS[0], REFUSING))
    assert {world.call() for _ in range(20)} == {PODS[0]}
    world.apply(*web(PODS[0], DARK))
    assert {world.call() for _ in range(10)} == {PODS[0]}


def test_a_service_without_pods_closes_at_once(world: World) -> None:
    world.apply(*web())
    began = time.monotonic()
    assert world.call() == ""
    assert time.monotonic() - began < 2


def test_connections_outlive_changes_of_endpoints_and_reloads(world: World) -> None:
    world.apply(*web(*PODS[:2]))
    held = [world.open() for _ in range(40)]
    for connection in held:
        assert connection.recv(100)
    assert world.apply(*web(*PODS))["proxies"] == {"haproxy": "changed"}
    assert {world.call() for _ in range(9)} == set(PODS)
    assert world.apply(*web(PODS[2]))["proxies"] == {"haproxy": "changed"}
    assert {world.call() for _ in range(6)} == {PODS[2]}
    more = [service("more", clusterIP="10.96.7.8"), slice_of("more", PODS[0])]
    assert world.apply(*web(PODS[2]), *more)["proxies"] == {"haproxy": "reloaded"}
    assert world.call("10.96.7.8") == PODS[0]
    for number, connection in enumerate(held):
        connection.sendall(f"{number}\n".encode())
        assert connection.recv(100).decode() == f"{number}\n"
        connection.close()


def test_endpoints_come_and_go_by_deltas(world: World) -> None:
    states = [web(*PODS[:1], *more) for more in ((), (PODS[1],), (PODS[2],), (PODS[1], PODS[2]))]
    world.apply(*states[0])
    pid = world.pid("haproxy")
    with world.open() as held:
        assert held.recv(100)
        for had, has in itertools.pairwise(states):
            answer = world.host.apply(world.delta(had, has))
            assert (answer["proxies"], answer["changed"]) == ({"haproxy": "changed"}, True)
        assert {world.call() for _ in range(9)} == set(PODS)
        held.sendall(b"still here\n")
        assert held.recv(100) == b"still here\n"
    assert world.host.akp("status", "--verify").json["drift"] == 0
    # The whole of what is in force is nothing new, to the last line.
    assert world.apply(*states[3])["changed"] is False
    assert world.pid("haproxy") == pid
    assert world.host.akp("rollback").code == 0
    assert {world.call() for _ in range(9)} == {PODS[0], PODS[2]}


def test_automation_may_move_endpoints_by_deltas_and_sign_nothing_else(world: World, tmp_path: Path) -> None:
    keys = {name: new_key(tmp_path / "keys", name) for name in ("alice", "automation")}
    allow(etc_of(world.host), *keys.values())
    first, second, third = (web(pod) for pod in PODS)
    sign_bundle(made := world.bundle(*first), keys["alice"])
    world.host.apply(made)
    sign_bundle(made := world.delta(first, second), keys["automation"])
    world.host.apply(made)
    assert world.call() == PODS[1]
    sign_bundle(made := world.bundle(*third), keys["automation"])
    refused = world.host.akp("apply", made)
    assert (refused.code, "haproxy.cfg is another" in refused.json["error"]) == (2, True), refused.stdout
    assert world.call() == PODS[1]
    (etc_of(world.host) / "allowed_signers").unlink()


def test_what_deltas_made_comes_back_after_the_proxy_was_killed(world: World) -> None:
    world.apply(*web(PODS[0]))
    world.host.apply(world.delta(web(PODS[0]), web(PODS[1])))
    os.kill(world.pid("haproxy"), signal.SIGKILL)
    assert world.host.akp("status").json["state"] == "partial"
    refused = world.host.akp("apply", world.delta(web(PODS[1]), web(PODS[2])))
    assert refused.json["need"] == "full"
    assert world.host.akp("restore").code == 0
    assert {world.call() for _ in range(3)} == {PODS[1]}
    assert world.host.akp("status", "--verify").json["drift"] == 0


def test_a_pod_that_comes_back_while_connections_are_held_needs_no_reload(world: World) -> None:
    world.apply(*web(*PODS[:2]))
    held = [world.open() for _ in range(4)]
    for pods in (PODS[:1], PODS[:2], PODS[1:2], PODS[:2]):
        assert world.apply(*web(*pods))["proxies"] == {"haproxy": "changed"}
        assert {world.call() for _ in range(6)} == set(pods)
    for connection in held:
        connection.close()


def test_settings_of_the_node_decide_on_checks_and_on_how_long_old_processes_live(world: World) -> None:
    settings = etc_of(world.host) / "node.conf"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("proxy_check often\n")
    assert world.host.akp("apply", world.bundle(*web(*PODS))).code == 2
    settings.write_text("proxy_check 0\nproxy_connect 250\nproxy_hours 2\nproxy_reloads 2\n")
    world.apply(*web(*PODS[:2]))
    written = (world.host.proxies / "haproxy.cfg").read_text()
    for line in ("timeout connect 250ms", "hard-stop-after 2h", "mworker-max-reloads 2", "default-server weight 1"):
        assert f"    {line}\n" in written
    assert world.apply(*web(PODS[0], PODS[2], REFUSING))["proxies"] == {"haproxy": "changed"}
    assert {world.call() for _ in range(9)} == {PODS[0], PODS[2]}
    with world.open() as held:
        assert held.recv(100)
        for number in range(3):
            held.sendall(b"still here\n")
            assert held.recv(100) == b"still here\n"
            more = [service(f"more-{i}", clusterIP=f"10.96.8.{i + 1}") for i in range(number + 1)]
            assert world.apply(*web(PODS[0]), *more)["proxies"] == {"haproxy": "reloaded"}
        assert held.recv(100) == b"", "two reloads are all that it may outlive"


def test_udp_flows_to_a_port_that_is_no_longer_the_services_end(world: World) -> None:
    """Another range moves the proxy port; a flow of a client would go on leading to the old one."""
    world.apply(*dns(PODS[0]))
    with netns.entered(world.host.name), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.connect((DNS, 53))
        client.send(b"?")
        assert client.recv(100).decode() == PODS[0]
        moved = world.host.apply(world.bundle(*dns(PODS[1]), portRange="20100-20100"))
        assert moved["flows"] == 1
        client.send(b"?")
        assert client.recv(100).decode() == PODS[1]
        assert world.apply(*dns(PODS[0]))["flows"] == 1
        changed = world.apply(*dns(PODS[2]))
        assert changed["flows"] == 0, "endpoints are the proxy's business"
        client.send(b"?")
        assert client.recv(100).decode() == PODS[2]


def test_rollback_and_cleanup_leave_what_was_there(world: World) -> None:
    reserved = "sysctl -n net.ipv4.ip_local_reserved_ports"
    world.host.sh("sysctl -qw net.ipv4.ip_local_reserved_ports=8080")
    before = world.host.kernel()
    world.apply(*web(PODS[0]))
    assert world.host.sh(reserved) == "8080,20000-27999\n"
    world.apply(*web(PODS[1]))
    assert world.host.akp("rollback").code == 0
    assert world.call() == PODS[0]
    assert world.host.akp("cleanup").code == 0
    assert world.host.kernel() == before
    assert world.host.sh(reserved) == "8080\n"
    assert not world.runs("haproxy")
    assert not world.host.proxies.exists()


def spoiled(bundle: Path, name: str, line: str) -> Path:
    """A bundle with one more line in a file, and a manifest that says so."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    file = bundle / name
    file.write_text(f"{file.read_text()}{line}\n")
    contents = [(each, (bundle / each).read_bytes()) for each in manifest.pop("files")]
    manifest.pop("apiVersion")
    (bundle / "manifest.json").write_text(manifest_text(manifest, contents))
    return bundle


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("haproxy.cfg", "program x"),
        ("haproxy.cfg", "    external-check command /bin/sh"),
        ("haproxy.cfg", "    server x 127.0.0.1:22"),
        ("haproxy.cfg", "    server x [::1]:22"),
        ("haproxy.cfg", "    bind *:22"),
        ("haproxy.cfg", "    server x 10.244.1.1:80 check"),
        ("haproxy.cfg", "global"),
        ("nginx.conf", "load_module /tmp/x.so;"),
        ("nginx.conf", "    proxy_pass 127.0.0.1:22;"),
        ("nginx.conf", "    server 127.0.0.1:53;"),
        ("nginx.conf", "    listen 53 udp;"),
        ("nginx.conf", "error_log /etc/passwd;"),
        ("ports.map", "tcp 22 shop/web"),
    ],
)
def test_files_of_proxies_hold_nothing_but_frontends_and_endpoints(world: World, name: str, line: str) -> None:
    refused = world.host.akp("check", spoiled(world.bundle(*web(PODS[0]), *dns(PODS[0])), name, line))
    assert refused.code == 2
    assert f"{name} line" in refused.json["error"]
