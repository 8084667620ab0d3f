# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The files of an nftables bundle: a State, or a Delta, as commands of nft in an order that it can run.

All files, in the order of their names, are one transaction; only what a delta drops comes after it. Which generation
the kernel holds is told by an empty chain, whose name is the generation: a delta deletes the chain of its base, so the
kernel itself refuses a delta where the base is not in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..addresses import Family
from .common import ALLOW_FILE, allow_changes, allow_file
from .state import Delta, DispatchObject, EndpointsObject, Object, Part, State, part_of

DROP_FILE = "nftables-4-drop.nft"

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
REJECT_CHAIN = "reject-chain"
_CHAIN_COMMENTS = {REJECT_CHAIN: "helper for @no-endpoint-services / @no-endpoint-nodeports"}

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

# Sets and maps whose elements come and go with endpoints; those of all others come and go with Services.
_ENDPOINTS = {"hairpin-connections"}
_DISPATCH = {"service-ips", "service-nodeports", "no-endpoint-services", "no-endpoint-nodeports"}


def container_object(family: str, kind: str, name: str) -> Object:
    """The name of a set or map of the frame."""
    obj = (family, kind, name)
    if name in _ENDPOINTS:
        return EndpointsObject(obj)
    return DispatchObject(obj) if name in _DISPATCH else obj


def rule_lines(family: str, chain: str, *rules: str) -> str:
    """The commands that add rules to a chain."""
    return "".join(f"add rule {NFT[family]} kube-proxy {chain} {rule}\n" for rule in rules)


def element_line(family: str, container: str, element: str) -> str:
    """The command that adds an element to a set or map."""
    return f"add element {NFT[family]} kube-proxy {container} {{ {element} }}\n"


def _name(part: Part) -> str:
    return f"nftables-{part.value}.nft"


def files(state: State) -> Iterator[tuple[str, str]]:
    """The files of a full bundle."""
    opened = state.open_objects
    for part in Part:
        yield _name(part), "".join(_file(state, part))
    for obj, text in opened.items():
        if obj[0] == "file":
            yield obj[1], text
    yield ALLOW_FILE, allow_file(state)


def _file(state: State, part: Part) -> Iterator[str]:
    """Commands that lead to the state from nothing as well as from an earlier state; sessions are kept."""
    # Files of frontends are the same bytes as long as no frontend changes: that is what a node compares.
    generation = "" if part is Part.FRONTENDS else f", generation {state.generation}"
    yield f"# node {state.node}, {state.mode} mode{generation}\n"
    for family in _families(state):
        frame = [obj for obj in state.frame if obj[0] == family]
        yield f"\n# {family}\n"
        if part is Part.ENDPOINTS:
            yield _table(family)
            # Sets and maps come first: the kernel finds them by walking all sets, those of the rules included.
            yield from map(_declaration, filter(_is_early, frame))
        own = [obj for obj in frame if part_of(obj) is part]
        yield from (_declaration(obj) for obj in own if not _is_early(obj))
        yield from map(_flush, own)
        yield from (state.frame[obj].head for obj in own)
        for each in state.fragments:
            if each.family == family:
                lines = [*_own_objects((obj, text) for obj, text in each.own if part_of(obj) is part)]
                lines += [text for obj, text in each.open if obj[0] == family and part_of(obj) is part]
                if lines:
                    yield f"\n# {each.name}\n"
                    yield from lines
        if part is Part.DISPATCH:
            yield f"\n{_marker('add', family, state.generation)}"


def _is_early(obj: Object) -> bool:
    """Whether elements of sets and maps, or rules of service ports, refer to an object of the frame."""
    return obj[1] in ("set", "map") or obj[2] == REJECT_CHAIN


def _families(state: State) -> tuple[str, ...]:
    return tuple(family for family in NFT if (family, "chain", "services") in state.frame)


def _table(family: str) -> str:
    return f'add table {NFT[family]} kube-proxy {{ comment "rules for kube-proxy" ; }}\n'


def _marker(verb: str, family: str, generation: str) -> str:
    """What makes or deletes the chain that names a generation."""
    return f"{verb} chain {NFT[family]} kube-proxy gen-{generation}\n"


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
    families = _families(state)
    for part in Part:
        lines = [line for family in families for line in _family_delta(change, state, family, part)]
        if part is Part.ENDPOINTS:
            lines = [
                f"# node {state.node}, {state.mode} mode, {change.base} to {change.generation}\n",
                *(_marker("delete", family, change.base) for family in families),
                *lines,
                *(_marker("add", family, change.generation) for family in families),
            ]
        if lines:
            yield _name(part), "".join(lines)
    if stale := [obj for obj in change.removed if obj[0] in families and obj[1] == "chain"]:
        yield DROP_FILE, "".join(f"delete chain {NFT[family]} kube-proxy {name}\n" for family, _kind, name in stale)
    for obj, text in change.changed.items():
        if obj[0] == "file":
            yield obj[1], text
    if allow := allow_changes(change):
        yield ALLOW_FILE, allow


def _family_delta(change: Delta, state: State, family: str, part: Part) -> Iterator[str]:
    """Commands that lead from the base to the state. A chain that is only flushed is stale: it is dropped later."""
    changed = {obj: text for obj, text in change.changed.items() if obj[0] == family and part_of(obj) is part}
    framed = [obj for obj in changed if obj in state.frame]
    own = [(obj, text) for obj, text in changed.items() if obj not in state.frame]
    chains = [obj for obj in framed if obj[1] == "chain"]
    containers = [obj for obj in framed if obj[1] in ("set", "map")]
    removed = [obj for obj in change.removed if obj[0] == family and part_of(obj) is part]
    yield from (_declaration(obj) for obj in framed if obj in chains or obj not in change.before)
    for obj in containers:
        gone = _lines_without(change.before.get(obj, ""), changed[obj])
        yield from (
            f"delete element {NFT[family]} kube-proxy {obj[2]} {{ {change.elements[line]} }}\n" for line in gone
        )
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
