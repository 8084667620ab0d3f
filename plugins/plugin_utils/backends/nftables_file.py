# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The file of an nftables bundle: a State, or a Delta, as commands of nft in an order that it can run.

Which generation the kernel holds is told by the comment of an empty table of its own. Objects inside the table
`kube-proxy` stay exactly those of kube-proxy, and reading the marker costs nothing however many Services there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..addresses import Family
from .state import Delta, Object, State

FILE = "nftables.nft"
MARKER_TABLE = "kube-proxy-generation"

NFT = {Family.IPV4.value: "ip", Family.IPV6.value: "ip6"}
ADDRESS = {Family.IPV4.value: "ipv4_addr", Family.IPV6.value: "ipv6_addr"}

BASE_CHAINS = {
    "filter-prerouting-pre-dnat": "type filter hook prerouting priority -110",
    "filter-output-pre-dnat": "type filter hook output priority -110",
    "filter-input": "type filter hook input priority 0",
    "filter-forward": "type filter hook forward priority 0",
    "filter-output": "type filter hook output priority 0",
    "nat-prerouting": "type nat hook prerouting priority -100",
    "nat-output": "type nat hook output priority -100",
    "nat-postrouting": "type nat hook postrouting priority 100",
}
_CHAIN_COMMENTS = {"reject-chain": "helper for @no-endpoint-services / @no-endpoint-nodeports"}

# Sets and maps: type and comment; ADDR is the family's type of address.
CONTAINERS = {
    ("set", "cluster-ips"): ("ADDR", "Active ClusterIPs"),
    ("set", "nodeport-ips"): ("ADDR", "IPs that accept NodePort traffic"),
    ("set", "hairpin-connections"): ("ADDR . ADDR . inet_proto . inet_service", "service hairpin connections"),
    ("map", "service-ips"): (
        "ADDR . inet_proto . inet_service : verdict",
        "ClusterIP, ExternalIP and LoadBalancer IP traffic",
    ),
    ("map", "service-nodeports"): ("inet_proto . inet_service : verdict", "NodePort traffic"),
    ("map", "firewall-ips"): (
        "ADDR . inet_proto . inet_service : verdict",
        "destinations that are subject to LoadBalancerSourceRanges",
    ),
    ("map", "no-endpoint-services"): (
        "ADDR . inet_proto . inet_service : verdict",
        "vmap to drop or reject packets to services with no endpoints",
    ),
    ("map", "no-endpoint-nodeports"): (
        "inet_proto . inet_service : verdict",
        "vmap to drop or reject packets to service nodeports with no endpoints",
    ),
    ("map", "localhost-nodeport-reject-ports"): (
        "inet_proto . inet_service : verdict",
        "localhost NodePorts rejected by kube-proxy",
    ),
}


def rule_lines(family: str, chain: str, *rules: str) -> str:
    """The commands that add rules to a chain."""
    return "".join(f"add rule {NFT[family]} kube-proxy {chain} {rule}\n" for rule in rules)


def element_line(family: str, container: str, element: str) -> str:
    """The command that adds an element to a set or map."""
    return f"add element {NFT[family]} kube-proxy {container} {{ {element} }}\n"


def files(state: State) -> Iterator[tuple[str, str]]:
    """The files of a full bundle."""
    opened = state.open_objects
    yield FILE, "".join(_file(state, opened))
    for obj, text in opened.items():
        if obj[0] == "file":
            yield obj[1], text


def _file(state: State, opened: dict[Object, str]) -> Iterator[str]:
    """Commands that lead to the state from nothing as well as from an earlier state; sessions are kept."""
    yield f"# node {state.node}, {state.mode} mode, generation {state.generation}\n"
    for family in _families(state):
        frame = [obj for obj in opened if obj[0] == family]
        yield f"\n# {family}\n"
        yield _table(family)
        # Sets and maps come first: the kernel finds them by walking all sets, those of the rules included.
        yield from map(_declaration, frame)
        yield from map(_flush, frame)
        yield from (state.frame[obj].head for obj in frame)
        for each in state.fragments:
            if each.family == family:
                yield f"\n# {each.name}\n"
                yield from _own_objects(each.own)
                yield from (text for obj, text in each.open if obj[0] == family)
        yield f"\n{_marker(family, state.generation)}"


def _families(state: State) -> tuple[str, ...]:
    return tuple(family for family in NFT if (family, "chain", "services") in state.frame)


def _table(family: str) -> str:
    return f'add table {NFT[family]} kube-proxy {{ comment "rules for kube-proxy" ; }}\n'


