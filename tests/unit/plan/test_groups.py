"""All changes of a run: complete, each told once, by the hosts that it happens on."""

from __future__ import annotations

from pathlib import Path

from agentless_kube_proxy.bundle.compare import Change
from agentless_kube_proxy.plan.approval import plan_text
from agentless_kube_proxy.plan.groups import Group, grouped, lines_of
from agentless_kube_proxy.plan.report import MOST_CHANGES, plan_of, summarise
from agentless_kube_proxy.tasks.directory import WorkDirectory
from agentless_kube_proxy.tasks.notes import Configured, Pushed

MANY = 3 * MOST_CHANGES


def change(number: int, action: str = "added") -> Change:
    return Change(action, f"shop/web{number}", "http", "tcp", "IPv4", (f"+ endpoint 10.0.0.1:{number}",))


def test_each_change_is_told_once_with_all_its_hosts() -> None:
    everywhere, first, second = change(1), change(2), change(3)
    found = grouped({"n2": [[everywhere, second]], "n1": [[everywhere, first]], "n3": [[everywhere]], "n4": [[]]})
    assert found == [
        Group(("n1", "n2", "n3"), (everywhere,)),
        Group(("n1",), (first,)),
        Group(("n2",), (second,)),
        Group(("n4",), ()),
    ]
    assert list(lines_of(found))[-2:] == ["on n4:", "  ~ rules of no Service"]


def test_a_long_plan_lists_everything_and_counts_are_true(tmp_path: Path) -> None:
    directory = WorkDirectory(tmp_path / "akp").make()
    hosts = [f"n{number}" for number in range(30)]
    changes = [change(number) for number in range(1, MANY + 1)]
    for host in hosts:
        mine = changes if host != "n7" else [*changes, change(MANY + 1, "removed")]
        directory.note(Pushed(1.0, 2.0, changed=True, node=host, generation="g", digest="d", changes=mine), host)
    assert len(list((directory.run / "changes").iterdir())) == 2, "what hosts have alike is written once"
    notes = list(directory.notes())
    summary = summarise(notes, hosts, check=True)
    assert summary.services == {"added": MANY, "changed": 0, "removed": 1}
    assert summary.endpoints["added"] == MANY + 1
    assert summary.long
    text = plan_text(plan_of(notes, "digest"))
    assert sum(line.startswith("  + shop/") for line in text) == MANY
    assert text[0] == f"on {', '.join(sorted(hosts))}:"
    assert text[-3:] == ["on n7:", f"  - shop/web{MANY + 1}:http tcp IPv4", f"      + endpoint 10.0.0.1:{MANY + 1}"]


def test_a_plan_names_every_host_that_changes_and_the_configuration_that_it_was_made_with() -> None:
    kept = {"config": {"mode": "nftables"}, "compat": "1.37"}
    notes = [
        ("n1", Pushed(1.0, 2.0, changed=True, node="other", generation="g", digest="d", changes=[change(1)])),
        ("n2", Pushed(1.0, 2.0, changed=True, node="n2", generation="g", digest="d")),
        ("n3", Pushed(1.0, 2.0, changed=False, node="n3", generation="g", digest="d")),
        ("localhost", Configured("nftables", "the last run", kept)),
    ]
    plan = plan_of(notes, "digest")
    assert plan["configuration"] == kept
    told = plan_text(plan)
    assert told[0] == "on n1 (Node other):"
    assert told[-2:] == ["on n2:", "  ~ rules of no Service"]
    # One that tells of fewer hosts than it changes still names them.
    assert plan_text({**plan, "changes": []}) == ["on n1 (Node other), n2:", "  ~ rules of no Service"]
