# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp names: the kernel objects of a service port, for operators who read iptables-save or nft on a node."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from ..addresses import endpoint_text, parse_ip
from ..backends.names import service_port_names
from ..cluster.files import UnreadableFile, load
from ..cluster.snapshot import Snapshot
from ..texts import visible
from .console import UsageError

_SERVICE = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?)/([a-z0-9]([-a-z0-9]*[a-z0-9])?)(:([a-z0-9]([-a-z0-9]*[a-z0-9])?))?"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of names."""
    parser = commands.add_parser(
        "names",
        help="the chain and set names of a service port",
        description="Names of the chains and sets of a service port in iptables and in nftables mode. A service port "
        "that the cluster does not have is an error with --cluster. Without it, the cluster of the last run is looked "
        "at, and a missing service port is a warning: it may be younger than that run.",
    )
    parser.add_argument(
        "service", metavar="NAMESPACE/NAME[:PORT]", help="PORT is the name of the Service's port, if it has one"
    )
    parser.add_argument("--protocol", default="tcp", choices=("tcp", "udp", "sctp"), help="default: %(default)s")
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="IP:PORT",
        help="also the names of this endpoint; can be given more than once",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="PATH",
        help="a file or directory of manifests, or a snapshot (default: ~/.akp/NAME/snapshot.json, if it is there)",
    )
    parser.add_argument(
        "--cluster-name", default="default", metavar="NAME", help="the name that runs have for it (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the names."""
    match = _SERVICE.fullmatch(args.service)
    if match is None:
        raise UsageError(f"{args.service!r} is not NAMESPACE/NAME or NAMESPACE/NAME:PORT")
    endpoints = [_endpoint(text) for text in args.endpoint]
    _look(args, match[1], match[3], match[6] or "")
    names = service_port_names(match[1], match[3], match[6] or "", args.protocol, endpoints)
    if args.json:
        print(json.dumps(names))
        return 0
    for mode, objects in names.items():
        print(mode)
        for what, name in objects.items():
            print(f"  {what:<36} {name}")
    return 0


def _look(args: argparse.Namespace, namespace: str, name: str, port: str) -> None:
    """Say so if the cluster does not have the service port; its names would be found on no node."""
    last = Path(f"~/.akp/{args.cluster_name}/snapshot.json").expanduser()
    try:
        missing = _missing(load(args.cluster or last), namespace, name, port, args.protocol)
    except (OSError, UnreadableFile):
        if args.cluster:
            raise
        return  # there was no run, and nothing to compare with
    if not missing:
        return
    if args.cluster:
        raise UsageError(f"{args.cluster}: {missing}")
    print(visible(f"warning: {missing}, when {last} was written"), file=sys.stderr)


def _missing(snapshot: Snapshot, namespace: str, name: str, port: str, protocol: str) -> str:
    """What is not there, and what is; empty if the service port exists."""
    services = {each.name: each for each in snapshot.services if each.namespace == namespace}
    if name not in services:
        has = ", ".join(sorted(services)) or "none"
        return f"namespace {namespace} has no Service {name} with a cluster IP; it has {has}"
    ports = [(each.name, each.protocol) for each in services[name].ports]
    if (port, protocol) in ports:
        return ""
    asked = f"port {port}" if port else "port without a name"
    has = ", ".join(f"{namespace}/{name}{':' if each else ''}{each} --protocol {kind}" for each, kind in ports)
    return f"Service {namespace}/{name} has no {asked} of protocol {protocol}; it has {has}"


def _endpoint(text: str) -> tuple[str, int]:
    host, _colon, port = text.rpartition(":")
    ip = parse_ip(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    if ip is None or not port.isdigit() or not 1 <= int(port) <= 65535 or text != endpoint_text(ip, int(port)):
        raise UsageError(f"{text!r} is not IP:PORT, or [IP]:PORT for IPv6")
    return ip, int(port)
