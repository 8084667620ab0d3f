# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""iptables mode: a State as files for iptables-restore, and a Delta as files that lead to the next State."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..addresses import Family
from .common import ALLOW_FILE, allow_changes, allow_file
from .iptables_frame import CANARY_CHAIN, JUMPS, MASQUERADE_CHAIN
from .state import Delta, Object, Part, State, part_of

TOOLS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}


def files(state: State) -> Iterator[tuple[str, str]]:
    """The files of a full bundle."""
    opened = state.open_objects
    for family in Family:
        if (family.value, "mangle", CANARY_CHAIN) in opened:
            place = f"# node {state.node}, {state.mode} mode, {family.value}"
            head = f"{place}, generation {state.generation}\n"
            yield _name(family, Part.ENDPOINTS), head + _endpoints_file(state, family.value)
            yield _name(family, Part.DISPATCH), head + _dispatch_file(state, family.value, opened)
            # The same bytes as long as no frontend changes: that is what a node compares.
            yield _name(family, Part.FRONTENDS), f"{place}\n{_frontends_file(state, family.value, opened)}"
    for obj, text in opened.items():
        if obj[0] == "file":
            yield obj[1], text
    yield ALLOW_FILE, allow_file(state)


def _name(family: Family, part: Part) -> str:
    return f"{TOOLS[family]}-{part.value}.rules"


def marker_chain(generation: str) -> str:
    """The chain that names a generation; 28 characters are all that a name may have."""
    return f"KUBE-PROXY-GEN-{generation[:13].upper()}"


def marker(generation: str) -> str:
    """What makes that chain, with a rule that has the whole generation."""
    chain = marker_chain(generation)
    return f":{chain} - [0:0]\n-A {chain} -m comment --comment {generation}\n"


def demands(base: str, jumps: str) -> str:
    """What the kernel refuses where the base, or a jump to our chains, is not there. The base's marker goes."""
    chain = marker_chain(base)
    return f"-F {chain}\n-X {chain}\n" + "".join(f"-C{line[2:]}" for line in jumps.splitlines(keepends=True))


def chain_lines(chains: Iterable[tuple[Object, str]]) -> Iterator[str]:
    """Chains and then their rules, so that rules find each other's chains; chains that are there are emptied."""
    chains = tuple(chains)
    yield from (f":{obj[2]} - [0:0]\n" for obj, _text in chains)
    yield from (text for _obj, text in chains)


def table_text(table: str, *parts: Iterable[str]) -> str:
    """A table of a restore file; nothing if there is nothing in it."""
    text = "".join(line for lines in parts for line in lines)
    return f"*{table}\n{text}COMMIT\n" if text else ""


_ALL_SERVICES = "# all services\n"


def _own_chains(state: State, family: str, part: Part, declared: Part | None = None) -> Iterator[str]:
    """The chains of service ports, below the name of each; those of `declared` are made here and filled elsewhere."""
    for each in state.fragments:
        if each.family == family:
            chains = [(obj, text) for obj, text in each.own if part_of(obj) is part]
            early = [(obj, "") for obj, _text in each.own if part_of(obj) is declared]
            if chains or early:
                yield f"# {each.name}\n"
                yield from chain_lines([*early, *chains])


def _endpoints_file(state: State, family: str) -> str:
    """The chains that lead to endpoints."""
    return table_text("nat", [f":{MASQUERADE_CHAIN} - [0:0]\n"], _own_chains(state, family, Part.ENDPOINTS))


def _dispatch_file(state: State, family: str, opened: dict[Object, str]) -> str:
    """What leads to the chains of service ports, or refuses; and the marker, as only with this there is service."""
    nat, filter_ = (chain_lines(_chains(opened, family, table, Part.DISPATCH)) for table in ("nat", "filter"))
    own = _own_chains(state, family, Part.DISPATCH, declared=Part.FRONTENDS)
    mark = [marker(state.generation)]
    return table_text("nat", own, [_ALL_SERVICES], nat, mark) + table_text("filter", filter_, mark)


def _frontends_file(state: State, family: str, opened: dict[Object, str]) -> str:
    """What all service ports share, the firewalls of load balancers, and at last the jumps of the built-in chains."""
    own = _own_chains(state, family, Part.FRONTENDS)
    nat, filter_, mangle = (
        chain_lines(_chains(opened, family, table, Part.FRONTENDS)) for table in ("nat", "filter", "mangle")
    )
    return (
        table_text("nat", own, [_ALL_SERVICES], nat, [JUMPS["nat"]])
        + table_text("filter", filter_, [JUMPS["filter"]])
        + table_text("mangle", mangle)
    )


def _chains(objects: dict[Object, str], family: str, table: str, part: Part) -> list[tuple[Object, str]]:
    return [(obj, text) for obj, text in objects.items() if obj[:2] == (family, table) and part_of(obj) is part]


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """The files of a delta bundle: the changed chains whole, the stale ones deleted, and the new generation."""
    for family in Family:
        if (family.value, "mangle", CANARY_CHAIN) in state.frame:
            head = f"# node {state.node}, {state.mode} mode, {family.value}, {change.base} to {change.generation}\n"
            for part, text in _family_delta(change, family.value).items():
                if text:
                    yield _name(family, part), head + text
    for obj, text in change.changed.items():
        if obj[0] == "file":
            yield obj[1], text
    if allow := allow_changes(change):
        yield ALLOW_FILE, allow


def _family_delta(change: Delta, family: str) -> dict[Part, str]:
    """The texts of the three files. A chain goes at the end of a table, when nothing refers to it any more."""
    found = dict.fromkeys(Part, "")
    for table in ("nat", "filter"):
        sections: dict[Part, list[str]] = {}
        removed = [obj for obj in change.removed if obj[:2] == (family, table)]
        for part in Part:
            emptied = [(obj, "") for obj in removed if part_of(obj) is part]
            sections[part] = [*chain_lines([*_chains(change.changed, family, table, part), *emptied])]
        if sections[Part.DISPATCH] and table == "nat":
            # Load balancer addresses may lead to firewalls that are new.
            fresh = _chains(change.changed, family, table, Part.FRONTENDS)
            declared = [f":{obj[2]} - [0:0]\n" for obj, _text in fresh if obj not in change.before]
            sections[Part.DISPATCH] = [*declared, *sections[Part.DISPATCH]]
        last = max((part for part in Part if sections[part]), key=[*Part].index, default=Part.ENDPOINTS)
        sections[last] += [f"-X {obj[2]}\n" for obj in removed]
        sections[Part.ENDPOINTS] = [
            demands(change.base, JUMPS[table]),
            *sections[Part.ENDPOINTS],
            marker(change.generation),
        ]
        for part, lines in sections.items():
            found[part] += table_text(table, lines)
    return found
