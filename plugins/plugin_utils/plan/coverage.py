# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether every Node of the cluster is some host of the inventory: one that is none gets nothing, without a failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..proxy.warned import Warned

HEADING = "Nodes without a host"


def without_host(
    members: Iterable[str], covered: Iterable[str], others: Iterable[str], hostvars: Mapping[str, Any]
) -> tuple[Warned, ...]:
    """The Nodes of a cluster that are no host. Covered: those of the play's hosts; others: hosts that are not in it.

    Variables of other hosts are read only if a Node is not found by name: for thousands of hosts that takes seconds.
    """
    missing = dict.fromkeys(members)
    for name in (*covered, *others):
        missing.pop(name, None)
    if missing:
        for host in others:
            missing.pop(str(hostvars[host].get("kube_proxy_node_name") or host), None)
    return tuple(
        Warned(HEADING, f"Node {name} is no host of the inventory, and gets nothing from here") for name in missing
    )
