"""Servers and calls in any namespace, from one process: a socket stays in the namespace in which it was made.

A server answers with the address it was reached at and the address it sees as its caller. It listens on all addresses
at once, so a namespace that owns a whole range by a local route answers for each of them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct

from tests.controlplane import netns

IP_PKTINFO, IPV6_FREEBIND, IP_FREEBIND = 8, 78, 15
REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET}


def make(namespace: str, protocol: str, ipv6: bool) -> socket.socket:
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    with netns.entered(namespace):
        made = socket.socket(family, socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM)
    made.setblocking(False)
    if ipv6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made


def _freebind(sock: socket.socket, ipv6: bool) -> None:
    sock.setsockopt(*((socket.IPPROTO_IPV6, IPV6_FREEBIND) if ipv6 else (socket.IPPROTO_IP, IP_FREEBIND)), 1)


class Servers:
    """Echo servers on any number of ports; `close` ends them all."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []

    def serve(self, namespace: str, protocol: str, port: int, address: str | None = None) -> None:
        """Answer on a port, in both families; on all addresses unless one is given."""
        for ipv6 in (False, True):
            if address is not None and (":" in address) != ipv6:
                continue
            made = make(namespace, protocol, ipv6)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _freebind(made, ipv6)  # to answer from addresses that are ours by a route only
            made.bind((address or ("::" if ipv6 else "0.0.0.0"), port))
            if protocol == "TCP":
                made.listen(512)
                self._loop.add_reader(made, self._accept, made)
            else:
                made.setsockopt(
                    *((socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO) if ipv6 else (socket.IPPROTO_IP, IP_PKTINFO)), 1
                )
                self._loop.add_reader(made, self._answer, made)
            self._sockets.append(made)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, peer = listening.accept()
            with connection:
                address, port = connection.getsockname()[:2]
                connection.send(f"{address} {port} {peer[0]}".encode())
        except OSError:
            pass  # the caller has given up meanwhile

    def _answer(self, sock: socket.socket) -> None:
        try:
            _, ancillary, _, peer = sock.recvmsg(64, 256)
            port = sock.getsockname()[1]
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
                    address = socket.inet_ntop(socket.AF_INET6, data[:16])
                    reply = [(level, kind, data[:16] + struct.pack("I", 0))]
                elif level == socket.IPPROTO_IP and kind == IP_PKTINFO:
                    address = socket.inet_ntop(socket.AF_INET, data[8:12])
                    reply = [(level, kind, struct.pack("I", 0) + data[8:12] + b"\0\0\0\0")]
                else:
                    continue
                # From the address that was called, or the answer would look like a stranger's.
                sock.sendmsg([f"{address} {port} {peer[0]}".encode()], reply, 0, peer)
        except OSError:
            pass

    def close(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()


async def call(
    namespace: str, protocol: str, destination: str, port: int, source: str | None = None, timeout: float = 0.5
) -> str:
    """One connection; says who answered and whom that one saw, or how it failed."""
    ipv6 = ":" in destination
    loop = asyncio.get_running_loop()
    with make(namespace, protocol, ipv6) as sock:
        try:
            if source is not None:
                _freebind(sock, ipv6)
                sock.bind((source, 0))
            async with asyncio.timeout(timeout):
                await loop.sock_connect(sock, (destination, port))
                if protocol == "UDP":
                    await loop.sock_sendall(sock, b"who?")
                answer = (await loop.sock_recv(sock, 200)).decode()
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return "refused" if error.errno in REFUSED else "unreachable"
    if not answer:
        return "refused"
    address, answered, seen = answer.split()
    return f"{address} {answered} saw {seen}"
