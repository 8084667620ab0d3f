"""kube-proxy.exe under Wine in a network namespace, and what it has told the simulated Host Networking Service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.conformance.side import Side

Object = dict[str, Any]

WINE, SERVER = "/usr/lib/wine/wine64", "/usr/lib/wine/wineserver64"
LIBRARIES = ("computenetwork.dll", "vmcompute.dll", "bcryptprimitives.dll")


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

    def stop(self) -> None:
        """End all its programs."""
        subprocess.run([SERVER, "-k"], env=self.environment, check=False, capture_output=True)
        subprocess.run([SERVER, "-w"], env=self.environment, check=False, capture_output=True, timeout=60)


@dataclass
class Store:
    """The documents that the service holds, by ID."""

    file: Path
    given: frozenset[str] = frozenset()  # IDs of what was there before kube-proxy

    def write(self, version: str, network: Object, endpoints: list[Object]) -> None:
        lines = [f"version {version}", f"network {_compact(network)}", *(f"endpoint {_compact(e)}" for e in endpoints)]
        self.file.write_text("\n".join(lines) + "\n")
        self.given = frozenset(each["ID"] for each in endpoints)

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

    def documents(self) -> tuple[dict[str, Object], list[Object]]:
        """The endpoints that kube-proxy made, by address, and all load balancers, with addresses in place of IDs."""
        found = self.read()
        address = {name: each["IpConfigurations"][0]["IpAddress"] for name, each in found["endpoint"].items()}
        made = {
            address[name]: {k: v for k, v in each.items() if k not in ("ID", "HostComputeNetwork")}
            for name, each in found["endpoint"].items()
            if name not in self.given
        }
        balancers = []
        for each in found["loadbalancer"].values():
            ips = sorted(address.get(name, name) for name in each["HostComputeEndpoints"])
            balancers.append({k: v for k, v in each.items() if k != "ID"} | {"HostComputeEndpoints": ips})
        return made, balancers


def _compact(document: Object) -> str:
    return json.dumps(document, separators=(",", ":"))


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
        argv = [WINE, str(binaries() / "kube-proxy.exe"), f"--config={windows_path(path)}", "--v=2"]
        environment = {**self.wine.environment, "HNS_STORE": windows_path(self.store.file)}
        self._process = subprocess.Popen(
            self.side.command(argv), env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def wait(self, shows: Any, seconds: float = 180) -> None:
        """Return once what was written before shows, and nothing more is written."""
        deadline = time.monotonic() + seconds
        while not shows(self.store.documents()[1]) or time.time() - self.store.file.stat().st_mtime < 1.0:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"kube-proxy.exe exited {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"kube-proxy.exe has not caught up after {seconds} s:\n{self.tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.wine.stop()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def tail(self, lines: int = 25) -> str:
        return "\n".join((self.folder / "kube-proxy.log").read_text(errors="replace").splitlines()[-lines:])
