"""The configuration that akp watch follows: that of the last run, whatever a reload finds in the inventory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cli.watch import _Reading
from agentless_kube_proxy.configuration import Kept, OtherSettings, read_kept
from agentless_kube_proxy.tasks.directory import WorkDirectory

from ..build import document

NFTABLES, IPTABLES = document(mode="nftables"), document(mode="iptables")


class Reading:
    """What a watch reads in a directory, and what it says of that. No setting of these tests asks the API server."""

    def __init__(self, path: Path) -> None:
        self.directory = WorkDirectory(path).make()
        self.said: list[tuple[str, str]] = []
        self._reading = _Reading(self.directory, None, lambda event, problem: self.said.append((event, problem)))

    def mode(self, **settings: Any) -> str:
        return str(self._reading.choices(settings).proxy.mode)


def test_it_does_not_start_with_another_configuration_than_the_last_run_had(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    Kept(NFTABLES).write(reading.directory.config)
    with pytest.raises(OtherSettings, match="mode nftables -> iptables"):
        reading.mode(config=IPTABLES)
    assert reading.mode() == "nftables"
    assert reading.said == []


def test_one_that_is_asked_for_is_said_and_kept(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    Kept(NFTABLES).write(reading.directory.config)
    assert reading.mode(config=IPTABLES, allow_mode_change=True) == "iptables"
    assert reading.said == [("warning", "the settings change: mode nftables -> iptables")]
    assert read_kept(reading.directory.config) == Kept(IPTABLES)


def test_at_a_reload_the_configuration_of_the_last_run_holds(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    assert reading.mode(config=NFTABLES) == "nftables"
    assert reading.mode(config=IPTABLES) == "nftables"
    ((event, problem),) = reading.said
    assert event == "configuration"
    assert "mode nftables -> iptables" in problem
    # A run that was allowed to has changed it meanwhile; the inventory of the watch still has the old one.
    Kept(IPTABLES).write(reading.directory.config)
    assert reading.mode(config=NFTABLES) == "iptables"
    assert reading.mode() == "iptables"
