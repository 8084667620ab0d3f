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


_NODE = """\
again() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); [ "$n" -lt "$tries" ] || return 1; sleep 1; done; }
fail() { printf '{"ok": false, "probe": true, "error": "%s: does not answer from the node%s"}\\n' "$1" "$2"; exit 1; }
tcp() {
  if command -v nc >/dev/null 2>&1; then nc -z -w 2 "$1" "$2"
  elif command -v bash >/dev/null 2>&1; then timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2"
  else curl -s -m 2 "telnet://$3:$2" </dev/null; case $? in 0 | 28) ;; *) return 1 ;; esac; fi
}
get() {
  if wget --version >/dev/null 2>&1; then set -- -t 1 --max-redirect=0 --content-on-error "$@"; fi
  timeout 2 wget -q --no-check-certificate "$@" # not every busybox survives -T
}
status() {
  if command -v curl >/dev/null 2>&1; then curl -s -k -m 2 -o /dev/null -w '%{http_code}' "$1"
  else get -S -O /dev/null "$1" 2>&1 | sed -n -e 's|.*HTTP/[0-9.]* \\([1-5][0-9][0-9]\\).*|\\1|p' | head -n 1; fi
}
body() {
  if command -v curl >/dev/null 2>&1; then curl -s -k -m 2 "$1"; else get -O - "$1"; fi | head -c 65536
  echo . # or the last newlines of the body would be lost
}
web() {
  got=$(status "$1")
  case $got in [1-5]??) ;; *) return 1 ;; esac
  case " $2 " in *" $got "*) ;; '  ') case $got in [23]??) ;; *) return 1 ;; esac ;; *) return 1 ;; esac
  [ -z "$3" ] || case $(body "$1") in *"$3"*) ;; *) return 1 ;; esac
}
"""


def node_script(probes: Iterable[Probe]) -> str:
    """Shell that makes the probes from the node; silent if all is well, else its last line is an answer."""
    wanted = [each for each in probes if each.place == "node"]
    if not wanted:
        return ""
    lines = [_NODE]
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
