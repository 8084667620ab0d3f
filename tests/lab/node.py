"""A node: network, mount, UTS and PID namespaces with a disk and an sshd of their own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .addresses import pod_cidrs, pod_gateways
from .place import Place
from .record import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Node(Place):
    """The machine's /tmp is the node's /tmp, all else that it writes stays in the lab, the rest of / is read-only."""

    number: int
    state: Path

    @property
    def pid(self) -> int:
        """The node's process 1 (its sshd), as the machine numbers it."""
        return int((self.state / f"{self.name}.pid").read_text())

    @property
    def pod_cidrs(self) -> tuple[str, str]:
        return pod_cidrs(self.number)

    @property
    def bridge(self) -> str:
        """The lab's bridge that the node's pods hang on, unless each is linked to the node itself."""
        return ""

    @property
    def pod_gateways(self) -> tuple[str, str]:
        """The node's own addresses towards its pods: what a local pod sees when the node itself calls."""
        return pod_gateways(self.number)

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv as root on this node."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--pid", "--", *argv]

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
        return run(self.name, self.enter(argv), input=input, check=check, env=env, timeout=timeout)

    def ssh(self, command: str, *, input: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:  # noqa: A002
        """Runs a shell command on the node over ssh, as a carrier does."""
        argv = [str(self.state / "ssh"), "-F", str(self.state / "ssh_config"), f"root@{self.addresses[0]}", command]
        return run(self.name, argv, input=input, check=check)

    def apply(self, bundle: Path, *options: str) -> dict[str, Any]:
        """Applies a bundle with the program that comes in it, and returns its JSON result."""
        return self.akp(bundle, "apply", *options, str(bundle))

    def akp(self, bundle: Path, verb: str, *arguments: str) -> dict[str, Any]:
        """Runs the bundle's akp-node with this verb."""
        done = self.run(["sh", str(bundle / "akp-node"), verb, *arguments])
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def use_iptables(self, variant: str) -> None:
        """Makes `iptables` mean the "nft" or the "legacy" one, as a host's alternatives do."""
        links = [f"ip{v}tables{tool}" for v in ("", "6") for tool in ("", "-save", "-restore")]
        script = "".join(
            f"ln -sf /usr/sbin/{link.replace('tables', f'tables-{variant}')} /etc/alternatives/{link}\n"
            for link in links
        )
        self.run(["sh", "-eu", "-c", f"ls /usr/sbin/iptables-{variant}\n{script}"])


def run(
    where: str,
    argv: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002
    check: bool = True,
    env: dict[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """subprocess.run with a clean environment and an error that tells the story."""
    stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
    done = subprocess.run(
        argv,
        text=True,
        capture_output=True,
        env=ENVIRONMENT | (env or {}),
        timeout=timeout,
        check=False,
        cwd="/",
        **stdin,
    )
    if check and done.returncode != 0:
        raise LabError(f"{where}: {' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done
