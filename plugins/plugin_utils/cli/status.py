# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp status: what is known of each node, and what waits."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..texts import visible
from .console import UsageError

_DESCRIPTION = """\
What the control host knows of each node: mode, generation, behind by how much, drift, when it was last confirmed, and
what waits. It reads the working directory that runs and `akp watch` write, and asks no node.

  akp status -i inventory
  akp status --dir ~/.akp/production --follow

Exits with 0 if all nodes are as intended, with 1 if not, and with 2 if nothing is known.
"""
_CLEAR = "\x1b[H\x1b[2J"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of status."""
    parser = commands.add_parser(
        "status",
        help="what is known of each node, and what waits",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--inventory", metavar="INVENTORY", help="its hosts, and the working directory they name")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="the working directory (default: that of the inventory)"
    )
    parser.add_argument("--all", action="store_true", help="list every node, however many are as intended")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object, with --follow one a line")
    parser.add_argument("--follow", action="store_true", help="print it again when something has changed, until Ctrl+C")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="how often --follow looks (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it, once or until the operator stops it."""
    from ..report.fleet import Status, status_of
    from ..report.nodes import Place
    from ..tasks.directory import WorkDirectory

    hosts: dict[str, dict[str, Any]] = {}
    if args.inventory:
        hosts = _hosts(args.inventory)
        if not hosts:
            raise UsageError(f"{args.inventory}: has no hosts")
    elif not args.dir:
        raise UsageError("say which fleet: -i INVENTORY, or --dir DIR")
    settings = next(iter(hosts.values()), {})
    cluster = str(settings.get("kube_proxy_cluster_name") or (args.dir.expanduser().name if args.dir else "default"))
    given = {"dir": args.dir or settings.get("kube_proxy_dir"), "cluster_name": cluster}
    if "{{" in str(given["dir"]):
        raise UsageError(f"kube_proxy_dir is {given['dir']}: a template, give the directory with --dir")
    directory = WorkDirectory.of(given)
    places = [Place(str(each.get("kube_proxy_node_name") or host), host) for host, each in hosts.items()]

    def now() -> Status:
        return status_of(directory, cluster, places, time.time())

    if not args.follow:
        found = now()
        _print(found, args)
        return 2 if not found.known else 0 if found.good else 1
    _follow(now, args)
    return 0


def _follow(now: Any, args: argparse.Namespace) -> None:
    """Until Ctrl+C. A terminal is redrawn each time, as ages grow; elsewhere only news is printed."""
    last: Any = None
    while True:
        found = now()
        told = [found.known, *({**each, "note": ""} for each in found.data["nodes"]), found.data["plan"]]
        if sys.stdout.isatty() and not args.json:
            print(_CLEAR, end="")
            _print(found, args)
        elif told != last:
            _print(found, args)
        last = told
        time.sleep(args.every)


def _print(found: Any, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(found.data, indent=None if args.follow else 2), flush=True)
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print("\n".join(_safe(line) for line in found.lines(whole=args.all, colour=colour)), flush=True)


def _safe(line: str) -> str:
    """Only our own colours reach the terminal."""
    return "\x1b[".join(map(visible, line.split("\x1b[")))


def _hosts(inventory: str) -> dict[str, dict[str, Any]]:
    """The hosts that playbooks would go to, with their variables, as Ansible reads the inventory."""
    beside = Path(sys.executable).parent / "ansible-inventory"
    program = str(beside) if beside.exists() else shutil.which("ansible-inventory")
    if program is None:
        raise UsageError("-i needs Ansible: pip install ansible-core; or give --dir")
    argv = [program, "-i", inventory, "--list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise UsageError(f"{inventory}: Ansible cannot read it: {done.stderr.strip()[-500:]}") from None
    variables: Mapping[str, Any] = (found.get("_meta") or {}).get("hostvars") or {}
    group = "nodes" if "nodes" in found else "all"
    return {host: dict(variables.get(host) or {}) for host in dict.fromkeys(_members(found, group))}


def _members(groups: Mapping[str, Any], name: str) -> Iterator[str]:
    group = groups.get(name) or {}
    yield from group.get("hosts") or ()
    for child in group.get("children") or ():
        yield from _members(groups, child)
