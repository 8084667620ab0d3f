# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Where the rules of a kernel differ from those that were meant, for one packet: in what they do, and in their text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from ..addresses import family_of
from .intent import Place
from .iptables import Chain
from .iptables_walk import IptablesWalker
from .nft_text import NftTable
from .nft_walk import NftWalker
from .packet import Packet, Verdict
from .ruleset import NoRules
from .walk import Walker

_MOST = 20  # differing rules that are told
_NUMBER = re.compile(r"\b0x0*([0-9a-f]+)\b")
_NOISE = re.compile(
    r'counter packets \d+ bytes \d+ ?| comment "[^"]*"| with icmp(?:v6|x)?(?: type)? (?:port-unreachable|no-route)'
)
_WORDS = {"meta mark": "mark", "&": "and", "|": "or", "^": "xor", "type ipv4_addr": ""}


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it was meant."""

    what: str  # does, missing, added, order, unknown; or mode, where the rules are of another one
    place: str  # table and chain
    text: str


def differences(meant: Place, live: Place, packet: Packet) -> Iterator[Difference]:
    """What the kernel does otherwise with a packet, and the rules on its way that differ."""
    family = family_of(packet.destination)
    if meant.rules.mode != live.rules.mode:
        yield Difference("mode", "", f"the rules are of mode {live.rules.mode}, and {meant.rules.mode} is meant")
        return
    try:
        walker = live.walkers[family]
    except NoRules as error:
        yield Difference("missing", "", str(error))
        return
    wanted, found = meant.walkers[family].walk(packet), walker.walk(packet)
    yield from (Difference("unknown", "", f"cannot be followed: {each}") for each in found.skipped)
    if (said := _told(found)) != _told(wanted):
        yield Difference("does", "", f"{said}; meant: {_told(wanted)}")
    places = dict.fromkeys(step.place for each in (wanted, found) for path in each.paths for step in path.steps)
    for place in list(places):
        yield from _texts(place, meant.walkers[family], walker)


def _told(verdict: Verdict) -> str:
    """A verdict in a line."""
    ends = [
        f"{float(share):.1%} to {to}{' with another source' if verdict.masquerades[to] else ''}"
        for to, share in sorted(verdict.shares.items())
    ]
    if verdict.lost:
        ends.append(f"{float(verdict.lost):.1%} to no endpoint")
    return ", ".join(ends) or verdict.end.value


def _texts(place: str, meant: Walker, live: Walker) -> Iterator[Difference]:
    """The rules of a chain that only one side has, and a chain whose order differs."""
    wanted, found = _rules(place, meant), _rules(place, live)
    gone = [each for each in wanted if each not in found]
    come = [each for each in found if each not in wanted]
    for what, rules in (("missing", gone), ("added", come)):
        yield from (Difference(what, place, text) for text in rules[:_MOST])
    if not gone and not come and wanted != found:
        yield Difference("order", place, "the same rules in another order, or some of them twice")


def _rules(place: str, walker: Walker) -> list[str]:
    kind, _space, name = place.partition(" ")
    if isinstance(walker, NftWalker):
        table: NftTable = walker.table
        return [normal(text) for text in table.chains[name].rules] if name in table.chains else []
    if isinstance(walker, IptablesWalker) and place != "ipvs":
        chain: Chain | None = walker.tables.get((kind, name))
        return [text.replace("--nfacct-name  ", "--nfacct-name ") for text in chain.texts] if chain else []
    return []


def normal(text: str) -> str:
    """A rule of nft in one of its forms: commands and listings write the same rule in different words."""
    text = _NOISE.sub("", text)
    for word, other in _WORDS.items():
        text = text.replace(word, other)
    text = _NUMBER.sub(lambda match: str(int(match[1], 16)), text)
    return " ".join(text.replace(",", " ").split())
