"""Rules of userspace mode in a canonical form, so that two kernels can be compared that chose other proxy ports.

A proxy port is written as the service port that it belongs to. That is a bijection or the rules are wrong: a service
port has one port in all its rules, and no two of one protocol share it. The order of Services in a chain is that in
which kube-proxy heard of them, so each chain is sorted; the order of the built-in chains counts.
"""

from __future__ import annotations

import re

from .kernel import State

_CHAINS = re.compile(r"KUBE-(PORTALS|NODEPORT)-(CONTAINER|HOST|NON-LOCAL)")
_RULE = re.compile(r"-A (?P<chain>\S+) (?P<rest>.*)")
_NAME = re.compile(r'--comment "?(?P<name>[^" ]+)"? ')
_TO_PROXY = re.compile(r"(?P<before>--to-ports |--to-destination \S*:)(?P<port>\d+)$")
_ACCEPTED = re.compile(r"(?P<before>--dport )(?P<port>\d+)")


class NoBijection(Exception):
    """A service port with two proxy ports, or a proxy port of two service ports."""


def canonical(text: str, tool: str) -> State:
    """What iptables-save or ip6tables-save printed: chains of the mode, and the jumps to them, in the built-in ones."""
    state: dict[str, list[str]] = {}
    ports: dict[tuple[str, str], str] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":KUBE-") and _CHAINS.fullmatch(line[1:].split()[0]):
            state.setdefault(f"{tool} {table} {line[1:].split()[0]}", [])
        rule = _RULE.fullmatch(line)
        if rule is None or not _CHAINS.search(line):
            continue
        rest, key = rule["rest"], f"{tool} {table} {rule['chain']}"
        if _CHAINS.fullmatch(rule["chain"]):
            rest = _with_names(rule["chain"], rest, ports)
        state.setdefault(key, []).append(rest)
    _check(ports)
    return {
        key: tuple(sorted(rules) if _CHAINS.fullmatch(key.split()[2]) else rules)
        for key, rules in sorted(state.items())
    }


def _with_names(chain: str, rule: str, ports: dict[tuple[str, str], str]) -> str:
    """A rule with the name of the service port in place of its proxy port."""
    name, protocol = _NAME.search(rule), rule.partition("-p ")[2].split()[0]
    if name is None:
        return rule
    owner = (name["name"], protocol)

    def named(match: re.Match[str]) -> str:
        if ports.setdefault(owner, match["port"]) != match["port"]:
            raise NoBijection(f"{' '.join(owner)} has the proxy ports {ports[owner]} and {match['port']}")
        return f"{match['before']}<{' '.join(owner)}>"

    return (_ACCEPTED if chain.endswith("-NON-LOCAL") else _TO_PROXY).sub(named, rule, count=1)


def _check(ports: dict[tuple[str, str], str]) -> None:
    owners: dict[tuple[str, str], str] = {}
    for (name, protocol), port in ports.items():
        other = owners.setdefault((protocol, port), name)
        if other != name:
            raise NoBijection(f"{other} and {name} share the proxy port {port}/{protocol}")
