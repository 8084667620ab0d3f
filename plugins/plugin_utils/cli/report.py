# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp report: a cluster and its nodes as one page."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from ..files import write_atomic
from .console import UsageError
from .source import Source, add_options

_DESCRIPTION = """\
Writes one page: the cluster at a glance, its Services with search, for each of them a picture of where traffic goes;
with --dir also its nodes, the plan that waits, the ledger, and how fresh nodes were. The page makes no request, so it
can be mailed.

  akp report --cluster cluster --config kube-proxy.yaml -o report.html
  akp report --dir ~/.akp/production -o report.html
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of report."""
    parser = commands.add_parser(
        "report",
        help="a cluster and its nodes as one page",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the page to write")
    parser.add_argument("--name", default="", metavar="NAME", help="what the page calls the cluster")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan (default: plan.json of --dir)")
    parser.add_argument(
        "--allowed-signers", type=Path, metavar="FILE", help="say who has signed the plan, according to this file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    gc.disable()
    source = Source(args)
    # Here and not above: templates take a while to import.
    from ..report.collect import About, collect
    from ..report.page import report_page
    from ..tasks.directory import WorkDirectory

    directory = WorkDirectory(args.dir.expanduser()) if args.dir else None
    if directory and not directory.path.is_dir():
        raise UsageError(f"{directory.path}: is no working directory")
    if args.allowed_signers and not args.allowed_signers.is_file():
        raise UsageError(f"{args.allowed_signers}: there are no allowed signers")
    where = args.cluster or args.kubeconfig or (directory.snapshot if directory else "")
    named = args.cluster or args.dir or Path(args.context or args.kubeconfig or "cluster")
    about = About(
        cluster=args.name or named.expanduser().resolve().name,
        source=str(where),
        directory=directory,
        plan=args.plan,
        allowed_signers=args.allowed_signers,
    )
    page = report_page(collect(source.snapshot(), source.choices, source.facts(), about))
    write_atomic(args.output, page, 0o644)
    return 0
