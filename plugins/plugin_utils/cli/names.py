# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp names: the kernel objects of a service port, for whoever reads iptables-save or nft on a node."""

from __future__ import annotations

import argparse
import json
import re

from ..addresses import endpoint_text, parse_ip
from ..backends.names import service_port_names
from .console import UsageError

_SERVICE = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?)/([a-z0-9]([-a-z0-9]*[a-z0-9])?)(:([a-z0-9]([-a-z0-9]*[a-z0-9])?))?"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of names."""
    parser = commands.add_parser(
        "names",
        help="the chain and set names of a service port",
        description="Names of the chains and sets of a service port in iptables and in nftables mode.",
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
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the names."""
    match = _SERVICE.fullmatch(args.service)
    if match is None:
        raise UsageError(f"{args.service!r} is not NAMESPACE/NAME or NAMESPACE/NAME:PORT")
    endpoints = [_endpoint(text) for text in args.endpoint]
    names = service_port_names(match[1], match[3], match[6] or "", args.protocol, endpoints)
    if args.json:
        print(json.dumps(names))
        return 0
    for mode, objects in names.items():
        print(mode)
        for what, name in objects.items():
            print(f"  {what:<36} {name}")
    return 0


def _endpoint(text: str) -> tuple[str, int]:
    host, _colon, port = text.rpartition(":")
    ip = parse_ip(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    if ip is None or not port.isdigit() or not 1 <= int(port) <= 65535 or text != endpoint_text(ip, int(port)):
        raise UsageError(f"{text!r} is not IP:PORT, or [IP]:PORT for IPv6")
    return ip, int(port)
