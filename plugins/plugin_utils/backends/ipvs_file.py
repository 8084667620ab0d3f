# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""ipvs mode: a State as files for iptables-restore, ipset, ipvsadm and ip; a Delta as what leads to the next State."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..addresses import Family, host_cidr
from .iptables_file import TOOLS, chain_lines, demands, marker, table_text
from .ipvs_rules import JUMPS, set_name
from .state import Delta, Object, Part, State, part_of

# Of sets and of virtual servers there are two files each: what Services ask for, and then what endpoints ask for.
SET_FILES = {Part.FRONTENDS: "ipset-1-frontends.rules", Part.ENDPOINTS: "ipset-2-endpoints.rules"}
SERVER_FILES = {Part.FRONTENDS: "ipvs-1-frontends.rules", Part.ENDPOINTS: "ipvs-2-endpoints.rules"}
ADDRESSES_FILE = "ip.batch"
DEVICE = "kube-ipvs0"
REAL = " -m -w 1\n"  # how every real server is reached: by masquerading, and all of them alike


def files(state: State) -> Iterator[tuple[str, str]]:
    """The files of a full bundle, in the order in which they are loaded."""
    opened = state.open_objects
    families = _families(state)
    # Every set is made by the first file, so that rules can ask it.
    entries = {obj: _set_lines(text) for obj, text in opened.items() if obj[1] == "ipset"}
    yield (
        SET_FILES[Part.FRONTENDS],
        "".join("".join(lines if part_of(obj) is Part.FRONTENDS else lines[:1]) for obj, lines in entries.items()),
    )
    yield (
        SET_FILES[Part.ENDPOINTS],
        "".join("".join(lines[1:]) for obj, lines in entries.items() if part_of(obj) is Part.ENDPOINTS),
    )
    servers = [text.partition("\n") for each in state.fragments for _obj, text in each.own]
    yield SERVER_FILES[Part.FRONTENDS], "".join(f"{virtual}\n" for virtual, _end, _real in servers)
    yield SERVER_FILES[Part.ENDPOINTS], "".join(real for _virtual, _end, real in servers)
    yield ADDRESSES_FILE, _addresses(opened, families)
    for family in families:
        yield f"{TOOLS[family]}.rules", _restore_file(state, family.value, opened)
    for obj, text in opened.items():
        if obj[0] == "file":
            yield obj[1], text


def _families(state: State) -> list[Family]:
    return [family for family in Family if (family.value, "nat", "KUBE-SERVICES") in state.frame]


def _restore_file(state: State, family: str, opened: dict[Object, str]) -> str:
    """Input of iptables-restore. Order counts in every chain, and no chain belongs to a single Service."""
    text = f"# node {state.node}, {state.mode} mode, {family}, generation {state.generation}\n"
    for table in ("nat", "filter"):
        chains = [(obj, text) for obj, text in opened.items() if obj[:2] == (family, table)]
        text += table_text(table, chain_lines(chains), [marker(state.generation), JUMPS[table]])
    return text


def _set_lines(text: str) -> list[str]:
    """How a set is made, and its entries, each once, though several service ports may have asked for it."""
    return [*dict.fromkeys(text.splitlines(keepends=True))]


def _addresses(opened: dict[Object, str], families: Iterable[Family]) -> str:
    """Input of `ip -batch`: the device and what is bound to it."""
    lines = {f"link add {DEVICE} type dummy\n": None}
    for family in families:
        name = set_name("KUBE-IPVS-IPS", family)
        entries = opened[family.value, "ipset", name].splitlines()[1:]
        lines.update((f"addr add {host_cidr(entry.rpartition(' ')[2])} dev {DEVICE}\n", None) for entry in entries)
    return "".join(lines)


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """The files of a delta bundle: changed chains whole, all else as the commands that make the difference."""
    sets = {
        part: [
            line
            for obj, text in change.changed.items()
            if obj[1] == "ipset" and part_of(obj) is part
            for line in _set_changes(obj, text, change)
        ]
        for part in SET_FILES
    }
    yield from ((SET_FILES[part], "".join(lines)) for part, lines in sets.items() if lines)
    servers = [
        line for obj, text in change.changed.items() if obj[1] == "ipvs" for line in _server_changes(obj, text, change)
    ]
    servers += [(Part.FRONTENDS, f"-D {obj[2]}\n") for obj in change.removed if obj[1] == "ipvs"]
    for part, name in SERVER_FILES.items():
        if lines := [line for of, line in servers if of is part]:
            yield name, "".join(sorted(lines, key=_comes_or_goes))
    bound = [line for line in sets[Part.FRONTENDS] if line.split()[1].endswith("-IPVS-IPS")]
    if bound:
        yield ADDRESSES_FILE, "".join(map(_address_change, bound))
    for family in _families(state):
        name = family.value
        rules = f"# node {state.node}, {state.mode} mode, {name}, {change.base} to {change.generation}\n"
        for table in ("nat", "filter"):
            changed = [(obj, text) for obj, text in change.changed.items() if obj[:2] == (name, table)]
            head, mark = demands(change.base, JUMPS[table]), marker(change.generation)
            rules += table_text(table, [head], chain_lines(changed), [mark])
        yield f"{TOOLS[family]}.rules", rules
    for obj, text in change.changed.items():
        if obj[0] == "file":
            yield obj[1], text


def _set_changes(obj: Object, text: str, change: Delta) -> Iterator[str]:
    """Entries that come, and entries that go."""
    old, new = change.before.get(obj, "").splitlines(keepends=True), text.splitlines(keepends=True)
    known, wanted = set(old), set(new)
    yield from (line for line in dict.fromkeys(new) if line not in known)
    yield from (
        line.replace("add", "del", 1) for line in dict.fromkeys(old) if line not in wanted and line[:3] == "add"
    )


def _address_change(line: str) -> str:
    verb, _name, ip = line.split()
    return f"addr {verb} {host_cidr(ip)} dev {DEVICE}\n"


def _server_changes(obj: Object, text: str, change: Delta) -> Iterator[tuple[Part, str]]:
    """A virtual server that comes or is edited, real servers that come, real servers that go."""
    old = change.before.get(obj, "").splitlines(keepends=True)
    new = text.splitlines(keepends=True)
    if not old:
        yield Part.FRONTENDS, new[0]
    elif old[0] != new[0]:
        yield Part.FRONTENDS, new[0].replace("-A", "-E", 1)
    known, wanted = set(old[1:]), set(new[1:])
    yield from ((Part.ENDPOINTS, line) for line in new[1:] if line not in known)
    for line in old[1:]:
        if line not in wanted:
            yield Part.ENDPOINTS, f"{line.removesuffix(REAL)}\n".replace("-a", "-d", 1)


def _comes_or_goes(line: str) -> bool:
    return line[:2] in ("-d", "-D")
