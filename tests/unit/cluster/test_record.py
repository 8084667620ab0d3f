"""A cluster on disk: the fields that matter, the same bytes whatever the order, and nobody else's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cluster.files import UnreadableFile, load
from agentless_kube_proxy.cluster.objects import Reader
from agentless_kube_proxy.cluster.record import Record, peek, prune, read_record, record_of, snapshot_of
from agentless_kube_proxy.cluster.snapshot import Snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import build, clusters

SHOP = Path(__file__).parents[3] / "examples" / "shop"
SLICE_NOISE = {"targetRef": {"kind": "Pod", "name": "x", "uid": "y"}, "deprecatedTopology": {"a": "b"}, "zone": "z"}


def snapshot_from(objects: list[dict[str, Any]]) -> Snapshot:
    reader = Reader()
    for obj in objects:
        reader.add(obj)
    return reader.snapshot()


def facts(snapshot: Snapshot) -> tuple[Any, ...]:
    return snapshot.services, snapshot.slices, snapshot.nodes, snapshot.service_cidrs


def test_a_record_holds_every_fact_of_the_files_it_was_made_from() -> None:
    record = record_of(documents_of(SHOP), "shop")
    assert facts(snapshot_of(record)) == facts(load(SHOP))
    assert record.counts["Service"] > 5


@settings(max_examples=60)
@given(st.integers(0, 8), st.integers())
def test_nothing_that_a_rule_depends_on_is_pruned(size: int, seed: int) -> None:
    objects = clusters.cluster(size, seed)
    pruned = [
        {"apiVersion": obj["apiVersion"], "kind": obj["kind"], **prune(obj["kind"], obj)}
        for obj in objects
        if obj["kind"] in ("Service", "EndpointSlice", "Node", "ServiceCIDR")
    ]
    assert facts(snapshot_from(pruned)) == facts(snapshot_from(objects))


def test_what_no_rule_depends_on_is_pruned() -> None:
    service = build.service(annotations={"note": "private", "kube-proxy.agentless.io/x": "kept"})
    service["metadata"] |= {"uid": "u", "managedFields": [1], "resourceVersion": "9"}
    service["spec"]["selector"] = {"app": "web"}
    text = json.dumps(prune("Service", service))
    for gone in ("uid", "managedFields", "resourceVersion", "selector", "private"):
        assert gone not in text
    assert "kept" in text
    each = {**build.endpoint("10.0.0.1"), **SLICE_NOISE}
    (kept,) = prune("EndpointSlice", {"endpoints": [each]})["endpoints"]
    assert kept == {**build.endpoint("10.0.0.1"), "targetRef": {"kind": "Pod", "name": "x"}}, (
        "explanations name the Pod"
    )


def test_the_order_of_files_and_objects_does_not_matter() -> None:
    documents = documents_of(SHOP)
    assert record_of(documents, "x") == record_of(reversed(documents), "x")


def test_lists_and_lists_of_lists_are_unpacked() -> None:
    service = build.service()
    bare = {key: value for key, value in service.items() if key not in ("kind", "apiVersion")}
    nested = {"kind": "List", "items": [{"kind": "ServiceList", "apiVersion": "v1", "items": [bare]}]}
    assert record_of([nested], "x").lists == record_of([service], "x").lists


def test_a_kind_of_another_group_is_none_of_ours() -> None:
    other = {**build.service(), "apiVersion": "serving.knative.dev/v1"}
    assert record_of([other], "x").counts["Service"] == 0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    record = record_of(documents_of(SHOP), "the shop")
    file = tmp_path / "snapshot.json"
    record.write(file)
    assert read_record(file) == record
    assert peek(file) == record.digest
    assert facts(load(file)) == facts(load(SHOP)), "akp render reads it, too"
    assert json.loads(file.read_text())["kind"] == "List"


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    record_of([build.service()], "x").write(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot.json"]


def test_the_same_cluster_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record_of(documents_of(SHOP), "x").write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        (lambda node: node["metadata"]["labels"].update({"disk": "ssd"}), False),
        (lambda node: node["status"]["conditions"][0].update({"status": "False"}), False),
        (lambda node: node["metadata"]["labels"].update({"topology.kubernetes.io/zone": "other"}), True),
        (lambda node: node["status"]["addresses"].append({"type": "InternalIP", "address": "192.0.2.1"}), True),
        (lambda node: node["spec"].update({"podCIDRs": ["10.1.0.0/24"]}), True),
    ],
    ids=["a label", "readiness", "the zone", "an address", "the pod CIDR"],
)
def test_the_digest_names_what_rules_depend_on(change: Any, matters: bool) -> None:
    node: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1", "labels": {}},
        "spec": {},
        "status": {"addresses": [], "conditions": [{"type": "Ready", "status": "True"}]},
    }
    before = record_of([node], "x")
    change(node)
    after = record_of([node], "x")
    assert before != after
    assert (before.digest != after.digest) is matters


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text.replace("10.96.7.7", "10.96.7.8"), "digest does not match"),
        (lambda text: text[: len(text) // 2], "not as it was written"),
        (lambda text: json.dumps(json.loads(text)), "not as it was written"),
        (lambda _text: "{}", "not as it was written"),
        (lambda _text: "", "not as it was written"),
    ],
    ids=["edited", "cut short", "written anew", "empty object", "empty"],
)
def test_a_record_that_was_changed_is_refused(tmp_path: Path, spoil: Any, words: str) -> None:
    file = tmp_path / "snapshot.json"
    record_of([build.service()], "x").write(file)
    file.write_text(spoil(file.read_text()))
    with pytest.raises(UnreadableFile, match=words) as raised:
        read_record(file)
    assert str(file) in str(raised.value)


def test_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="No such file"):
        read_record(tmp_path / "none")
    assert peek(tmp_path / "none") == ""


def test_an_object_that_cannot_be_used_is_told_of_when_the_record_is_read() -> None:
    bad = build.service(ports=[{"port": 70000}])
    record: Record = record_of([bad, build.service("good")], "x")
    snapshot = snapshot_of(record)
    assert [each.name for each in snapshot.services] == ["good"]
    assert "70000 is not between 1 and 65535" in str(snapshot.problems[0])


def documents_of(folder: Path) -> list[Any]:
    import yaml

    return [document for file in sorted(folder.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())]
