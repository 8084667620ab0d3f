"""The kernel state of a namespace: read it, bring it into a canonical form, name the differences of two of them.

Order counts wherever a packet would notice it. kube-proxy walks its Services in no fixed order, so in the chains that
hold rules of many Services these are sorted by Service, each Service's own rules keeping their order.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .side import Side

Texts = dict[str, str]  # what each tool printed, by file name
State = dict[str, tuple[str, ...]]  # kernel object -> its lines, canonical

SYSCTLS = (
    "net.ipv4.conf.all.route_localnet",
    "net.ipv4.ip_forward",
    "net.ipv6.conf.all.forwarding",
    "net.ipv4.conf.all.arp_ignore",
    "net.ipv4.conf.all.arp_announce",
    "net.netfilter.nf_conntrack_tcp_be_liberal",
    "net.netfilter.nf_conntrack_tcp_timeout_established",
    "net.netfilter.nf_conntrack_tcp_timeout_close_wait",
    "net.netfilter.nf_conntrack_udp_timeout",
    "net.netfilter.nf_conntrack_udp_timeout_stream",
)

# Rules of many Services, in the order of a hash map.
MIXED = {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL"}
MIXED_IPVS = {"KUBE-IPVS-OUT-FILTER"}
# Our own marker, a chain; kube-proxy has nothing like it.
MARKER = re.compile(r"KUBE-PROXY-GEN-[0-9A-F]{13}|ip6? kube-proxy chain gen-[0-9a-f]{64}")


IPVS_SYSCTLS = (
    "net.ipv4.vs.conntrack",
    "net.ipv4.vs.conn_reuse_mode",
    "net.ipv4.vs.expire_nodest_conn",
    "net.ipv4.vs.expire_quiescent_template",
)
# File name -> the command whose output it holds.
TOOLS = {
    "iptables.txt": "iptables-save",
    "ip6tables.txt": "ip6tables-save",
    "nft.txt": "nft list ruleset",
    "nfacct.txt": "nfacct list",
    "sysctls.txt": f"sysctl {' '.join(SYSCTLS)}",
}
IPVS_TOOLS = {
    "iptables.txt": "iptables-save",
    "ip6tables.txt": "ip6tables-save",
    "ipset.txt": "ipset save",
    "ipvs.txt": "ipvsadm -Sn",
    "ipvs-timeouts.txt": "ipvsadm -Ln --timeout",
    "kube-ipvs0.txt": "ip -o addr show dev kube-ipvs0",
    "link.txt": "ip -o link show dev kube-ipvs0",
    "sysctls.txt": f"sysctl {' '.join(SYSCTLS + IPVS_SYSCTLS)}",
}


def read(side: Side, mode: str) -> Texts:
    """Everything that kube-proxy may have programmed, as the tools print it; one visit, since some are far away."""
    tools = IPVS_TOOLS if mode == "ipvs" else TOOLS
    script = "".join(f"echo '=== {file}'\n{command}\n" for file, command in tools.items())
    parts = re.split(r"(?m)^=== (\S+)\n", side.run("sh", "-eu", stdin=script))
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    if "nft.txt" in texts:
        texts["nft.txt"] = _kube_tables(texts["nft.txt"])
    return texts


def read_sysctls(side: Side) -> str:
    return side.run("sysctl", *SYSCTLS)


def _kube_tables(ruleset: str) -> str:
    """Only kube-proxy's own nft tables: a ruleset shows those of iptables too, which iptables-save reads better."""
    tables = re.split(r"(?m)^(?=table )", ruleset)
    return "".join(text for text in tables if re.match(r"table \S+ kube-proxy ", text))


def canonical(texts: Mapping[str, str], mode: str) -> State:
    state: State = {}
    for file, text in texts.items():
        kind = file.removesuffix(".txt")
        if kind in ("iptables", "ip6tables"):
            state.update((f"{kind} {name}", lines) for name, lines in _iptables(text, mode))
        elif kind == "nft":
            state.update((f"nft {name}", lines) for name, lines in _nft(text))
        elif kind == "nfacct":
            state["nfacct"] = tuple(sorted(re.findall(r"(\S+);", text)))
        elif kind == "ipset":
            state.update((f"ipset {name}", lines) for name, lines in _ipset(text))
        elif kind == "ipvs":
            state.update((f"ipvs {name}", lines) for name, lines in _ipvs(text))
        elif kind == "kube-ipvs0":
            state[kind] = tuple(sorted(re.findall(r" inet6? (?!fe80:)(\S+)", text)))
        elif kind == "link":  # its number and hardware address are left to chance
            state[kind] = tuple(re.findall(r"kube-ipvs0: <(\S+)> mtu (?:\d+)", text))
        else:
            state[kind] = tuple(sorted(line.strip() for line in text.splitlines() if line.strip()))
    return state


# iptables-save


