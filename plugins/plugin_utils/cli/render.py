# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp render: a cluster goes in, each node's bundle comes out."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle.write import write_bundle
from ..choices import Choices
from ..cluster.files import UnreadableFile, documents, load
from ..cluster.objects import ANNOTATION_SCHEDULER
from ..cluster.snapshot import Snapshot
from ..engine import Engine
from ..proxy.compat import DEFAULT_COMPAT
from ..proxy.policy import ACTIONS
from ..texts import visible
from .console import Progress, UsageError, report_left_out
from .options import add_facts

_DESCRIPTION = """\
Writes, for each node, a bundle: OUT/NODE/ with the files that the node's own tools load (iptables.rules, ...), a
manifest with their digests, and akp-node, the program that applies them. The same input gives the same bytes.
A node of Windows gets hns.json and akp-node.cs, a preview, never run on Windows.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of render."""
    parser = commands.add_parser(
        "render",
        help="compute the state of nodes and write it as bundles",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_options(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME",
        help="a node; can be given more than once (default: hostnameOverride of the configuration)",
    )
    which.add_argument("--all-nodes", action="store_true", help="every Node of the cluster")
    add_facts(parser)
    parser.add_argument(
        "--output", required=True, type=Path, metavar="OUT", help="the directory that gets a bundle per node"
    )
    add_rule_options(parser)
    parser.set_defaults(run=run)


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """What rules are made of."""
    parser.add_argument(
        "--cluster",
        required=True,
        type=Path,
        metavar="PATH",
        help="what kubectl prints of Services, EndpointSlices, Nodes and ServiceCIDRs: a file, or a directory of them",
    )
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="a KubeProxyConfiguration, as kube-proxy reads it"
    )


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """What rules can depend on beside the cluster and its configuration."""
    parser.add_argument(
        "--strict", action="store_true", help="fail if an object of the input is invalid, instead of leaving it out"
    )
    parser.add_argument(
        "--compat",
        default=DEFAULT_COMPAT,
        metavar="MINOR",
        help="the kube-proxy minor whose rules are written (default: %(default)s)",
    )
    vips = parser.add_argument_group("addresses that Services claim, beyond kube-proxy")
    vips.add_argument(
        "--vips",
        choices=ACTIONS,
        default="warn",
        help="an external or load balancer IP that something else has: say so (the default), leave it out, or stop",
    )
    vips.add_argument(
        "--external-ips",
        action="append",
        metavar="CIDR",
        help="where externalIPs may lie; can be given more than once (default: anywhere)",
    )
    vips.add_argument(
        "--load-balancer-ips",
        action="append",
        metavar="CIDR",
        help="where IPs of load balancers may lie; can be given more than once (default: anywhere)",
    )
    vips.add_argument(
        "--control-port",
        action="append",
        metavar="PORT",
        help="by which the control host comes in, and which no Service gets on a node; can be given more than once "
        "(default: 22)",
    )
    vips.add_argument(
        "--health-check-ports",
        default="",
        metavar="FIRST-LAST",
        help="the ports that nodes open for health checks of load balancers (default: 30000-32767)",
    )
    ipvs = parser.add_argument_group("ipvs mode, beyond kube-proxy")
    ipvs.add_argument(
        "--scheduler",
        action="append",
        default=[],
        metavar="NAMESPACE/NAME=SCHEDULER",
        help="the scheduler of one Service; can be given more than once",
    )
    ipvs.add_argument(
        "--scheduler-annotations",
        action="store_true",
        help=f"let a Service choose its scheduler with the annotation {ANNOTATION_SCHEDULER}",
    )


def run(args: argparse.Namespace) -> int:
    """Render the bundles that were asked for."""
    # One large structure without cycles, and then the end: looking for garbage would cost a fifth of the time.
    gc.disable()
    with Progress() as progress:
        engine = Engine(Choices.of(settings_of(args)), preview=True)
        snapshot = load(args.cluster, lambda name: progress.step(f"reading {name}"))
        report_left_out(snapshot, strict=args.strict)
        nodes = _nodes(args, engine.choices.proxy.hostname_override, snapshot)
        gathered = _gathered(args.facts, nodes)
        progress.step("deciding")
        engine.update(snapshot)
        of_nodes = (each for node in nodes for each in engine.warnings_of(node, gathered.get(node)))
        for warning in dict.fromkeys((*engine.warnings, *of_nodes)):
            print(visible(f"warning: {warning}"), file=sys.stderr)
        for index, node in enumerate(nodes):
            progress.step(f"writing {node}", index, len(nodes))
            state = engine.state(node, gathered.get(node))
            write_bundle(state, args.output / node)
            print(f"{args.output / node}  {state.mode}  generation {state.generation}")
    return 0


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_input_options` and `add_rule_options` asked for."""
    return {
        "config": str(args.config),
        "compat": args.compat,
        "schedulers": dict(each.partition("=")[::2] for each in args.scheduler),
        "scheduler_annotations": args.scheduler_annotations,
        "vip_policy": args.vips,
        "external_ip_cidrs": args.external_ips,
        "load_balancer_cidrs": args.load_balancer_ips,
        "control_ports": args.control_port,
        "health_check_ports": args.health_check_ports,
    }


def _nodes(args: argparse.Namespace, by_default: str, snapshot: Snapshot) -> list[str]:
    if args.all_nodes:
        if not snapshot.nodes:
            raise UsageError(f"{args.cluster}: holds no Node, so --all-nodes means nothing")
        return [node.name for node in snapshot.nodes]
    names = args.node or [by_default]
    if names == [""]:
        raise UsageError("name a node with --node, or ask for --all-nodes")
    known = [node.name for node in snapshot.nodes]
    for name in names:
        if name not in known:
            raise UsageError(f"{args.cluster}: has no Node {name}; it has {', '.join(known) or 'none'}")
    return list(dict.fromkeys(names))


def _gathered(file: Path | None, nodes: list[str]) -> dict[str, Mapping[str, Any]]:
    """Facts per node from a file of one node's facts or of many."""
    content = _content(file)
    if {"capabilities", "addresses", "hns"} & content.keys():
        if len(nodes) != 1:
            raise UsageError(f"{file}: holds the facts of one node, but {len(nodes)} nodes are rendered")
        return {nodes[0]: content}
    return gathered_facts(file)


def _content(file: Path | None) -> Mapping[str, Any]:
    content = next(documents(file), None) if file is not None else {}
    if not isinstance(content, Mapping):
        raise UnreadableFile(f"{file}: must be a mapping")
    return content


def gathered_facts(file: Path | None) -> dict[str, Mapping[str, Any]]:
    """Facts per node from a file of many."""
    content = _content(file)
    for name, facts in content.items():
        if not isinstance(facts, Mapping):
            raise UnreadableFile(f"{file}: facts of node {name}: must be a mapping")
    return dict(content)
