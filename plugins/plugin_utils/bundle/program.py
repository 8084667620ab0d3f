# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The program that applies a bundle on a node: one file there, and here its parts in the directory akp_node."""

from __future__ import annotations

from functools import cache
from importlib import resources

PROGRAM = "akp-node"
_FOR_EDITORS = "# shellcheck shell=sh\n"


@cache
def node_program() -> str:
    """Its text: the parts in the order of their names."""
    parts = sorted(
        (part for part in resources.files(__package__).joinpath("akp_node").iterdir() if part.name.endswith(".sh")),
        key=lambda part: part.name,
    )
    return "".join(part.read_text(encoding="utf-8").removeprefix(_FOR_EDITORS) for part in parts)
