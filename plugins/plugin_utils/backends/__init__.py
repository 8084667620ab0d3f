# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""State written down: one module per mode, each a pure function from a NodeView to a State."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ..errors import UserError
from ..proxy.compat import COMPATS, DEFAULT_COMPAT, Compat
from ..proxy.config import NODE_PORT_KEYWORDS, ProxyConfig
from ..proxy.facts import UnusableNode
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
        """Views that are not asked for any more."""


# Mode -> the modules that write its states and its files, loaded when the mode is used: a question needs one of them.
_MODES = {
    "iptables": ("iptables", "iptables_file"),
    "ipvs": ("ipvs", "ipvs_file"),
    "nftables": ("nftables", "nftables_file"),
    "userspace": ("userspace", "userspace"),
    "kernelspace": ("kernelspace", "kernelspace"),
}


def _module(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__)


class ByNode:
    """Writes a node of Windows in kernelspace mode, and any other in the configured one."""

    def __init__(self, linux: Renderer, preview: Compat | None) -> None:
        self._linux, self._preview = linux, preview

    def state(self, view: NodeView) -> State:
        """The state of one node; UnusableNode if nothing can be written for it."""
        name = view.facts.name
        if view.facts.hns is None:
            if view.config.mode == "kernelspace":
                raise UnusableNode(f"node {name}: mode kernelspace is for nodes of Windows, and it runs Linux")
            return self._linux.state(view)
        if self._preview is None:
            raise UnusableNode(
                f"node {name}: it runs Windows. kernelspace mode is a preview, never run on Windows: akp render writes its "
                "bundle, and the module windows_node carries it, see docs/kernelspace.md; leave this host out of the play"
            )
        found: State = _module("kernelspace").Renderer(self._preview).state(view)
        return found

    def forget(self, views: Iterable[PortView]) -> None:
        """Views that are asked for no more."""
        self._linux.forget(views)


def renderer(config: ProxyConfig, compat: str = DEFAULT_COMPAT, *, preview: bool = False) -> Renderer:
    """The writer of the configured mode, and, as a preview, of Windows nodes."""
    if compat not in COMPATS:
        raise UnknownBackend(f"compat {compat!r} is not one of {', '.join(COMPATS)}")
    if config.mode not in _MODES:
        raise UnknownBackend(f"mode {config.mode!r} cannot be written; one of {', '.join(_MODES)} can")
    profile = COMPATS[compat]
    for entry in config.node_port_addresses:
        if entry in NODE_PORT_KEYWORDS and entry not in profile.node_port_keywords:
            raise UnknownBackend(f"nodePortAddresses: kube-proxy {compat} does not know the keyword {entry}")
    linux: Renderer = _module(_MODES[config.mode][0]).Renderer(profile)
    return ByNode(linux, profile if preview else None)


def files(state: State) -> Iterator[tuple[str, str]]:
    """Names and contents of the files of a full bundle."""
    found: Iterator[tuple[str, str]] = _module(_MODES[state.mode][1]).files(state)
    return found


def delta_files(change: Delta, state: State) -> Iterator[tuple[str, str]]:
    """Names and contents of the files of a delta bundle that leads to a state."""
    found: Iterator[tuple[str, str]] = _module(_MODES[state.mode][1]).delta_files(change, state)
    return found
