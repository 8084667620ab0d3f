# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""When a change of endpoints began, as the EndpointSlice controller notes it; the time to the kernel counts from it."""

from __future__ import annotations

import datetime
from typing import Any

LAST_CHANGE_TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"


def trigger_text(metadata: Any) -> str:
    """The annotation of an EndpointSlice; empty if there is none."""
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    text = annotations.get(LAST_CHANGE_TRIGGER_TIME) if isinstance(annotations, dict) else None
    return text if isinstance(text, str) else ""


def trigger_time(text: str) -> float | None:
    """The same in seconds since the epoch; None if it is no time."""
    try:
        when = datetime.datetime.fromisoformat(text)
        return when.timestamp() if when.tzinfo is not None else None
    except (OverflowError, ValueError):
        return None
