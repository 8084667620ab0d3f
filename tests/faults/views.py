"""What packets can meet of a rule set: everything that a hook leads to.

The unit is what the kernel switches at once. For iptables that is one table of one family, for nftables everything.
A unit is whole if it equals the old or the new one. Chains that nothing leads to are no part of it.

Sets, virtual servers and addresses of ipvs mode change one by one, with kube-proxy too. They are whole if all that is
in both states is there, and nothing that is in neither.
"""

from __future__ import annotations

import re

MEMBERS = "members of"
Views = dict[str, dict[str, str]]  # unit -> object -> text


def iptables_views(saved: dict[str, str]) -> Views:
    """Of what iptables-save printed, by family."""
    found: Views = {}
    for family, text in saved.items():
        table = ""
        chains: dict[str, list[str]] = {}
        for line in [*text.splitlines(), "COMMIT"]:
            if line.startswith("*"):
                table, chains = line[1:], {}
            elif line.startswith(":"):
                name, policy = line[1:].split()[:2]
                chains[name] = [] if policy == "-" else [f"hook, {policy}"]
            elif line.startswith("-A "):
                chains[line.split()[1]].append(line)
            elif line == "COMMIT" and table:
                hooks = [name for name, rules in chains.items() if rules and rules[0].startswith("hook")]
                objects = {name: "\n".join(rules) for name, rules in chains.items()}
                visible = _reachable(objects, hooks, r"-[jg] (\S+)")
                # A hook without a rule does what a hook does that is not there.
                used = {name: text for name, text in visible.items() if "\n" in text or not text.startswith("hook")}
                if used:
                    found[f"{family} {table}"] = used
                table = ""
    return found


def nftables_views(listing: str) -> Views:
    """Of what `nft list ruleset` printed about our tables: one unit, as both families switch together."""
    visible: dict[str, str] = {}
    for family, body in re.findall(r"^table (ip6?) kube-proxy \{\n(.*?)^\}", listing, re.M | re.S):
        objects: dict[str, str] = {}
        for name, inner in re.findall(r"^\t(?:chain|set|map|counter) (\S+) \{\n(.*?)^\t\}", body, re.M | re.S):
            text = re.sub(r"packets \d+ bytes \d+", "", inner)
            if name.startswith("affinity-"):
                text = ""
            if "elements = {" in text:
                text = "\n".join(sorted(part.strip() for part in re.split(r"[,\n]", text)))
            objects[name] = text
        hooks = [name for name, text in objects.items() if " hook " in text]
        led = _reachable(objects, hooks, r"(?:@|goto |jump )([^\s,}]+)")
        visible |= {f"{family} {name}": text for name, text in led.items()}
    return {"kube-proxy": visible} if visible else {}


def member_views(parts: dict[str, list[str]]) -> Views:
    """Of lines that stand for themselves. Real servers of weight 0 are on their way out."""
    kept = {name: [line for line in lines if not line.endswith("-w 0")] for name, lines in parts.items()}
    return {f"{MEMBERS} {name}": dict.fromkeys(lines, "") for name, lines in kept.items() if lines}


def _reachable(objects: dict[str, str], start: list[str], reference: str) -> dict[str, str]:
    """The objects that the first ones lead to, and those themselves."""
    seen: dict[str, str] = {}
    todo = list(start)
    while todo:
        name = todo.pop()
        if name in objects and name not in seen:
            seen[name] = objects[name]
            todo += re.findall(reference, objects[name])
    return dict(sorted(seen.items()))


def halves(now: Views, old: Views, new: Views) -> list[str]:
    """Units that are neither as they were nor as they shall be, with the first difference to either."""
    found = []
    for unit in sorted({*now, *old, *new}):
        has, was, will = now.get(unit, {}), old.get(unit, {}), new.get(unit, {})
        if unit.startswith(MEMBERS):
            gone, strange = (was.keys() & will.keys()) - has.keys(), has.keys() - was.keys() - will.keys()
            if gone or strange:
                found.append(f"{unit}: without {sorted(gone)}, with {sorted(strange)}")
        elif has not in (was, will):
            found.append(f"{unit}: {_difference(has, was)} and {_difference(has, will)}")
    return found


def _difference(a: dict[str, str], b: dict[str, str]) -> str:
    names = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
    return f"{len(names)} objects differ, {names[0]}: {a.get(names[0])!r} not {b.get(names[0])!r}"
