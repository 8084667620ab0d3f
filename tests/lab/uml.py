"""A node with a kernel of its own: user-mode Linux, which has what the machine's kernel may lack, above all ip_vs.

It stands in the lab like any other node. Only its pods are linked differently: they hang on a bridge of the lab, and
the node has one interface into that bridge, because a namespace of the lab cannot be moved into another kernel.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .node import ENVIRONMENT, Node, run
from .pod import batch, link_up
from .record import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
BOOT_WITHIN = 120.0


@dataclass(frozen=True)
class UmlNode(Node):
    """Commands run over ssh, on one connection that stays, and so do calls from the node."""

    @property
    def bridge(self) -> str:
        return f"{self.name}-bridge"

    def enter(self, argv: Sequence[str]) -> list[str]:
        return [*self._ssh(), "-o", "ControlMaster=no", f"root@{self.addresses[0]}", "--", shlex.join(argv)]

    def run(
        self,
        argv: Sequence[str],
        *,
        input: str | None = None,  # noqa: A002 (as in subprocess.run)
        check: bool = True,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the node; with check, a failure raises LabError with what the command said."""
        words = ["env", *(f"{name}={value}" for name, value in (ENVIRONMENT | (env or {})).items()), *argv]
        return run(self.name, self.enter(words), input=input, check=check, timeout=timeout)

    def _ssh(self) -> list[str]:
        return [str(self.state / "ssh"), "-F", str(self.state / "ssh_config"), "-o", f"ControlPath={self.agent}.ssh"]

    def links_script(self) -> str:
        """Commands that plug the node into the lab, to be run inside the lab once."""
        lines = [f"link add {self.bridge} type bridge forward_delay 0 mcast_snooping 0", f"link set {self.bridge} up"]
        for tap, bridge in ((self.name, "br0"), (f"{self.name}-pods", self.bridge)):
            lines += [
                f"tuntap add dev {tap} mode tap",
                f"link set {tap} addrgenmode none",
                f"link set {tap} master {bridge} up",
            ]
        lines += [f"route replace {cidr} via {via}" for cidr, via in zip(self.pod_cidrs, self.addresses, strict=True)]
        return batch("", lines)

    def boot_script(self, links: Sequence[str]) -> str:
        """Commands that start the kernel, to be run inside the lab; links are ip commands for the node itself."""
        own = [*links, *link_up("eth1", "fe80::1")]
        for cidr, gateway in zip(self.pod_cidrs, self.pod_gateways, strict=True):
            own += [f"addr add {gateway}/{cidr.partition('/')[2]} dev eth1{' nodad' if ':' in cidr else ''}"]
        commands = "\n".join(own)
        boot = f"{HERE}/uml-boot {self.name} {self.state} /run/nodes/{self.name} 02:00:00:00:{self.number:02x}"
        return (
            f"cat >{self.state}/{self.name}.ip <<'END'\n{commands}\nEND\n"
            f"setsid unshare --mount {boot} >{self.state}/{self.name}.log 2>&1 &\n"
        )

    def connect(self) -> None:
        """Opens the connection that all commands share, once sshd answers, and waits for the node's agent."""
        opened = ["-o", "ControlMaster=yes", "-o", "ControlPersist=yes", "-o", "ServerAliveInterval=30"]
        forward = ["-o", "StreamLocalBindUnlink=yes", "-L", f"{self.agent}:/run/agent.sock"]
        argv = [*self._ssh(), *opened, *forward, "-N", "-f", f"root@{self.addresses[0]}"]
        quiet = subprocess.DEVNULL
        done = subprocess.run(
            argv, stdin=quiet, stdout=quiet, stderr=quiet, env=ENVIRONMENT, cwd="/", timeout=60, check=False
        )
        if done.returncode != 0:
            raise LabError(f"{self.name} lets nobody in; its console says:\n{self.console()}")
        self.run(["sh", "-c", "until [ -S /run/agent.sock ]; do sleep 0.05; done"], timeout=60)

    def power_off(self) -> None:
        """Ends the kernel, and its processes, which would live on as ordinary ones of the machine."""
        run(self.name, [*self._ssh(), "-O", "exit", f"root@{self.addresses[0]}"], check=False)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(self.pid, signal.SIGKILL)
                time.sleep(0.01)

    def console(self) -> str:
        return (self.state / f"{self.name}.log").read_text(errors="replace")
