# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whose rule that is: the Service that a difference on a node belongs to.

A node compares its kernel with what was applied, and knows nothing of Services. Here their names are added: by the
names of chains and sets, which follow from the names of a service port, by comments, and otherwise by addresses and
ports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..addresses import parse_ip
from ..backends.names import service_port_names
from ..texts import visible
from .compare import parse_records

_WORD = re.compile(r'[\s"{}]+')
_PART = re.compile(r"[\s,/\[\]{}]+")
_PROTOCOLS = {"tcp": "tcp", "udp": "udp", "sctp": "sctp", "-t": "tcp", "-u": "udp", "--sctp-service": "sctp"}
_FIELDS = ("chain", "name", "rule", "value")


class Owners:
    """Service ports, by all that their objects in the kernel are known by."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Lines of services.jsonl; ValueError, KeyError or RecursionError if they are none."""
        self._named: dict[str, str] = {}  # a chain, a set, or what comments begin with
        self._placed: dict[tuple[str, str, str], set[tuple[str, str]]] = {}  # address, protocol, port; some are empty
        for (service, port, protocol, _family), record in parse_records(lines).items():
            title = f"{service}:{port}" if port else service
            namespace, _slash, name = service.partition("/")
            endpoints = [_place(each) for key in ("endpoints", "localEndpoints") for each in record.get(key, ())]
            numbered = [(ip, int(number)) for ip, number in endpoints if number.isdecimal()]
            for objects in service_port_names(namespace, name, port, protocol, numbered).values():
                self._named |= dict.fromkeys(objects.values(), title)
            self._named[title] = title
            cluster_ip, number = _place(record.get("clusterIP", ""))
            others = [str(ip) for key in ("externalIPs", "loadBalancerIPs") for ip in record.get(key, ())]
            places = [*endpoints, *((ip, number) for ip in (cluster_ip, *others))]
            found = [(ip, protocol, at) for ip, at in places] + [(ip, "", "") for ip, _at in places]
            found += [("", protocol, str(record[key])) for key in ("nodePort", "healthCheckNodePort") if key in record]
            for place in found:
                self._placed.setdefault(place, set()).add((service, title))

    def named(self, differences: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Differences that a node found, each with its service where that is known."""
        found = []
        for each in differences:
            owner = visible(self._owner([str(each[key]) for key in _FIELDS if each.get(key)]))
            found.append({**each, "service": owner} if owner else dict(each))
        return found

    def _owner(self, texts: list[str]) -> str:
        """`namespace/name:port`, or `namespace/name` if it is that of several ports, or nothing."""
        for text in texts:
            for word in _WORD.split(text):
                if word in self._named:
                    return self._named[word]
        addresses, protocols, numbers = _parts(" ".join(texts))
        exact = [(ip, protocol, at) for ip in (*addresses, "") for protocol in protocols for at in numbers]
        for places in (exact, [(ip, "", "") for ip in addresses]):
            owners = {owner for place in places for owner in self._placed.get(place, ())}
            services, titles = {service for service, _title in owners}, {title for _service, title in owners}
            if owners:
                return titles.pop() if len(titles) == 1 else services.pop() if len(services) == 1 else ""
        return ""


def _place(text: Any) -> tuple[str, str]:
    """Address and port of "10.0.0.1:80" or "[fd00::1]:80"."""
    address, _colon, number = str(text).rpartition(":")
    return address.strip("[]"), number


def _parts(text: str) -> tuple[list[str], list[str], list[str]]:
    """The addresses, protocols and numbers of a rule, an element or an entry."""
    addresses: list[str] = []
    protocols: list[str] = []
    numbers: list[str] = []
    for part in _PART.split(text):
        for word in part.split(":") if part.count(":") == 1 else [part]:
            if word in _PROTOCOLS:
                protocols.append(_PROTOCOLS[word])
            elif word.isdecimal():
                numbers.append(word)
            elif ip := parse_ip(word):
                addresses.append(ip)
    # The sets of node ports have it in their names only.
    return addresses, protocols or sorted(set(_PROTOCOLS.values())), numbers
