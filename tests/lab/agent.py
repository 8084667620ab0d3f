"""The one process inside a lab: it serves and calls from any namespace of the lab, so that pods need no process.

A socket stays in the network namespace it was made in, whatever its owner does later; that is all the magic there is.
Requests come as one JSON object per connection on a Unix socket, answers go back the same way. Only the standard
library is used, and no other part of the lab, because it starts for every lab and should start fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any

CLONE_NEWNET = 0x40000000
IPPROTO = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP, "sctp": socket.IPPROTO_SCTP}
REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET}
UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EADDRNOTAVAIL}
libc = ctypes.CDLL(None, use_errno=True)


def socket_in(netns: str, proto: str, address: str) -> socket.socket:
    """A non-blocking socket of the address's family, made in the named network namespace ("" is the controller's)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_DGRAM if proto == "udp" else socket.SOCK_STREAM
    with contextlib.ExitStack() as stack:
        if netns:
            home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, home)
            there = os.open(f"/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, there)
            setns(there)
            stack.callback(setns, home)
        made = socket.socket(family, kind, IPPROTO[proto])
    made.setblocking(False)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made


def setns(fd: int) -> None:
    if libc.setns(fd, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Agent:
    """Servers and open connections by number, and one method for each request."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.servers: dict[int, tuple[socket.socket, set[asyncio.Task[None]]]] = {}
        self.connections: dict[int, socket.socket] = {}
        self.last = 0

    def number(self) -> int:
        self.last += 1
        return self.last

    async def do_serve(self, netns: str, proto: str, addresses: list[str], port: int, name: str) -> list[int]:
        """Answers every question on these addresses and this port with the name and the peer's address."""
        numbers = []
        for address in addresses:
            sock = socket_in(netns, proto, address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            tasks: set[asyncio.Task[None]] = set()
            if proto == "udp":
                self.loop.add_reader(sock, answer_datagrams, sock, name)
            else:
                sock.listen(128)
                self.loop.add_reader(sock, self.accept, sock, name, tasks)
            number = self.number()
            self.servers[number] = (sock, tasks)
            numbers.append(number)
        return numbers

    def accept(self, sock: socket.socket, name: str, tasks: set[asyncio.Task[None]]) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                peer, address = sock.accept()
                peer.setblocking(False)
                task = self.loop.create_task(answer_stream(peer, reply_text(name, address)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def do_unserve(self, servers: list[int], drop: bool) -> None:
        """Stops listening; with drop, connections that are open are cut as well."""
        for number in servers:
            sock, tasks = self.servers.pop(number)
            self.loop.remove_reader(sock)
            sock.close()
            if drop:
                for task in list(tasks):
                    task.cancel()

    async def do_call(self, count: int, parallel: int, **question: Any) -> list[dict[str, Any]]:
        """Asks `count` times, each on a connection of its own."""
        gate = asyncio.Semaphore(parallel)

        async def once() -> dict[str, Any]:
            async with gate:
                opened = await self.do_open(**question)
                if "connection" not in opened:
                    return opened
                try:
                    return await self.do_ask(opened["connection"], question["timeout"])
                finally:
                    await self.do_close(opened["connection"])

        return list(await asyncio.gather(*(once() for _call in range(count))))

    async def do_open(
        self, netns: str, proto: str, address: str, port: int, timeout: float, source: str, source_port: int
    ) -> dict[str, Any]:
        sock = socket_in(netns, proto, address)
        try:
            if source or source_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((source, source_port))
            async with asyncio.timeout(timeout):
                await self.loop.sock_connect(sock, (address, port))
        except OSError as error:  # TimeoutError is one, too
            sock.close()
            return outcome(error)
        number = self.number()
        self.connections[number] = sock
        return {"connection": number}

    async def do_ask(self, connection: int, timeout: float) -> dict[str, Any]:
        """Asks once on an open connection who is there."""
        sock = self.connections[connection]
        try:
            async with asyncio.timeout(timeout):
                await self.loop.sock_sendall(sock, b"who\n")
                answer = await self.loop.sock_recv(sock, 1024)
        except OSError as error:
            return outcome(error)
        if not answer:
            return {"outcome": "refused"}
        return {"outcome": "answered", **json.loads(answer)}

    async def do_close(self, connection: int) -> None:
        sock = self.connections.pop(connection)
        if sock.type == socket.SOCK_STREAM:
            # A reset instead of the usual farewell: many calls must not leave as many ports in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    async def do_wait(self, address: str, port: int, timeout: float) -> bool:
        """Waits until a server greets on this address, as sshd does."""
        async with asyncio.timeout(timeout):
            while True:
                with socket_in("", "tcp", address) as sock, contextlib.suppress(OSError):
                    async with asyncio.timeout(0.1):  # short, because a first packet may find no link yet
                        await self.loop.sock_connect(sock, (address, port))
                    async with asyncio.timeout(5):
                        if await self.loop.sock_recv(sock, 64):
                            return True
                await asyncio.sleep(0.01)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        method: Callable[..., Awaitable[Any]] = getattr(self, "do_" + request.pop("do"))
        try:
            answer = {"result": await method(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer).encode())
        writer.close()


def reply_text(name: str, peer: tuple[Any, ...]) -> bytes:
    return json.dumps({"who": name, "source": peer[0], "port": peer[1]}).encode()


def answer_datagrams(sock: socket.socket, name: str) -> None:
    with contextlib.suppress(OSError):  # nothing more to read, or an ICMP error for an earlier answer
        while True:
            _question, peer = sock.recvfrom(1024)
            sock.sendto(reply_text(name, peer), peer)


async def answer_stream(sock: socket.socket, answer: bytes) -> None:
    loop = asyncio.get_running_loop()
    with sock, contextlib.suppress(ConnectionError):
        while await loop.sock_recv(sock, 1024):
            await loop.sock_sendall(sock, answer)


def outcome(error: OSError) -> dict[str, Any]:
    if isinstance(error, TimeoutError):
        return {"outcome": "timeout"}
    if error.errno in REFUSED:
        return {"outcome": "refused"}
    if error.errno in UNREACHABLE:
        return {"outcome": "unreachable"}
    raise error


def reap() -> None:
    """Process 1 inherits the orphans of its namespace."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def main(path: str) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, reap)
    gone = asyncio.Event()
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        # The owner holds the other end of this pipe. It closes when the owner ends, in whatever way; then so do we.
        loop.add_reader(0, gone.set)
    agent = Agent()
    server = await asyncio.start_unix_server(agent.handle, path + ".new")
    os.rename(path + ".new", path)  # noqa: PTH104 (pathlib costs start-up time)
    async with server:
        await gone.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
