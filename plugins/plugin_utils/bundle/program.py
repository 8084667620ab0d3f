# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The program that applies a bundle on a node."""

from __future__ import annotations

from importlib import resources

PROGRAM = "akp-node"


def node_program() -> str:
    """Its text."""
    return resources.files(__package__).joinpath(PROGRAM).read_text(encoding="utf-8")
