"""What `akp explain` says about a connection, beside how the connection really ended on a node.

The question is asked as an operator asks it, by the command line, with a cluster, a configuration and facts as files.
Whose rules the node has, ours or a kube-proxy's, makes no difference.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentless_kube_proxy.cli import main as akp

from tests.lab.program import PROGRAM

from .draw import Cluster
from .packets import CALLER, LOOPBACK, Probe
from .side import Side

MOST_SEEN = 12  # of more endpoints than these, not all can be met
# What becomes of a connection that rules leave alone is not theirs to say; only an endpoint must not have answered.
_ENDS = {"refused": {"refused"}, "dropped": {"no answer"}}
_TOLD = ("outcome", "service", "endpoints", "masquerade", "problems", "why")


@dataclass(frozen=True)
class Files:
    """What a question is asked with."""

    cluster: Path
    config: Path
    facts: Path
    node: str
    compat: str

    @classmethod
    def write(cls, drawn: Cluster, folder: Path, facts: str, snapshot: Path | None = None) -> Files:
        """The files of a drawn cluster; where an API server has it, its snapshot, with what the server fills in."""
        folder.mkdir(exist_ok=True)
        cluster, config, facts_file = (folder / f"{name}.json" for name in ("cluster", "config", "facts"))
        cluster.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(drawn.objects)}))
        config.write_text(json.dumps(drawn.config))
        facts_file.write_text(facts)
        return cls(snapshot or cluster, config, facts_file, drawn.node, drawn.minor)

    @property
    def options(self) -> list[str]:
        named = [f"--{name}={getattr(self, name)}" for name in ("cluster", "config", "facts")]
        return [*named, "--compat", self.compat, "--node", self.node]


@dataclass(frozen=True)
class Answer:
    """What was said about a probe."""

    probe: Probe
    question: str
    said: Any
    own: frozenset[str]  # addresses of the node, which endpoints see where the source is replaced

    def objection(self, ends: frozenset[str]) -> str:
        """What ended otherwise than was said, for people; empty if nothing did."""
        wrong, unmet = self._wrong(ends), self._unmet(ends)
        if not wrong and not unmet:
            return ""
        told = json.dumps({name: self.said[name] for name in _TOLD})
        return (
            f"  akp {self.question}\n  said {told}\n  was {', '.join(sorted(ends))}\n"
            f"  not foretold: {', '.join(sorted(wrong)) or 'nothing'}; not met: {', '.join(sorted(unmet)) or 'nobody'}"
        )

    def _wrong(self, ends: frozenset[str]) -> set[str]:
        """Ends that were not foretold."""
        said, probe = self.said, self.probe
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
        masked = self._masked()
        found = set(ends) - answers.keys()
        if answers or (not all(masked.values()) and probe.source in ("itself", "outside")):
            # Caller and endpoint may be in one namespace of this rig: the answer then does not come by the node.
            found -= {"no answer"}
        for end, (who, seen) in answers.items():
            if who not in masked:
                found.add(end)
            elif masked[who]:
                found |= {end} if seen not in self.own else set()
            elif seen not in (CALLER, said["packet"]["source"]) and not (probe.source == "node" and seen in self.own):
                found.add(end)
        return found

    def _unmet(self, ends: frozenset[str]) -> set[str]:
        """Endpoints that were foretold and did not answer."""
        if self.said["outcome"] != "endpoints" or self.probe.single or len(self.said["endpoints"]) > MOST_SEEN:
            return set()
        wanted = self._masked()
        if self.probe.source in ("itself", "outside"):
            wanted = {who: masked for who, masked in wanted.items() if masked}
        return wanted.keys() - {end.split(" saw ")[0] for end in ends}

    def _masked(self) -> dict[str, bool]:
        """Endpoint, as it answers, -> whether it sees another source."""
        return {_who(each["address"]): each["masquerade"] for each in self.said["endpoints"]}


@dataclass(frozen=True)
class Asked:
    """Questions about one node."""

    files: Files
    own: frozenset[str]

    @classmethod
    def of(cls, drawn: Cluster, side: Side, folder: Path, snapshot: Path | None = None) -> Asked:
        """A node as it is now, with the facts that it tells."""
        facts = side.run("sh", str(PROGRAM), "facts").splitlines()[-1]
        links = json.loads(side.run("ip", "-j", "addr"))
        own = {each["local"] for link in links for each in link["addr_info"]}
        return cls(Files.write(drawn, folder, facts, snapshot), frozenset({*drawn.addresses, *LOOPBACK, *own}))

    def about(self, probe: Probe) -> Answer:
        """The question as it is typed, and the answer."""
        where = f"[{probe.destination}]" if ":" in probe.destination else probe.destination
        who = probe.destination if probe.destination in LOOPBACK else probe.address or self.files.node
        to = f"{where}:{probe.port}/{probe.protocol.lower()}"
        argv = ["explain", *self.files.options, "--from", who, "--to", to]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = akp([*argv, "--json"])
        if code == 2:
            raise RuntimeError(f"akp {' '.join(argv)}: {err.getvalue()}")
        return Answer(probe, " ".join(argv), json.loads(out.getvalue()), self.own)


def _who(address: str) -> str:
    ip, _colon, port = address.rpartition(":")
    return f"{ip.strip('[]')} {port}"
