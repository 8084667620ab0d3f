# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp program: the programs of a node, for a review or a node image."""

from __future__ import annotations

import argparse

from ..bundle.program import MODES, PARTS, WINDOWS_PROGRAM, node_program, part_program, programs


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of program."""
    parser = commands.add_parser(
        "program",
        help="print a program of the node: akp-node, akp-pull or akp-health",
        description="Prints akp-node as the bundles of a mode carry it, for a review or a node image: "
        "akp program --mode nftables > /usr/local/sbin/akp-node; or one of the programs beside it: "
        "akp program --part leave > /usr/local/sbin/akp-leave",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--mode",
        choices=(*MODES, "kernelspace"),
        help="akp-node for nodes of this mode; of Windows nodes akp-node.cs, a preview, never run on Windows",
    )
    which.add_argument("--part", choices=PARTS, help="a program beside akp-node, e.g. akp-pull")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    if args.part:
        text = part_program(args.part)
    elif args.mode == "kernelspace":
        text = dict(programs(args.mode))[WINDOWS_PROGRAM]
    else:
        text = node_program(args.mode)
    print(text, end="")
    return 0
