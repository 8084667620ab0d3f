# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""All changes of a run, each told once with the hosts that it happens on, however many there are.

groups = grouped({"n1": changes, "n2": changes})       # most nodes have the same, and as the same object
lines_of(groups, names)                                 # for those who are to approve it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..bundle.compare import Change
from ..texts import visible

SIGNS = {"added": "+", "removed": "-", "changed": "~"}


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Hosts, and what happens on all of them and on no other; nothing if only rules of no Service change."""

    hosts: tuple[str, ...]
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Group:
        """From JSON, as a plan has it."""
        changes = (Change(**{**each, "details": tuple(each["details"])}) for each in content["changes"])
        return cls(tuple(content["hosts"]), tuple(changes))


def grouped(changes: Mapping[str, Sequence[Sequence[Change]]]) -> list[Group]:
    """Groups of hosts, in the order in which their first change comes. Changes: host -> lists of them.

    Hosts that have the very same lists are looked at once, so a large cluster costs little more than one node.
    """
    alike: dict[tuple[int, ...], list[str]] = {}
    for host in sorted(changes):
        alike.setdefault(tuple(id(each) for each in changes[host] if each), []).append(host)
    # Change -> the classes of hosts that have it, a bit for each.
    having: dict[Change, int] = {}
    for index, hosts in enumerate(alike.values()):
        for each in changes[hosts[0]]:
            for change in each:
                having[change] = having.get(change, 0) | (1 << index)
    groups: dict[int, list[Change]] = {}
    for change, classes in having.items():
        groups.setdefault(classes, []).append(change)
    found = [Group(_hosts(classes, list(alike.values())), tuple(each)) for classes, each in groups.items()]
    others = tuple(host for host in sorted(changes) if not any(changes[host]))
    return [*found, Group(others, ())] if others else found


def _hosts(classes: int, alike: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted(host for index, hosts in enumerate(alike) if classes >> index & 1 for host in hosts))


def change_lines(change: Change) -> Iterator[str]:
    """A change for people, and below it what it consists of."""
    yield visible(f"{SIGNS[change.action]} {change.title}")
    for detail in change.details:
        yield visible(f"    {detail}")


def lines_of(groups: Sequence[Group], name: Callable[[str], str] = str) -> Iterator[str]:
    """Everything, for people; `name` says what a host is called."""
    for each in groups:
        yield visible(f"on {', '.join(map(name, each.hosts))}:")
        for change in each.changes:
            yield from (f"  {line}" for line in change_lines(change))
        if not each.changes:
            yield "  ~ rules of no Service"
