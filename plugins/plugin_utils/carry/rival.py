# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A kube-proxy that runs on a node which is to get its rules from here: each would undo the other's work.

The node program looks for its process and for its port. Some distributions run it within another program (k3s,
MicroK8s), and a process may be hidden; then the port tells, or what it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Chains of Services and endpoints. An apply leaves none that its bundle does not name, and people do not make these up.
_OF_SERVICES = re.compile(
    r"KUBE-(?:SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}|(?:service|external|firewall|endpoint|affinity)-[A-Z2-7]{8}-.+"
)
_SERVER = re.compile(r"(-t|-u|--sctp-service) \[?([^]\s]+?)\]?:([0-9]+)")
_PROTOCOLS = {"-t": "tcp", "-u": "udp", "--sctp-service": "sctp"}
_SHOWN = 3


def signs(answer: Mapping[str, Any]) -> list[str]:
    """What tells of a kube-proxy there, by the answer of `akp-node ask`; nothing if there is none."""
    found = []
    processes = answer.get("kubeProxy") or []
    if processes:
        found.append(f"process {', '.join(map(str, processes))}")
    elif answer.get("kubeProxyPort"):
        found.append("no process of that name is seen, but its metrics port 10249 is taken")
    written = _written(answer.get("status") or {})
    if written:
        more = f" and {len(written) - _SHOWN} more" if len(written) > _SHOWN else ""
        found.append(f"since the last apply, something wrote {', '.join(written[:_SHOWN])}{more}")
    return found


def runs(answer: Mapping[str, Any]) -> bool:
    """Whether one runs now, by its process or its port; what it wrote may be older than that."""
    return bool(answer.get("kubeProxy") or answer.get("kubeProxyPort"))


def _written(status: Mapping[str, Any]) -> list[str]:
    """Chains and virtual servers of Services that are in the kernel and in nothing that was applied.

    Only while our own markers are all there: chains of a run that was cut short, and old rules that were loaded at
    boot, come with other markers or none.
    """
    if status.get("state") != "applied" or not status.get("generation"):
        return []
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each in status.get("differences") or ():
        found.setdefault(str(each.get("kind")), []).append(each)
    names = (str(each.get("chain") or each.get("name") or "") for each in found.get("stale-chain", ()))
    entries = {str(each.get("value")) for each in found.get("extra-entry", ())}
    servers = (str(each.get("name")) for each in found.get("extra-server", ()))
    return sorted(
        {name for name in names if _OF_SERVICES.fullmatch(name)}
        | {f"ipvs {server}" for server in servers if _entry(server) in entries}
    )


def _entry(server: str) -> str:
    """What kube-proxy puts into an ipset for a virtual server; who makes one by hand hardly makes both."""
    match = _SERVER.fullmatch(server)
    return f"{match[2]},{_PROTOCOLS[match[1]]}:{match[3]}" if match else ""


def told(host: str, node: str, found: Sequence[str]) -> str:
    """For people."""
    return (
        f"kube-proxy runs on {host} ({'; '.join(found)}), and two writers of the same rules undo each other's work. "
        f"Keep it away from this node alone: `kubectl label node {node} kube-proxy.agentless.io/node=`, once its "
        "DaemonSet has the affinity that docs/migration.md gives it. With kube_proxy_allow_running=true it may run "
        "beside"
    )
