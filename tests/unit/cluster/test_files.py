"""A cluster from files, as `kubectl get -o yaml|json` leaves them; what does not parse is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from agentless_kube_proxy.cluster.files import UnreadableFile, load

from tests.unit.build import node, service, slice_of, snapshot

OBJECTS = [service("a"), service("b", clusterIP="10.96.0.2"), slice_of("a", "10.244.1.1"), node()]


def write(directory: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


@pytest.mark.parametrize(
    "files",
    [
        {"all__json": json.dumps({"kind": "List", "apiVersion": "v1", "items": OBJECTS})},
        {"all__yaml": yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": OBJECTS})},
        {"all__yml": yaml.safe_dump_all(OBJECTS)},
        {"all__yaml": "---\n---\n" + yaml.safe_dump_all(OBJECTS, explicit_start=True) + "---\n# nothing more\n"},
        {f"{index}__json": json.dumps(each) for index, each in enumerate(OBJECTS)},
        {
            "services__json": json.dumps({"kind": "ServiceList", "apiVersion": "v1", "items": OBJECTS[:2]}),
            "rest__yaml": yaml.safe_dump_all(OBJECTS[2:]),
            "README__md": "not read",
        },
    ],
    ids=["json list", "yaml list", "yaml documents", "empty documents", "a file each", "a directory of both"],
)
def test_however_the_objects_are_laid_out_the_cluster_is_the_same(tmp_path: Path, files: dict[str, str]) -> None:
    read = load(write(tmp_path, **files))
    expected = snapshot(*OBJECTS)
    assert (read.services, read.slices, read.nodes) == (expected.services, expected.slices, expected.nodes)
    assert read.problems == ()


def test_a_single_file_is_a_cluster_too(tmp_path: Path) -> None:
    write(tmp_path, a__json=json.dumps(service()), b__json="not even JSON")
    assert [each.name for each in load(tmp_path / "a.json").services] == ["web"]


def test_a_problem_names_the_file_it_came_from(tmp_path: Path) -> None:
    write(tmp_path, services__yaml=yaml.safe_dump_all([service("ok"), service("Bad")]))
    read = load(tmp_path)
    assert [str(problem) for problem in read.problems] == [
        f"{tmp_path}/services.yaml: Service/shop/Bad: metadata.name: 'Bad' is no DNS label"
    ]
    assert [each.name for each in read.services] == ["ok"]


def test_a_contradiction_names_both_files(tmp_path: Path) -> None:
    write(tmp_path, a__json=json.dumps(service()), b__json=json.dumps(service(clusterIP="10.96.0.9")))
    assert [str(problem) for problem in load(tmp_path).problems] == [
        f"{tmp_path}/b.json: Service/shop/web: metadata.name: another Service of this name was given in"
        f" {tmp_path}/a.json; one of the two is used"
    ]


def test_dates_are_text_and_an_impossible_one_disturbs_nobody(tmp_path: Path) -> None:
    text = yaml.safe_dump(service()) + "extra: 2024-13-99\n"
    assert len(load(write(tmp_path, a__yaml=text)).services) == 1


def test_progress_is_told_file_by_file(tmp_path: Path) -> None:
    told: list[str] = []
    load(write(tmp_path, b__json=json.dumps(node()), a__json=json.dumps(service())), told.append)
    assert told == ["a.json", "b.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a__json", '{\n "kind": "Service",\n "spec": }\n', ":3:10: is not valid JSON: Expecting value"),
        ("a__json", '{"kind": "Service"}\n{"kind": "Node"}\n', ":2:1: is not valid JSON: Extra data"),
        ("a__json", "", ":1:1: is not valid JSON: Expecting value"),
        ("a__json", '{"kind": "Serv', ":1:10: is not valid JSON: Unterminated string starting at"),
        ("a__json", "[" * 100_000, ": is nested too deeply"),
        ("a__json", '{"port": ' + "8" * 5000 + "}", ": holds a value that cannot be read: Exceeds the limit"),
        ("a__yaml", "kind: Service\nspec:\n  a: [1\nb: 2\n", ":4:2: is not valid YAML: "),
        ("a__yaml", "kind: Service\n\tspec: 1\n", ":2:1: is not valid YAML: found "),
        ("a__yaml", "a: 1\n---\nb: {\n", ":4:1: is not valid YAML: did not find expected node content"),
        ("a__yaml", "a: 1\nb: é\x07\n", ":2: is not valid YAML: unacceptable character #x0007: control characters"),
        ("a__yaml", "a: *b\n", ":1:4: is not valid YAML: found undefined alias"),
        ("a__yaml", "a: !!python/object/apply:os.system [id]\n", ":1:4: is not valid YAML: could not determine a cons"),
        ("a__yaml", "port: " + "8" * 5000 + "\n", ": holds a value that cannot be read: Exceeds the limit"),
        ("a__yaml", "&a {kind: List, items: [*a]}\n", ": is nested too deeply"),
        ("a__yaml", b"kind: \xff\n", ": is not UTF-8 text (byte 6)"),
        ("a__json", b"\xff\xfe{\x00}\x00", ": is not UTF-8 text (byte 0)"),
    ],
)
def test_a_file_that_does_not_parse_is_named_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    write(tmp_path, **{name: content})
    with pytest.raises(UnreadableFile) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{name.replace('__', '.')}{message}")


def test_a_path_that_is_not_there_and_a_directory_without_manifests(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=r"nowhere: no such file or directory$"):
        load(tmp_path / "nowhere")
    with pytest.raises(UnreadableFile, match=r": holds no file that ends in \.json, \.yaml, \.yml$"):
        load(write(tmp_path, notes__txt="hello"))


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("/proc/self/mem")
    with pytest.raises(UnreadableFile, match=r"a\.json: (Input/output error|Permission denied)"):
        load(tmp_path)
