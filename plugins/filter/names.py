# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters for the names of chains, sets and maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.backends.names import service_port_names

_SERVICE_PORT = re.compile(r"(?P<namespace>[^/:]+)/(?P<name>[^/:]+)(?::(?P<port>[^/:]+))?")
_ENDPOINT = re.compile(r"\[?(?P<ip>[0-9a-f.:]+?)\]?:(?P<port>[0-9]+)")


def names(service_port: str, protocol: str = "tcp", endpoints: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Every name that a service port has in the kernel: mode -> what it is -> name."""
    found = _SERVICE_PORT.fullmatch(str(service_port))
    if found is None:
        raise AnsibleFilterError(f"{service_port!r} is not NAMESPACE/NAME or NAMESPACE/NAME:PORT")
    if protocol not in ("tcp", "udp", "sctp"):
        raise AnsibleFilterError(f"{protocol!r} is not one of tcp, udp, sctp")
    parsed = []
    for endpoint in endpoints:
        match = _ENDPOINT.fullmatch(str(endpoint))
        if match is None:
            raise AnsibleFilterError(f"{endpoint!r} is not IP:PORT")
        parsed.append((match["ip"], int(match["port"])))
    return service_port_names(found["namespace"], found["name"], found["port"] or "", protocol, parsed)


class FilterModule:
    """The collection's filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"service_names": names}
