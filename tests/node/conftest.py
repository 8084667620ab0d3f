"""Hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node import userspace
from tests.node.host import Host

# Flavour and shell do not meet in the program: two hosts show both of each.
MATRIX = [("nft", "dash"), ("legacy", "busybox")]


@pytest.fixture
def new_host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Make hosts that are gone after the test."""
    hosts: list[Host] = []

    def make(flavour: str = "nft", shell: str = "dash") -> Host:
        directory = tmp_path / f"host{len(hosts)}"
        directory.mkdir()
        hosts.append(Host(directory, flavour, shell))
        return hosts[-1]

    yield make
    for each in hosts:
        each.close()


@pytest.fixture(params=MATRIX, ids=["-".join(pair) for pair in MATRIX])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host of each flavour of iptables, and of each shell."""
    return new_host(*request.param)


@pytest.fixture(params=["nft", "legacy"])
def any_flavour(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host of each flavour of iptables."""
    return new_host(request.param)


@pytest.fixture
def nft_host(new_host: Callable[..., Host]) -> Host:
    """A host with iptables-nft."""
    return new_host()


@pytest.fixture
def world(new_host: Callable[..., Host]) -> Iterator[userspace.World]:
    """A host for userspace mode."""
    with userspace.world(new_host()) as made:
        yield made
