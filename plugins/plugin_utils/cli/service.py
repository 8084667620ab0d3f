# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp service: everything about one Service."""

from __future__ import annotations

import argparse
import gc
import json

from ..explain.needed import Wanted
from ..explain.question import WrongQuestion, known_node, known_service
from ..explain.service import about, history, lines
from ..explain.suggestions import same_name, without_rules
from ..texts import visible
from .console import UsageError
from .source import Source, add_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of service."""
    parser = commands.add_parser(
        "service",
        help="everything about one Service",
        description="Its frontends, its endpoints by node, the chains, sets and maps that are its own on a node, and, "
        "from the ledger of a working directory, by which run nodes got it and who approved that.",
    )
    parser.add_argument("service", metavar="NAMESPACE/NAME")
    add_options(parser)
    parser.add_argument(
        "--node", default="", metavar="NAME", help="the node whose objects are listed (default: the first)"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what there is to know."""
    gc.disable()
    namespace, slash, name = args.service.partition("/")
    source = Source(args)
    if not slash:
        names = [f"{each.namespace}/{each.name}" for each in source.only("Service").services]
        raise UsageError(f"{args.service}: must be NAMESPACE/NAME{same_name(names, args.service)}")
    snapshot, found = source.needed(Wanted(service=(namespace, name), counted=source.choices.proxy.mode == "iptables"))
    if not any((each.namespace, each.name) == (namespace, name) for each in snapshot.services):
        if why := without_rules(source.objects(), (namespace, name)):
            raise WrongQuestion(why)
        known_service(source.only("Service").services, namespace, name)
    if not snapshot.nodes:
        raise WrongQuestion("the cluster has no Node, so no rules")
    node = known_node(snapshot, args.node or snapshot.nodes[0].name)
    intent = source.intent(snapshot, node.name)
    told = about(intent, (namespace, name), node.name, found.services)
    runs = list(history(args.dir.expanduser(), args.service)) if args.dir else None
    if args.json:
        print(json.dumps({**told, "history": runs or []}, indent=2))
    else:
        print("\n".join(map(visible, lines(told, runs))))
    return 0
