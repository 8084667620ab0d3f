# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp publish: signed bundles for nodes that fetch them."""

from __future__ import annotations

import argparse
import gc
import re
import sys
from functools import partial
from pathlib import Path

from ..cluster.files import cluster_files, documents
from ..cluster.record import record_of
from ..configuration import Configuration, Kept, announced, read_kept
from ..ledger import FILE
from ..plan.audit import Auditor, who
from ..publish.publishing import History, Inputs, publish
from ..publish.store import Publication, Terms
from ..texts import visible
from .console import Progress, UsageError, report_left_out
from .options import add_facts
from .render import add_input_options, add_rule_options, gathered_facts, settings_of

_DESCRIPTION = """\
Writes a directory that nodes pull from (akp-pull), over any static web server or file share:
OUT/NODE.release, signed, and OUT/objects with the bundles and deltas that releases name. Each release is replaced in
one step when everything it names is there. A node without news gets a new release only when half of the time of its
old one is over. What becomes of nodes is an entry of ledger.jsonl, beside the history; see akp ledger.
"""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of publish."""
    parser = commands.add_parser(
        "publish",
        help="write signed bundles of all nodes into a directory that they pull from",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_options(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="OUT", help="the directory to publish in")
    parser.add_argument(
        "--cluster-name", required=True, metavar="NAME", help="what nodes know the cluster as (node.conf: cluster)"
    )
    parser.add_argument(
        "--key",
        required=True,
        action="append",
        type=Path,
        metavar="FILE",
        help="an SSH private key, or the public part of one that an agent holds; more than once for more signatures",
    )
    parser.add_argument(
        "--valid-for",
        default="7d",
        type=_seconds,
        metavar="TIME",
        help="how long a release counts, e.g. 12h; publish again before half of it is over (default: %(default)s)",
    )
    parser.add_argument("--node", action="append", metavar="NAME", help="publish for this node only; more than once")
    add_facts(parser)
    parser.add_argument(
        "--history",
        type=Path,
        metavar="DIR",
        help="where the last clusters are kept that deltas are made from; not to be served "
        "(default: ~/.akp/NAME/published)",
    )
    parser.add_argument(
        "--deltas", type=int, default=3, metavar="N", help="make deltas from so many earlier states (%(default)s)"
    )
    parser.add_argument(
        "--grace",
        default="1h",
        type=_seconds,
        metavar="TIME",
        help="how long objects stay that no release names any more (default: %(default)s)",
    )
    parser.add_argument(
        "--max-removed",
        type=int,
        default=50,
        metavar="PERCENT",
        help="refuse if a node would lose more of its service ports (default: %(default)s)",
    )
    parser.add_argument(
        "--ledger-copy",
        default="",
        metavar="PLACE",
        help="syslog, or a file that gets each entry of the ledger as well",
    )
    parser.add_argument(
        "--allow-mode-change",
        action="store_true",
        help="publish another mode, version or other settings of all nodes than the last time",
    )
    parser.add_argument("--renew", action="store_true", help="sign everything anew, e.g. with another key")
    add_rule_options(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smhd]?)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write e.g. 90s, 30m, 12h or 7d")
    return float(int(found[1]) * _UNITS[found[2]])


def run(args: argparse.Namespace) -> int:
    """Publish, and say what is new."""
    gc.disable()
    history = args.history or Path("~/.akp").expanduser() / args.cluster_name / "published"
    if args.output.resolve() in (history.resolve(), *history.resolve().parents):
        raise UsageError(f"{history}: lies in the directory that is served; choose another place with --history")
    auditor = Auditor(history.with_name(FILE), {"cluster": args.cluster_name, "who": who({})}, args.ledger_copy)
    try:
        with Progress() as progress:
            progress.step(f"reading {args.cluster}")
            record = record_of(
                (each for file in cluster_files(args.cluster) for each in documents(file)), str(args.cluster)
            )
            kept_file = history.with_name("config.json")
            kept = read_kept(kept_file)
            configuration = Configuration.of(settings_of(args), kept=kept)
            settings = configuration.refuse_changes(kept, allowed=args.allow_mode_change)
            inputs = Inputs(record, configuration.choices, gathered_facts(args.facts))
            report_left_out(inputs.snapshot, strict=args.strict)
            told = [f"{each.heading}: {each.text}" for each in announced(settings, {}, inputs.choices.proxy.mode)]
            for warning in (*told, *inputs.warnings):
                print(visible(f"warning: {warning}"), file=sys.stderr)
            terms = Terms(args.cluster_name, tuple(args.key), args.valid_for, args.grace, args.renew)
            progress.step("publishing")
            report = publish(
                Publication(args.output, terms),
                History(history, args.deltas),
                inputs,
                args.node,
                args.max_removed,
                partial(auditor.write, "publish", snapshot=record.digest),
            )
            Kept.of(inputs.choices).write(kept_file)
    finally:
        # Not at the end: what matters most is the entry of a run that failed.
        if auditor.told:
            print(auditor.told)
    for each in report.nodes:
        said = f", {each.deltas} deltas, {each.size} bytes" if each.action == "changed" else ""
        print(f"{each.node}  {each.action}  generation {each.generation}{said}")
    for node in report.withdrawn:
        print(f"{node}  withdrawn: the cluster has no such Node")
    for node, error in report.errors.items():
        print(visible(f"akp: {node}: not published: {error}"), file=sys.stderr)
    return 1 if report.errors else 0
