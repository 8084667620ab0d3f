# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The ledgers of several control hosts as one.

    merge(ledger, other)        # `ledger` has afterwards what `other` has

If the other ledger goes on where this one ends, its lines are added as they are; so a host that has none yet continues
the one of another host. Otherwise each line becomes a part of an entry here, with the hash that it had there: heads
that runs on the other host have printed are found in this ledger too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .files import open_regular, sync_folder
from .ledger import MERGED, Head, entry_of, lines, seal, tail_of, unmerged
from .locks import lock


def hashes(file: Path) -> Iterator[str]:
    """Those of all entries, merged ones included."""
    for _line, entry in lines(file):
        yield from (str(each["hash"]) for each in unmerged(entry))


def merge(ledger: Path, other: Path) -> int:
    """Add the entries of another ledger that this one does not have; how many there were. Both must be intact."""
    theirs = list(lines(other))
    ledger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_regular(ledger, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=True)
    with os.fdopen(descriptor, "r+b") as stream:
        lock(stream.fileno())
        head, _torn = tail_of(stream, ledger)
        known = set(hashes(ledger))
        # What was merged there of what is here has another hash, and holds nothing new.
        new = [(line, entry) for line, entry in theirs if str([*unmerged(entry)][-1]["hash"]) not in known]
        goes_on = bool(new) and new[0][1]["previous"] == head.hash and new == theirs[-len(new) :]
        stream.writelines([line + b"\n" for line, _entry in new] if goes_on else _wrapped(head, new))
        stream.flush()
        os.fsync(stream.fileno())
    if head == Head():
        sync_folder(ledger.parent)
    return len(new)


def _wrapped(head: Head, new: Sequence[tuple[bytes, dict[str, Any]]]) -> Iterator[bytes]:
    """Entries that follow a head and hold these lines."""
    number, previous = head.number, head.hash
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for line, _entry in new:
        number += 1
        fields = {"number": number, "previous": previous, "time": now, "action": "merge", MERGED: line.decode("ascii")}
        sealed = seal(fields)
        previous = str(entry_of(sealed, "")["hash"])
        yield sealed
