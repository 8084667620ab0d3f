"""Whoever carries a change dies: the nodes are whole, and the next run makes good what is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.control import ControlHost, other
from tests.lab import Lab

pytestmark = pytest.mark.slow


def test_a_control_host_that_dies_before_it_confirms(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """Once, the next run found everything as it should be, said so, and a minute later the nodes went back."""
    host = ControlHost(make_lab(), tmp_path / "control", "iptables-nft")
    host.sync(other(host.current))
    host.current = other(host.current)
    for alone in (False, True):
        new = other(host.current)
        # Long enough to look at the nodes before they go back.
        run = host.sync(new, "confirm host-before", confirm_within=20 if alone else 60, check=False)
        assert (host.fired, run.code) == (True, -9)
        assert all(host.view(node) == view for node, view in zip(host.nodes, host.views[new], strict=True))
        assert host.examine(new, "kill-control host", "the first confirmation", alone=alone).trouble == []
