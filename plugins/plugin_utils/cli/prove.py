# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""akp prove: every frontend of every node, and not by samples."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..choices import Choices
from ..cluster.snapshot import Snapshot
from ..explain.claims import Claim, of_addresses, of_rules, told
from ..explain.intent import Intent
from ..explain.prove import Ends, Proof, Prover, disagreements
from ..explain.question import known_node
from ..explain.ruleset import read_directory
from ..texts import visible
from .console import UsageError
from .source import Source, add_options

_ALIKE = ("iptables", "ipvs", "nftables")  # modes that do the same, where they do not differ by design
_DESCRIPTION = """\
Proves, for every frontend of every node and every kind of source, that rules do what was decided: no packet to a
Service leaves for an address that its EndpointSlices do not name, and a policy Local keeps to its node. Then that the
modes agree, that no two Services claim one frontend, and that no address of a Service is a node's, a pod's or the API
server's.

  akp prove --cluster cluster --config kube-proxy.yaml
  akp prove --cluster cluster --config kube-proxy.yaml --bundle bundles    # these very files, as akp render wrote them

Exits with 0 if all of it holds, with 1 and the smallest counterexample if not.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line of prove."""
    parser = commands.add_parser(
        "prove",
        help="prove that rules do what was decided, for all nodes and frontends",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--node", action="append", default=[], metavar="NAME", help="only this node; can be repeated")
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="DIR",
        help="prove these rules: a directory of bundles, or one bundle or what a node's tools print with --node",
    )
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prove, and say what holds."""
    gc.disable()
    source = Source(args)
    snapshot = source.snapshot()
    # What Windows does with its documents cannot be followed here.
    nodes = args.node or [each.name for each in snapshot.nodes if not each.windows]
    for name in nodes:
        if known_node(snapshot, name).windows:
            raise UsageError(f"--node {name}: it runs Windows, and only rules of Linux nodes can be proved")
    if not nodes:
        raise UsageError("the cluster has no Node of Linux, so there is nothing to prove")
    facts = source.facts(args.node[0] if len(args.node) == 1 else "")
    if args.bundle:
        claims = [_of_texts(args.bundle, Intent(snapshot, source.choices, facts), nodes)]
    else:
        claims = list(_of_modes(_Work(snapshot, source.choices, dict(facts), tuple(nodes))))
    claims += of_addresses(snapshot)
    if args.json:
        print(
            json.dumps({"holds": not any(each.failures for each in claims), "claims": [_json(each) for each in claims]})
        )
    else:
        print("\n".join(map(visible, _text(claims))))
    return 1 if any(each.failures for each in claims) else 0


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a process needs to prove one mode."""

    snapshot: Snapshot
    choices: Choices
    facts: dict[str, Any]
    nodes: tuple[str, ...]


_work: _Work | None = None  # what forked processes find


def _prove(mode: str) -> tuple[Proof, Ends]:
    """One mode on all nodes."""
    if _work is None:
        raise RuntimeError("a mode is proved in a process that _of_modes has forked")
    intent = Intent(_work.snapshot, _in_mode(_work.choices, mode), _work.facts)
    prover = Prover()
    for name in _work.nodes:
        prover.node(intent, name)
    return prover.proof, prover.ends


def _in_mode(choices: Choices, mode: str) -> Choices:
    """The same choices for another mode; what is said of masquerading for one mode is meant for all."""
    was = choices.proxy
    masquerade = {"masqueradeBit": was.masquerade_bit, "masqueradeAll": was.masquerade_all}
    sections = {name: {**(choices.config.get(name) or {}), **masquerade} for name in ("iptables", "nftables")}
    return dataclasses.replace(choices, config={**choices.config, **sections, "mode": mode})


def _of_modes(work: _Work) -> Iterator[Claim]:
    """The rules of the configured mode, and that the others do the same; each mode in a process of its own."""
    global _work
    _work = work
    chosen = work.choices.proxy.mode
    # What proxies in user space do, and what Windows does, no other mode does.
    modes = sorted(_ALIKE, key=lambda mode: mode != chosen) if chosen in _ALIKE else [chosen]
    with multiprocessing.get_context("fork").Pool(min(len(modes), multiprocessing.cpu_count())) as pool:
        found = dict(zip(modes, pool.map(_prove, modes, chunksize=1), strict=True))
    ends = found[modes[0]][1]
    yield of_rules([proof for proof, _ends in found.values()], f"modes {', '.join(modes)}")
    if not modes[1:]:
        return
    other = (each for mode in modes[1:] for each in disagreements(ends, found[mode][1]))
    yield Claim(
        "modes", f"{modes[0]} beside {' and '.join(modes[1:])}, where they do not differ by design", told(other)
    )


def _of_texts(path: Path, intent: Intent, nodes: list[str]) -> Claim:
    """Rules that were given."""
    prover = Prover()
    for name in nodes:
        directory = path / name if (path / name).is_dir() else path
        prover.texts(intent.view(name), read_directory(directory))
    return of_rules([prover.proof], str(path))


def _json(claim: Claim) -> dict[str, Any]:
    return {
        "claim": claim.name,
        "holds": not claim.failures,
        "lookedAt": claim.looked_at,
        "counterexample": claim.failures[0] if claim.failures else None,
        "failures": len(claim.failures),
    }


def _text(claims: list[Claim]) -> Iterator[str]:
    failing = [each for each in claims if each.failures]
    yield "proved: rules do what was decided" if not failing else f"not proved: {failing[0].failures[0]}"
    yield ""
    for each in claims:
        yield f"{'FAILS' if each.failures else 'holds':6} {each.name:10} {each.looked_at}"
        if each.failures:
            more = f" (and {len(each.failures) - 1:,} more)" if len(each.failures) > 1 else ""
            yield f"{'':17} {each.failures[0]}{more}"
    yield ""
    yield "= not proved: that the cluster told the truth, that a firewall lets packets pass, that endpoints answer"
