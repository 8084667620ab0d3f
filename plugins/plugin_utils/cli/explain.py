# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp explain: where a packet goes on a node, and why."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

from ..addresses import Family, family_of, parse_ip
from ..cluster.snapshot import Node, Snapshot
from ..explain.answer import Explanation, as_json, explain
from ..explain.intent import Place
from ..explain.needed import COUNTED, Needed, Wanted
from ..explain.packet import Origin, Packet
from ..explain.question import (
    Destination,
    NoService,
    Sender,
    UnclearDestination,
    WrongQuestion,
    known_node,
    parse_destination,
    resolved,
    sender,
)
from ..explain.ruleset import read_directory
from ..explain.suggestions import endpoint_of, meant, nearest, without_rules
from ..texts import visible
from .console import UsageError
from .source import Source, add_options

_DESCRIPTION = """\
Follows a packet through the rules that a node is meant to have, or has: which Service it is for, which endpoints are in
or out and why, how likely each is, whether the source stays, and every rule on the way.

  akp explain --cluster cluster --config kube-proxy.yaml --node n1 --from 10.244.1.5 --to 10.96.0.10:53/udp
  akp explain --cluster cluster --config kube-proxy.yaml --node n1 --from shop/cart-1 --to shop/catalog:http
  akp explain --cluster cluster --config kube-proxy.yaml --node n1 --from n1 --to localhost:30080 --live -i inventory

Exits with 0 if the question has an answer, with 2 if it has none, and with 1 if rules do otherwise than was decided.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of explain."""
    parser = commands.add_parser(
        "explain",
        help="where a packet goes on a node, and why",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--node", required=True, metavar="NAME", help="the node whose rules it meets")
    parser.add_argument(
        "--from", required=True, dest="sender", metavar="WHO", help="an address, NAMESPACE/POD or the name of a Node"
    )
    parser.add_argument(
        "--to",
        required=True,
        dest="destination",
        metavar="WHERE",
        help="ADDRESS:PORT/PROTOCOL (tcp unless told otherwise), NODE:PORT or NAMESPACE/SERVICE:PORT",
    )
    parser.add_argument(
        "--live",
        nargs="?",
        const="",
        metavar="DIR",
        help="compare with the rules that the node has: read from it with -i, or from a directory with iptables.rules, "
        "ip6tables.rules, nftables.nft, ipset.rules, ipvs.rules as its own tools print them",
    )
    parser.add_argument("-i", "--inventory", metavar="INVENTORY", help="the inventory by which --live reaches the node")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    # One large structure, and then the end: looking for garbage would cost a fifth of the time.
    gc.disable()
    source = Source(args)
    if known_node(source.nodes, args.node).windows:
        return _on_windows(args, source)
    told, help_ = _answer(args, source)
    if args.json:
        print(json.dumps(as_json(told), indent=2))
    else:
        from ..explain.words import lines

        print("\n".join(map(visible, lines(told, help_))))
    return 0 if told.agrees and not told.live else 1


def _on_windows(args: argparse.Namespace, source: Source) -> int:
    """The load balancer that takes the packet; who sends it makes no difference to documents."""
    from ..explain import hns

    if args.live is not None:
        raise UsageError(f"--live: {args.node} runs Windows, and only rules of Linux nodes can be read")
    destination = parse_destination(args.destination, source.nodes.nodes)
    given = parse_ip(args.sender.strip("[]"))
    snapshot = source.snapshot()
    target = resolved(snapshot, destination, family_of(given) if given and not destination.address else None)
    state, own = source.intent(snapshot, args.node).windows(args.node)
    told = hns.taken(state, own, target)
    print(json.dumps(hns.as_json(told), indent=2) if args.json else "\n".join(map(visible, hns.lines(told))))
    return 0


def _answer(args: argparse.Namespace, source: Source) -> tuple[Explanation, str]:
    node = known_node(source.nodes, args.node)
    destination = _destination(args, source)
    wanted = _wanted(args, source, node, destination)
    if wanted is not None:
        snapshot, found = source.needed(wanted)
        place, whole = _place(source, snapshot, args.node, found)
        try:
            if not whole:
                return _asked(args, source, snapshot, place, destination)
        except WrongQuestion:
            if not found.left_out:
                raise  # otherwise what was left out may be near
    snapshot = source.snapshot()
    return _asked(args, source, snapshot, source.intent(snapshot, args.node).place(args.node), destination)


def _destination(args: argparse.Namespace, source: Source) -> Destination:
    try:
        return parse_destination(args.destination, source.nodes.nodes)
    except UnclearDestination as error:
        raise UnclearDestination(
            f"{error}{meant(args.destination, source.only('Service').services, args.node)}"
        ) from None


def _wanted(args: argparse.Namespace, source: Source, node: Node, destination: Destination) -> Wanted | None:
    """What the question depends on; None if that is all of the cluster."""
    config = source.choices.proxy
    # Whole chains are compared with a kernel's; and addresses of all Services may be addresses of node ports.
    if args.live is not None or (config.mode == "ipvs" and config.node_port_addresses):
        return None
    own = {ip for _sort, ip in node.addresses}
    ports = frozenset({destination.port} if destination.port else ())
    who = parse_ip(args.sender.strip("[]")) or args.sender.rpartition("/")[2]
    addresses = frozenset({destination.address, *own} - {""})
    return Wanted(addresses, ports, destination.service, who, counted=config.mode == "iptables")


def _place(source: Source, snapshot: Snapshot, node: str, found: Needed) -> tuple[Place, bool]:
    """The node with the Services that were asked for, and whether that is not enough to know its rules."""
    place = source.intent(snapshot, node).place(node, found.services)
    counts = {family.value: each.total_endpoints for family, each in place.families.items()}
    return place, any(counts.get(family, 0) < COUNTED for family in found.cut & counts.keys())


def _asked(
    args: argparse.Namespace, source: Source, snapshot: Snapshot, place: Place, destination: Destination
) -> tuple[Explanation, str]:
    given = parse_ip(args.sender.strip("[]"))
    try:
        target = resolved(snapshot, destination, family_of(given) if given and not destination.address else None)
    except NoService as error:
        raise NoService(without_rules(source.objects(), destination.service) or str(error)) from None
    family = family_of(target[0])
    if family not in place.families:
        raise WrongQuestion(f"--to {args.destination}: {args.node} has no rules of {family.value}")
    who = sender(snapshot, place, args.sender, family)
    if family_of(who.address) is not family:
        raise WrongQuestion(f"--from {args.sender} and --to {args.destination} are of different families")
    packet = _packet(place, who, family, target)
    live = _live(args, place) if args.live is not None else None
    zones = {each.name: each.zone for each in snapshot.nodes}
    told = explain(place, zones, who, packet, live)
    if told.frontend is not None:
        return told, ""
    return told, endpoint_of(source.objects(), target[0]) or nearest(source.only("Service").services, place, packet)


def _packet(place: Place, who: Sender, family: Family, target: tuple[str, int, str]) -> Packet:
    source = place.source_of(family, target[0]) if who.origin is Origin.NODE else who.address
    return place.packet(source, target, who.origin)


def _live(args: argparse.Namespace, place: Place) -> Place:
    if args.live:
        return Place(place.view, read_directory(Path(args.live)))
    if not args.inventory:
        raise UsageError("--live needs -i INVENTORY, or a directory with what the node's tools print")
    from ..carry.live import read_live

    return Place(place.view, read_live(args.inventory, args.node))
