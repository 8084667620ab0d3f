# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp diff: what changes, told per Service and endpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from ..bundle.compare import Change, Records, compare_records, parse_records
from ..choices import Choices
from ..cluster.files import load
from ..engine import Engine
from ..explain.bundles import bundles, compare_bundles
from ..texts import visible
from .console import Progress, UsageError

_DESCRIPTION = """\
OLD and NEW are two bundles, two directories of bundles as `akp render` writes them, or two clusters, each a file or a
directory of what kubectl prints.
Exits with 1 if they differ, with 0 if they do not.
"""
_COLOURS = {"+": "\033[32m", "-": "\033[31m", "~": "\033[33m"}
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of diff."""
    parser = commands.add_parser(
        "diff",
        help="what changes between two bundles or two clusters",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    with Progress() as progress:
        progress.step("comparing")
        changes = _changes(args.old, args.new)
    if args.json:
        print(json.dumps({node: [dataclasses.asdict(each) for each in found] for node, found in changes.items()}))
    else:
        print(_text(changes, colours=sys.stdout.isatty()), end="")
    return 1 if any(changes.values()) else 0


def _changes(old: Path, new: Path) -> dict[str, list[Change]]:
    """Node name -> its changes; a comparison of clusters has the empty name."""
    for path in (old, new):
        if not path.exists():
            raise UsageError(f"{path}: no such file or directory")
    before, after = bundles(old), bundles(new)
    if bool(before) != bool(after):
        raise UsageError(f"{old} and {new}: one is a bundle, the other is not")
    if not before:
        return {"": list(compare_records(_of_cluster(old), _of_cluster(new)))}
    if len(before) == len(after) == 1:
        # Two bundles are compared whatever their nodes are called.
        ((_name, first),), ((name, second),) = before.items(), after.items()
        return {name: compare_bundles(first, second)}
    return {name: compare_bundles(before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys())}


def _of_cluster(path: Path) -> Records:
    """The service ports of a cluster, whatever its configuration is."""
    engine = Engine(Choices.of({}))
    engine.update(load(path))
    return parse_records(engine.service_lines())


def _text(changes: dict[str, list[Change]], *, colours: bool) -> str:
    """Nodes with the same changes are told of once."""
    groups: dict[tuple[Change, ...], list[str]] = {}
    for node, found in changes.items():
        groups.setdefault(tuple(found), []).append(node)
    lines: list[str] = []
    for told, nodes in groups.items():
        if told and nodes != [""]:
            lines.append(visible(f"on {', '.join(nodes)}:"))
        for change in told:
            lines.append(_coloured(f"{_SIGNS[change.action]} {change.title}", colours=colours))
            lines.extend("    " + _coloured(detail, colours=colours) for detail in change.details)
    return "".join(f"{line}\n" for line in lines) or "no differences\n"


def _coloured(line: str, *, colours: bool) -> str:
    line = visible(line)
    return f"{_COLOURS[line[0]]}{line}\033[0m" if colours else line
