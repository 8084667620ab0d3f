# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The command `akp`."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys

from .. import __version__
from ..errors import UserError
from ..texts import visible, visible_lines

_COMMANDS = (
    "render",
    "watch",
    "publish",
    "diff",
    "explain",
    "service",
    "prove",
    "report",
    "status",
    "names",
    "approve",
    "ledger",
    "program",
)

_EPILOG = """\
a first run, with what the cluster and its kube-proxy already have:
  kubectl get services,endpointslices,nodes,servicecidrs -A -o json > cluster/all.json
  kubectl -n kube-system get configmap kube-proxy -o jsonpath='{.data.config\\.conf}' > kube-proxy.yaml
  akp render --cluster cluster --config kube-proxy.yaml --all-nodes --output bundles
  akp diff bundles-of-yesterday bundles
  scp -r bundles/NODE NODE:bundle && ssh NODE sudo sh bundle/akp-node apply bundle
"""


def parser(wanted: str = "") -> argparse.ArgumentParser:
    """The command line; where the command is known, only what belongs to it is loaded."""
    top = argparse.ArgumentParser(
        prog="akp",
        description="kube-proxy without a kube-proxy: computes, for every node, the packet rules that kube-proxy "
        "would have programmed there, as files that the node's own tools load.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"akp {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in (wanted,) if wanted in _COMMANDS else _COMMANDS:
        importlib.import_module(f".{name}", __name__).add_parser(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 is good, 1 says that something differs, 2 that the input or the call was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    # The options of watch are Ansible's, and read by it.
    own = 1 if argv[:1] == ["watch"] else len(argv)
    # Modules stay for good: to look for garbage while they are loaded is a tenth of the time of a short command.
    gc.disable()
    args = parser(argv[0] if argv else "").parse_args(argv[:own])
    gc.freeze()
    gc.enable()
    args.rest = argv[own:]
    try:
        return int(args.run(args))
    except OSError as error:
        print(visible(f"akp: {error.filename or 'output'}: {error.strerror or error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print(_in_words(error, args), file=sys.stderr)
        return 2


def _in_words(error: UserError, args: argparse.Namespace) -> str:
    """An error that input or call brought about, for a person."""
    from ..proxy.config import InvalidConfig
    from ..proxy.policy import RefusedVips

    if isinstance(error, InvalidConfig):
        file = getattr(args, "config", None) or "KubeProxyConfiguration"
        return "\n".join(visible(f"akp: {file}: {each}") for each in error.errors)
    if isinstance(error, RefusedVips):
        return "\n".join(visible(f"akp: refused: {found}") for found in error.found)
    return visible_lines(f"akp: {error}")
