"""Our rules on a node of drawn clusters, and whether connections end there as `akp explain` says.

python -m tests.conformance.explained --mode nftables --seed 100 --clusters 50
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentless_kube_proxy.cli import main as akp

from tests.lab.program import PROGRAMS

from .draw import Cluster, cluster
from .foretold import Asked
from .namespaces import Node, World
from .packets import AT_ONCE, ROUNDS, Probe, Side, callers
from .run import stop_on_term
from .side import Network


async def surprises(drawn: Cluster, asked: Asked, node: Node, chosen: Sequence[Probe]) -> list[str]:
    """Connect by every way, and tell what was not foretold."""
    side = Side(drawn, node, asyncio.Semaphore(AT_ONCE))

    async def settle(probe: Probe) -> str:
        answer = asked.about(probe)
        found: frozenset[str] = frozenset()
        start = 0
        for number, count in enumerate(ROUNDS):
            seen = await side.outcomes(probe, range(start, start + count), 0.4 * (1 + number))
            start += count
            patient = answer.said["outcome"] != "dropped"
            found = (found - {"no answer"} if patient else found) | seen
            if not answer.objection(found):
                return ""
        return f"{probe}\n{answer.objection(found)}"

    try:
        ended = await asyncio.gather(*(settle(probe) for probe in chosen))
    finally:
        side.close()
    return [each for each in ended if each]


def case(drawn: Cluster, node: Node, folder: Path) -> tuple[int, list[str]]:
    """Our rules on a virgin node, and what connections do there."""
    interface = drawn.config.get("detectLocal", {}).get("bridgeInterface", "veth0")
    node.build(Network(drawn.addresses, drawn.others, drawn.pod_cidrs, interface))
    asked = Asked.of(drawn, node, folder)
    bundles = folder / "bundles"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        if akp(["render", *asked.files.options, "--output", str(bundles)]):
            raise RuntimeError(err.getvalue())
    bundle = bundles / drawn.node
    mode = json.loads((bundle / "manifest.json").read_text())["mode"]
    state = f"AKP_STATE={folder}/state"
    node.run("env", state, "sh", str(PROGRAMS[mode]), "apply", str(bundle))
    node.forward()
    chosen = list(callers(drawn, most=100))
    return len(chosen), asyncio.run(surprises(drawn, asked, node, chosen))


@contextlib.contextmanager
def standing(prefix: str) -> Iterator[Node]:
    """A node and its world, gone afterwards."""
    world = World(f"{prefix}-w")
    node = Node(prefix, world)
    world.build()
    try:
        yield node
    finally:
        node.remove()
        world.remove()


def main(argv: Sequence[str] | None = None) -> int:
    """A campaign; 1 if something ended otherwise than was explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="iptables", choices=("iptables", "nftables"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clusters", type=int, default=10)
    args = parser.parse_args(argv)
    stop_on_term()
    failed = 0
    with standing(f"akpx{os.getpid()}") as node:
        for seed in range(args.seed, args.seed + args.clusters):
            with tempfile.TemporaryDirectory(prefix="akp-explained-") as folder:
                count, found = case(cluster(seed, args.mode), node, Path(folder))
            print(f"{args.mode} seed {seed}: {count} probes, {len(found)} surprises", flush=True)
            for each in found:
                print(each, flush=True)
            failed += len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
