"""Ansible as the carrier: its process dies, or the whole control host, or the session of a node, in the middle.

The steps of the control host are the commands that it sends to nodes: an ssh of our own counts them. The steps of a
node are, as everywhere here, the tools of its program.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.collection.play import BIN, SHOP, Run, playbook
from tests.collection.test_sync import edited_shop
from tests.faults.inject import Fault, Steps, changes_something
from tests.faults.uml import LOG, ipvs_views
from tests.faults.views import Views, halves, iptables_views, nftables_views
from tests.faults.walk import Finding
from tests.lab import Lab, Node
from tests.lab.manifests import realise
from tests.lab.program import PROGRAM
from tests.lab.uml import UmlNode

FAULT = "/var/tmp/akp-fault"
# The last one is a helper that some kernels start for themselves when iptables first speaks to them.
IDLE = ("sshd", "sshd-session", "ps", "bpfilter_umh")
# Services of both states that every node leads to, and the pods that may answer.
BOTH = {
    "10.96.10.4": {"catalog-1", "catalog-2", "catalog-3"},
    "fd00:10:96::a04": {"catalog-1", "catalog-2", "catalog-3"},
    "10.96.10.3": {"cart-1", "cart-2"},
}
_SSH = """\
#!/bin/sh
case $* in *"-O "*) exec {real} "$@" ;; esac
steps=${{AKP_RECORD%/*}}
n=1
while ! mkdir "$steps/step.$n" 2>/dev/null; do n=$((n + 1)); done
read -r step what <"$steps/fault"
# Nodes are served side by side: the first confirmation comes when all of them have the change.
[ "$step" != confirm ] || case $* in
    *" apply "*) {real} "$@"; code=$?; : >"$steps/applied.$n"; exit "$code" ;;
    *" confirm "*) while [ "$(ls "$steps" | grep -c '^applied')" -lt {nodes} ]; do sleep 0.1; done; step=$n ;;
esac
[ "$n" = "$step" ] || exec {real} "$@"
: >"$steps/fired"
everything() {{ grep -lz "^AKP_RECORD=$AKP_RECORD" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3 | grep -vx $$; }}
case $what in
    process-before) kill -s KILL "$(cat "$steps/pid")"; exec {real} "$@" ;;
    process-after) {real} "$@"; kill -s KILL "$(cat "$steps/pid")" ;;
    host-before) kill -s KILL $(everything) ;;
    host-within) {real} "$@" <&0 & sleep 0.3; kill -s KILL $(everything) ;;
esac 2>/dev/null
kill -s KILL $$
"""


class ControlHost:
    """Nodes, the shop in two states, and who brings it to them; `mode` is as in the table.

    In ipvs mode only nodes with kernels of their own are given anything: the others may have no ip_vs.
    """

    def __init__(self, lab: Lab, directory: Path, mode: str) -> None:
        self.lab, self.work, self.mode = lab, directory, mode
        self._runs = itertools.count(1)
        directory.mkdir(parents=True)
        self.nodes = [node for node in lab.nodes if mode != "ipvs" or isinstance(node, UmlNode)]
        self._resting = {node.name: self._processes(node).keys() for node in self.nodes}
        # How long nobody confirms when nobody comes back: longer than a run takes that nothing happens to.
        self.patience = 15 if mode == "ipvs" else 5
        realise(lab, SHOP)
        self.clients = [lab.add_pod(f"client-{node.name}", node.name) for node in self.nodes]
        self.shops = {"A": SHOP, "B": edited_shop(directory / "B")}
        self._log = directory
        self._steps = LOG
        self._inventory = self._made_ours(lab.inventory(directory / "hosts.yml"))
        self.views: dict[str, list[Views]] = {}
        for name in ("A", "B"):
            self.sync(name)
            self.views[name] = [self.view(node) for node in self.nodes]
        self.current = "B"

    def _made_ours(self, inventory: Path) -> Path:
        """With our nodes, and with our ssh."""
        content = yaml.safe_load(inventory.read_text())
        ssh = self.work / "ssh"
        ssh.write_text(_SSH.format(real=self.lab.state / "ssh", nodes=len(self.nodes)))
        ssh.chmod(0o755)
        hosts = content["nodes"]["hosts"]
        content["nodes"]["hosts"] = {node.name: hosts[node.name] for node in self.nodes}
        content["nodes"]["vars"]["ansible_ssh_executable"] = str(ssh)
        inventory.write_text(yaml.safe_dump(content))
        return inventory

    def sync(self, name: str, fault: str = "0 -", *, confirm_within: int = 60, check: bool = True) -> Run:
        """The playbook, which may die of the fault."""
        self._log = self.work / f"run-{next(self._runs)}"
        self._log.mkdir()
        (self._log / "fault").write_text(f"{fault}\n")
        config = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())
        variables: dict[str, Any] = {
            "kube_proxy_cluster_dir": str(self.shops[name]),
            "kube_proxy_config": {**config, "mode": self.mode.partition("-")[0]},
            "kube_proxy_confirm_within": confirm_within,
        }
        named = ["sh", "-c", f'echo $$ >{self._log}/pid; exec "$@"', "sh"]
        # By this variable all that belongs to the run is found.
        environment = {"AKP_RECORD": str(self._log / "record.jsonl")}
        return playbook(
            "sync-services",
            self._inventory,
            self.work,
            variables=variables,
            environment=environment,
            prefix=named,
            check=check,
        )

    @property
    def fired(self) -> bool:
        return (self._log / "fired").exists()

    @property
    def commands(self) -> int:
        """How many the last run sent."""
        return len(list(self._log.glob("step.*")))

    def view(self, node: Node) -> Views:
        if self.mode == "ipvs":
            return ipvs_views(node)
        if self.mode == "nftables":
            return nftables_views(node.run(["nft", "list", "ruleset"]).stdout)
        saved = {ip: node.run([f"{ip}tables-save"]).stdout for ip in ("ip", "ip6")}
        return iptables_views(saved)

    def status(self, node: Node) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(node.run(["sh", str(PROGRAM), "status", "--verify"]).stdout.splitlines()[-1])
        return told

    def silent(self) -> list[str]:
        """Services of both states that do not answer, asked on every node."""
        found = []
        for client in self.clients:
            for address, allowed in BOTH.items():
                reply = client.call("tcp", address, 80, timeout=3)
                if reply.who not in allowed:
                    found.append(f"a Service was lost, {address} from {client.name}: {reply}")
        return found

    def half(self, old: str, new: str) -> list[str]:
        found = []
        for node, was, will in zip(self.nodes, self.views[old], self.views[new], strict=True):
            found += [f"{node.name}: {each}" for each in halves(self.view(node), was, will)]
        return found

    def left_alone(self, old: str, new: str) -> list[str]:
        """Nobody comes any more: what was not confirmed is undone by the nodes themselves."""
        deadline = time.monotonic() + 90
        for node in self.nodes:
            while busy := {
                pid: name for pid, name in self._processes(node).items() if pid not in self._resting[node.name]
            }:
                if time.monotonic() > deadline:
                    return [f"{node.name} did not come to rest: {busy}"]
                time.sleep(0.2)
        found = []
        for node, was, will in zip(self.nodes, self.views[old], self.views[new], strict=True):
            if not any(self._trouble(node, view) == [] for view in (was, will)):
                found += [f"left alone, {each}" for each in self._trouble(node, was)]
        return found

    @staticmethod
    def _processes(node: Node) -> dict[str, str]:
        """Process id -> name of all that does something. Threads of a kernel of the node's own have no memory."""
        rows = [line.split(maxsplit=2) for line in node.run(["ps", "-eo", "pid=,vsz=,comm="]).stdout.splitlines()]
        return {pid: name for pid, size, name in rows if size != "0" and name not in IDLE}

    def _trouble(self, node: Node, wanted: Views) -> list[str]:
        """What keeps a node from being in a state and in no other."""
        told = self.status(node)
        found = [] if self.view(node) == wanted else [f"{node.name} has other rules"]
        for key, value in (("state", "applied"), ("drift", 0), ("unconfirmed", None)):
            if told[key] != value:
                found.append(f"{node.name}: {key} is {told[key]}, differences {told.get('differences')}")
        return found

    def settled(self, name: str) -> list[str]:
        """Why the nodes are not all in this state and nothing else."""
        pairs = zip(self.nodes, self.views[name], strict=True)
        found = [each for node, view in pairs for each in self._trouble(node, view)]
        ledger = [str(BIN / "akp"), "ledger", "verify", str(self.work / "akp" / "ledger.jsonl")]
        verified = subprocess.run(ledger, capture_output=True, text=True, check=False)
        return found if verified.returncode == 0 else [*found, f"the ledger: {verified.stdout}{verified.stderr}"]

    def examine(self, new: str, kind: str, where: str, *, alone: bool) -> Finding:
        """What a fault led to, and how the next run heals it."""
        old = self.current
        half, lost = self.half(old, new), self.silent()
        unhealed = self.left_alone(old, new) if alone else []
        started = time.monotonic()
        run = self.sync(new, check=False)
        seconds = time.monotonic() - started
        self.current = new
        if run.code:
            unhealed.append(f"the next run failed: {run.output}")
        unhealed += [*self.settled(new), *self.silent()]
        return Finding(self.mode, "sync", kind, where, half, lost, unhealed, [], seconds)

    # -- a node whose steps are counted

    def count_steps(self, node: Node) -> None:
        """From now on every tool on the node is a step."""
        steps = Steps(self.work / "tools")
        for script in steps.tools.iterdir():
            script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n. {FAULT}\n", 1))
        self.arm(node, None)
        node.run(["sh", "-c", f"cp {steps.tools}/* /usr/local/sbin/"])

    def arm(self, node: Node, fault: Fault | None) -> None:
        """Count anew, and let this happen."""
        step, kind = (fault.step, fault.kind) if fault else (0, "")
        # What is still under way from before counts elsewhere, and never reads half of the file: without a place for
        # its step a tool would look for one for ever, and keep the program's lock.
        self._steps = f"{LOG}-{next(self._runs)}"
        text = f"AKP_STEPS={self._steps} AKP_FAULT_STEP={step} AKP_FAULT={kind}\n"
        place = f"PATH=/usr/bin:/bin; mkdir {self._steps}; cat >{FAULT}.new; mv {FAULT}.new {FAULT}"
        node.run(["sh", "-euc", place], input=text)

    def steps(self, node: Node) -> list[str]:
        numbers = "$(ls | sed -n 's/^step.//p' | sort -n)"
        listing = f"PATH=/usr/bin:/bin; cd {self._steps}; for i in {numbers}; do head -n 1 step.$i; done"
        return node.run(["sh", "-c", listing]).stdout.splitlines()

    def happened(self, node: Node) -> str:
        return node.run(["sh", "-c", f"cat {self._steps}/fired 2>/dev/null || :"]).stdout.strip()


def other(name: str) -> str:
    return "B" if name == "A" else "A"


def control_faults(host: ControlHost, thin: int = 1, shift: int = 0) -> Iterator[Finding]:
    """The process, or everything on the control host, dies at a command; every second time nobody comes back."""
    kinds = {
        "process-before": "kill-ansible-playbook",
        "process-after": "kill-ansible-playbook",
        "host-before": "kill-control host",
        "host-within": "kill-control host",
    }
    host.sync(other(host.current))
    host.current = other(host.current)
    rounds = [(step, what) for step in range(1, host.commands + 1) for what in kinds]
    for number, (step, what) in enumerate(rounds[shift % thin :: thin]):
        alone = number % 2 == 1
        new = other(host.current)
        run = host.sync(new, f"{step} {what}", confirm_within=host.patience if alone else 60, check=False)
        if host.fired:
            assert run.code < 0, run.output
            yield host.examine(new, kinds[what], f"command {step}, {what}", alone=alone)
        else:
            host.current = new


def session_faults(host: ControlHost, wanted: int = 8) -> Iterator[Finding]:
    """sshd's session on a node is killed at steps of the program that it carries."""
    node = host.nodes[0]
    host.count_steps(node)
    host.sync(other(host.current))
    host.current = other(host.current)
    points = [number for number, call in enumerate(host.steps(node), 1) if changes_something(call)]
    for number, step in enumerate(points[:: max(1, len(points) // wanted)]):
        alone = number % 2 == 1
        host.arm(node, Fault("session", step))
        new = other(host.current)
        host.sync(new, confirm_within=host.patience if alone else 60, check=False)
        happened = host.happened(node)
        host.arm(node, None)
        if happened:
            where = f"step {step}, {happened[:80]}"
            yield host.examine(new, "kill-sshd on the node", where, alone=alone)
        else:
            host.current = new
