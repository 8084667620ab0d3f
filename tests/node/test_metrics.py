"""What a host tells Prometheus, through a file that node_exporter picks up."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.lab.program import METRICS, PROGRAMS
from tests.node.host import Host, Result
from tests.node.test_apply import everything, host_generation

SYNCED = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
QUEUED = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
COUNT = "kubeproxy_sync_proxy_rules_duration_seconds_count"


def with_textfile(host: Host) -> Path:
    """The file that a host will write its metrics to."""
    folder = host.directory / "textfile"
    folder.mkdir()
    (host.directory / "etc").mkdir(exist_ok=True)
    (host.directory / "etc" / "node.conf").write_text(f"textfile {folder}\n")
    return folder / "akp.prom"


def metrics(host: Host, *arguments: str) -> Result:
    """Run akp-metrics."""
    return host.akp(*arguments, program=METRICS, AKP_NODE_PROGRAM=str(PROGRAMS[host.mode]))


def polled(host: Host, answer: str) -> Result:
    """What akp-pull leaves after a poll with this answer."""
    (host.state / "pull").mkdir(exist_ok=True)
    (host.state / "pull" / "last").write_text(answer + "\n")
    return metrics(host, "pull")


def good(fetched: str = "new") -> str:
    return f'{{"verb": "pull", "ok": true, "changed": true, "fetched": "{fetched}", "seconds": 0.31, "warnings": []}}'


def bad(code: int) -> str:
    return f'{{"verb": "pull", "ok": false, "code": {code}, "asBefore": true, "error": "x", "warnings": []}}'


def read(file: Path) -> dict[str, Any]:
    """Samples by name, as Prometheus' own parser reads them; those with labels beside the node's by all of them."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(file.read_text()):
        assert family.documentation
        assert family.type != "unknown", family.name
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "node"}
            found[sample.name if not labels else f"{sample.name}{sorted(labels.items())}"] = sample.value
    return found


def test_a_host_tells_what_it_has_and_since_when(host: Host, tmp_path: Path) -> None:
    file = with_textfile(host)
    bundle = everything(tmp_path / "a")
    host.apply(bundle)
    assert polled(host, good()).code == 0
    first = read(file)
    assert first[f"akp_node_generation_info[('generation', '{host_generation(bundle)}'), ('mode', 'iptables')]"] == 1
    assert first["akp_node_drift"] == first["akp_node_last_run_failed"] == 0
    assert first[SYNCED] >= first[QUEUED] > 1_600_000_000
    assert first[COUNT] == 1
    assert polled(host, good("unchanged")).code == 0
    second = read(file)
    assert second[COUNT] == 2, "a sync that finds nothing to do is one"
    assert second["kubeproxy_sync_proxy_rules_duration_seconds_bucket[('le', '+Inf')]"] == 2
    assert second["kubeproxy_sync_proxy_rules_duration_seconds_bucket[('le', '0.256')]"] == 0
    assert second["akp_node_applied_timestamp_seconds"] == first["akp_node_applied_timestamp_seconds"]
    assert file.stat().st_mode & 0o777 == 0o644, "node_exporter may read it"
    assert [each.name for each in file.parent.iterdir()] == ["akp.prom"]


def test_drift_shows_when_somebody_looks(nft_host: Host, tmp_path: Path) -> None:
    """On nodes that are pushed to as well."""
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    assert metrics(nft_host, "look", "--verify").code == 0
    assert read(file)["akp_node_drift"] == 0
    nft_host.sh("$ipt -A KUBE-FORWARD -j ACCEPT")
    assert metrics(nft_host, "look", "--verify").code == 0
    seen = read(file)
    assert seen["akp_node_drift"] == 1
    assert seen[COUNT] == 0, "looking is no sync"
    nft_host.sh("nft flush ruleset")
    assert metrics(nft_host, "look").code == 0
    assert read(file)["akp_node_drift"] == 1


def test_a_sync_that_fails_leaves_the_time_of_the_last_good_one(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    polled(nft_host, good())
    before = read(file)
    polled(nft_host, bad(2))
    after = read(file)
    assert after["akp_node_last_run_failed"] == 1
    assert after["akp_node_failures_total[('code', '2')]"] == 1
    assert after[SYNCED] == before[SYNCED]
    assert after[QUEUED] >= before[QUEUED]
    assert after[COUNT] == before[COUNT]


def test_a_pull_without_an_answer_confirms_nothing(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    polled(nft_host, good())
    kept = nft_host.state / "pull" / "metrics"
    kept.write_text(re.sub(rf"^({SYNCED}|{QUEUED}) .*", r"\1 1000", kept.read_text(), flags=re.M))
    polled(nft_host, good("offline"))
    after = read(file)
    assert after[SYNCED] == 1000
    assert after[QUEUED] > 1000, "it was tried"
    assert after["akp_node_last_run_failed"] == 0


def test_after_a_cleanup_there_is_nothing_to_tell(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    metrics(nft_host, "look")
    assert file.exists()
    assert nft_host.akp("cleanup").code == 0
    metrics(nft_host, "look")
    assert not file.exists()


def test_metrics_that_cannot_be_written_are_said(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    file.parent.rmdir()
    nft_host.apply(everything(tmp_path / "a"))
    result = polled(nft_host, good())
    assert (result.code, "no metrics: there is no directory" in result.stderr) == (1, True)


MAKE: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "fifo": lambda path, _victim: os.mkfifo(path),
    "directory link": lambda path, victim: path.symlink_to(victim.parent),
}


@pytest.mark.parametrize("what", MAKE)
def test_who_owns_the_directory_cannot_make_root_write_elsewhere(nft_host: Host, tmp_path: Path, what: str) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    victim = nft_host.directory / "victim"
    victim.write_text("mine\n")
    victim.chmod(0o600)
    there = sorted(nft_host.directory.iterdir())
    for name in ("akp.prom", "akp.prom.new"):
        MAKE[what](file.parent / name, victim)
    assert polled(nft_host, good()).code == 0
    assert not file.is_symlink()
    assert read(file)[COUNT] == 1
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("mine\n", 0o600)
    assert sorted(nft_host.directory.iterdir()) == there
