# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Hosts that are left as they are: a kube-proxy writes rules there, or they have rules of another mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..carry import rival
from ..configuration import other_mode
from .machine import Host


def held_back(host: Host, result: Mapping[str, Any], settings: Mapping[str, Any], mode: str) -> str:
    """Why a host gets nothing, by what it answered; empty if it may. Mode: the one that it would get."""
    signs, had = result.get("kube_proxy") or (), result.get("mode")
    if signs and not settings.get("allow_running"):
        return rival.told(host.name, host.node, signs)
    if had and result.get("generation") and had != mode and not settings.get("allow_mode_change"):
        return other_mode(str(had), mode)
    return ""
