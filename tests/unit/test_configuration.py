"""Where the configuration of a cluster comes from, and which of its changes have to be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.cluster.files import UnreadableFile
from agentless_kube_proxy.cluster.record import configuration_of, peek_configuration, read_record, record_of
from agentless_kube_proxy.configuration import (
    CONFIG_MAP,
    DEFAULTS,
    Configuration,
    Kept,
    NoConfiguration,
    OtherSettings,
    announced,
    from_cluster,
    read_kept,
    settings_changes,
)

from .build import document, service

KEPT = Kept(document(mode="nftables"), "1.36")
PLAN = Kept(document(mode="ipvs"))
TEXT = yaml.safe_dump(document(mode="nftables", clusterCIDR="10.1.0.0/16"))


@pytest.mark.parametrize(
    ("given", "known", "mode", "origin"),
    [
        ({"mode": "ipvs"}, {"kept": KEPT, "cluster": TEXT}, "ipvs", "kube_proxy_config"),
        ("cluster", {"kept": KEPT, "cluster": TEXT}, "nftables", CONFIG_MAP),
        ("", {"kept": KEPT, "plan": PLAN, "cluster": TEXT}, "ipvs", "the plan"),
        ({}, {"kept": KEPT, "cluster": TEXT}, "nftables", "the last run"),
        (None, {"cluster": TEXT}, "nftables", CONFIG_MAP),
        (None, {}, "iptables", DEFAULTS),
    ],
)
def test_the_nearest_one_that_says_something_holds(given: Any, known: Any, mode: str, origin: str) -> None:
    found = Configuration.of({"config": given}, **known)
    assert (found.choices.proxy.mode, found.origin) == (mode, origin)
    assert bool(found.warnings) == (origin == DEFAULTS)


def test_the_version_of_the_last_run_holds_unless_another_is_named() -> None:
    assert Configuration.of({}, kept=KEPT).choices.compat == "1.36"
    assert Configuration.of({"config": {"mode": "ipvs"}}, kept=KEPT).choices.compat == "1.36"
    assert Configuration.of({"compat": "1.37"}, kept=KEPT).choices.compat == "1.37"
    assert Configuration.of({}).choices.compat == "1.37"


def test_the_configuration_of_a_cluster_that_was_not_read_is_an_error() -> None:
    with pytest.raises(NoConfiguration, match="the snapshot was read without the ConfigMap"):
        Configuration.of({"config": "cluster"}, kept=KEPT)


def test_the_cluster_is_asked_only_where_nothing_else_is_known() -> None:
    assert from_cluster({"config": "cluster"}, KEPT) == "must"
    assert from_cluster({"config": ""}, None) == "may"
    assert from_cluster({"config": ""}, KEPT) == ""
    assert from_cluster({"config": "kube-proxy.yaml"}, None) == ""


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"mode": "iptables"}, []),
        ({"mode": "iptables"}, {"iptables": {"masqueradeBit": 14}}, []),
        ({}, {"iptables": {"syncPeriod": "1m"}, "healthzBindAddress": "0.0.0.0:10256"}, []),
        ({}, {"clientConnection": {"kubeconfig": "/etc/kubeconfig"}}, []),
        ({"mode": "nftables"}, {}, ["mode nftables -> iptables"]),
        (
            {"clusterCIDR": "10.1.0.0/16", "mode": "nftables"},
            {"metricsBindAddress": "127.0.0.1:1"},
            ["mode nftables -> iptables", 'clusterCIDR "10.1.0.0/16" -> (none)'],
        ),
        ({}, {"nodePortAddresses": ["primary"]}, ['nodePortAddresses (none) -> ["primary"]']),
        ({}, {"iptables": {"masqueradeAll": True}}, ["iptables.masqueradeAll (none) -> true"]),
    ],
)
def test_settings_change_where_rules_do(before: dict[str, Any], after: dict[str, Any], told: list[str]) -> None:
    assert settings_changes(Kept(document(**before)), Kept(document(**after))) == told


def test_another_configuration_is_refused_unless_it_is_asked_for() -> None:
    found = Configuration.of({"config": {"mode": "iptables"}, "compat": "1.37"})
    with pytest.raises(OtherSettings, match=r"mode nftables -> iptables; compat 1\.36 -> 1\.37.*allow_mode_change"):
        found.refuse_changes(KEPT, allowed=False)
    changes = found.refuse_changes(KEPT, allowed=True)
    assert [each.text for each in announced(changes, {"n2": "nftables", "n1": "nftables"}, "iptables")] == [
        "mode nftables -> iptables",
        "compat 1.36 -> 1.37",
        "mode nftables -> iptables on n1, n2",
    ]
    assert found.refuse_changes(None, allowed=False) == ()


def test_what_a_run_leaves_is_what_the_next_one_finds(tmp_path: Path) -> None:
    file = tmp_path / "akp" / "config.json"
    assert read_kept(file) is None
    KEPT.write(file)
    stamp = file.stat().st_mtime_ns
    KEPT.write(file)
    assert file.stat().st_mtime_ns == stamp, "others look when it was written"
    assert read_kept(file) == KEPT
    for broken in ("", "[]", '{"config": 1}'):
        file.write_text(broken)
        with pytest.raises(UnreadableFile, match=r"config\.json"):
            read_kept(file)


def test_a_snapshot_carries_the_configuration_of_its_cluster(tmp_path: Path) -> None:
    metadata = {"name": "kube-proxy", "namespace": "kube-system"}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"config.conf": TEXT}}
    other = {**found, "metadata": {**metadata, "namespace": "default"}, "data": {"config.conf": "mode: ipvs"}}
    documents = [{"kind": "List", "items": [other, found]}, service("web")]
    assert configuration_of(documents) == TEXT
    assert configuration_of([other]) == ""
    record = record_of(documents, "test")
    file = tmp_path / "snapshot.json"
    record.write(file)
    assert (peek_configuration(file), read_record(file).configuration) == ("", "")
    type(record)(record.lists, record.source, TEXT).write(file)
    assert peek_configuration(file) == read_record(file).configuration == TEXT
    assert read_record(file).digest == record.digest, "a digest names the objects that rules are made of"
