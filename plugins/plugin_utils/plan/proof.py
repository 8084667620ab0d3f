# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A proof before a push: the states of nodes are followed packet by packet, and a run whose states fail ends there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choices import Choices
from ..errors import UserError

if TYPE_CHECKING:
    from ..cluster.record import Record


class NotProved(UserError):
    """Rules that do not do what was decided, or addresses with two owners; the message has the smallest example."""


def refuse_unproved(
    record: Record | Path, choices: Choices, facts: Mapping[str, Mapping[str, Any]], nodes: Iterable[str]
) -> None:
    """Stop unless all claims hold for what these nodes are going to be given."""
    names = sorted(set(nodes))
    if not names:
        return
    # Here and not above: few runs prove, and what follows packets takes a while to import.
    from ..cluster.record import read_record, snapshot_of
    from ..explain.claims import of_nodes
    from ..explain.intent import Intent
    from ..proxy.policy import Known

    record = read_record(record) if isinstance(record, Path) else record
    intent = Intent(snapshot_of(record), choices, facts, Known(url=record.source))
    failing = [each for each in of_nodes(intent, names) if each.failures]
    if failing:
        count = sum(len(each.failures) for each in failing)
        more = f" (and {count - 1:,} more; `akp prove` tells of them)" if count > 1 else ""
        raise NotProved(
            f"refused, and no node was touched: not proved: {failing[0].failures[0]}{more}. If that is meant, allow it "
            "for one run with kube_proxy_prove=false"
        )
