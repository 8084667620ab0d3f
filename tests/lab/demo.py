"""`make demo`: three nodes, a shop, its traffic before and after a pod leaves. Fails if a single packet goes astray."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from .addresses import STRANGER
from .lab import Lab
from .manifests import realise
from .place import REFUSED, TIMEOUT, Place, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .pod import Pod

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "shop"
AKP = str(Path(sys.executable).with_name("akp"))
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass(frozen=True)
class Call:
    """A question to a Service, and who may answer it. All of them must, unless one is enough."""

    caller: Place
    to: str
    proto: str
    address: str
    port: int
    servers: tuple[str, ...]
    entry: str
    """The node whose rules choose the pod."""
    shows: str
    """What a pod sees as the source: "client", or "node" when the entry node puts its own address there."""
    outcome: Literal["answered", "refused", "timeout"] = "answered"
    source: str = ""
    one_of: bool = False

    def expected(self, lab: Lab) -> set[Reply]:
        """Every reply that the Service's definition allows and demands."""
        if self.outcome != "answered":
            return {REFUSED if self.outcome == "refused" else TIMEOUT}
        return {Reply(name, self.seen_by(lab, lab.pod(name))) for name in self.servers}

    def make(self) -> Counter[Reply]:
        """Calls often enough to meet every server; where silence is due, a few times are enough."""
        silent = self.outcome == "timeout"
        count, timeout = (4, 0.3) if silent else (60, 2.0)
        return Counter(
            self.caller.calls(self.proto, self.address, self.port, count, timeout=timeout, source=self.source)
        )

    def allows(self, lab: Lab, seen: set[Reply]) -> bool:
        expected = self.expected(lab)
        return len(seen) == 1 and seen <= expected if self.one_of else seen == expected

    def seen_by(self, lab: Lab, pod: Pod) -> str:
        family = 1 if ":" in self.address else 0
        entry = lab.node(self.entry)
        if self.shows == "client" and pod != self.caller:
            return self.source or self.caller.addresses[family]
        return entry.pod_gateways[family] if pod.node == entry else entry.addresses[family]


def calls_of(lab: Lab) -> list[Call]:
    """The shop's Services, as its manifests define them, called from everywhere."""
    pod, n1, outside = lab.pod("client"), lab.node("n1"), lab.outside
    frontends, catalogs = ("frontend-1", "frontend-2", "frontend-3"), ("catalog-1", "catalog-2", "catalog-3")
    dns, checkouts, carts = ("coredns-1", "coredns-2"), ("checkout-1", "checkout-2"), ("cart-1", "cart-2")
    n2_ip, n3_ip = lab.node("n2").addresses[0], lab.node("n3").addresses[0]
    return [
        Call(pod, "catalog", "tcp", "10.96.10.4", 80, catalogs, "n1", "client"),
        Call(pod, "catalog IPv6", "tcp", "fd00:10:96::a04", 80, catalogs, "n1", "client"),
        Call(lab.pod("catalog-1"), "catalog, of which it is one", "tcp", "10.96.10.4", 80, catalogs, "n1", "client"),
        Call(pod, "kube-dns", "udp", "10.96.0.10", 53, dns, "n1", "client"),
        Call(pod, "kube-dns IPv6", "udp", "fd00:10:96::a", 53, dns, "n1", "client"),
        Call(pod, "cart, ClientIP affinity", "tcp", "10.96.10.3", 80, carts, "n1", "client", one_of=True),
        Call(pod, "metrics, own node only", "udp", "10.96.10.6", 8125, ("metrics-1",), "n1", "client"),
        Call(pod, "orders, no pods", "tcp", "10.96.10.7", 80, (), "n1", "", "refused"),
        Call(pod, "frontend, client not in range", "tcp", "203.0.113.10", 80, (), "n1", "", "timeout"),
        Call(n1, "catalog", "tcp", "10.96.10.4", 80, catalogs, "n1", "node"),
        Call(n1, "kube-dns IPv6", "udp", "fd00:10:96::a", 53, dns, "n1", "node"),
        Call(outside, "admin, node port of n2", "tcp", n2_ip, 30090, ("admin-1",), "n2", "node"),
        Call(outside, "frontend, node port of n3", "tcp", n3_ip, 30080, frontends, "n3", "node"),
        Call(outside, "frontend", "tcp", "203.0.113.10", 80, frontends, "n1", "node"),
        Call(outside, "frontend IPv6", "tcp", "2001:db8:113::10", 80, frontends, "n1", "node"),
        Call(outside, "frontend, client not in range", "tcp", "203.0.113.10", 80, (), "n1", "", "timeout", STRANGER[0]),
        Call(outside, "checkout, Local policy", "tcp", "203.0.113.20", 443, checkouts, "n2", "client"),
        Call(outside, "checkout, node port of n2", "tcp", n2_ip, 30443, checkouts, "n2", "client"),
        Call(outside, "checkout, node port of n3", "tcp", n3_ip, 30443, (), "n3", "", "timeout"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--mode", choices=["iptables", "nftables"], default="iptables")
    mode = parser.parse_args().mode
    with tempfile.TemporaryDirectory(prefix="akp-demo-") as work:
        return demo(Path(work), mode)


def demo(work: Path, mode: str) -> int:
    config = work / "kube-proxy.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load((SHOP / "kube-proxy.yaml").read_text()) | {"mode": mode}))
    with step("Three nodes with sshd, a client outside, and a controller between them"):
        lab = Lab(f"demo-{os.getpid()}", nodes=3)
    with lab:
        with step("The pods of examples/shop, and one more to call from"):
            realise(lab, SHOP)
            lab.add_pod("client", "n1")
        before = work / "before"
        render(SHOP, config, before)
        apply(lab, before)
        calls = calls_of(lab)
        wrong = show_calls(lab, calls)

        console.print(Rule("The pod catalog-2 leaves its Service"))
        shop, after = work / "shop", work / "after"
        shutil.copytree(SHOP, shop)
        remove_endpoint(shop / "catalog.yaml", "catalog-2")
        render(shop, config, after)
        akp("diff", before, after, expect=1)
        apply(lab, after)
        wrong += show_calls(lab, [without(call, "catalog-2") for call in calls if call.to.startswith("catalog")])

        console.print(Rule("The same bundle once more"))
        if any(result["changed"] for result in apply(lab, after)):
            wrong.append("a second apply of the same bundle changed a node")
    for line in wrong:
        console.print(f"[bold red]Not as defined:[/] {escape(line)}")
    if not wrong:
        console.print("[bold green]Every packet went where the Services say.[/] The lab is gone without a trace.")
    return 1 if wrong else 0


def render(cluster: Path, config: Path, output: Path) -> None:
    akp("render", "--cluster", cluster, "--config", config, "--all-nodes", "--output", output)


def akp(*arguments: str | Path, expect: int = 0) -> None:
    """Runs `akp` the way a user does, its output on the screen."""
    words = [
        str(word.relative_to(ROOT) if isinstance(word, Path) and word.is_relative_to(ROOT) else word)
        for word in arguments
    ]
    console.print(f"[bold]$ akp {' '.join(words)}[/]", soft_wrap=True)
    began = time.monotonic()
    done = subprocess.run([AKP, *words], check=False, cwd=ROOT, stderr=subprocess.STDOUT)
    if done.returncode != expect:
        raise SystemExit(f"akp {words[0]} ended with {done.returncode} instead of {expect}")
    console.print(f"[dim]{time.monotonic() - began:.2f} s[/]\n")


def apply(lab: Lab, bundles: Path) -> list[dict[str, Any]]:
    """Runs each node's akp-node over ssh, all nodes at once."""
    command = f"sh {bundles}/NODE/akp-node apply {bundles}/NODE"
    console.print(f"[bold]$ ssh NODE {command}[/]", soft_wrap=True)
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda node: node.ssh(command.replace("NODE", node.name)), lab.nodes))
    results = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    for node, result in zip(lab.nodes, results, strict=True):
        console.print(f"{node.name}: {summary(result)}", markup=False, soft_wrap=True)
    console.print(f"[dim]{time.monotonic() - began:.2f} s[/]\n")
    return results


