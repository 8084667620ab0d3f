"""What a host tells Prometheus, through a file that node_exporter picks up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.node import bundles
from tests.node.host import Host
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
    first = read(file)
    assert first[f"akp_node_generation_info[('generation', '{host_generation(bundle)}'), ('mode', 'iptables')]"] == 1
    assert first["akp_node_drift"] == first["akp_node_last_run_failed"] == 0
    assert first[SYNCED] >= first[QUEUED] > 1_600_000_000
    assert first[COUNT] == 1
    host.apply(bundle)
    second = read(file)
    assert second[COUNT] == 2, "a sync that finds nothing to do is one"
    assert second["kubeproxy_sync_proxy_rules_duration_seconds_bucket[('le', '+Inf')]"] == 2
    assert second["akp_node_applied_timestamp_seconds"] == first["akp_node_applied_timestamp_seconds"]
    assert file.stat().st_mode & 0o777 == 0o644, "node_exporter may read it"
    assert [each.name for each in file.parent.iterdir()] == ["akp.prom"]


def test_drift_shows_when_somebody_looks_and_goes_with_a_restore(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    nft_host.sh("$ipt -A KUBE-FORWARD -j ACCEPT")
    assert read(file)["akp_node_drift"] == 0
    nft_host.akp("status", "--verify")
    seen = read(file)
    assert seen["akp_node_drift"] == 1
    assert seen[COUNT] == 1, "looking is no sync"
    assert nft_host.akp("restore", "--verify").code == 0
    assert read(file)["akp_node_drift"] == 0


def test_a_sync_that_fails_leaves_the_time_of_the_last_good_one(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    before = read(file)
    other = bundles.simple(tmp_path / "b")
    (other / "iptables.rules").write_text("nonsense\n")
    assert nft_host.akp("apply", other).code == 2
    after = read(file)
    assert after["akp_node_last_run_failed"] == 1
    assert after["akp_node_failures_total[('code', '2')]"] == 1
    assert after[SYNCED] == before[SYNCED]
    assert after[QUEUED] >= before[QUEUED]
    assert after[COUNT] == before[COUNT]


def test_a_pull_without_an_answer_confirms_nothing(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    file.write_text(re.sub(rf"^({SYNCED}) .*", r"\1 1000", file.read_text(), flags=re.M))
    settings = nft_host.directory / "etc" / "node.conf"
    settings.write_text(f"{settings.read_text()}url http://127.0.0.1:9/\ncluster shop\nnode n1\n")
    (settings.parent / "allowed_signers").write_text("publisher ssh-ed25519 AAAA\n")
    answer = nft_host.akp("pull")
    assert answer.json["fetched"] == "offline", answer.stdout + answer.stderr
    after = read(file)
    assert after[SYNCED] == 1000
    assert after[QUEUED] > 1000, "it was tried"
    assert after["akp_node_last_run_failed"] == 0


def test_cleanup_takes_the_metrics_away(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    nft_host.apply(everything(tmp_path / "a"))
    assert nft_host.akp("cleanup", "--dry-run").code == 0
    assert file.exists()
    assert nft_host.akp("cleanup").code == 0
    assert not file.exists()


def test_metrics_that_cannot_be_written_do_not_fail_a_sync(nft_host: Host, tmp_path: Path) -> None:
    file = with_textfile(nft_host)
    file.parent.rmdir()
    result = nft_host.akp("apply", everything(tmp_path / "a"))
    assert result.code == 0
    assert "no metrics: there is no directory" in result.stderr
