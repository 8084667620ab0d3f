# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The process that carries things to nodes: Ansible is loaded in it, and nothing else.

It forks workers, as Ansible does, each for one task at a time and for some tasks in all: most of what a fork costs is
paying for the memory that the first task touches. It has no threads and stays small, so that is safe; and a node that
hangs holds up only itself. The process that starts it talks to it in lines of JSON over a pair of sockets. When that
process is gone, it finishes what is under way and ends.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from ..errors import UserError
from ..tasks.notes import About
from .time_limit import limit_of

# One that takes longer than this most likely waits for a dead host; it does not count when others want to begin.
SLOW_TASK_SECONDS = 15.0
# For so long after an urgent task began, one that is not waits even if there is a worker for it: it would only slow
# down a change that is waited for.
HOLD_SECONDS = 5.0
# How long a worker waits for a next task, and how many it takes. Questions come more often than that, so that one is
# always there when something changes.
IDLE_SECONDS = 90.0
MOST_TASKS = 100


class Executor(Protocol):
    """What runs tasks: inventory.Inventory."""

    forks: int

    def execute(
        self, host: str, arguments: Mapping[str, Any], about: Mapping[str, Any], line: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Run the node action on a host, with the line that an earlier result of the host had, if one had."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """Host -> its variables."""

    def refresh(self) -> None:
        """Read the inventory anew."""


class CarrierGone(UserError):
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

    def submit(
        self, host: str, arguments: Mapping[str, Any], *, about: About | None = None, patience: float = 0.0
    ) -> None:
        """A task for a host. For so many seconds at most, it lets those go first that have no patience.

        `about` is for the ledger.
        """
        self._send(
            {"host": host, "arguments": dict(arguments), "about": asdict(about) if about else {}, "patience": patience}
        )

    def cancel(self) -> None:
        """Take back every task that has not begun; the result of each says that it was cancelled."""
        self._send({"cancel": True})

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
        self._waiting: list[tuple[float, int, dict[str, Any]]] = []  # a heap: when it is due, a number, the task
        self._numbers = itertools.count()
        self._workers: dict[int, _Worker] = {}  # by descriptor
        self._limits: dict[str, float] = {}  # host -> seconds for a task of it
        self._lines: dict[str, Any] = {}  # host -> what its last result left for the next task
        self._inventory = 0  # which reading of it new workers have
        self._ending = False

    def serve(self) -> None:
        """Until the other end is closed and everything under way is done."""
        os.setpgid(0, 0)  # the terminal's Ctrl-C is for who started this
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        # Forked processes share the memory that is there, as long as no collector looks for garbage in it.
        gc.collect()
        gc.freeze()
        self._tell_settings()
        self._link.setblocking(False)
        self._selector.register(self._link, selectors.EVENT_READ)
        rest = b""
        while not self._ending or self._busy():
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
                    self._waiting.clear()
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
                self._inventory += 1
                self._lines.clear()
                self._tell_settings()
        elif message.get("cancel"):
            waiting, self._waiting = self._waiting, []
            for _due, _number, task in sorted(waiting, key=lambda each: each[:2]):
                self._tell({"host": task["host"], "result": {"cancelled": True}})
        else:
            due = time.monotonic() + message["patience"]
            heapq.heappush(self._waiting, (due, next(self._numbers), message))

    def _tell_settings(self) -> None:
        settings = self._executor.settings()
        self._limits = {host: limit_of(each) for host, each in settings.items()}
        self._tell({"settings": settings})

    def _busy(self) -> list[_Worker]:
        return [each for each in self._workers.values() if each.host]

    def _start(self) -> None:
        while self._waiting and self._counted() < self._executor.forks:
            if self._waiting[0][0] > time.monotonic() and self._held():
                return
            _due, _number, task = heapq.heappop(self._waiting)
            worker = self._idle() or self._fork()
            worker.give({**task, "line": self._lines.get(task["host"])})

    def _counted(self) -> int:
        """The tasks that others have to wait for."""
        return sum(time.monotonic() - each.began < SLOW_TASK_SECONDS for each in self._busy())

    def _held(self) -> bool:
        """Whether something urgent has just begun."""
        return any(each.urgent and time.monotonic() - each.began < HOLD_SECONDS for each in self._busy())

    def _idle(self) -> _Worker | None:
        """A worker without a task that may take one more; the one that had the last, as its memory is warm."""
        fit = [each for each in self._workers.values() if not each.host and each.fit(self._inventory)]
        return max(fit, key=lambda each: each.began, default=None)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            # Held open here, the others' ends would keep them from seeing that this process is gone.
            ours.close()
            self._link.close()
            for each in self._workers.values():
                each.link.close()
            self._work(theirs)
        theirs.close()
        worker = _Worker(pid, ours, self._inventory)
        self._workers[ours.fileno()] = worker
        self._selector.register(ours.fileno(), selectors.EVENT_READ)
        return worker

    def _work(self, link: socket.socket) -> None:
        """In the forked process: task after task, until there are no more."""
        try:
            self._prepare()
            gc.freeze()
            with link.makefile("rb") as stream:
                for line in stream:
                    link.sendall(json.dumps(self._result(json.loads(line)), default=str).encode() + b"\n")
        finally:
            os._exit(0)

    def _result(self, task: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._executor.execute(task["host"], task["arguments"], task["about"], task["line"])
        except BaseException as error:
            return {"failed": True, "msg": f"{type(error).__name__}: {error}"}

    def _read(self, number: int) -> None:
        worker = self._workers[number]
        try:
            data = worker.link.recv(1 << 16)
        except ConnectionError:
            data = b""
        if data:
            worker.data.append(data)
            if not data.endswith(b"\n"):
                return
        host, answer = worker.host, b"".join(worker.data)
        worker.done()
        if not data or not worker.fit(self._inventory):
            self._dismiss(worker)
        if host:
            try:
                result = json.loads(answer)
            except ValueError:
                result = {"failed": True, "msg": worker.why or "the task ended without a result"}
            line = result.pop("line", None) if isinstance(result, dict) else None
            if line is not None and worker.inventory == self._inventory:
                self._lines[host] = line
            self._tell({"host": host, "result": result})

    def _dismiss(self, worker: _Worker) -> None:
        """It ends as soon as it sees that there is nothing more to come."""
        number = worker.link.fileno()
        self._selector.unregister(number)
        del self._workers[number]
        worker.link.close()
        os.waitpid(worker.pid, 0)

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if not worker.host:
                if now - worker.began > IDLE_SECONDS or not worker.fit(self._inventory):
                    self._dismiss(worker)
            elif not worker.why and now - worker.began > self._longest(worker.host):
                worker.why = f"no answer within {now - worker.began:.0f} s"
                _kill_group(worker.pid)

    def _longest(self, host: str) -> float:
        """Seconds after which a task is ended that did not end by itself, as it should."""
        return self._limits.get(host, limit_of({}))

    def _terminate(self, _number: int, _frame: object) -> None:
        for worker in self._workers.values():
            _kill_group(worker.pid)
        os._exit(0)

    def _tell(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message, default=str).encode() + b"\n"
        self._link.setblocking(True)
        with contextlib.suppress(OSError):
            self._link.sendall(data)
        self._link.setblocking(False)


class _Worker:
    """A process that runs tasks."""

    def __init__(self, pid: int, link: socket.socket, inventory: int) -> None:
        self.pid, self.link = pid, link
        self.inventory, self._left = inventory, MOST_TASKS
        self.host = ""  # the host of its task, if it has one
        self.began = 0.0  # when it was given its last task
        self.urgent = False  # whether that has no patience
        self.data: list[bytes] = []
        self.why = ""

    def give(self, task: Mapping[str, Any]) -> None:
        """Have it run a task. If it is gone, that shows when its answer is read."""
        self.host, self.began, self.urgent = str(task["host"]), time.monotonic(), not task["patience"]
        self._left -= 1
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(task).encode() + b"\n")

    def done(self) -> None:
        """Its task has ended."""
        self.host, self.data = "", []

    def fit(self, inventory: int) -> bool:
        """Whether it may be given another task: it knows the inventory of now, and has not had too many."""
        return self.inventory == inventory and self._left > 0


def _kill_group(pid: int) -> None:
    """The process of a task, and the ssh that it started; on the node the program finishes or has not begun."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGTERM)
