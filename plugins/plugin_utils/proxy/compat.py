# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Where kube-proxy minors differ, in one place."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Compat:
    """The kube-proxy minor whose state is written, and what it does its own way."""

    minor: str
    short_dnat: bool  # nftables: a lone endpoint gets `dnat to IP:PORT` instead of a map with one entry
    cleans_unserved_udp: bool  # flows of a UDP service port go when its last serving endpoint does
    node_port_keywords: tuple[str, ...]  # keywords that nodePortAddresses may hold


COMPATS = {
    "1.36": Compat("1.36", short_dnat=False, cleans_unserved_udp=False, node_port_keywords=("primary",)),
    "1.37": Compat(
        "1.37", short_dnat=True, cleans_unserved_udp=True, node_port_keywords=("primary", "localhost", "all")
    ),
}
# The one that the conformance tests run against unless another is asked for.
DEFAULT_COMPAT = "1.37"
