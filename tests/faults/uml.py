"""The same in ipvs mode: a node with a kernel of its own, as ip_vs does not live in every namespace."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.inject import Fault, Steps
from tests.faults.site import NOTHING, Site
from tests.faults.views import Views, iptables_views, member_views
from tests.faults.walk import Finding, examine, prepare
from tests.lab import Lab, Node
from tests.lab.program import PROGRAMS, PULL
from tests.node.host import Result, with_path
from tests.node.ipvs import World, kernel_of
from tests.node.signing import allow

PROGRAM = PROGRAMS["ipvs"]
LOG = "/var/tmp/akp-steps"
SESSION = "/var/tmp/akp-session"
EMPTY = (
    "for ipt in iptables ip6tables; do for t in nat filter mangle; do $ipt -t $t -F; $ipt -t $t -X; done; done; "
    "ipvsadm -C; ! ip link show kube-ipvs0 >/dev/null 2>&1 || ip link del kube-ipvs0; "
    "for s in $(ipset list -n | grep ^KUBE-); do ipset destroy $s; done"
)


@dataclasses.dataclass
class LabHost:
    """What a Site asks of its host, for a node of the lab."""

    world: World
    directory: Path
    flavour: str = "legacy"
    shell: str = "dash"
    state: Path = Path("/var/lib/akp")

    def akp(self, *arguments: str | Path) -> Result:
        return self.world.akp(*arguments)

    def apply(self, bundle: Path, *options: str) -> dict[str, Any]:
        return self.world.apply(bundle, *options)

    def sh(self, script: str) -> str:
        return self.world.sh(script)


class LabSteps(Steps):
    """The log is on the node's own disk."""

    def __init__(self, directory: Path, world: World) -> None:
        super().__init__(directory)
        self.world = world

    def environment(self, fault: Fault | None) -> dict[str, str]:
        self.world.sh(f"rm -rf {LOG}; mkdir -p {LOG}")
        env = {"PATH": f"{self.tools}:/usr/sbin:/usr/bin:/sbin:/bin", "AKP_STEPS": LOG, "AKP_FAULT_STEP": "0"}
        return env | ({"AKP_FAULT": fault.kind, "AKP_FAULT_STEP": str(fault.step)} if fault else {})

    @property
    def fired(self) -> str:
        return self.world.sh(f"cat {LOG}/fired 2>/dev/null || :").strip()

    def taken(self) -> list[str]:
        return self.world.sh(
            f"cd {LOG}; for i in $(ls | sed -n 's/^step.//p' | sort -n); do head -n 1 step.$i; done"
        ).splitlines()


def ipvs_views(node: Node) -> Views:
    """What packets can meet on a node with ip_vs: rules, and what they leave to sets, virtual servers and addresses."""
    kernel = kernel_of(node)
    saved = {ip: node.run([f"{ip}tables-save"]).stdout for ip in ("ip", "ip6")}
    return iptables_views(saved) | member_views({name: kernel[name] for name in ("sets", "servers", "addresses")})


