"""userspace mode on a host: real HAProxy and nginx behind real rules, and pods that answer, refuse or say nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.manifest import manifest_text
from agentless_kube_proxy.bundle.write import write_bundle

from tests.controlplane import netns
from tests.unit.build import Object, node, port, render, service, slice_of

from .host import Host
from .test_faults import hiding

PODS = ("10.244.1.1", "10.244.1.2", "10.244.1.3")
REFUSING, DARK = "10.244.1.8", "10.244.1.9"
NODE, VIP, DNS = "192.168.77.11", "10.96.7.7", "10.96.0.10"
# Each pod tells its address, and then says again what it is told.
SERVER = """
import asyncio, sys
class Datagrams(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, sender):
        self.transport.sendto(self.transport.get_extra_info("sockname")[0].encode(), sender)
async def serve(reader, writer):
    writer.write(writer.get_extra_info("sockname")[0].encode() + b"\\n")
    while line := await reader.readline():
        writer.write(line)
    writer.close()
async def main():
    for ip in sys.argv[1:]:
        await asyncio.start_server(serve, ip, 8080)
        await asyncio.get_running_loop().create_datagram_endpoint(Datagrams, (ip, 5353))
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def web(*ips: str, **spec: Any) -> list[Object]:
    return [service(**spec), slice_of("web", *ips)]


def dns(*ips: str) -> list[Object]:
    entry = [port(53, "dns", "UDP")]
    made = service("dns", "kube-system", clusterIP=DNS, ports=entry)
    return [made, slice_of("dns", *ips, namespace="kube-system", ports=[port(5353, "dns", "UDP")])]


@dataclass
class World:
    """A host with pods at addresses of its own."""

    host: Host
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def bundle(self, *objects: Object, **fields: Any) -> Path:
        """A bundle of the host for these objects."""
        made = node("n1", NODE, "fd77::11")
        conntrack = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
        path = self.host.directory / f"bundle-{next(self.names)}"
        write_bundle(render(*objects, made, mode="userspace", conntrack=conntrack, **fields), path)
        return path

    def apply(self, *objects: Object) -> dict[str, Any]:
        return self.host.apply(self.bundle(*objects))

    def open(self, ip: str = VIP, number: int = 80) -> socket.socket:
        connection = netns.connect(self.host.name, ip, number, timeout=10)
        connection.settimeout(10)
        return connection

    def call(self, ip: str = VIP, number: int = 80) -> str:
        """The pod that answers; empty if the connection is closed without an answer."""
        with self.open(ip, number) as connection:
            return connection.recv(100).decode().strip()

    def ask(self) -> str:
        """The pod that answers a datagram."""
        with netns.entered(self.host.name), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.settimeout(5)
            sender.sendto(b"?", (DNS, 53))
            return sender.recv(100).decode()

    def pid(self, proxy: str) -> int:
        return int((self.host.proxies / f"run/{proxy}.pid").read_text())

    def runs(self, proxy: str) -> bool:
        try:
            return Path(f"/proc/{self.pid(proxy)}/stat").read_text().split()[2] != "Z"
        except FileNotFoundError:
            return False


@pytest.fixture
def world(new_host: Callable[..., Host]) -> Iterator[World]:
    """A host with three pods, one address that refuses and one that is silent."""
    host = new_host()
    host.mode = "userspace"
    own = (NODE, *PODS, REFUSING, DARK)
    host.sh("; ".join([f"ip addr add {ip}/32 dev lo" for ip in own] + ["ip route add 10.96.0.0/12 dev lo"]))
    host.sh(f"$ipt -I INPUT -d {DARK} -p tcp --dport 8080 -j DROP")
    pods = subprocess.Popen(
        netns.command(host.name, [sys.executable, "-c", SERVER, *PODS]), stdout=subprocess.PIPE, text=True
    )
    assert pods.stdout is not None
    assert pods.stdout.readline() == "ready\n"
    found = World(host)
    yield found
    host.akp("cleanup")
    pods.terminate()
    pods.wait()
    assert not any(map(found.runs, ("haproxy", "nginx"))), "a proxy outlived its host"


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


def test_a_killed_proxy_is_seen_and_comes_back(world: World) -> None:
    world.apply(*web(*PODS))
    os.kill(world.pid("haproxy"), signal.SIGKILL)
    assert world.host.akp("status").json["state"] == "partial"
    assert world.host.akp("restore").code == 0
    assert world.host.akp("status").json["state"] == "applied"
    assert world.call() in PODS


def test_a_port_that_another_program_has_is_named_and_all_stays_as_it_was(world: World) -> None:
    before = world.host.rules()
    with netns.entered(world.host.name), socket.create_server(("0.0.0.0", 24919)):
        refused = world.host.akp("apply", world.bundle(*web(*PODS)))
    assert (refused.code, refused.json["asBefore"]) == (4, True)
    assert "port 24919 is taken by another program" in refused.json["error"]
    assert world.host.rules() == before
    assert not world.host.proxies.exists()


@pytest.mark.parametrize(("tool", "package"), [("haproxy", "haproxy"), ("nginx", "nginx")])
def test_a_proxy_that_is_not_installed_is_named(world: World, tool: str, package: str) -> None:
    refused = world.host.akp("apply", world.bundle(*web(*PODS), *dns(PODS[0])), prefix=hiding(tool))
    assert (refused.code, refused.json["error"]) == (3, f"missing tool: {tool} (package {package})")


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
