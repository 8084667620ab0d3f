"""The traffic of the demo: who may answer a call to a Service of the shop, and who did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rich.markup import escape
from rich.table import Table

from .addresses import STRANGER
from .place import REFUSED, TIMEOUT, Place, Reply
from .prompt import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .lab import Lab
    from .pod import Pod

FRONTENDS = ("frontend-1", "frontend-2", "frontend-3")
CATALOGS = ("catalog-1", "catalog-2", "catalog-3")
CHECKOUTS = ("checkout-1", "checkout-2")
DNS = ("coredns-1", "coredns-2")
CARTS = ("cart-1", "cart-2")


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
        """Calls often enough to meet every server; where none may answer, a few times, as kernels ration refusals."""
        timeout = 0.3 if self.outcome == "timeout" else 2.0
        # With affinity the first call chooses. Others that come at the same time could choose for themselves.
        counts = (1, 59) if self.one_of else (60,) if self.outcome == "answered" else (4,)
        replies: Counter[Reply] = Counter()
        for count in counts:
            replies.update(
                self.caller.calls(self.proto, self.address, self.port, count, timeout=timeout, source=self.source)
            )
        return replies

    def allows(self, lab: Lab, seen: set[Reply]) -> bool:
        expected = self.expected(lab)
        return len(seen) == 1 and seen <= expected if self.one_of else seen == expected

    def seen_by(self, lab: Lab, pod: Pod) -> str:
        family = 1 if ":" in self.address else 0
        entry = lab.node(self.entry)
        if self.shows == "client" and pod != self.caller:
            return self.source or self.caller.addresses[family]
        return entry.pod_gateways[family] if pod.node == entry else entry.addresses[family]


def calls_of(lab: Lab, mode: str) -> list[Call]:
    """The shop's Services, as its manifests define them, called from everywhere."""
    calls = _calls(lab)
    return [_in_userspace(call) for call in calls if ":" not in call.address] if mode == "userspace" else calls


def _calls(lab: Lab) -> list[Call]:
    pod, n1, outside = lab.pod("client"), lab.node("n1"), lab.outside
    n2_ip, n3_ip = lab.node("n2").addresses[0], lab.node("n3").addresses[0]
    return [
        Call(pod, "catalog", "tcp", "10.96.10.4", 80, CATALOGS, "n1", "client"),
        Call(pod, "catalog IPv6", "tcp", "fd00:10:96::a04", 80, CATALOGS, "n1", "client"),
        Call(lab.pod("catalog-1"), "catalog, of which it is one", "tcp", "10.96.10.4", 80, CATALOGS, "n1", "client"),
        Call(pod, "kube-dns", "udp", "10.96.0.10", 53, DNS, "n1", "client"),
        Call(pod, "kube-dns IPv6", "udp", "fd00:10:96::a", 53, DNS, "n1", "client"),
        Call(pod, "cart, ClientIP affinity", "tcp", "10.96.10.3", 80, CARTS, "n1", "client", one_of=True),
        Call(pod, "metrics, own node only", "udp", "10.96.10.6", 8125, ("metrics-1",), "n1", "client"),
        Call(pod, "orders, no pods", "tcp", "10.96.10.7", 80, (), "n1", "", "refused"),
        Call(pod, "frontend, client not in range", "tcp", "203.0.113.10", 80, (), "n1", "", "timeout"),
        Call(n1, "catalog", "tcp", "10.96.10.4", 80, CATALOGS, "n1", "node"),
        Call(n1, "kube-dns IPv6", "udp", "fd00:10:96::a", 53, DNS, "n1", "node"),
        Call(outside, "admin, node port of n2", "tcp", n2_ip, 30090, ("admin-1",), "n2", "node"),
        Call(outside, "frontend, node port of n3", "tcp", n3_ip, 30080, FRONTENDS, "n3", "node"),
        Call(outside, "frontend", "tcp", "203.0.113.10", 80, FRONTENDS, "n1", "node"),
        Call(outside, "frontend IPv6", "tcp", "2001:db8:113::10", 80, FRONTENDS, "n1", "node"),
        Call(outside, "frontend, client not in range", "tcp", "203.0.113.10", 80, (), "n1", "", "timeout", STRANGER[0]),
        Call(outside, "checkout, Local policy", "tcp", "203.0.113.20", 443, CHECKOUTS, "n2", "client"),
        Call(outside, "checkout, node port of n2", "tcp", n2_ip, 30443, CHECKOUTS, "n2", "client"),
        Call(outside, "checkout, node port of n3", "tcp", n3_ip, 30443, (), "n3", "", "timeout"),
    ]


def _in_userspace(call: Call) -> Call:
    """The same call where a proxy of the entry node answers: pods see the node, and a node port leads to all endpoints.

    Source ranges have no effect. The frontend has no node port, because a load balancer address of the other family
    closes it. Services answer in the family of their first address alone.
    """
    call = replace(call, shows="node")
    match call.to:
        case "frontend, client not in range":
            return replace(call, to="frontend, ranges do not count", servers=FRONTENDS, outcome="answered")
        case "frontend, node port of n3":
            return replace(call, to="frontend, left out on n3", servers=(), outcome="refused")
        case "checkout, node port of n3":
            return replace(call, servers=CHECKOUTS, outcome="answered")
    return call


def without(call: Call, server: str) -> Call:
    """The same call once a server has left its Service."""
    return replace(call, servers=tuple(name for name in call.servers if name != server))


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
