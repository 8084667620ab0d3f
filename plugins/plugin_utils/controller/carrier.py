# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The process that carries things to nodes: Ansible is loaded in it, and nothing else.

For every task it forks a process that ends with the task, as Ansible does. It has no threads and stays small, so that
is safe and takes milliseconds; and a node that hangs holds nobody up but itself. Who starts it talks to it in lines of
JSON over a pair of sockets. When that one is gone, it finishes what is under way and ends.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

# A task that takes longer is ended. Connecting has its own, shorter limit in Ansible.
LONGEST_TASK_SECONDS = 300.0
# One that takes longer than this most likely waits for a dead host; it does not count when others want to begin.
SLOW_TASK_SECONDS = 15.0


class Executor(Protocol):
    """What runs tasks: inventory.Inventory."""

    forks: int

    def execute(self, host: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run the node action on a host."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """Host -> its variables."""

    def refresh(self) -> None:
        """Read the inventory anew."""


class CarrierGone(Exception):
    """The process that carries ended, which it never does by itself."""


class Carrier:
    """The carrying process, as the one that started it sees it."""

    def __init__(self, executor: Executor, prepare: Callable[[], None]) -> None:
        """Fork it. `prepare` is what a process that runs a task does first. No thread may run yet."""
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                ours.close()
                _Server(executor, prepare, theirs).serve()
            finally:
                os._exit(0)
        theirs.close()
        self._ended = False
        self._socket = ours
        self._stream = ours.makefile("rb")

    def submit(self, host: str, arguments: Mapping[str, Any], *, urgent: bool = True) -> None:
        """A task for a host. One that is not urgent waits while others do."""
        self._send({"host": host, "arguments": dict(arguments), "urgent": urgent})

    def refresh(self) -> None:
        """Have the inventory read anew; what it says comes as an answer."""
        self._send({"refresh": True})

    def answers(self) -> Iterator[dict[str, Any]]:
        """What comes back, as it comes: of tasks {host, result}, of the inventory {settings} or {error}."""
        for line in self._stream:
            yield json.loads(line)
        raise CarrierGone("the process that carries to the nodes has ended")

    def close(self, patience: float) -> None:
        """Take no more tasks, wait for those under way, and end those that take longer. Twice does no harm."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                return
            time.sleep(0.02)
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise CarrierGone("the process that carries to the nodes has ended") from error


class _Server:
    """The carrying process itself."""

    def __init__(self, executor: Executor, prepare: Callable[[], None], link: socket.socket) -> None:
        self._executor = executor
        self._prepare = prepare
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._urgent: collections.deque[dict[str, Any]] = collections.deque()
        self._other: collections.deque[dict[str, Any]] = collections.deque()
        self._running: dict[int, _Running] = {}  # by the descriptor that the result comes from
        self._ending = False

    def serve(self) -> None:
        """Until the other end is closed and everything under way is done."""
        os.setpgid(0, 0)  # the terminal's Ctrl-C is for who started this
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        # Forked processes share what is there already for as long as nobody looks for garbage in it.
        gc.collect()
        gc.freeze()
        self._tell_settings()
        self._link.setblocking(False)
        self._selector.register(self._link, selectors.EVENT_READ)
        rest = b""
        while not self._ending or self._running:
            for key, _mask in self._selector.select(1.0):
                if key.fileobj is not self._link:
                    self._read(key.fd)
                    continue
                try:
                    data = self._link.recv(1 << 16)
                except BlockingIOError:
                    continue
                if not data:
                    self._ending = True
                    self._urgent.clear()
                    self._other.clear()
                    self._selector.unregister(self._link)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
            self._start()
            self._end_late()

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("refresh"):
            try:
                self._executor.refresh()
            except Exception as error:
                self._tell({"error": f"the inventory cannot be read: {error}"})
            else:
                self._tell_settings()
        else:
            (self._urgent if message["urgent"] else self._other).append(message)

    def _tell_settings(self) -> None:
        self._tell({"settings": self._executor.settings()})

    def _start(self) -> None:
        while (self._urgent or self._other) and self._counted() < self._executor.forks:
            task = (self._urgent or self._other).popleft()
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._run(task, write)
            os.close(write)
            self._running[read] = _Running(pid, task["host"], time.monotonic())
            self._selector.register(read, selectors.EVENT_READ)

    def _counted(self) -> int:
        """The tasks that others have to wait for."""
        return sum(time.monotonic() - each.began < SLOW_TASK_SECONDS for each in self._running.values())

    def _run(self, task: Mapping[str, Any], write: int) -> None:
        """In the forked process: the task, its result, the end."""
        gc.disable()
        try:
            self._prepare()
            result = self._executor.execute(task["host"], task["arguments"])
        except BaseException as error:
            result = {"failed": True, "msg": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BaseException), os.fdopen(write, "wb") as stream:
            stream.write(json.dumps(result, default=str).encode())
        os._exit(0)

    def _read(self, number: int) -> None:
        running = self._running[number]
        data = os.read(number, 1 << 16)
        if data:
            running.data.append(data)
            return
        self._selector.unregister(number)
        os.close(number)
        del self._running[number]
        os.waitpid(running.pid, 0)
        try:
            result = json.loads(b"".join(running.data))
        except ValueError:
            result = {"failed": True, "msg": running.why or "the task ended without a result"}
        self._tell({"host": running.host, "result": result})

    def _end_late(self) -> None:
        for running in self._running.values():
            if not running.why and time.monotonic() - running.began > LONGEST_TASK_SECONDS:
                running.why = f"no answer within {LONGEST_TASK_SECONDS:.0f} s"
                _kill_group(running.pid)

    def _terminate(self, _number: int, _frame: object) -> None:
        for running in self._running.values():
            _kill_group(running.pid)
        os._exit(0)

    def _tell(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message, default=str).encode() + b"\n"
        self._link.setblocking(True)
        with contextlib.suppress(OSError):
            self._link.sendall(data)
        self._link.setblocking(False)


class _Running:
    """A task under way."""

    def __init__(self, pid: int, host: str, began: float) -> None:
        self.pid, self.host, self.began = pid, host, began
        self.data: list[bytes] = []
        self.why = ""


def _kill_group(pid: int) -> None:
    """The process of a task, and the ssh that it started; on the node the program finishes or has not begun."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGTERM)