def _marker(family: str, generation: str) -> str:
    """An empty table whose comment names the state. A comment cannot be changed, so the table is made anew."""
    ip = NFT[family]
    return f"""\
add table {ip} {MARKER_TABLE}
delete table {ip} {MARKER_TABLE}
add table {ip} {MARKER_TABLE} {{ comment "{generation}" ; }}
"""


def _declaration(obj: Object) -> str:
    """The command that makes an object of the frame, if it is not there."""
    family, kind, name = obj
    ip = NFT[family]
    if kind == "counter":
        return f"add counter {ip} kube-proxy {name}\n"
    if kind == "chain":
        attributes = ""
        if name in BASE_CHAINS:
            attributes = f" {{ {BASE_CHAINS[name]} ; }}"
        elif name in _CHAIN_COMMENTS:
            attributes = f' {{ comment "{_CHAIN_COMMENTS[name]}" ; }}'
        return f"add chain {ip} kube-proxy {name}{attributes}\n"
    type_, comment = CONTAINERS[kind, name]
    type_ = type_.replace("ADDR", ADDRESS[family])
    return f'add {kind} {ip} kube-proxy {name} {{ type {type_} ; comment "{comment}" ; }}\n'


def _flush(obj: Object) -> str:
    family, kind, name = obj
    return "" if kind == "counter" else f"flush {kind} {NFT[family]} kube-proxy {name}\n"


def _own_objects(objects: Iterable[tuple[Object, str]]) -> Iterator[str]:
    """Sets and empty chains first, so that rules find what they refer to."""
    objects = tuple(objects)
    for (family, kind, name), text in objects:
        if kind == "set":
            yield text
        else:
            yield f"add chain {NFT[family]} kube-proxy {name}\nflush chain {NFT[family]} kube-proxy {name}\n"
    yield from (text for obj, text in objects if obj[1] == "chain")


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """The files of a delta bundle."""
    yield FILE, "".join(_delta_file(change, state))
    for obj, text in change.changed.items():
        if obj[0] == "file":
            yield obj[1], text


def _delta_file(change: Delta, state: State) -> Iterator[str]:
    """Commands that lead from the base to the state; a chain that is flushed but not added is stale."""
    yield f"# node {state.node}, {state.mode} mode, {change.base} to {change.generation}\n"
    for family in NFT:
        if (family, "chain", "services") in change.removed:
            ip = NFT[family]
            yield f"\n# {family}\ndelete table {ip} kube-proxy\ndelete table {ip} {MARKER_TABLE}\n"
        elif (family, "chain", "services") in state.frame:
            yield f"\n# {family}\n"
            yield from _family_delta(change, state, family)
            yield _marker(family, change.generation)


def _family_delta(change: Delta, state: State, family: str) -> Iterator[str]:
    changed = {obj: text for obj, text in change.changed.items() if obj[0] == family}
    made = [obj for obj in changed if obj in state.frame and obj not in change.before]
    own = [(obj, text) for obj, text in changed.items() if obj not in state.frame]
    chains = [obj for obj in changed if obj in state.frame and obj[1] == "chain"]
    containers = [obj for obj in changed if obj in state.frame and obj[1] in ("set", "map")]
    removed = [obj for obj in change.removed if obj[0] == family]
    if (family, "chain", "services") in made:
        yield _table(family)
    yield from (_declaration(obj) for obj in changed if obj in made or obj in chains)
    for obj in containers:
        yield from map(_deletion, _lines_without(change.before.get(obj, ""), changed[obj]))
    yield from map(_flush, chains)
    yield from (changed[obj] for obj in chains)
    yield from _own_objects(own)
    for obj in containers:
        yield from _lines_without(changed[obj], change.before.get(obj, ""))
    yield from (_flush(obj) for obj in removed if obj[1] == "chain")
    for _family, kind, name in removed:
        if kind != "chain":
            yield f"delete {kind} {NFT[family]} kube-proxy {name}\n"


def _lines_without(text: str, other: str) -> Iterator[str]:
    """The lines of a text that another one has not, each once: two ports of a Service add the same cluster IP."""
    known = set(other.splitlines(keepends=True))
    return (line for line in dict.fromkeys(text.splitlines(keepends=True)) if line not in known)


def _deletion(line: str) -> str:
    """The command that undoes an `add element` command."""
    command, _brace, element = line.rstrip(" }\n").partition(" { ")
    key = element.partition(" comment ")[0].partition(" : ")[0]
    return f"{command.replace('add', 'delete', 1)} {{ {key} }}\n"
