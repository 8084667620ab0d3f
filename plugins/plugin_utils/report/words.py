# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Moments, ages and counts as people read them: UTC, two units at most."""

from __future__ import annotations

import time


def age(seconds: float) -> str:
    """A span of time."""
    whole = max(0, int(seconds))
    if whole < 90:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """A moment in UTC."""
    return time.strftime(form, time.gmtime(seconds))


def counted(number: int, one: str, many: str = "") -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
