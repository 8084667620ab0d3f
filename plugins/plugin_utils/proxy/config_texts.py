# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Texts that fields of a KubeProxyConfiguration hold: durations, ranges of ports, an address with a port."""

from __future__ import annotations

import re

from ..addresses import parse_ip

_DURATION = re.compile(r"(?P<sign>[-+]?)(?P<parts>(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0)")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|µs|ms|s|m|h)")
_PORT_RANGE = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5})|\+(?P<more>[0-9]{1,5}))?")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


_LONGEST = (2**63 - 1) / 1e9  # Go counts nanoseconds in 64 bits, and refuses more


def parse_duration(text: object) -> float | None:
    """Seconds of a Go duration, or None."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(match["parts"]))
    if seconds > _LONGEST:
        return None
    return -seconds if match["sign"] == "-" else seconds


def parse_port_range(text: str) -> tuple[int, int] | None:
    """The first and the last port of `FIRST-LAST`, `FIRST+MORE` or `PORT`; None of an empty text or of port 0."""
    match = _PORT_RANGE.fullmatch(text.strip())
    if match is None:
        return None
    first = int(match["first"])
    last = int(match["last"] or first + int(match["more"] or 0))
    return (first, last) if 0 < first <= last <= 65535 else None


def healthz_port(address: str) -> int:
    """The port of IP:PORT; without one it is kube-proxy's default."""
    port = "" if parse_ip(address) else address.rpartition(":")[2]
    return int(port) if re.fullmatch("[0-9]{1,5}", port) else 10256


def is_ip_port(text: str) -> bool:
    """Whether a text is an address, or an address and a port."""
    if parse_ip(text) is not None:
        return True  # a bare address gets the default port
    host, _colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return parse_ip(bare) is not None and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
