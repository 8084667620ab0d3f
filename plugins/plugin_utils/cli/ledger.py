# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp ledger: what was done to which node, and whether that record is still whole."""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..ledger import FILE, BrokenLedger, lines, unmerged, verify
from ..ledger_copy import verify_copy
from ..ledger_merge import merge
from ..texts import visible
from .console import UsageError

_DEFAULT = Path("~/.akp/default") / FILE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of ledger."""
    parser = commands.add_parser(
        "ledger",
        help="verify or show the record of what was done to nodes",
        description="Every run that changes a node, or tries to, leaves entries in a file on the control host. Each "
        "carries a hash over its text and its predecessor.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    check = verbs.add_parser(
        "verify",
        help="is it what was written",
        description="Exits with 0 if every entry is as it was written, in its place, and the known one is among them; "
        "with 1 if not.",
    )
    show = verbs.add_parser("show", help="the entries, for people")
    join = verbs.add_parser(
        "merge",
        help="add what other control hosts wrote",
        description="Adds the entries of other ledgers that this one does not have, each with the hash that it had "
        "there. A ledger that is not there yet continues the first of them. Twice does no harm.",
    )
    join.add_argument("others", nargs="+", type=Path, metavar="OTHER", help="a ledger of another host, or a copy of it")
    join.add_argument(
        "--into", dest="file", type=Path, default=_DEFAULT, metavar="FILE", help=f"the ledger (default: {_DEFAULT})"
    )
    for verb in (check, show):
        verb.add_argument(
            "file", nargs="?", type=Path, default=_DEFAULT, metavar="FILE", help=f"the ledger (default: {_DEFAULT})"
        )
    check.add_argument(
        "--head", default="", metavar="HASH", help="the hash of an entry, as a run printed it: it must still be there"
    )
    check.add_argument(
        "--copy",
        type=Path,
        metavar="COPY",
        help="a copy of the ledger, or a log of syslog: what it holds must be in the ledger; where there is no ledger "
        "any more, the copy alone is verified",
    )
    show.add_argument("--node", default="", metavar="NAME", help="only what was done to this node or host")
    show.add_argument("--run", default="", dest="run_name", metavar="ID", help="only the entries of this run")
    show.add_argument("--last", type=int, default=0, metavar="N", help="only the last N entries of those")
    show.add_argument("--json", action="store_true", help="for programs: the lines as they are")
    check.set_defaults(run=_verify)
    show.set_defaults(run=_show)
    join.set_defaults(run=_merge)


def _existing(args: argparse.Namespace) -> Path:
    file: Path = args.file.expanduser()
    if not file.is_file():
        raise UsageError(f"{file}: there is no ledger")
    return file


def _verify(args: argparse.Namespace) -> int:
    if args.head and not re.fullmatch("[0-9a-f]{64}", args.head):
        raise UsageError(f"--head {args.head}: is no hash of 64 hexadecimal digits")
    try:
        if args.copy:
            return _verify_copy(args)
        head = verify(_existing(args), args.head)
    except BrokenLedger as error:
        print(visible(f"broken: {error}"))
        return 1
    print(f"intact: {head.number} entries, head {head.hash}")
    return 0


def _verify_copy(args: argparse.Namespace) -> int:
    copy, file = args.copy.expanduser(), args.file.expanduser()
    if not copy.is_file():
        raise UsageError(f"{copy}: there is no copy")
    if args.head:
        verify(_existing(args), args.head)
    for line in verify_copy(copy, file if file.is_file() else None):
        print(visible(f"intact: {line}"))
    return 0


def _merge(args: argparse.Namespace) -> int:
    file = args.file.expanduser()
    for other in args.others:
        if not other.expanduser().is_file():
            raise UsageError(f"{other}: there is no ledger")
        try:
            count = merge(file, other.expanduser())
        except BrokenLedger as error:
            print(visible(f"broken: {error}"))
            return 1
        print(visible(f"{file}: {count} entries of {other} added"))
    return 0


def _show(args: argparse.Namespace) -> int:
    if args.last < 0:
        raise UsageError(f"--last {args.last}: is no number of entries")
    kept: deque[tuple[bytes, dict[str, Any]]] = deque(maxlen=args.last or None)
    try:
        for line, outer in lines(_existing(args)):
            entry = list(unmerged(outer))[-1]
            if (not args.run_name or entry.get("run") == args.run_name) and _concerns(entry, args.node):
                kept.append((line, entry))
    except BrokenLedger as error:
        broken = f"broken: {error}"
    else:
        broken = ""
    for line, entry in kept:
        # What stands in an entry was said by nodes, and by people.
        print(visible(line.decode()) if args.json else "\n".join(map(visible, _lines(entry))))
    if broken:
        print(visible(broken))
    return 1 if broken else 0


def _concerns(entry: Mapping[str, Any], node: str) -> bool:
    nodes = entry.get("nodes") or {}
    known = nodes if isinstance(nodes, dict) else {}
    return not node or node in known or any(_of(each).get("node") == node for each in known.values())


def _of(value: Any) -> Mapping[str, Any]:
    """A mapping: a ledger that is intact may still hold whatever its writer meant."""
    return value if isinstance(value, dict) else {}


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    who = _of(entry.get("who"))
    name = who.get("name") or who.get("user") or "?"
    parts = [
        f"{entry['number']:>6}  {entry.get('time', '?')}  {name}@{who.get('host', '?')}",
        str(entry.get("action", "?")),
        str(entry.get("result", "")),
    ]
    yield "  ".join(part for part in parts if part)
    for key, title in (("reason", "reason"), ("snapshot", "cluster"), ("plan", "plan"), ("error", "error")):
        if entry.get(key):
            yield f"        {title} {entry[key]}"
    if entry.get("approvers"):
        yield f"        approved by {', '.join(map(str, entry['approvers']))}"
    for host, found in _of(entry.get("nodes")).items():
        each = _of(found)
        before, after = (str(each[key] or "nothing")[:12] if key in each else "unknown" for key in ("before", "after"))
        told = f": {each['error']}" if each.get("error") else ""
        yield f"        {host}  {before} -> {after}  {each.get('result', '')}{told}".rstrip()
    if entry.get("torn"):
        yield f"        before it, {entry['torn']} bytes of an entry that was never finished were taken away"
