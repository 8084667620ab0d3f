# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A kube-proxy that runs on a node which is to get its rules from here: each would undo the other's work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .scripts import script

# Prints a line for each, before the node program answers.
LOOK = script("rival")
_LINE = re.compile(r'\{"kubeProxy": ([1-9][0-9]{0,9})\}')
_MOST = 20


def running(lines: Iterable[str]) -> list[int]:
    """The processes that were seen, by what the node printed."""
    found = (_LINE.fullmatch(line) for line in lines)
    return [int(each[1]) for each in found if each][:_MOST]


def told(host: str, node: str, processes: Sequence[int]) -> str:
    """For people."""
    return (
        f"kube-proxy runs on {host} (process {', '.join(map(str, processes))}), and two writers of the same rules undo "
        f"each other's work. Keep it away from this node alone: `kubectl label node {node} "
        "kube-proxy.agentless.io/node=`, once its DaemonSet has the affinity that docs/migration.md gives it. With "
        "kube_proxy_allow_running=true it may run beside"
    )
