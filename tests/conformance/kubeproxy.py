"""A real kube-proxy in a namespace, and the means to know when it has caught up."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.controlplane import ControlPlane

from .plan import IPV4, IPV6
from .side import Side

Object = dict[str, Any]


SENTINEL_NAMESPACE = "conformance"
ADDRESSES = {IPV4: "10.96.0.250", IPV6: "fd00:10:96::fa"}
ENDPOINTS = {IPV4: "10.250.0.1", IPV6: "fd00:10:250::1"}


@dataclass
class Sentinel:
    """A Service whose port and endpoint change on demand: once its rules show, so does all that was written before it.

    Watches deliver in order, and kube-proxy programs everything that it has heard of at each sync.
    """

    plane: ControlPlane
    number: int = 20000

    def objects(self) -> list[Object]:
        meta: Object = {"namespace": SENTINEL_NAMESPACE, "name": "sentinel"}
        port = {"name": "sentinel", "protocol": "TCP", "port": self.number}
        labels = {"kubernetes.io/service-name": "sentinel"}
        service: Object = {
            "apiVersion": "v1", "kind": "Service", "metadata": meta,
            "spec": {
                "clusterIP": ADDRESSES[IPV4], "clusterIPs": [*ADDRESSES.values()], "ports": [port],
                "ipFamilies": [*ADDRESSES], "ipFamilyPolicy": "RequireDualStack", "type": "ClusterIP",
            },
        }  # fmt: skip
        slices: list[Object] = [
            {
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family, "ports": [port],
                "metadata": {**meta, "name": f"sentinel-{family.lower()}", "labels": labels},
                "endpoints": [{"addresses": [address]}],
            }
            for family, address in ENDPOINTS.items()
        ]  # fmt: skip
        return [service, *slices]

    def poke(self) -> None:
        self.number += 1
        for obj in self.objects():
            self.plane.client.replace(obj)

    def shows(self, side: Side, mode: str) -> bool:
        """Whether the last poke has reached the kernel, in both families."""
        if mode == "nftables":
            texts = _visit(side, "nft list table ip kube-proxy", "nft list table ip6 kube-proxy")
            return all(
                f"{ADDRESSES[family]} . tcp . {self.number} " in text and self._endpoint(family).search(text)
                for family, text in zip((IPV4, IPV6), texts, strict=True)
            )
        if mode == "ipvs":
            # The last thing that a sync does is to remove what is no longer wanted.
            servers, sets = _visit(side, "ipvsadm -Sn", "ipset save")
            return all(
                f"-A -t {server}:{self.number} " in servers
                and f"-r {endpoint}:{self.number} " in servers
                and f"-A -t {server}:{self.number - 1} " not in servers
                and f" {server.strip('[]')},tcp:{self.number}\n" in sets
                for server, endpoint in (("10.96.0.250", "10.250.0.1"), ("[fd00:10:96::fa]", "[fd00:10:250::1]"))
            )
        return all(
            f"--to-destination {endpoint}:{self.number}" in text and f"--dport {self.number} -j KUBE-SVC-" in text
            for text, endpoint in zip(
                _visit(side, "iptables-save -t nat", "ip6tables-save -t nat"),
                ("10.250.0.1", "[fd00:10:250::1]"),
                strict=True,
            )
        )

    def _endpoint(self, family: str) -> re.Pattern[str]:
        """The sentinel's endpoint in a nft rule; 1.36 has a map there even for one."""
        address = re.escape(ENDPOINTS[family])
        return re.compile(rf"(?:{address}\]?:|{address} \. ){self.number}\b")


def _visit(side: Side, *commands: str) -> list[str]:
    """What commands print, at the price of one; one that fails prints nothing."""
    script = "".join(f"{command} 2>/dev/null || :\necho '==='\n" for command in commands)
    return side.run("sh", stdin=script).split("===\n")[: len(commands)]


@dataclass
class KubeProxy:
    side: Side
    binary: Path
    folder: Path
    config: Object
    kubeconfig: Path
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> str:
        return (self.folder / "kube-proxy.log").read_text(errors="replace")

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config, "clientConnection": {"kubeconfig": str(self.kubeconfig)}}
        path = self.folder / "kube-proxy.json"
        path.write_text(json.dumps(config, indent=1))
        self._log = (self.folder / "kube-proxy.log").open("wb")
        # The pid is that of the kernel it runs on; a process here may only be its far end.
        remember = ["sh", "-c", 'echo $$ >"$0"; exec "$@"', str(self.folder / "kube-proxy.pid")]
        argv = [*remember, str(self.binary), f"--config={path}", "--v=2"]
        self._process = subprocess.Popen(
            self.side.command(argv),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.side.run("kill", (self.folder / "kube-proxy.pid").read_text().strip(), check=False)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()

    def wait(self, sentinel: Sentinel, mode: str, seconds: float = 120) -> None:
        """Return once everything written before the last poke is in the kernel."""
        deadline = time.monotonic() + seconds
        while not sentinel.shows(self.side, mode):
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"kube-proxy exited {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"kube-proxy has not caught up after {seconds} s:\n{self.tail()}")
            time.sleep(self.side.pause)

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.splitlines()[-lines:])
