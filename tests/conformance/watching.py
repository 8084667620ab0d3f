"""akp watch as users run it, and a wire to the API server that can be cut."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.collection.play import BIN, ROOT, SHOP, ansible_environment
from tests.controlplane import PORT, TOKENS, ControlPlane, netns

Event = dict[str, Any]
DEADLINE = 120.0


class Watcher:
    """A running akp watch, and what it said."""

    def __init__(
        self,
        plane: ControlPlane,
        inventory: Path,
        work: Path,
        *arguments: str,
        port: int = PORT,
        kubeconfig: bool = True,
    ) -> None:
        """Without a kubeconfig among its options, the variables of the inventory have to name one."""
        self.work, self.log = work, work / "watch.jsonl"
        work.mkdir(exist_ok=True)
        server = f"https://{plane.addresses[0]}:{port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": str(plane.pki.ca)}}],
            "users": [{"name": "u", "user": {"token": TOKENS["akp"]}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (work / "kubeconfig").write_text(json.dumps(config))
        self._argv = [
            *netns.command(plane.namespace, [str(BIN / "akp"), "watch", "--log-json", "-i", str(inventory)]),
            *(("--kubeconfig", str(work / "kubeconfig")) if kubeconfig else ()),
            *("--dir", str(work / "akp")),
            *("--config", str(self.config(work / "kube-proxy.yaml")), *arguments),
        ]
        self._out = self.log.open("ab")
        self.process = self.start()

    @staticmethod
    def config(file: Path) -> Path:
        """That of the shop, with more frequent checks."""
        config = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())
        file.write_text(yaml.safe_dump({**config, "iptables": {"syncPeriod": "5s"}}))
        return file

    def start(self) -> subprocess.Popen[bytes]:
        """One more of the same."""
        environment = ansible_environment(self.work / "record.jsonl")
        return subprocess.Popen(self._argv, stdout=self._out, stderr=self._out, cwd=ROOT, env=environment)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._out.close()

    def events(self, name: str = "", start: int = 0) -> list[Event]:
        """What it said since a place in its log, of one sort if one is named."""
        return [each for each in self.said(self.work)[start:] if not name or each["event"] == name]

    @staticmethod
    def said(work: Path) -> list[Event]:
        """What all that ran in a directory said."""
        lines = (work / "watch.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def place(self) -> int:
        """Where its log ends now."""
        return len(self.events())

    def wait(self, name: str, start: int = 0, when: Callable[[Event], bool] = lambda _event: True) -> Event:
        """Until it says something."""
        deadline = time.monotonic() + DEADLINE
        while True:
            for each in self.events(name, start):
                if when(each):
                    return each
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"no {name} in {DEADLINE} s:\n{self.log.read_text()}"
            time.sleep(0.05)

    def stop(self) -> int:
        """SIGTERM, and how it ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)


class Wire:
    """A TCP forwarder to the API server, in its namespace: its connections can be cut, or go silent."""

    def __init__(self, plane: ControlPlane, port: int) -> None:
        self._target = (plane.addresses[0], PORT)
        self._namespace = plane.namespace
        with netns.entered(plane.namespace):
            self._listener = socket.create_server((plane.addresses[0], port), reuse_port=True)
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._silent: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                client, _address = self._listener.accept()
                try:
                    server = netns.connect(self._namespace, *self._target)
                except OSError:
                    client.close()
                    continue
                pair = (client, server)
                self._pairs.add(pair)
                threading.Thread(target=self._forward, args=(pair,), daemon=True).start()

    def _forward(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            for one, other in (pair, pair[::-1]):
                one.settimeout(60)
                selector.register(one, selectors.EVENT_READ, other)
            while True:
                for key, _mask in selector.select(1.0):
                    if pair in self._silent:
                        time.sleep(0.1)
                        continue
                    source: Any = key.fileobj
                    data = source.recv(1 << 16)
                    if not data:
                        raise ConnectionError
                    key.data.sendall(data)
        self._drop(pair)

    def _drop(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.discard(pair)
        for each in pair:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> int:
        """End every connection; how many there were."""
        pairs = list(self._pairs)
        for pair in pairs:
            self._drop(pair)
        return len(pairs)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def wire(plane: ControlPlane, port: int) -> Iterator[Wire]:
    """A Wire that is gone afterwards."""
    made = Wire(plane, port)
    try:
        yield made
    finally:
        made.close()


def resident_megabytes(process: subprocess.Popen[bytes]) -> float:
    """The memory of a process that runs in a namespace, and of its children."""
    total, known = 0, {process.pid}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, StopIteration):
            status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
            if int(entry.name) in known or int(status["PPid"]) in known:
                total += int(status.get("VmRSS", "0 kB").split()[0])
    return total / 1024


__all__ = ["Watcher", "Wire", "resident_megabytes", "wire"]