class LabSite(Site):
    """Node n3 of the lab."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.world = World(lab, directory)
        v4, v6 = self.world.node.addresses
        lab.sh(f"ip route replace 10.96.0.0/16 via {v4}\nip -6 route replace fd00:10:96::/64 via {v6}\n")
        self.host = LabHost(self.world, directory)  # type: ignore[assignment]
        self.mode = "ipvs"
        self.steps = LabSteps(directory / "steps", self.world)
        web = self.world.web
        self.states = {
            "A": self.world.state(*web(41, "near", "far-1"), *web(42, "far-2"), *web(43, "near")),
            "B": self.world.state(*web(41, "far-1", "far-2"), *web(42, "far-2"), *web(44, "near", "far-2")),
        }
        self.bundles = {name: self.world.bundle(state) for name, state in self.states.items()}
        self.deltas = {
            name: self.world.delta(self.states["B" if name == "A" else "A"], self.states[name]) for name in ("A", "B")
        }
        self.world.akp("cleanup")
        self.views = {NOTHING: self.view()}
        self.all_names = {}
        for name in ("A", "B"):
            self.host.apply(self.bundles[name])
            self.views[name], self.all_names[name] = self.view(), self.names()
        self.current = "B"

    @property
    def label(self) -> str:
        return "ipvs"

    def close(self) -> None:
        self.world.akp("cleanup")

    def view(self) -> Views:
        return ipvs_views(self.world.node)

    def names(self) -> set[str]:
        text = self.world.sh("iptables-save; ip6tables-save; ipset list -n | sed s/^/:/")
        return {line[1:].split()[0] for line in text.splitlines() if line.startswith(":KUBE-")}

    def silent(self) -> list[str]:
        allowed = {41: {"near", "far-1", "far-2"}, 42: {"far-2"}}
        found = []
        for number, pods in allowed.items():
            for address in (f"10.96.0.{number}", f"fd00:10:96::{number}"):
                # Long enough for a busy machine to send a lost packet again.
                reply = self.world.lab.outside.call("tcp", address, 80, timeout=5)
                if reply.who not in pods:
                    found.append(f"{address}: {reply}")
        return found

    def run(
        self, *arguments: str | Path, fault: Fault | None = None, prefix: tuple[str, ...] = (), **env: str
    ) -> Result:
        grouped = ["setsid", "-w", "sh", "-c", 'AKP_FAULT_GROUP=$$; export AKP_FAULT_GROUP; exec "$@"', "sh"]
        argv = [*grouped, *prefix, "sh", str(PROGRAM), *map(str, arguments)]
        done = self.world.node.run(argv, check=False, env=with_path(self.steps.environment(fault) | env))
        return Result(done.returncode, done.stdout, done.stderr)

    def pull(self) -> Result:
        done = self.world.node.run(["sh", str(PULL)], check=False, env={"AKP_NODE_PROGRAM": str(PROGRAM)})
        return Result(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def trusting(self, key: Path, settings: str) -> Iterator[None]:
        """On the node's own disk, where its program looks."""
        shared = self.host.directory / "etc"
        allow(shared, key, settings=settings)
        self.world.sh(f"mkdir /etc/akp; cp {shared}/* /etc/akp/")
        try:
            yield
        finally:
            self.world.sh("rm -r /etc/akp")

    def flush(self) -> None:
        self.world.sh(EMPTY)
        self.current = NOTHING

    # -- carriers

    def over_ssh(self, *arguments: str) -> subprocess.Popen[str]:
        """The program at the end of a connection, as carriers run it."""
        state = self.world.node.state
        self.world.sh(f"rm -f {SESSION}")
        command = f"echo $PPID $$ >{SESSION}; exec sh {PROGRAM} {shlex.join(arguments)}"
        alone = ["-o", "ControlMaster=no", "-o", "ControlPath=none"]
        argv = [
            str(state / "ssh"),
            "-F",
            str(state / "ssh_config"),
            *alone,
            f"root@{self.world.node.addresses[0]}",
            command,
        ]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def sessions(site: LabSite, rounds: int = 4) -> Iterator[Finding]:
    """The connection ends in the middle of a run: its process on the node is killed, or the one on the control host."""
    for where in ("sshd on the node", "ssh on the control host"):
        for number in range(rounds):
            move = prepare(site, "apply")
            carrier = site.over_ssh(*move.arguments)
            # A little later each time.
            site.world.sh(f"until [ -s {SESSION} ]; do sleep 0.05; done; sleep 0.{2 * number + 1}")
            if where.startswith("sshd"):
                site.world.sh(f"read -r session program <{SESSION}; kill -9 $session")
            else:
                carrier.kill()
            carrier.communicate()
            # What was under way ends, with or without its connection.
            site.world.sh(f"read -r session program <{SESSION}; while kill -0 $program 2>/dev/null; do sleep 0.1; done")
            yield examine(site, move, f"kill-{where}", f"round {number}", Result(-9, "", ""))
