# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which lines of a bundle's files are there for certain service ports.

Rules of iptables and nft stand below a heading that names their service port, or have its name in a comment. Sets,
virtual servers and addresses have neither; they are known by addresses and node ports.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_FAMILIES = {"iptables": "IPv4", "ip6tables": "IPv6"}  # how the names of files begin
_HEADING = re.compile(r"# (?:(?P<family>IPv[46])|(?P<owner>\S+/\S+) \S+(?: (?P<of>IPv[46]))?|.*)$")
_COMMENT = re.compile(r'--comment "(?P<owner>[^\s"/]+/[^\s"]+)')
# What is known by addresses and ports only.
_BY_ADDRESS = re.compile(
    r"add KUBE-|-[aA] -[tu] |-[aA] --sctp-service |addr add |add element \S+ kube-proxy hairpin-conn|-A KUBE-IPVS-"
)
_CHECK = re.compile(r"check (?P<family>ipv[46]) \d+ (?P<namespace>\S+) (?P<name>\S+)$")
_COUNT = re.compile(r"count (?P<family>ipv[46]) (?P<port>\d+) \d+$")
_WORD = re.compile(r"[\s,/]+")


@dataclasses.dataclass(frozen=True)
class Explained:
    """Service ports, and what their lines are known by."""

    names: frozenset[tuple[str, str]]  # family, "namespace/name:port"
    services: frozenset[tuple[str, str]]  # family, "namespace/name"
    places: frozenset[str]  # addresses, and node ports

    @classmethod
    def by(cls, records: Iterable[Mapping[str, Any]]) -> Explained:
        """The service ports of lines of services.jsonl."""
        names, services, places = set(), set(), set()
        for each in records:
            family, service, port = str(each["family"]), str(each["service"]), str(each.get("port", ""))
            names.add((family, f"{service}:{port}" if port else service))
            services.add((family, service))
            lists = ("endpoints", "localEndpoints", "externalIPs", "loadBalancerIPs")
            found = [each.get("clusterIP", ""), *(place for key in lists for place in each.get(key) or ())]
            places |= {_address(str(place)) for place in found}
            places |= {str(each[key]) for key in ("nodePort", "healthCheckNodePort") if key in each}
        return cls(frozenset(names), frozenset(services), frozenset(places - {""}))

    def others(self, file: str, lines: Iterable[str]) -> Iterator[str]:
        """The lines of a file that are not there for these service ports; headings are left out."""
        family, owner = _FAMILIES.get(re.split("[-.]", file)[0], ""), ""
        for line in lines:
            heading = _HEADING.match(line)
            if heading:
                family, owner = heading["family"] or heading["of"] or family, heading["owner"] or ""
            elif not self._has(family, owner, line):
                yield line

    def _has(self, family: str, owner: str, line: str) -> bool:
        comment, check = _COMMENT.search(line), _CHECK.match(line)
        if check:
            return (check["family"].replace("ip", "IP"), f"{check['namespace']}/{check['name']}") in self.services
        if count := _COUNT.match(line):
            return count["port"] in self.places
        if owner or comment:
            return (family, owner or (comment["owner"] if comment else "")) in self.names
        return bool(_BY_ADDRESS.match(line)) and any(map(self._is_place, _WORD.split(line)))

    def _is_place(self, word: str) -> bool:
        return word in self.places or _address(word) in self.places or word.rpartition(":")[2] in self.places


def _address(place: str) -> str:
    """The address of "10.0.0.1:80", "[::1]:80" or "::1"."""
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0] if place.count(":") == 1 else place
