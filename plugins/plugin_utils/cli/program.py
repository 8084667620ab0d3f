# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp program: the node program, for whoever reviews it or puts it into a node image."""

from __future__ import annotations

import argparse

from ..bundle.program import node_program


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of program."""
    parser = commands.add_parser(
        "program",
        help="print the node program akp-node",
        description="Prints akp-node, the program that every bundle carries, for a review or a node image: "
        "akp program > /usr/local/sbin/akp-node",
    )
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    """Print it."""
    print(node_program(), end="")
    return 0
