# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Probes: what must still work after a change before it is confirmed."""

from __future__ import annotations

import dataclasses
import http.client
import re
import shlex
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ..addresses import parse_host
from ..errors import UserError
from .scripts import script

TYPES = ("tcp", "udp", "http", "https")
PLACES = ("control", "node")
_KEYS = {"name", "type", "address", "port", "path", "status", "contains", "send", "timeout", "from"}
_MOST_BYTES = 65536
_PATH = re.compile(r"/[!-~]*")


class InvalidProbe(UserError):
    """A probe that cannot be made; the message names its position and field."""


class ProbeFailed(Exception):
    """What was probed does not answer as it should; the message says how it did."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Something that must answer."""

    type: str
    address: str
    port: int
    name: str = ""
    path: str = "/"
    status: tuple[int, ...] = ()  # of HTTP; none: anything from 200 to 399
    contains: str = ""  # in the body, or in the answer to a datagram
    send: str = ""  # the datagram
    timeout: int = 5  # seconds in which it is tried again and again
    place: str = "control"

    @property
    def title(self) -> str:
        """For messages."""
        where = f"[{self.address}]" if ":" in self.address else self.address
        target = f"{self.type} {where}:{self.port}{self.path if self.type.startswith('http') else ''}"
        return f"{self.name} ({target})" if self.name else target


def parse_probes(given: Iterable[Mapping[str, Any]], own_address: str) -> list[Probe]:
    """Probes as a user lists them. One without an address is for the node itself: its node ports."""
    return [_probe(index, each, own_address) for index, each in enumerate(given)]


def _probe(index: int, given: Mapping[str, Any], own_address: str) -> Probe:
    where = f"kube_proxy_probes[{index}]"
    if not isinstance(given, Mapping):
        raise InvalidProbe(f"{where}: must be a mapping with at least a port, not {given!r}")
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        raise InvalidProbe(f"{where}: has no {', '.join(unknown)}; it may have {', '.join(sorted(_KEYS))}")
    kind, place = str(given.get("type", "tcp")), str(given.get("from", "control"))
    if kind not in TYPES:
        raise InvalidProbe(f"{where}.type: {kind!r} is not one of {', '.join(TYPES)}")
    if place not in PLACES:
        raise InvalidProbe(f"{where}.from: {place!r} is not one of {', '.join(PLACES)}")
    if (kind, place) == ("udp", "node"):
        raise InvalidProbe(f"{where}: a udp probe can be made from the control host only")
    address, path = parse_host(str(given.get("address") or own_address)), str(given.get("path") or "/")
    if address is None:
        shown = given.get("address") or own_address
        raise InvalidProbe(f"{where}.address: {shown!r} is neither an address nor a DNS name")
    if not _PATH.fullmatch(path):
        raise InvalidProbe(f"{where}.path: {path!r} is not the path of a URL, which begins with / and has no blanks")
    try:
        status = given.get("status") or ()
        codes = status if isinstance(status, list | tuple) else [status]
        return Probe(
            type=kind,
            address=address,
            port=int(given["port"]),
            name=str(given.get("name") or ""),
            path=path,
            status=tuple(int(code) for code in codes),
            contains=str(given.get("contains") or ""),
            send=str(given.get("send") or ""),
            timeout=max(1, int(given.get("timeout", 5))),
            place=place,
        )
    except KeyError:
        raise InvalidProbe(f"{where}: has no port") from None
    except (TypeError, ValueError) as error:
        raise InvalidProbe(f"{where}: {error}") from None


def run_probes(probes: Iterable[Probe]) -> None:
    """Those from the control host, one after the other; the first that fails ends it."""
    for each in probes:
        if each.place == "control":
            _until_it_works(each)


def _until_it_works(probe: Probe) -> None:
    deadline = time.monotonic() + probe.timeout
    while True:
        left = deadline - time.monotonic()
        try:
            _once(probe, max(0.2, min(left, 2.0)))
            return
        except (OSError, http.client.HTTPException, ProbeFailed) as error:
            if time.monotonic() + 0.2 >= deadline:
                raise ProbeFailed(f"{probe.title}: {error or type(error).__name__}") from None
        time.sleep(0.2)


def _once(probe: Probe, patience: float) -> None:
    if probe.type == "tcp":
        socket.create_connection((probe.address, probe.port), timeout=patience).close()
    elif probe.type == "udp":
        _datagram(probe, patience)
    else:
        _request(probe, patience)


def _datagram(probe: Probe, patience: float) -> None:
    family = socket.AF_INET6 if ":" in probe.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(patience)
        client.connect((probe.address, probe.port))
        client.send(probe.send.encode())
        _look_for(probe.contains, client.recv(_MOST_BYTES))


def _request(probe: Probe, patience: float) -> None:
    connection: http.client.HTTPConnection
    if probe.type == "https":
        # Whether it answers is asked here, not who it is: a node's address is in no certificate.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(probe.address, probe.port, timeout=patience, context=context)
    else:
        connection = http.client.HTTPConnection(probe.address, probe.port, timeout=patience)
    try:
        connection.request("GET", probe.path, headers={"Connection": "close"})
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    finally:
        connection.close()
    good = answer.status in probe.status if probe.status else 200 <= answer.status < 400
    if not good:
        raise ProbeFailed(f"answers with status {answer.status}")
    _look_for(probe.contains, body)


def _look_for(wanted: str, answer: bytes) -> None:
    if wanted.encode() not in answer:
        raise ProbeFailed(f"its answer does not contain {wanted!r}")


def node_script(probes: Iterable[Probe]) -> str:
    """Shell that makes the probes from the node; silent if all is well, else its last line is an answer."""
    wanted = [each for each in probes if each.place == "node"]
    if not wanted:
        return ""
    lines = [script("probes")]
    for each in wanted:
        bracketed = f"[{each.address}]" if ":" in each.address else each.address
        title = shlex.quote("".join(c for c in each.title if c.isprintable() and c not in '"\\'))
        how = ""
        if each.type == "tcp":
            call = f"tcp {shlex.quote(each.address)} {each.port} {shlex.quote(bracketed)}"
        else:
            url = f"{each.type}://{bracketed}:{each.port}{each.path}"
            call = shlex.join(["web", url, " ".join(map(str, each.status)), each.contains])
            how = " as it should"
        lines.append(f"tries={each.timeout}; again {call} || fail {title} {shlex.quote(how)}\n")
    return "".join(lines)
