"""A lab for the tests of this folder; every test finds its nodes clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import unused_prefix
from tests.lab import Lab
from tests.lab.program import PROGRAM


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[Lab]:
    with Lab(unused_prefix(), 3) as lab:
        yield lab


@pytest.fixture
def nodes(shared_lab: Lab) -> Lab:
    """Three nodes with nothing applied."""
    for node in shared_lab.nodes:
        node.run(["sh", str(PROGRAM), "cleanup"])
        node.run(["sh", "-c", "rm -rf /usr/local/sbin/* /usr/local/bin/* /var/lib/akp"])
        # A node that was given back to kube-proxy keeps the settings that kube-proxy needs as well.
        node.run(["sysctl", "-qw", "net.ipv4.conf.all.route_localnet=0"])
    return shared_lab


@pytest.fixture
def inventory(nodes: Lab, tmp_path: Path) -> Path:
    return nodes.inventory(tmp_path / "hosts.yml")
