"""What changes between two bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.compare import Change
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.explain.bundles import compare_bundles

from tests.unit.build import render, service, slice_of

MODES = ["iptables", "ipvs", "nftables"]
OTHER = service("other", clusterIP="10.96.7.8", externalIPs=["192.0.2.8"])
ENDPOINTS = slice_of("other", "10.244.1.8", "10.244.2.8")


def changes(folder: Path, old: tuple[Any, ...], new: tuple[Any, ...], **config: Any) -> dict[str, Change]:
    """Between a bundle and one with other objects and settings. Title -> change."""
    mode = {"mode": config.pop("mode", "iptables")}
    web = (service("web"), slice_of("web", "10.244.1.1"))
    write_bundle(render(*web, *old, **mode), folder / "old")
    write_bundle(render(*web, *new, **mode, **config), folder / "new")
    return {each.title: each for each in compare_bundles(folder / "old", folder / "new")}


@pytest.mark.parametrize("mode", MODES)
def test_a_service_explains_all_of_its_rules(tmp_path: Path, mode: str) -> None:
    assert set(changes(tmp_path, (), (OTHER, ENDPOINTS), mode=mode)) <= {"shop/other:http tcp IPv4"} | (
        # The rules of ipvs mode ask only for sets that have something in them.
        {"node"} if mode == "ipvs" else set()
    )
    more = slice_of("other", "10.244.1.8", "10.244.2.8", "10.244.1.9")
    assert set(changes(tmp_path, (OTHER, ENDPOINTS), (OTHER, more), mode=mode)) == {"shop/other:http tcp IPv4"}


@pytest.mark.parametrize("mode", MODES)
def test_rules_of_no_service_are_told_beside_services(tmp_path: Path, mode: str) -> None:
    bit = {mode if mode == "nftables" else "iptables": {"masqueradeBit": 15}}
    found = changes(tmp_path, (OTHER,), (OTHER, ENDPOINTS), mode=mode, **bit)
    assert set(found) == {"shop/other:http tcp IPv4", "node"}
    told = found["node"].details
    assert any("0x8000" in each or "0x00008000" in each for each in told)
    assert not [each for each in told if "10.244.1.8" in each or "10.96.7.8" in each or "other" in each]


def test_rules_of_services_that_stay_are_told_too(tmp_path: Path) -> None:
    found = changes(tmp_path, (), (OTHER, ENDPOINTS), iptables={"masqueradeAll": True})
    (gone, come) = found["node"].details
    assert gone.startswith("- iptables-1-endpoints.rules: -A KUBE-SVC-")
    assert "shop/web:http cluster IP" in come


def test_settings_in_files_are_told(tmp_path: Path) -> None:
    found = changes(tmp_path, (), (OTHER,), nodePortAddresses=["172.18.0.0/24"])
    assert {"- health.conf: listen ipv4 0.0.0.0", "+ health.conf: listen ipv4 172.18.0.11"} <= set(
        found["node"].details
    )


def test_rules_in_another_order_are_others(tmp_path: Path) -> None:
    write_bundle(render(service("web")), tmp_path / "one")
    write_bundle(render(service("web")), tmp_path / "two")
    assert compare_bundles(tmp_path / "one", tmp_path / "two") == []
    rules, manifest = tmp_path / "two" / "iptables-3-frontends.rules", tmp_path / "two" / "manifest.json"
    lines = rules.read_text().splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if line.startswith("-A KUBE-POSTROUTING"))
    lines[first : first + 2] = reversed(lines[first : first + 2])
    rules.write_text("".join(lines))
    manifest.write_text(manifest.read_text().replace('-3-frontends.rules": "', '-3-frontends.rules": "0'))
    (change,) = compare_bundles(tmp_path / "one", tmp_path / "two")
    assert change.details == ("~ iptables-3-frontends.rules: the same lines in another order",)
