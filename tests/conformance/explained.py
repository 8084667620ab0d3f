"""What `akp explain` says about a connection, beside how the connection really ends on a node.

The question is asked as anybody would ask it, by the command line, with a cluster, a configuration and facts as files.
The node is one side of the twins; whose rules it has, ours or a kube-proxy's, makes no difference.

    python -m tests.conformance.explained --mode nftables --seed 100 --clusters 50
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import ipaddress
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentless_kube_proxy.cli import main as akp

from tests.lab.program import PROGRAM, PROGRAMS

from .draw import Cluster, cluster
from .namespaces import Node, World
from .packets import AT_ONCE, CALLER, LOOPBACK, ROUNDS, Probe, Side, probes
from .run import stop_on_term
from .side import Network

MOST_SEEN = 12  # of more endpoints than these, not all can be met
# What becomes of a connection that rules leave alone is not theirs to say; only an endpoint must not have answered.
_ENDS = {"refused": {"refused"}, "dropped": {"no answer"}}


@dataclass(frozen=True)
class Files:
    """What a question is asked with."""

    cluster: Path
    config: Path
    facts: Path | None
    node: str

    @classmethod
    def write(cls, drawn: Cluster, folder: Path, facts: str) -> Files:
        """The files of a drawn cluster."""
        files = cls(folder / "cluster.json", folder / "config.json", folder / "facts.json", drawn.node)
        items = {"apiVersion": "v1", "kind": "List", "items": list(drawn.objects)}
        files.cluster.write_text(json.dumps(items))
        files.config.write_text(json.dumps(drawn.config))
        if files.facts:
            files.facts.write_text(facts)
        return files

    @property
    def options(self) -> list[str]:
        facts = ["--facts", str(self.facts)] if self.facts else []
        return ["--cluster", str(self.cluster), "--config", str(self.config), *facts, "--node", self.node]


@dataclass(frozen=True)
class Surprise:
    """A connection that ended otherwise than was explained."""

    probe: Probe
    question: str
    said: Any
    ends: frozenset[str]

    def __str__(self) -> str:
        told = {name: self.said[name] for name in ("outcome", "service", "endpoints", "masquerade", "problems", "why")}
        return f"{self.probe}\n  akp {self.question}\n  said {json.dumps(told)}\n  was {', '.join(sorted(self.ends))}"


def ask(files: Files, probe: Probe) -> tuple[str, Any]:
    """The question as it is typed, and the answer."""
    own = ":" in probe.destination
    where = f"[{probe.destination}]" if own else probe.destination
    who = probe.address or files.node
    if probe.destination in LOOPBACK:
        who = probe.destination
    argv = ["explain", *files.options, "--from", who, "--to", f"{where}:{probe.port}/{probe.protocol.lower()}"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = akp([*argv, "--json"])
    if code == 2:
        raise RuntimeError(f"akp {' '.join(argv)}: {err.getvalue()}")
    return " ".join(argv), json.loads(out.getvalue())


def wrong(said: Any, probe: Probe, own: set[str], ends: frozenset[str]) -> set[str]:
    """Ends that were not foretold."""
    if said["problems"]:
        return {"the rules do not do what was decided"}
    if said["outcome"] in _ENDS:
        # A process of the node is told at once that what it sends is not sent.
        told = {"unreachable"} if (probe.source, probe.protocol) == ("node", "UDP") else set()
        lost = {"no answer"} if "refused" in ends else set()  # a busy machine loses an answer now and then
        return set(ends) - _ENDS[said["outcome"]] - told - lost
    answers = {end: end.split(" saw ") for end in ends if " saw " in end}
    if said["outcome"] == "passed":
        return {end for end, (who, _seen) in answers.items() if who.split()[0] != probe.destination}
    masked = {_who(each["address"]): each["masquerade"] for each in said["endpoints"]}
    found = set(ends) - answers.keys()
    if not all(masked.values()) and probe.source in ("itself", "outside"):
        # Caller and endpoint may be in one namespace of this rig: the answer then does not come by the node.
        found -= {"no answer"}
    if answers:
        found -= {"no answer"}
    for end, (who, seen) in answers.items():
        if who not in masked:
            found.add(end)
        elif masked[who]:
            found |= {end} if seen not in own else set()
        elif seen not in (CALLER, said["packet"]["source"]) and not (probe.source == "node" and seen in own):
            found.add(end)
    return found


def unmet(said: Any, probe: Probe, ends: frozenset[str]) -> set[str]:
    """Endpoints that were foretold and did not answer."""
    if said["outcome"] != "endpoints" or probe.single or len(said["endpoints"]) > MOST_SEEN:
        return set()
    wanted = {_who(each["address"]): each["masquerade"] for each in said["endpoints"]}
    if probe.source in ("itself", "outside"):
        wanted = {who: masked for who, masked in wanted.items() if masked}
    return wanted.keys() - {end.split(" saw ")[0] for end in ends}


def _who(address: str) -> str:
    ip, _colon, port = address.rpartition(":")
    return f"{ip.strip('[]')} {port}"


def callers(drawn: Cluster) -> Iterator[Probe]:
    """The probes of the twins, and endpoints of this node that call their own Services."""
    networks = [ipaddress.ip_network(cidr) for cidr in drawn.pod_cidrs]
    bridged = drawn.config.get("detectLocalMode") == "BridgeInterface"  # these pods are on no bridge
    for probe in probes(drawn, most=100):
        yield probe
        if probe.source != "pod" or bridged:
            continue
        for backend in sorted(probe.backends)[:2]:
            address = backend.split()[0]
            here = any(ipaddress.ip_address(address) in each for each in networks)
            if here and (":" in address) == (":" in probe.destination):
                yield replace(probe, source="itself", address=address)


async def surprises(drawn: Cluster, files: Files, node: Node) -> tuple[int, list[Surprise]]:
    """Connect by every way, and tell what was not foretold."""
    side = Side(drawn, node, asyncio.Semaphore(AT_ONCE))
    side._places["itself"] = node.pods
    own = {*drawn.addresses, *LOOPBACK, *_addresses(node)}

    async def settle(probe: Probe) -> Surprise | None:
        question, said = ask(files, probe)
        found: frozenset[str] = frozenset()
        start = 0
        for number, count in enumerate(ROUNDS):
            seen = await side.outcomes(probe, range(start, start + count), 0.4 * (1 + number))
            start += count
            patient = said["outcome"] != "dropped"
            found = (found - {"no answer"} if patient else found) | seen
            if not wrong(said, probe, own, found) and not unmet(said, probe, found):
                return None
        return Surprise(probe, question, said, found)

    chosen = list(callers(drawn))
    try:
        ended = await asyncio.gather(*(settle(probe) for probe in chosen))
    finally:
        side.close()
    return len(chosen), [each for each in ended if each is not None]


def _addresses(node: Node) -> set[str]:
    listed = json.loads(node.run("ip", "-j", "addr"))
    return {each["local"] for link in listed for each in link["addr_info"]}


def case(drawn: Cluster, node: Node, folder: Path) -> tuple[int, list[Surprise]]:
    """Our rules on a virgin node, and what connections do there."""
    interface = drawn.config.get("detectLocal", {}).get("bridgeInterface", "veth0")
    node.build(Network(drawn.addresses, drawn.others, drawn.pod_cidrs, interface))
    facts = node.run("sh", str(PROGRAM), "facts").splitlines()[-1]
    files = Files.write(drawn, folder, facts)
    bundles = folder / "bundles"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        if akp(["render", *files.options, "--output", str(bundles)]):
            raise RuntimeError(err.getvalue())
    bundle = bundles / drawn.node
    mode = json.loads((bundle / "manifest.json").read_text())["mode"]
    state = f"AKP_STATE={folder}/state"
    node.run("env", state, "sh", str(PROGRAMS[mode]), "apply", str(bundle))
    node.forward()
    return asyncio.run(surprises(drawn, files, node))


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
