# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a proof claims, what was looked at for it, and what does not hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..cluster.snapshot import Snapshot
from .intent import Intent
from .overlaps import double_claims, overlaps
from .prove import Counterexample, Proof, Prover, smallest


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What was looked at, and what does not hold."""

    name: str
    looked_at: str
    failures: tuple[str, ...]  # the smallest first


def of_nodes(intent: Intent, nodes: Iterable[str]) -> list[Claim]:
    """What must hold before nodes are given what is meant for them, in the mode that they are configured for."""
    prover = Prover()
    for name in nodes:
        prover.node(intent, name)
    return [of_rules([prover.proof], f"mode {intent.mode}"), *of_addresses(intent.snapshot)]


def of_rules(proofs: list[Proof], where: str) -> Claim:
    """That rules do what was decided; proofs are of the same nodes, each in a mode."""
    looked_at = (
        f"{proofs[0].ports:,} service ports of {proofs[0].nodes:,} nodes in {where}; "
        f"{sum(each.walked for each in proofs):,} packets stand for all"
    )
    return Claim("rules", looked_at, told(each for proof in proofs for each in proof.wrong))


def of_addresses(snapshot: Snapshot) -> list[Claim]:
    """That nothing has two owners."""
    count = f"{len(snapshot.services):,} Services"
    return [
        Claim("frontends", f"{count}: none claims what another one claims", _lines(double_claims(snapshot.services))),
        Claim(
            "addresses", f"{count}: none has an address of nodes, pods or the API server", _lines(overlaps(snapshot))
        ),
    ]


def told(found: Iterable[Counterexample]) -> tuple[str, ...]:
    """Counterexamples in words, the smallest first."""
    found = list(found)
    first = smallest(found)
    return (str(first), *(str(each) for each in found if each is not first)) if first else ()


def _lines(found: Iterable[object]) -> tuple[str, ...]:
    return tuple(sorted(map(str, found)))
