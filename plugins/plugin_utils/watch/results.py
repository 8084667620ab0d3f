# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What the node action says of a task, as an event of the host that the task was for."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from ..carry.answers import settled
from ..plan.history import UNREACHABLE
from .machine import Phase
from .vocabulary import Answered, Applied, Confirmed, Event, Failed, NeedsBundle, TakenBack, Trial


def event_of(phase: Phase, result: Mapping[str, Any], period: float) -> Event:
    """The event. `phase` is that of the host, `period` the seconds until it is asked again."""
    now = time.monotonic()
    if result.get("cancelled"):
        return TakenBack()
    if result.get("failed") or result.get("unreachable"):
        return failed((UNREACHABLE if result.get("unreachable") else "") + str(result.get("msg") or "failed"))
    if phase is Phase.ASKED:
        return Answered(
            generation=str(result.get("generation") or ""),
            intact=settled(result),
            state=str(result.get("state")),
            differences=len(result.get("differences") or ()),
            landed=time.time(),
            look_at=now + period,
        )
    if result.get("need"):
        return NeedsBundle(str(result.get("reason")))
    if phase is Phase.CONFIRMING:
        return Confirmed()
    trial = None
    if result.get("confirm"):
        until = now + float(result.get("confirm_within") or 0)
        trial = Trial(str(result["confirm"]), str(result.get("previous") or ""), until)
    return Applied(
        generation=str(result.get("generation") or ""),
        changed=bool(result.get("changed")),
        deltas=int(result.get("deltas") or 0),
        trial=trial,
        landed=time.time(),
        look_at=now + period,
    )


def failed(reason: str) -> Failed:
    """A failure of now. Hosts that fail together do not come back together."""
    return Failed(reason, time.monotonic(), random.uniform(0.9, 1.1))
