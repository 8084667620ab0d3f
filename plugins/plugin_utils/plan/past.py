# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host had at some time, as the ledger tells it."""

from __future__ import annotations

import datetime
from pathlib import Path

from ..errors import UserError
from ..ledger import entries

_DONE = ("sync", "heal", "rollback", "cleanup", "release")


class NotKnown(UserError):
    """A time that cannot be read, or of which the ledger says nothing."""


def parse_time(text: str) -> datetime.datetime:
    """A time as people write it; without a zone it is that of the control host."""
    try:
        when = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise NotKnown(
            f"{text!r} is no time; write it such as 2026-11-17T21:30 (of the control host) or 2026-11-17T21:30Z"
        ) from None
    return when.astimezone(datetime.UTC)


def generation_at(ledger: Path, host: str, when: datetime.datetime) -> str:
    """The generation that a host had then; empty if it had nothing."""
    found: str | None = None
    told = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    for entry in entries(ledger) if ledger.exists() else ():
        if str(entry.get("time")) > told:
            break
        node = (entry.get("nodes") or {}).get(host)
        if node is None or entry.get("action") not in _DONE or entry.get("result") == "begun":
            continue
        if "after" in node or entry.get("action") in ("cleanup", "release"):
            found = str(node.get("after") or "")
    if found is None:
        raise NotKnown(f"{ledger}: has nothing about {host} up to {told}")
    return found
