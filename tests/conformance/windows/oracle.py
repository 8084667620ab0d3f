"""kube-proxy.exe under Wine in a network namespace, and what it has told the simulated Host Networking Service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.conformance.side import Side

from .draw import HostNetworking

Object = dict[str, Any]

WINE, SERVER = "/usr/lib/wine/wine64", "/usr/lib/wine/wineserver64"
LIBRARIES = ("computenetwork.dll", "vmcompute.dll", "bcryptprimitives.dll")


@cache
def binaries() -> Path:
    """The folder with kube-proxy.exe and its libraries; built now if it was never built."""
    build = Path(__file__).with_name("build")
    done = subprocess.run([str(build)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{build} exited {done.returncode}; its messages are above")
    return Path(done.stdout.splitlines()[-1])


def windows_path(path: Path) -> str:
    """A path as a program under Wine names it."""
    return "Z:" + str(path.absolute()).replace("/", "\\")


@dataclass
class Wine:
    """A Windows of its own, in a folder, that knows our libraries."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        own = {"WINEPREFIX": str(self.folder), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}
        return {**os.environ, **own}

    def build(self) -> None:
        self.folder.mkdir(parents=True)
        subprocess.run([WINE, "wineboot", "-i"], env=self.environment, check=True, capture_output=True, timeout=300)
        for name in LIBRARIES:
            shutil.copy(binaries() / name, self.folder / "drive_c/windows/system32")
        # Sockets belong to Wine's server: the next one starts in the namespace of the node.
        self.stop()

    def stop(self) -> None:
        """End all its programs."""
        subprocess.run([SERVER, "-k"], env=self.environment, check=False, capture_output=True)
        subprocess.run([SERVER, "-w"], env=self.environment, check=False, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Documents:
    """What a proxy has made, with addresses in place of IDs."""

    endpoints: list[Object]
    balancers: list[Object]

    def lines(self) -> Counter[str]:
        """How often each document is there."""
        return Counter(json.dumps(each, sort_keys=True) for each in (*self.endpoints, *self.balancers))


@dataclass
class Store:
    """The documents that the service holds, by ID."""

    file: Path
    given: frozenset[str] = frozenset()  # IDs of what was there before kube-proxy

    @classmethod
    def of(cls, folder: Path, hns: HostNetworking) -> Store:
        """A service to which nothing has been told yet."""
        folder.mkdir(parents=True)
        (folder / "store").write_text(given(hns))
        return cls(folder / "store", frozenset(each["ID"] for each in hns.endpoints))

    def read(self) -> dict[str, dict[str, Object]]:
        """Kind -> ID -> document, as of now."""
        found: dict[str, dict[str, Object]] = {"network": {}, "endpoint": {}, "loadbalancer": {}}
        # What is being written has no end of line yet.
        for line in self.file.read_text().rpartition("\n")[0].splitlines():
            kind, _blank, rest = line.partition(" ")
            if kind == "delete":
                which, _blank, name = rest.partition(" ")
                found[which].pop(name, None)
            elif kind in found:
                document = json.loads(rest)
                found[kind][document["ID"]] = document
        return found

    def documents(self) -> Documents:
        found = self.read()
        address = {name: each["IpConfigurations"][0]["IpAddress"] for name, each in found["endpoint"].items()}
        made = [
            {k: v for k, v in each.items() if k not in ("ID", "HostComputeNetwork")}
            for name, each in found["endpoint"].items()
            if name not in self.given
        ]
        balancers = []
        for each in found["loadbalancer"].values():
            ips = sorted(address.get(name, name) for name in each["HostComputeEndpoints"])
            balancers.append({k: v for k, v in each.items() if k != "ID"} | {"HostComputeEndpoints": ips})
        return Documents(made, balancers)


def given(hns: HostNetworking) -> str:
    """The store of a service to which nothing has been told yet."""
    made = [("network", hns.network), *(("endpoint", each) for each in hns.endpoints)]
    return "\n".join([f"version {hns.version}", *(line(kind, each) for kind, each in made), ""])


def line(kind: str, document: Object) -> str:
    """An object as a line of a store."""
    return f"{kind} {json.dumps(document, separators=(',', ':'))}"


@dataclass
class KubeProxyExe:
    """A running kube-proxy.exe."""

    side: Side
    wine: Wine
    folder: Path
    store: Store
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = field(default=None, repr=False)

    def start(self, config: Object, kubeconfig: Path) -> None:
        path = self.folder / "kube-proxy.json"
        path.write_text(json.dumps({**config, "clientConnection": {"kubeconfig": windows_path(kubeconfig)}}))
        self._log = (self.folder / "kube-proxy.log").open("wb")
        argv = [WINE, str(binaries() / "kube-proxy.exe"), f"--config={windows_path(path)}", "--v=3"]
        environment = {**self.wine.environment, "HNS_STORE": windows_path(self.store.file)}
        self._process = subprocess.Popen(
            self.side.command(argv), env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        # Programs that begin a session of Wine at the same time may never find its services.
        self._wait(lambda: "Waiting for caches to sync" in self.log, 120)

    def wait(self, shows: Callable[[Documents], bool]) -> None:
        """Return once what was written before shows, and no sync is under way."""
        self._wait(lambda: shows(self.store.documents()) and self._rests(), 180)

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"kube-proxy.exe exited {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"kube-proxy.exe has not caught up after {seconds} s:\n{self.tail()}")
            time.sleep(0.2)

    def _rests(self) -> bool:
        """Whether each sync that has begun has ended."""
        return self.log.count('"Syncing Policies"') == self.log.count('"Syncing Policies complete"')

    @property
    def log(self) -> str:
        return (self.folder / "kube-proxy.log").read_text(errors="replace")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.splitlines()[-lines:])
