"""A node in a namespace whose Services lead to endpoints in the same namespace, in two states, A and B."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta

from tests.faults.inject import Fault, Steps
from tests.faults.views import Views, iptables_views, nftables_views
from tests.lab.program import PROGRAMS, PULL
from tests.node.host import Host, Result, program_of, with_path
from tests.node.nftables import NO_SYSCTLS
from tests.node.signing import allow, etc_of
from tests.unit.build import Object, dual_stack, endpoint, node, port, render, service, slice_of

NOTHING = "-"
DNS = port(53, "dns", "UDP")
PORTS = [port(8080), port(5353, "dns", "UDP")]
# The Services that are in both states, and who may answer for them.
BOTH = {
    ("10.96.7.7", 80): {"10.244.1.1", "10.244.1.2", "10.244.1.3"},
    ("10.96.7.8", 80): {"10.244.1.4"},
    ("10.96.7.9", 80): {"10.244.1.5", "10.244.1.6"},
    ("fd00:10:96::9", 80): {"fd00:10:244::5", "fd00:10:244::6"},
}


def objects(name: str) -> list[Object]:
    """Services that change, that stay as they are, that come and that go."""
    first = name == "A"
    two = dual_stack("two", clusterIP="10.96.7.9", clusterIPs=["10.96.7.9", "fd00:10:96::9"])
    number = 5 if first else 6
    return [
        node("n1", "172.18.0.11"),
        service("web", clusterIP="10.96.7.7", type="NodePort", ports=[port(nodePort=31080), DNS]),
        slice_of("web", *(("10.244.1.1", "10.244.1.2") if first else ("10.244.1.2", "10.244.1.3")), ports=PORTS),
        service("cart", clusterIP="10.96.7.8", sessionAffinity="ClientIP"),
        slice_of("cart", "10.244.1.4"),
        two,
        slice_of("two", f"10.244.1.{number}", name="two-4"),
        slice_of("two", endpoint(f"fd00:10:244::{number}"), name="two-6", addressType="IPv6"),
        service("old" if first else "new", clusterIP=f"10.96.7.1{number}"),
        slice_of("old" if first else "new", "10.244.1.1", "10.244.1.3"),
        service("late", clusterIP="10.96.7.20"),
        *([] if first else [slice_of("late", "10.244.1.4")]),
    ]


class Site:
    """The node; `mode` is iptables or nftables, or switch: then A is of the one, and B of the other."""

    def __init__(self, directory: Path, mode: str = "iptables", flavour: str = "nft", shell: str = "dash") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.host = Host(directory, flavour, shell, "iptables" if mode == "switch" else mode)
        self.mode = mode
        self.steps = Steps(directory / "steps")
        modes = {"A": "iptables", "B": "nftables"} if mode == "switch" else {"A": mode, "B": mode}
        self.states: dict[str, State] = {
            name: render(*objects(name), mode=modes[name], conntrack=NO_SYSCTLS) for name in modes
        }
        self.bundles: dict[str, Path] = {}
        self.deltas: dict[str, Path] = {}
        for name, state in self.states.items():
            self.bundles[name] = directory / f"bundle-{name}"
            write_bundle(state, self.bundles[name])
            if mode != "switch":
                self.deltas[name] = directory / f"delta-{name}"
                write_delta(delta(self.states[other(name)], state), state, self.deltas[name])
        self._populate()
        self.views: dict[str, Views] = {NOTHING: self.view()}
        self.all_names: dict[str, set[str]] = {}
        for name in ("A", "B"):
            self.host.apply(self.bundles[name])
            assert self.host.akp("status", "--verify").json["drift"] == 0
            self.views[name], self.all_names[name] = self.view(), self.names()
        self.current = "B"

    @property
    def label(self) -> str:
        return f"iptables-{self.host.flavour}" if self.mode == "iptables" else self.mode

    def _populate(self) -> None:
        addresses = ["10.244.9.9/32", *(f"10.244.1.{i}/32" for i in range(1, 7))]
        addresses += ["fd00:10:244::9:9/128", *(f"fd00:10:244::{i}/128" for i in range(1, 7))]
        lines = [f"ip addr add {each} dev lo" for each in addresses]
        lines += ["ip route add 10.96.0.0/16 dev lo", "ip -6 route add fd00:10:96::/112 dev lo"]
        self.host.sh("\n".join(lines))
        script = Path(__file__).with_name("answering.py")
        self._answering = subprocess.Popen(
            ["ip", "netns", "exec", self.host.name, sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._answering.stdout
        assert self._answering.stdout.readline() == "ready\n"

    def close(self) -> None:
        assert self._answering.stdin
        self._answering.stdin.close()
        self._answering.wait(60)
        self.host.close()

    # -- what is there

    def view(self) -> Views:
        """What packets can meet."""
        new = nftables_views(self.host.sh("nft list ruleset")) if self.mode != "iptables" else {}
        return new if self.mode == "nftables" else new | self._iptables_view()

    def _iptables_view(self) -> Views:
        tables = {"ipv4": "/proc/net/ip_tables_names", "ipv6": "/proc/net/ip6_tables_names"}
        saved = {}
        for family, names in tables.items():
            tool = f"{'ip6' if family == 'ipv6' else 'ip'}tables-{self.host.flavour}-save"
            if self.host.flavour == "nft":
                saved[family] = self.host.sh(f"{tool} 2>/dev/null || true")
            else:
                saved[family] = self.host.sh(f"[ ! -e {names} ] || for t in $(cat {names}); do {tool} -t $t; done")
        return iptables_views(saved)

    def silent(self) -> list[str]:
        """Services of both states that do not answer as they should."""
        assert self._answering.stdin
        assert self._answering.stdout
        self._answering.stdin.write(",".join(f"{address} {number}" for address, number in BOTH) + "\n")
        answers = self._answering.stdout.readline().split()
        pairs = zip(BOTH.items(), answers, strict=True)
        return [f"{where[0]}: {answer}" for (where, allowed), answer in pairs if answer not in allowed]

    def names(self) -> set[str]:
        """Every chain, set and map there is, reachable or not."""
        text = self.host.sh(
            "nft list ruleset 2>/dev/null; for s in iptables-legacy-save ip6tables-legacy-save; do $s; done"
        )
        tables = (
            re.sub(r"^table ip6? (?!kube-proxy)\S+ \{\n.*?^\}\n", "", text, flags=re.M | re.S)
            if self.mode == "nftables"
            else text
        )
        return set(re.findall(r"^\t(?:chain|set|map) (\S+)", tables, re.M)) | set(
            re.findall(r"^:(KUBE-\S+)", tables, re.M)
        )

    def settled(self, name: str) -> list[str]:
        """Why this is not the node in state `name` and nothing else; empty if it is."""
        trouble = [] if self.view() == self.views[name] else [f"the rules are not those of {name}"]
        if name != NOTHING and self.names() != self.all_names[name]:
            trouble.append(f"left over or missing: {sorted(self.names() ^ self.all_names[name])}")
        status = self.host.akp("status").json
        found = (status["state"], status["generation"], status["unconfirmed"])
        wanted = ("absent", None, None) if name == NOTHING else ("applied", self.states[name].generation, None)
        if found != wanted:
            trouble.append(f"status {found}, not {wanted}")
        return trouble + ([] if name == NOTHING else self.silent())

    # -- what happens to it

    def run(
        self, *arguments: str | Path, fault: Fault | None = None, prefix: tuple[str, ...] = (), **env: str
    ) -> Result:
        """Run the program with every tool a step, in a process group of its own."""
        shell = ["busybox", "ash"] if self.host.shell == "busybox" else ["dash"]
        grouped = ["sh", "-c", 'AKP_FAULT_GROUP=$$; export AKP_FAULT_GROUP; exec "$@"', "sh"]
        program = next(filter(None, map(program_of, map(Path, arguments))), PROGRAMS[self.host.mode])
        done = subprocess.run(
            ["/usr/sbin/ip", "netns", "exec", self.host.name, *grouped, *prefix, *shell, program, *arguments],
            env=with_path(self.host.environment | {"AKP_CHUNK": "20"} | self.steps.environment(fault) | env),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def pull(self) -> Result:
        """What a timer runs on the node."""
        return self.host.akp(program=PULL, AKP_NODE_PROGRAM=str(PROGRAMS[self.host.mode]))

    @contextlib.contextmanager
    def trusting(self, key: Path, settings: str) -> Iterator[None]:
        """Meanwhile the node takes what this key has signed, and nothing else."""
        etc = etc_of(self.host)
        allow(etc, key, settings=settings)
        try:
            yield
        finally:
            shutil.rmtree(etc)

    def flush(self) -> None:
        """As after a reboot: the state directory is there, the kernel is empty."""
        self.host.sh(
            "nft flush ruleset; for names in /proc/net/ip_tables_names /proc/net/ip6_tables_names; do"
            " case $names in *ip6*) ipt=ip6tables-legacy ;; *) ipt=iptables-legacy ;; esac;"
            " [ ! -e $names ] || for t in $(cat $names); do $ipt -t $t -F; $ipt -t $t -X; done; done"
        )
        self.current = NOTHING

    def go(self, name: str) -> None:
        """Make sure of a state, without faults."""
        if self.current != name:
            self.host.apply(self.bundles[name])
            self.current = name


def other(name: str) -> str:
    return "B" if name == "A" else "A"


def answer_of(result: Result) -> dict[str, Any] | None:
    """The program's answer, if it gave one."""
    try:
        return result.json
    except (IndexError, ValueError):
        return None
