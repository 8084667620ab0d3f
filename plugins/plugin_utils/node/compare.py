# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""State `compared`: what the kernel of the node has, beside its bundle; for a node whose rules are kube-proxy's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..bundle.manifest import SERVICES_FILE
from ..bundle.owners import Owners
from ..plan import report
from .apply import read_bundle, refuse
from .visit import Visit

# Our marker of a generation, which kube-proxy does not have.
_MARKER = re.compile(r"KUBE-PROXY-GEN-[0-9A-F]+|gen-[0-9a-f]+")
_HOOKED = re.compile(r"(?:filter|nat)-(?:prerouting|input|forward|output|postrouting)\b")
# Chains that hold rules of many Services, in the order of a hash map of kube-proxy: it is another one after each start.
_MIXED = frozenset(
    {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL", "KUBE-IPVS-OUT-FILTER"}
)


def compare(visit: Visit) -> dict[str, Any]:
    """What a packet could notice if the node got its bundle now. The node is asked, and not changed."""
    refuse(visit)
    bundle = read_bundle(visit)
    if bundle is None:
        # It has its bundle, and the answer that the bundle module read tells what was changed since.
        mode, found = visit.status.get("mode"), visit.status.get("differences") or []
        services = visit.held(visit.status.get("generation"))
    else:
        arguments = ["check", "--unsigned", "--verify", "--node", str(bundle.manifest["node"])]
        answer = visit.answer(visit.way.carry(arguments, bundle.directory, manifest=bundle.sealed))
        mode, found = bundle.manifest["mode"], answer.required("differences")
        services = (bundle.directory / SERVICES_FILE).read_text(encoding="utf-8").splitlines()
    differences = Owners(services).named(noticeable(found))
    return {
        "changed": False,
        "node": visit.name,
        "mode": mode,
        "differing": len(differences),
        "differences": differences[: report.MOST_CHANGES],
        "lines": report.limited([report.difference_text(each) for each in differences]),
    }


def noticeable(differences: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that a packet could notice.

    A chain that should not be there has no effect: whatever leads to it is a difference of its own. kube-proxy removes
    such chains a while after the last rule that led there. To a base chain of nftables the kernel itself leads.
    """
    return [each for each in differences if not _unnoticed(str(each.get("kind")), str(each.get("chain") or ""))]


def _unnoticed(kind: str, chain: str) -> bool:
    if kind == "stale-chain" and not _HOOKED.match(chain):
        return True
    return (kind == "order" and chain in _MIXED) or bool(_MARKER.fullmatch(chain))
