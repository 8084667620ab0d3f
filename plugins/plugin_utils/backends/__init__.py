# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""State written down: one module per mode, each a pure function from a NodeView to a State."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ..errors import UserError
from ..proxy.compat import COMPATS, DEFAULT_COMPAT
from ..proxy.config import NODE_PORT_KEYWORDS, ProxyConfig
from ..proxy.port_view import PortView
from ..proxy.view import NodeView
from .state import Delta, State


class UnknownBackend(UserError):
    """A mode or a kube-proxy minor that nothing here writes, or a setting that the minor does not know."""


class Renderer(Protocol):
    """Writes down the state of nodes; what nodes share is written once."""

    def state(self, view: NodeView) -> State:
        """The state of one node."""

    def forget(self, views: Iterable[PortView]) -> None:
        """Views that nobody will ask for any more."""


# Mode -> the modules that write its states and its files, loaded when the mode is used: a question needs one of them.
_MODES = {
    "iptables": ("iptables", "iptables_file"),
    "ipvs": ("ipvs", "ipvs_file"),
    "nftables": ("nftables", "nftables_file"),
    "userspace": ("userspace", "userspace"),
}


def _module(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__)


def renderer(config: ProxyConfig, compat: str = DEFAULT_COMPAT) -> Renderer:
    """The writer of the configured mode."""
    if compat not in COMPATS:
        raise UnknownBackend(f"compat {compat!r} is not one of {', '.join(COMPATS)}")
    if config.mode not in _MODES:
        raise UnknownBackend(f"mode {config.mode!r} cannot be written; one of {', '.join(_MODES)} can")
    profile = COMPATS[compat]
    for entry in config.node_port_addresses:
        if entry in NODE_PORT_KEYWORDS and entry not in profile.node_port_keywords:
            raise UnknownBackend(f"nodePortAddresses: kube-proxy {compat} does not know the keyword {entry}")
    found: Renderer = _module(_MODES[config.mode][0]).Renderer(profile)
    return found


def files(state: State) -> Iterator[tuple[str, str]]:
    """Names and contents of the files of a full bundle."""
    found: Iterator[tuple[str, str]] = _module(_MODES[state.mode][1]).files(state)
    return found


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """Names and contents of the files of a delta bundle that leads to a state."""
    found: Iterator[tuple[str, str]] = _module(_MODES[state.mode][1]).delta_files(change, state)
    return found
