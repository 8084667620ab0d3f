"""Labs by hand: `python -m tests.lab up`, look around with `run`, then `down`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import record
from .lab import Lab
from .manifests import realise
from .record import LabError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make a lab that stays")
    up.add_argument("prefix", nargs="?", default="lab")
    up.add_argument("--nodes", type=int, default=3)
    up.add_argument("--uml", type=int, default=0, help="so many more nodes with kernels of their own")
    up.add_argument("--iptables", choices=["nft", "legacy"], default="")
    up.add_argument("--manifests", type=Path, help="make the pods that the manifests of this folder name")
    up.add_argument("--inventory", type=Path, help="where to write the Ansible inventory")
    down = commands.add_parser("down", help="remove a lab and all that runs in it")
    down.add_argument("prefix", nargs="?", default="lab")
    commands.add_parser("list", help="all labs of this machine")
    run = commands.add_parser("run", help="run a command on a node, by default a shell")
    run.add_argument("prefix")
    run.add_argument("node")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    try:
        return int(globals()[f"lab_{arguments.command}"](arguments))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1


def lab_up(arguments: argparse.Namespace) -> int:
    lab = Lab(arguments.prefix, arguments.nodes, uml=arguments.uml, iptables=arguments.iptables, stay=True)
    print(f"{lab.prefix}: {', '.join(f'{node.name} {node.addresses[0]}' for node in lab.nodes)}")
    if arguments.manifests:
        realise(lab, arguments.manifests)
    print(f"inventory: {lab.inventory(arguments.inventory or lab.state / 'hosts.yml')}")
    return 0


def lab_down(arguments: argparse.Namespace) -> int:
    if not record.remove(arguments.prefix):
        raise LabError(f"there is no lab {arguments.prefix}")
    return 0


def lab_list(_arguments: argparse.Namespace) -> int:
    for prefix in record.labs():
        found = record.read(prefix)
        if found is None:
            print(f"{prefix}\tremains")
        else:
            owner = f"owner {found.owner.pid}" if found.owner else "stays"
            print(f"{prefix}\t{found.nodes} nodes\t{owner}\t{'alive' if found.wanted else 'dead'}")
    return 0


def lab_run(arguments: argparse.Namespace) -> int:
    argv = Lab.attach(arguments.prefix).node(arguments.node).enter(arguments.argv or ["bash"])
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    sys.exit(main())