def summary(result: dict[str, Any]) -> str:
    if not result["changed"]:
        return f"unchanged, {result['seconds']} s"
    chains = "; ".join(
        f"{family} chains: {counts['added']} added, {counts['changed']} changed, {counts['removed']} removed"
        for family, counts in result["chains"].items()
    )
    return f"changed, {result['mode']}; {chains}; {result['seconds']} s"


def show_calls(lab: Lab, calls: Sequence[Call]) -> list[str]:
    """Makes all calls, prints who answered, and returns what is not as defined."""
    table = Table(header_style="bold", show_lines=True)
    for column in ("from", "to", "answered by", "source it saw", ""):
        table.add_column(column, no_wrap=True)
    wrong = []
    for call in calls:
        replies = call.make()
        fine = call.allows(lab, set(replies))
        ordered = sorted(replies.items(), key=lambda item: item[0].who)
        table.add_row(
            f"{call.caller.name} on {lab.pod(call.caller.name).node.name}"
            if call.caller.name in lab.pods
            else call.caller.name,
            escape(f"{call.to}\n{call.proto} {bracketed(call.address)}:{call.port}"),
            "\n".join(f"{count:2} x {who_and_where(lab, reply)}" for reply, count in ordered),
            "\n".join(reply.source for reply, _ in ordered),
            "[green]ok[/]" if fine else "[red]WRONG[/]",
        )
        if not fine:
            want, got = (sorted(map(str, replies)) for replies in (call.expected(lab), replies))
            wrong.append(f"{call.caller.name} to {call.to}: {got} instead of {want}")
    console.print(table)
    return wrong


def who_and_where(lab: Lab, reply: Reply) -> str:
    return f"{reply.who} on {lab.pod(reply.who).node.name}" if reply.who else f"nobody: {reply.outcome}"


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def without(call: Call, server: str) -> Call:
    return Call(**{**vars(call), "servers": tuple(name for name in call.servers if name != server)})


def remove_endpoint(manifest: Path, pod: str) -> None:
    """What the control plane does when a pod goes: its endpoint leaves all slices."""
    documents = list(yaml.safe_load_all(manifest.read_text()))
    for document in documents:
        if document["kind"] == "EndpointSlice":
            document["endpoints"] = [one for one in document["endpoints"] if one["targetRef"]["name"] != pod]
    manifest.write_text(yaml.safe_dump_all(documents, sort_keys=False))


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    console.print(f"{what} [dim]{time.monotonic() - began:.2f} s[/]")


if __name__ == "__main__":
    sys.exit(main())
