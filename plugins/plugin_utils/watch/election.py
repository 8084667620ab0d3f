# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who leads, of several control hosts that follow one cluster: the one that holds a Lease and keeps renewing it.

A leader renews every RENEW_SECONDS. If it could not for DEADLINE_SECONDS, it does not lead any more, whether another
one does or not. The others take the Lease once they have seen nothing of its holder for LEASE_SECONDS, which is longer;
so two never lead at a time, as long as clocks run at about the same speed. What they show does not matter. One that
ends gives the Lease back, and the next one has it within a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import socket
import threading
import time
import uuid
from types import TracebackType

from ..cluster.lease import Lease, LeaseObject
from ..cluster.refusals import ApiError

LEASE_SECONDS = 6.0
DEADLINE_SECONDS = 4.0
RENEW_SECONDS = 1.0
LOOK_SECONDS = 1.0
# Of one request; the deadline counts from its beginning.
REQUEST_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One of those who want to lead, and what it saw of the Lease. Times are those of its own clock."""

    name: str
    seen: Lease | None = None
    since: float = 0.0  # when that was seen first
    until: float = -math.inf  # it leads until then

    def leads(self, now: float) -> bool:
        """Whether it leads."""
        return now < self.until

    def saw(self, lease: Lease, now: float) -> Candidate:
        """The Lease is like this. If it is held by another, nothing that was known before counts."""
        until = self.until if lease.holder == self.name else -math.inf
        if self.seen is not None and self.seen.version == lease.version:
            return dataclasses.replace(self, until=until)
        return dataclasses.replace(self, seen=lease, since=now, until=until)

    def claim(self, now: float, wall: str) -> Lease | None:
        """What to write to lead, or to go on leading; None while another one does."""
        lease = self.seen
        if lease is None:
            return None
        if lease.holder == self.name:
            return dataclasses.replace(lease, renewed=wall)
        if lease.holder and now < self.since + max(LEASE_SECONDS, lease.seconds):
            return None
        return dataclasses.replace(
            lease,
            holder=self.name,
            acquired=wall,
            renewed=wall,
            seconds=round(LEASE_SECONDS),
            transitions=lease.transitions + 1,
        )

    def took(self, lease: Lease, began: float, now: float) -> Candidate:
        """What was to be written since `began` was written."""
        return dataclasses.replace(self, seen=lease, since=now, until=began + DEADLINE_SECONDS)


def clock() -> float:
    """Seconds of a clock that is never set, and also runs while a machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def own_name() -> str:
    """Names a process that wants to lead; no other one has the same name."""
    return f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"


class Election:
    """A candidate in a thread of its own, while the block of a `with` lasts."""

    def __init__(self, lease: LeaseObject, name: str = "") -> None:
        self._lease = lease
        self._candidate = Candidate(name or own_name())
        self._trouble = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="election")

    def __enter__(self) -> Election:
        # What is wrong from the beginning, such as rights that are missing, is an error and no trouble.
        self._once()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the Lease back, if it is ours."""
        self._stopped.set()
        self._thread.join(3 * REQUEST_SECONDS)
        candidate = self._candidate
        if candidate.leads(clock()) and candidate.seen is not None and not self._thread.is_alive():
            with contextlib.suppress(ApiError):
                self._lease.write(dataclasses.replace(candidate.seen, holder="", renewed=_wall()))
        self._lease.close()

    @property
    def leads(self) -> bool:
        """Whether this host leads now."""
        return self._candidate.leads(clock())

    @property
    def problem(self) -> str:
        """Why this host does not lead; empty if it does."""
        candidate = self._candidate
        if candidate.leads(clock()):
            return ""
        holder = candidate.seen.holder if candidate.seen is not None else ""
        if holder and holder != candidate.name and not self._trouble:
            return f"{holder} leads, by the Lease {self._lease.name}"
        return f"no leader is known by the Lease {self._lease.name}" + (f": {self._trouble}" if self._trouble else "")

    def _run(self) -> None:
        while not self._stopped.wait(RENEW_SECONDS if self.leads else LOOK_SECONDS):
            try:
                self._once()
            except Exception as error:
                # Whatever it was, this host stops to lead when its time is over.
                self._trouble = str(error)

    def _once(self) -> None:
        """Look at the Lease, and take it if that is due. A leader renews what it wrote last without a look."""
        candidate, began = self._candidate, clock()
        if not candidate.leads(began):
            candidate = candidate.saw(self._lease.read(), clock())
        claim = candidate.claim(clock(), _wall())
        if claim is not None:
            began = clock()
            written = self._lease.write(claim)
            if written is None:
                # Another one was quicker.
                candidate = candidate.saw(self._lease.read(), clock())
            else:
                candidate = candidate.took(written, began, clock())
        self._candidate, self._trouble = candidate, ""


def _wall() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
