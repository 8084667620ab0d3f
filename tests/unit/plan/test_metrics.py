"""How fresh nodes are, as Prometheus reads it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.bundle.program import part_program
from agentless_kube_proxy.cluster.record import Listing, Record
from agentless_kube_proxy.cluster.trigger import trigger_text, trigger_time
from agentless_kube_proxy.plan import history
from agentless_kube_proxy.plan.metrics import PROGRAMMING, Freshness, note_drift, note_run
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json
from agentless_kube_proxy.tasks.notes import CONTROL, Note, Pushed, SnapshotRead
from prometheus_client.parser import text_string_to_metric_families

ALERTS = Path(__file__).parents[3] / "examples" / "prometheus"
CONFIRMED = "akp_node_confirmed_timestamp_seconds"
FAILED = "akp_node_last_run_failed"


@pytest.fixture
def directory(tmp_path: Path) -> WorkDirectory:
    return WorkDirectory(tmp_path / "akp").make()


def run(directory: WorkDirectory, *notes: tuple[str, Note], hosts: tuple[str, ...] = ("n1", "n2")) -> None:
    failed = {host: note.failed for host, note in notes if isinstance(note, Pushed) and note.failed}
    with Freshness(directory, "shop") as fresh:
        note_run(fresh, directory, notes, hosts, failed)
        fresh.write(directory.path)


def push(host: str, ended: float, **fields: Any) -> tuple[str, Note]:
    return host, Pushed(ended - 1, ended, generation="a" * 64, **fields)


def samples(directory: WorkDirectory) -> dict[tuple[str, ...], float]:
    """(name, node and other labels but the cluster) -> value."""
    found = {}
    for family in text_string_to_metric_families((directory.path / "akp_shop.prom").read_text()):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["cluster"] == "shop"
            labels = [value for key, value in sorted(sample.labels.items()) if key != "cluster"]
            found[sample.name, *labels] = sample.value
    return found


def test_a_node_keeps_the_time_of_its_last_confirmation_when_it_fails(directory: WorkDirectory) -> None:
    run(directory, push("n1", 100.0), push("n2", 101.0, changed=True))
    run(directory, push("n1", 200.0), push("n2", 201.0, failed="the kernel refused"))
    found = samples(directory)
    assert (found[CONFIRMED, "n1"], found[FAILED, "n1"]) == (200.0, 0)
    assert (found[CONFIRMED, "n2"], found[FAILED, "n2"]) == (101.0, 1)
    assert found["akp_node_generation_info", "a" * 64, "n2"] == 1, "what it had it still has"
    assert found["akp_run_last_timestamp_seconds",] == 101.0, "only a run that confirmed all counts"
    assert found["akp_run_duration_seconds_count",] == 2


def test_a_node_that_never_answered_is_told_of(directory: WorkDirectory) -> None:
    run(directory, push("n1", 100.0))
    found = samples(directory)
    assert (CONFIRMED, "n2") not in found
    assert found[FAILED, "n2"] == 1


def test_the_time_to_the_kernel_is_counted_for_every_change_on_every_node_that_changed(
    directory: WorkDirectory,
) -> None:
    snapshot = CONTROL, SnapshotRead(90.0, 91.0, triggered=[99.8, 98.0])
    run(directory, snapshot, push("n1", 100.0, changed=True), push("n2", 101.0))
    found = samples(directory)
    assert found[f"{PROGRAMMING}_count",] == 2
    assert found[f"{PROGRAMMING}_bucket", "0.25"] == 1
    assert found[f"{PROGRAMMING}_bucket", "1"] == 1
    assert found[f"{PROGRAMMING}_bucket", "2"] == 2
    assert found[f"{PROGRAMMING}_sum",] == pytest.approx(2.2)


def test_a_host_that_is_out_of_the_play_stays_until_its_rules_are_taken_away(directory: WorkDirectory) -> None:
    write_json(directory.answer_file("n2"), {"node": "node-2"})
    run(directory, push("n1", 100.0), push("n2", 100.0))
    run(directory, push("n1", 200.0), hosts=("n1",))
    assert samples(directory)[CONFIRMED, "node-2"] == 100.0
    directory.answer_file("n2").unlink()
    run(directory, push("n1", 300.0), hosts=("n1",))
    assert (CONFIRMED, "node-2") not in samples(directory)


def test_names_of_clusters_and_nodes_cannot_break_the_text(directory: WorkDirectory) -> None:
    with Freshness(directory, 'a"b\\c/d') as fresh:
        fresh.confirmed("n", 'n"\n', "g", 1.0)
        file = fresh.write(directory.path)
    assert file.name == "akp_a_b_c_d.prom"
    (family, *_others) = text_string_to_metric_families(file.read_text())
    assert family.samples[0].labels == {"cluster": 'a"b\\c/d', "node": 'n"\n'}
    assert not list(directory.path.glob("*.new"))


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-16T05:00:00Z"}, 1794805200.0),
        ({"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-16T05:00:00.250Z"}, 1794805200.25),
        ({"endpoints.kubernetes.io/last-change-trigger-time": "yesterday"}, None),
        ({"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-16T05:00:00"}, None),
        ({"endpoints.kubernetes.io/last-change-trigger-time": 5}, None),
        ({}, None),
        ("text", None),
    ],
)
def test_the_time_that_a_change_began(annotations: Any, expected: float | None) -> None:
    assert trigger_time(trigger_text({"annotations": annotations})) == expected


def test_only_changes_that_are_news_count() -> None:
    def record(**items: str) -> Record:
        texts = {json.dumps({"metadata": {"name": name}}): when for name, when in items.items()}
        return Record((Listing("EndpointSlice", "discovery.k8s.io/v1", "1", tuple(texts), texts),), "test")

    before = record(a="2026-11-16T05:00:00Z")
    after = record(a="2026-11-16T05:00:00Z", b="2026-11-16T05:00:01Z", c="nonsense")
    assert after.triggered_since(before) == [1794805201.0]


def test_the_alerts_of_the_examples_fire_when_they_should() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=ALERTS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_of_the_examples_are_about_metrics_that_exist(directory: WorkDirectory) -> None:
    (group,) = yaml.safe_load((ALERTS / "alerts.yml").read_text())["groups"]
    asked = {name for rule in group["rules"] for name in re.findall(r"\b(?:akp|kubeproxy)_\w+", rule["expr"])}
    snapshot = CONTROL, SnapshotRead(98.0, 99.0, triggered=[99.0])
    run(directory, snapshot, push("n1", 100.0, changed=True), push("n2", 101.0))
    ours = {name for name, *_labels in samples(directory)}
    assert len(asked) == 7
    told = part_program("metrics").replace('SYNC "_', "kubeproxy_sync_proxy_rules_")
    assert all(name in ours or name in told for name in asked), asked - ours


def queries() -> list[str]:
    """What the panels of the dashboard ask for, with values for what Grafana fills in."""
    dashboard = json.loads((ALERTS / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "5m").replace("$cluster", ".*") for each in asked]


def test_the_dashboard_asks_prometheus_what_it_understands(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(queries())]
    assert len(rules) >= 12
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_about_metrics_and_labels_that_a_run_writes(directory: WorkDirectory) -> None:
    snapshot = CONTROL, SnapshotRead(98.0, 99.0, triggered=[99.0])
    run(directory, snapshot, push("n1", 100.0, changed=True), push("n2", 101.0, failed="unreachable: no route"))
    run(directory, snapshot, push("n1", 102.0, changed=True), push("n2", 103.0))
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families((directory.path / "akp_shop.prom").read_text()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    told = part_program("metrics")
    for query in queries():
        for name, selector in re.findall(r"\b((?:akp|kubeproxy)_\w+)(?:\{(.*?)\})?", query):
            assert name in labels or name in told, name
            for label in re.findall(r"(\w+)[=!]~?", selector):
                assert label in labels[name], (name, label)
        by = {label for each in re.findall(r"by \(([^)]*)\)", query) for label in each.split(", ")}
        assert by <= set().union(*labels.values()), query
    shown = set(re.findall(r"\{\{(\w+)\}\}", (ALERTS / "dashboard.json").read_text()))
    assert shown <= {"cluster", "node"}


def test_the_history_tells_when_nodes_were_not_as_intended(directory: WorkDirectory) -> None:
    start = time.time() - 10_000  # older than a month would be forgotten
    with Freshness(directory, "shop") as fresh:
        fresh.confirmed("n1", "n1", "a", start + 1000)
        fresh.confirmed("n2", "n2", "a", start + 1000)
    with Freshness(directory, "shop") as fresh:
        fresh.confirmed("n1", "n1", "a", start + 1300)
        fresh.confirmed("n2", "n2", "a", start + 4000)
    found = history.segments(directory.path / history.FILE, ["n1", "n2", "n3"], start + 500, start + 5000)
    assert found["n1"] == [(start + 500, start + 1000, "unknown"), (start + 1000, start + 5000, "current")]
    assert found["n2"][1:] == [
        (start + 1000, start + 1900, "current"),
        (start + 1900, start + 4000, "old"),
        (start + 4000, start + 5000, "current"),
    ]
    assert found["n3"] == [(start + 500, start + 5000, "unknown")]
    with Freshness(directory, "shop") as fresh:
        fresh.failed("n1", "n1", "unreachable: no route to host")
    last = (directory.path / history.FILE).read_text().splitlines()[-2:]
    states = {json.loads(line)["state"] for line in last}
    assert states == {"old", "unreached"}, "it was old before it was found out"


def test_the_history_tells_when_rules_were_changed_by_something_else(directory: WorkDirectory) -> None:
    with Freshness(directory, "shop") as fresh:
        fresh.confirmed("n1", "n1", "a", time.time())
    for found in (False, True, True, False):  # as four runs of verify_services find it
        note_drift(directory, "n1", "n1", found=found)
    note_drift(directory, "n2", "n2", found=True)  # a node that no run has given anything
    note_drift(directory, "n2", "n2", found=False)
    lines = [json.loads(line) for line in (directory.path / history.FILE).read_text().splitlines()]
    states = {node: [each["state"] for each in lines if each["node"] == node] for node in ("n1", "n2")}
    assert states == {"n1": ["current", "drift", "current"], "n2": ["drift", "unknown"]}
    note_drift(directory, "n1", "n1", found=True)
    run(directory, push("n1", time.time()), hosts=("n1",))
    assert json.loads((directory.path / history.FILE).read_text().splitlines()[-1])["state"] == "current"
