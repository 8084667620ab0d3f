# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How a task for a host can fail. None of it concerns other hosts."""

from __future__ import annotations


class NotDone(Exception):
    """The node did not do what it was asked, or was not asked; the message says why."""


class AsBefore(NotDone):
    """The same, and the node has what it had before."""


class Unreachable(NotDone):
    """No connection to the host."""