def _iptables(text: str, mode: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    table = ""
    chains: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            table, chains = line[1:], {}
        elif line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            chains[chain] = [] if policy == "-" else [f"policy {policy}"]
        elif line.startswith("-A "):
            chains[line.split()[1]].append(line)
        elif line == "COMMIT":
            for chain, rules in chains.items():
                if not MARKER.fullmatch(chain):
                    if mode == "ipvs" and chain in MIXED_IPVS:
                        rules = sorted(rules)  # all of them drop, and none says whose it is
                    elif mode != "ipvs" and chain in MIXED:
                        rules = _by_service(rules)
                    yield f"{table} {chain}", tuple(rules)


def _by_service(rules: list[str]) -> list[str]:
    """Sorted by Service, with the jumps to the node ports last; left alone when these are not last, as they must be."""
    last = len(rules)
    while last and rules[last - 1].endswith("-j KUBE-NODEPORTS"):
        last -= 1
    misplaced = any(rule.endswith("-j KUBE-NODEPORTS") for rule in rules[:last])
    head = rules[:last] if misplaced else sorted(rules[:last], key=_service)
    return head + sorted(rules[last:])


def _service(rule: str) -> str:
    found = re.search(r'--comment (?:"([^" ]+)|(\S+))', rule)
    return (found.group(1) or found.group(2)) if found else ""


# ipset save, ipvsadm -Sn


def _ipset(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Sets with their members; how large a hash has grown says nothing."""
    sets: dict[str, list[str]] = {}
    for line in text.splitlines():
        verb, name, rest = line.split(" ", 2)
        if verb == "create":
            sets[name] = [re.sub(r" (?:hashsize \d+|initval \S+|bucketsize \d+)", "", rest)]
        else:
            sets[name].append(re.sub(r"/(?:32|128)$", "", rest))
    for name, (kind, *members) in sets.items():
        yield name, (kind, *sorted(members))


def _ipvs(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Virtual servers with their real servers; one that only drains is nobody's difference."""
    servers: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        name = " ".join(words[1:3])
        if words[0] == "-A":
            servers[name] = [" ".join(words[3:])]
        elif not line.rstrip().endswith(" -w 0"):
            servers[name].append(" ".join(words[3:]))
    for name, (kind, *backends) in servers.items():
        yield name, (kind, *sorted(backends))


# nft list ruleset


def _nft(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each table, set, map, chain and counter; elements and anonymous sets sorted, since hashes have no order."""
    table, name = "", ""
    body: list[str] = []
    for raw in text.splitlines():
        line = raw.strip()
        opened = re.match(r"^(table|set|map|chain|counter|ct helper) (.+) \{$", line)
        if opened and opened.group(1) == "table":
            table, name, body = opened.group(2), "", []
        elif opened:
            name, body = f"{table} {opened.group(1)} {opened.group(2)}", []
        elif line == "}" and name:
            if not MARKER.fullmatch(name):
                yield name, tuple(_nft_body(name, body))
            name = ""
        elif line == "}":
            table = ""
        elif name:
            body.append(line)
        elif line:
            yield f"{table} {line.split()[0]}", (line,)


def _nft_body(name: str, body: list[str]) -> list[str]:
    kind, own = name.split()[-2:]
    if kind == "counter":
        return []
    if kind == "chain":
        return [_sort_anonymous(line) for line in body]
    start = next((i for i, line in enumerate(body) if line.startswith("elements = {")), len(body))
    head, elements = body[:start], " ".join(body[start:]).removeprefix("elements = {").removesuffix("}")
    if own.startswith("affinity-"):  # its elements are clients, not configuration
        return head
    return head + sorted(part.strip() for part in elements.split(", ") if part.strip())


def _sort_anonymous(rule: str) -> str:
    def ordered(found: re.Match[str]) -> str:
        return "{ " + ", ".join(sorted(part.strip() for part in found.group(1).split(","))) + " }"

    return re.sub(r"\{ ([^{}]*) \}", ordered, rule)


def leftovers(real: State) -> set[str]:
    """Objects that kube-proxy no longer needs and will delete in its own time; nothing leads to them.

    An nft chain is emptied at once and deleted a second or more later. With over 1,000 endpoints an iptables chain
    goes at the first sync after a syncPeriod, and keeps its rules until then.
    """
    edges: dict[str, set[str]] = {}
    for name, lines in real.items():
        # "iptables nat KUBE-X" jumps within its table; "nft ip kube-proxy map x" leads to chains of its table.
        place = " ".join([*name.split()[:3], "chain"]) if name.startswith("nft ") else " ".join(name.split()[:2])
        edges[name] = {f"{place} {target}" for line in lines for target in _TARGET.findall(line)}
    reached: set[str] = set()
    pending = [name for name in edges if not _DYNAMIC.search(name)]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending.extend(edges.get(name, ()))
    return {name for name in edges if name not in reached and (not name.startswith("nft ") or not real[name])}


_TARGET = re.compile(r"(?:-j|-g|goto|jump) ([^\s,]+)")
_DYNAMIC = re.compile(r"^ip6?tables nat KUBE-(?:SVC|SVL|SEP|EXT|FW)-|^nft ip6? kube-proxy chain .*/")


# Differences


@dataclass(frozen=True)
class Difference:
    """One kernel object that is not the same on both sides."""

    name: str
    real: tuple[str, ...] | None  # None: not there at all
    ours: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.ours is None or self.real is None:
            where, lines = ("kube-proxy", self.real) if self.ours is None else ("us", self.ours)
            return "\n".join([f"{self.name}: only with {where}", *(f"    {line}" for line in lines or ())])
        changed = [line for line in difflib.ndiff(self.real, self.ours) if line[0] in "-+"]
        return "\n".join([f"{self.name}: kube-proxy (-), us (+)", *(f"  {line}" for line in changed)])


def differences(real: State, ours: State) -> list[Difference]:
    names = sorted(real.keys() | ours.keys())
    return [Difference(name, real.get(name), ours.get(name)) for name in names if real.get(name) != ours.get(name)]


def rules(state: State) -> int:
    return sum(len(lines) for lines in state.values())
