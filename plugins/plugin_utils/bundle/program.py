# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The program that applies a bundle on a node: one file there, and here its parts in the directory akp_node."""

from __future__ import annotations

from functools import cache
from importlib import resources

PROGRAM = "akp-node"
# A part alone does not know what the others set and use.
_ALONE = "# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154\n"


@cache
def node_program() -> str:
    """Its text: the parts in the order of their names."""
    parts = sorted(
        (part for part in resources.files(__package__).joinpath("akp_node").iterdir() if part.name.endswith(".sh")),
        key=lambda part: part.name,
    )
    return "#!/bin/sh\n" + "".join(part.read_text(encoding="utf-8").removeprefix(_ALONE) for part in parts)
