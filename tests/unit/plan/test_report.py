"""What people read: per Service on one node, and over a whole run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.common import SERVICES
from agentless_kube_proxy.bundle.manifest import SERVICES_FILE
from agentless_kube_proxy.plan import report
from agentless_kube_proxy.proxy.warned import Warned
from agentless_kube_proxy.tasks.directory import WorkDirectory
from agentless_kube_proxy.tasks.notes import (
    CONTROL,
    About,
    Asked,
    Audited,
    Entered,
    Note,
    Planned,
    Pushed,
    Refused,
    Rendered,
    SnapshotRead,
    Span,
    Stopped,
)


def line(service: str, *endpoints: str, port: str = "http", family: str = "IPv4", **fields: Any) -> str:
    record = {"service": service, "port": port, "protocol": "tcp", "family": family, **fields}
    return json.dumps({**record, "endpoints": list(endpoints)})


def test_the_file_of_services_has_one_name() -> None:
    assert SERVICES == ("file", SERVICES_FILE)


def test_changes_are_counted_per_service_and_endpoint() -> None:
    before = [line("shop/old", "10.0.0.1:80"), line("shop/web", "10.0.0.2:80", "10.0.0.3:80")]
    after = [
        line("shop/web", "10.0.0.3:80", "10.0.0.4:80"),
        line("shop/new", "10.0.0.5:80"),
        line("shop/new", "[fd00::5]:80", family="IPv6"),
        line("shop/new", "10.0.0.5:81", port="admin"),
    ]
    counted = report.tally(report.service_changes(before, after))
    assert counted == {
        "services": {"added": 1, "changed": 1, "removed": 1},
        "endpoints": {"added": 4, "removed": 2},
    }


def test_a_diff_reads_like_a_sentence_about_services() -> None:
    changes = report.service_changes(
        [line("shop/web", "10.0.0.2:80", clusterIP="10.96.0.1:80")],
        [line("shop/web", "10.0.0.3:80", clusterIP="10.96.0.1:80")],
    )
    drift = [
        {
            "kind": "missing-rule",
            "family": "ipv4",
            "table": "nat",
            "chain": "KUBE-X",
            "service": "a/b",
            "rule": "-A KUBE-X",
        },
        {"kind": "sysctl", "name": "net.x", "wanted": "1", "actual": "0"},
    ]
    assert report.diff_text(changes, drift, ["sysctls: 1"]) == (
        "~ shop/web:http tcp IPv4\n"
        "    - endpoint 10.0.0.2:80\n"
        "    + endpoint 10.0.0.3:80\n"
        "~ sysctls: 1\n"
        "! not as it was left:\n"
        "    missing rule: ipv4 nat KUBE-X (a/b): -A KUBE-X\n"
        "    sysctl: net.x is 0, not 1\n"
    )


def test_a_flushed_table_does_not_fill_the_screen() -> None:
    drift = [{"kind": "missing-rule", "table": "nat", "chain": f"KUBE-{i}"} for i in range(500)]
    lines = report.diff_text([], drift).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "    and 480 more"


def note(sort: type[Span], host: str = CONTROL, **fields: Any) -> tuple[str, Note]:
    return host, sort(**{"began": 100.0, "ended": 101.5, **fields})


def push(host: str, *, changed: bool, **fields: Any) -> tuple[str, Note]:
    return note(Pushed, host, changed=changed, **fields)


ADDED = report.service_changes([], [line("shop/web", "10.0.0.1:80", "10.0.0.2:80")])


def test_a_run_is_summed_up() -> None:
    notes = [
        note(SnapshotRead, problems=["cluster/bad.yaml: Service/shop/bad: no"]),
        note(Asked, "n1"),
        note(Asked, "n2", began=101.0, ended=104.0),
        note(Asked, "n3"),
        note(Rendered, problems=["Service/shop/bad: no"]),
        push("n1", changed=True, changes=ADDED),
        push("n2", changed=True, changes=ADDED, differences=[{"kind": "missing-rule"}]),
        push("n3", changed=False),
        note(Pushed, "n4", failed="the kernel refused"),
    ]
    summary = report.summarise(notes, ["n1", "n2", "n3", "n4", "n5"], check=False)
    assert summary.lines() == [
        "5 nodes: 2 changed, 1 unchanged, 1 failed, 1 not tried",
        "  n4 failed: the kernel refused",
        "not tried, they keep what they have: n5",
        "Services: 1 added, 0 changed, 0 removed; endpoints: 2 added, 0 removed",
        "  n2 was not as it was left, 1 difference",
        "left out of the cluster: 1",
        "  cluster/bad.yaml: Service/shop/bad: no",
        "seconds: snapshot 1.50, ask 4.00, render 1.50, push 1.50",
    ]


def test_a_run_that_stopped_says_why() -> None:
    notes = [note(Asked, "n1"), (CONTROL, Stopped("401"))]
    lines = report.summarise(notes, ["n1"], check=False).lines()
    assert lines[:3] == [
        "1 node: 0 changed, 0 unchanged, 0 failed, 1 not tried",
        "not tried, they keep what they have: n1",
        "stopped: 401",
    ]


def test_check_mode_says_would() -> None:
    lines = report.summarise([push("n1", changed=True, changes=ADDED)], ["n1"], check=True).lines()
    assert lines[0] == "1 node: 1 would change, 0 unchanged, 0 failed"


def test_hosts_of_another_limit_are_not_counted() -> None:
    notes = [push("n1", changed=True, changes=ADDED), push("n2", changed=True)]
    assert report.summarise(notes, ["n2"], check=False).changed == ("n2",)


def test_a_plan_is_named_by_all_that_is_in_it() -> None:
    notes = [push("n1", changed=True, changes=ADDED, node="n1", previous=None, generation="g")]
    plan = report.plan_of(notes, "snapshot-digest")
    assert plan["hosts"]["n1"]["generation"] == "g"
    assert plan["digest"] == report.plan_digest(plan)
    for change in ({"snapshot": "other"}, {"hosts": {}}):
        assert report.plan_digest({**plan, **change}) != plan["digest"]
    again = [push("n1", changed=True, changes=ADDED, node="n1", previous=None, generation="g", ended=999.0)]
    assert report.plan_of(again, "snapshot-digest") == plan, "how long it took is no part of it"


@pytest.mark.parametrize(
    "written",
    [
        SnapshotRead(1.0, 2.0, ("Service/shop/bad: no",), "https://api", (1.5,)),
        Rendered(1.0, 2.0, ("a",), (Warned("things", "one"),)),
        About("s", "p", ("alice",)),
        Refused("no such Node"),
        Planned("g", "d"),
        Asked(1.0, 2.0, "unreachable"),
        Pushed(1.0, 2.0, changed=True, node="n1", previous=None, generation="g", digest="d", changes=tuple(ADDED)),
        Entered(3, "hash", "ledger.jsonl"),
        Audited("what", 3.0),
        Stopped("401"),
    ],
    ids=lambda note: note.SORT,
)
def test_a_note_is_read_as_it_was_written(tmp_path: Path, written: Note) -> None:
    directory = WorkDirectory(tmp_path).make()
    directory.note(written, "n1")
    read = directory.noted(type(written), "n1")
    assert json.dumps(dataclasses.asdict(read)) == json.dumps(dataclasses.asdict(written))
    assert type(read) is type(written)


def test_notes_of_a_run_are_its_own(tmp_path: Path) -> None:
    directory = WorkDirectory(tmp_path).make()
    asked = Asked(1.0, 2.0)
    directory.note(asked, "host/with:odd name")
    assert directory.noted(Asked, "host/with:odd name") == asked
    assert list(directory.notes()) == [("host/with:odd name", asked)]
    for number in range(9):
        (tmp_path / "runs" / f"old-{number}").mkdir()
    directory.forget_old_runs()
    left = {each.name for each in (tmp_path / "runs").iterdir()}
    assert len(left) == 6
    assert directory.run.name in left, "a run that goes on is never forgotten, however many begin beside it"
    assert tmp_path.stat().st_mode & 0o077 in (0, 0o055)


def test_warnings_stand_under_the_heading_that_they_were_made_with(tmp_path: Path) -> None:
    said = [
        Warned("b things", "one: claims more"),
        Warned("a thing", "two waits for approval"),
        Warned("b things", "3"),
    ]
    directory = WorkDirectory(tmp_path).make()
    directory.note(Rendered(1.0, 2.0, warned=said), CONTROL)
    lines = report.summarise(list(directory.notes()), [], check=False).lines()
    told = ["a thing: 1", "  two waits for approval", "b things: 2", "  one: claims more", "  3"]
    assert lines[lines.index("a thing: 1") :][:5] == told
