"""A host in userspace mode: real HAProxy and nginx behind real rules, and pods that answer, refuse or say nothing."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.controlplane import netns
from tests.unit.build import Object, node, port, render, service, slice_of

from .host import Host

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


def state(*objects: Object, **fields: Any) -> State:
    conntrack = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    return render(*objects, node("n1", NODE, "fd77::11"), mode="userspace", conntrack=conntrack, **fields)


@dataclass
class World:
    """A host with pods at addresses of its own."""

    host: Host
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def bundle(self, *objects: Object, **fields: Any) -> Path:
        """A bundle of the host for these objects."""
        path = self.host.directory / f"bundle-{next(self.names)}"
        write_bundle(state(*objects, **fields), path)
        return path

    def delta(self, had: list[Object], has: list[Object]) -> Path:
        """What leads from some objects to others."""
        path = self.host.directory / f"delta-{next(self.names)}"
        write_delta(delta(state(*had), state(*has)), state(*has), path)
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


@contextmanager
def world(host: Host) -> Iterator[World]:
    """A host with three pods, one address that refuses and one that is silent."""
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
