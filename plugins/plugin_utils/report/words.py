# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Moments, ages and counts as people read them: UTC, two units at most."""

from __future__ import annotations

import re
import time
from pathlib import Path


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


def at_home(path: Path) -> str:
    """A path without the name of the account that it belongs to."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key to sort names by, so that svc-2 comes before svc-10."""
    parts = re.split("([0-9]+)", name)
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in parts)


def counted(number: int, one: str, many: str = "") -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
