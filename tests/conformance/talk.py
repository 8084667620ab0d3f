"""Pods that greet, and clients that call them; plain sockets, so that the proxy between them is what takes time.

serve IP…                           a pod at each address: it says that, and then repeats what it hears
call IP PORT CALLS AT_ONCE IP…      calls from these addresses in turn; a line of JSON: of each, the pod and seconds
count IP PORT SECONDS AT_ONCE       how many calls were answered
hold IP PORT CONNECTIONS            says "held"; told a line, says how many of them no longer repeat what they hear
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

PORT = 8080
PATIENCE = 10.0  # seconds until a call counts as failed
RESET = struct.pack("ii", 1, 0)  # closed by a reset, a client's port is free again at once


def serve(*addresses: str) -> None:
    poll = select.epoll()
    doors: dict[int, tuple[socket.socket, bytes]] = {}
    open_: dict[int, socket.socket] = {}
    for address in addresses:
        door = socket.create_server((address, PORT), backlog=4096)
        door.setblocking(False)
        doors[door.fileno()] = (door, f"{address}\n".encode())
        poll.register(door, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        for fd, _event in poll.poll():
            if fd in doors:
                door, greeting = doors[fd]
                try:
                    caller, _address = door.accept()
                    caller.send(greeting)
                except OSError:
                    continue
                open_[caller.fileno()] = caller
                poll.register(caller, select.EPOLLIN)
                continue
            try:
                if heard := open_[fd].recv(100):
                    open_[fd].send(heard)
                    continue
            except OSError:
                pass
            poll.unregister(fd)
            open_.pop(fd).close()


class Calls:
    """Calls that are under way, and what became of those that ended."""

    def __init__(self, address: str, port: int) -> None:
        self._target = (address, port)
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, float]] = {}
        self.ended: list[tuple[str, float]] = []

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, source: str = "") -> None:
        caller = socket.socket()
        caller.setblocking(False)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if source:
            caller.bind((source, 0))
        caller.connect_ex(self._target)
        self._open[caller.fileno()] = (caller, time.monotonic())
        self._poll.register(caller, select.EPOLLIN)

    def wait(self) -> None:
        """Until one ends, or is given up."""
        for fd, _event in self._poll.poll(0.5):
            try:
                greeting = self._open[fd][0].recv(100)
            except OSError:
                greeting = b""
            self._end(fd, greeting.decode().strip())
        late = time.monotonic() - PATIENCE
        for fd in [fd for fd, (_caller, began) in self._open.items() if began < late]:
            self._end(fd, "")

    def _end(self, fd: int, pod: str) -> None:
        caller, began = self._open.pop(fd)
        self._poll.unregister(fd)
        caller.close()
        self.ended.append((pod, round(time.monotonic() - began, 4)))


def call(address: str, port: str, calls: str, at_once: str, *sources: str) -> None:
    made, begun = Calls(address, int(port)), 0
    while len(made.ended) < int(calls):
        while begun < int(calls) and len(made) < int(at_once):
            made.begin(sources[begun % len(sources)] if sources else "")
            begun += 1
        made.wait()
    print(json.dumps(made.ended))


def count(address: str, port: str, seconds: str, at_once: str) -> None:
    made, end = Calls(address, int(port)), time.monotonic() + float(seconds)
    while time.monotonic() < end:
        while len(made) < int(at_once):
            made.begin()
        made.wait()
    print(sum(1 for pod, _seconds in made.ended if pod))


def hold(address: str, port: str, connections: str) -> None:
    held = [socket.create_connection((address, int(port)), timeout=PATIENCE) for _ in range(int(connections))]
    silent = [each for each in held if not each.recv(100)]
    print("held", flush=True)
    sys.stdin.readline()
    broken = len(silent)
    for number, each in enumerate(held):
        word = f"{number}\n".encode()
        try:
            each.sendall(word)
            broken += each.recv(100) != word
        except OSError:
            broken += 1
    print(broken, flush=True)


if __name__ == "__main__":
    verbs: dict[str, Callable[..., None]] = {"serve": serve, "call": call, "count": count, "hold": hold}
    verbs[sys.argv[1]](*sys.argv[2:])
