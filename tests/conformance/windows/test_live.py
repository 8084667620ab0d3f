"""25 drawn clusters with histories on every kind of Windows node: kube-proxy.exe on Wine, akp-node.cs on mono."""

from __future__ import annotations

import pytest

from . import run
from .draw import NETWORK_TYPES, OLD, VERSIONS


@pytest.mark.soak
def test_what_we_tell_the_service_is_what_kube_proxy_tells_it() -> None:
    assert run.run(range(1, 26), 3, NETWORK_TYPES, VERSIONS) == 0


@pytest.mark.soak
def test_the_same_with_the_service_of_windows_server_2019() -> None:
    assert run.run(range(101, 106), 3, NETWORK_TYPES, (OLD,)) == 0
