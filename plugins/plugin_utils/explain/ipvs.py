# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Virtual servers and the addresses of their device, as `ipvsadm -Sn` and `ip` print them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from fractions import Fraction

_PROTOCOLS = {"-t": "tcp", "-u": "udp", "--sctp-service": "sctp"}
_BOUND = re.compile(r"(?:addr add |\binet6? )(\S+)/\d+\b.*\bkube-ipvs0\b|\bkube-ipvs0\s+inet6? (\S+)/")

# Schedulers that look at weights; the others take every real server that has one.
_WEIGHTED = ("wrr", "wlc", "sed", "lblc", "lblcr", "sh", "mh")


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualServer:
    """A destination, and the real servers behind it."""

    text: str  # as it is listed
    scheduler: str
    servers: tuple[tuple[str, int, int, str], ...]  # address, port, weight, and the line

    def shares(self) -> list[tuple[str, int, Fraction, str]]:
        """Address and port of each real server that new connections reach, its share, and its line."""
        usable = [each for each in self.servers if each[2] > 0]
        weights = [each[2] if self.scheduler in _WEIGHTED else 1 for each in usable]
        total = sum(weights)
        return [(ip, port, Fraction(w, total), line) for (ip, port, _w, line), w in zip(usable, weights, strict=True)]


def read_servers(lines: Iterable[str]) -> dict[tuple[str, str], VirtualServer]:
    """Protocol and "address:port" -> the virtual server."""
    heads: dict[tuple[str, str], tuple[str, str]] = {}
    real: dict[tuple[str, str], list[tuple[str, int, int, str]]] = {}
    for line in lines:
        words = line.split()
        if len(words) < 3 or words[1] not in _PROTOCOLS:
            continue
        key = (_PROTOCOLS[words[1]], words[2])
        if words[0] == "-A":
            heads[key] = (line.strip(), words[words.index("-s") + 1] if "-s" in words else "wlc")
        elif words[0] == "-a" and "-r" in words:
            address, _colon, port = words[words.index("-r") + 1].rpartition(":")
            weight = int(words[words.index("-w") + 1]) if "-w" in words else 1
            real.setdefault(key, []).append((address.strip("[]"), int(port), weight, line.strip()))
    return {key: VirtualServer(*head, tuple(real.get(key, ()))) for key, head in heads.items()}


def read_addresses(lines: Iterable[str]) -> frozenset[str]:
    """The addresses of kube-ipvs0: from a batch of `ip`, or from what `ip -o addr` prints."""
    found = (_BOUND.search(line) for line in lines)
    return frozenset(match[1] or match[2] for match in found if match)
