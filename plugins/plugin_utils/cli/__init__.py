# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The command `akp`."""

from __future__ import annotations

import argparse
import sys

from .. import __version__
from ..backends import UnknownBackend
from ..bundle.compare import UnreadableBundle
from ..bundle.publish import PublishRefused
from ..bundle.release import InvalidRelease, SigningFailed
from ..cluster.files import UnreadableFile
from ..ledger import BrokenLedger
from ..proxy.config import InvalidConfig
from ..proxy.facts import InvalidFacts, UnusableNode
from ..proxy.policy import InvalidPolicy, RefusedVips
from . import approve, diff, ledger, names, program, publish, render, watch
from .console import UsageError

_EPILOG = """\
a first run, with what the cluster and its kube-proxy already have:
  kubectl get services,endpointslices,nodes,servicecidrs -A -o json > cluster/all.json
  kubectl -n kube-system get configmap kube-proxy -o jsonpath='{.data.config\\.conf}' > kube-proxy.yaml
  akp render --cluster cluster --config kube-proxy.yaml --all-nodes --output bundles
  akp diff bundles-of-yesterday bundles
  scp -r bundles/NODE NODE:bundle && ssh NODE sudo sh bundle/akp-node apply bundle
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="akp",
        description="kube-proxy without a kube-proxy: computes, for every node, the packet rules that kube-proxy "
        "would have programmed there, as files that the node's own tools load.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"akp {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (render, watch, publish, diff, names, approve, ledger, program):
        command.add_parser(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 is good, 1 says that something differs, 2 that the input or the call was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    # The options of watch are Ansible's, and read by it.
    own = 1 if argv[:1] == ["watch"] else len(argv)
    args = parser().parse_args(argv[:own])
    args.rest = argv[own:]
    try:
        return int(args.run(args))
    except InvalidConfig as error:
        for each in error.errors:
            print(f"akp: {getattr(args, 'config', 'KubeProxyConfiguration')}: {each}", file=sys.stderr)
        return 2
    except RefusedVips as error:
        for found in error.found:
            print(f"akp: refused: {found}", file=sys.stderr)
        return 2
    except (
        BrokenLedger,
        InvalidFacts,
        InvalidPolicy,
        UnknownBackend,
        UnreadableBundle,
        UnreadableFile,
        UnusableNode,
        UsageError,
        PublishRefused,
        InvalidRelease,
        SigningFailed,
    ) as error:
        print(f"akp: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"akp: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
