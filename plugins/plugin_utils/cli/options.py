# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Options that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_facts(parser: argparse.ArgumentParser) -> None:
    """What nodes say of themselves."""
    parser.add_argument(
        "--facts",
        type=Path,
        metavar="FILE",
        help="what `akp-node facts` printed on the node, or node names mapped to that (default: the Node object)",
    )
