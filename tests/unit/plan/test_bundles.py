"""Bundles for the hosts of a play: who needs one, who does not, and what is not computed twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.choices import Choices, load_config
from agentless_kube_proxy.cluster.files import UnreadableFile
from agentless_kube_proxy.cluster.record import record_of
from agentless_kube_proxy.plan import bundles as render_module
from agentless_kube_proxy.plan.bundles import Outcome, Target, render, target
from agentless_kube_proxy.proxy.config import InvalidConfig
from agentless_kube_proxy.proxy.policy import RefusedVips
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json

from tests.unit import build

CONFIG = build.document(clusterCIDR="10.244.0.0/16")
FACTS: dict[str, Any] = {
    "addresses": [{"interface": "eth0", "address": "172.18.0.11", "prefix": 16}],
    "capabilities": {"ipv4": True, "ipv6": True, "nfacct": True},
    "cpus": 2,
    "kernel": "6.1.0",
    "tcpBeLiberal": 0,
}


@pytest.fixture
def work(tmp_path: Path) -> WorkDirectory:
    directory = WorkDirectory(tmp_path / "akp").make()
    write_cluster(directory, build.service(), build.slice_of("web", "10.244.1.5"))
    return directory


def write_cluster(directory: WorkDirectory, *objects: Any) -> None:
    nodes = [build.node(f"n{i}", f"172.18.0.{10 + i}") for i in (1, 2)]
    record_of([*objects, *nodes], "test").write(directory.snapshot)


def hosts(*names: str, current: str = "", facts: dict[str, Any] | None = None) -> list[Target]:
    return [Target(name, name, facts or FACTS, current) for name in names]


def go(work: WorkDirectory, targets: list[Target] | None, config: dict[str, Any] | None = None) -> Outcome:
    return render(work, work.snapshot, Choices(config or CONFIG), targets)


def test_a_host_that_was_never_served_is_stale_and_gets_a_bundle(work: WorkDirectory) -> None:
    outcome = go(work, hosts("n1", "n2"))
    assert outcome.stale == ["n1", "n2"]
    assert outcome.written == ["n1", "n2"]
    manifest = json.loads((work.bundles / "n1" / "manifest.json").read_text())
    assert manifest["generation"] == outcome.generations["n1"]
    assert outcome.counts["n1"] == {"service_ports": 1}


def test_a_host_that_has_its_state_is_not_stale_and_gets_none(work: WorkDirectory) -> None:
    generation = go(work, hosts("n1")).generations["n1"]
    (work.bundles / "n1" / "manifest.json").unlink()
    outcome = go(work, hosts("n1", current=generation))
    assert (outcome.stale, outcome.written) == ([], [])


def test_runs_that_share_out_the_nodes_keep_what_the_other_learned(
    work: WorkDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = render_module._render

    def other_run_meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(render_module, "_render", compute)
        go(work, hosts("n2"))
        compute(*arguments)

    monkeypatch.setattr(render_module, "_render", other_run_meanwhile)
    go(work, hosts("n1"))
    monkeypatch.setattr(render_module, "_render", lambda *_: pytest.fail("it was computed again"))
    assert go(work, hosts("n1", "n2")).stale == ["n1", "n2"]


def test_with_nothing_new_nothing_is_computed(work: WorkDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(work, hosts("n1", "n2"))
    monkeypatch.setattr(render_module, "_render", lambda *_: pytest.fail("it was computed again"))
    second = go(work, [Target(name, name, FACTS, first.generations[name]) for name in ("n1", "n2")])
    assert second.generations == first.generations
    assert second.stale == []
    third = go(work, hosts("n1", "n2"))
    assert third.stale == ["n1", "n2"], "what lies there is good enough for a host that was flushed"
    assert third.written == []


@pytest.mark.parametrize("what", ["the cluster", "the configuration", "the facts", "the compat", "the engine"])
def test_with_something_new_it_is_computed_again(
    work: WorkDirectory, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = go(work, hosts("n1"))
    config, facts = CONFIG, FACTS
    if what == "the cluster":
        write_cluster(work, build.service(), build.slice_of("web", "10.244.1.6"))
    elif what == "the configuration":
        config = {**CONFIG, "iptables": {"masqueradeAll": True}}
    elif what == "the facts":
        facts = {**FACTS, "capabilities": {**FACTS["capabilities"], "nfacct": False}}
    elif what == "the engine":
        monkeypatch.setattr(render_module, "engine_digest", lambda: "another")
    compat = "1.36" if what == "the compat" else "1.37"
    outcome = render(work, work.snapshot, Choices(config, compat), hosts("n1", facts=facts))
    assert outcome.rendered == 1
    if what not in ("the engine", "the compat"):
        assert outcome.generations != before.generations


def test_facts_that_no_rule_depends_on_change_nothing(work: WorkDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(work, hosts("n1"))
    monkeypatch.setattr(render_module, "_render", lambda *_: pytest.fail("it was computed again"))
    facts = {**FACTS, "seconds": 9.9, "tools": {"curl": False}, "warnings": ["x"]}
    assert go(work, hosts("n1", facts=facts)).generations == first.generations


def test_addresses_of_all_nodes_and_of_the_api_server_are_nobody_elses(work: WorkDirectory) -> None:
    def refused(*claims: str) -> str:
        """What stops the run for all."""
        nodes = [build.node(f"n{i}", f"172.18.0.{10 + i}") for i in (1, 2)]
        record = record_of([build.service(externalIPs=list(claims)), *nodes], "https://203.0.113.5:6443")
        record.write(work.snapshot)
        try:
            render(work, work.snapshot, Choices(CONFIG, vip_policy="refuse"), hosts("n1"))
        except RefusedVips as error:
            return str(error)
        return ""

    assert "203.0.113.5 is an address of the API server" in refused("203.0.113.5")
    assert "172.18.0.12 is an address of the node n2" in refused("172.18.0.12")
    # A node that says it has an address says that for itself.
    facts = {"addresses": [{"interface": "eth1", "address": "203.0.113.2", "prefix": 24}]}
    write_json(work.answer_file("host-2"), {"host": "host-2", "node": "n2", "facts": facts})
    assert refused("203.0.113.2") == ""


@pytest.mark.parametrize("policy", ["warn", "omit", "refuse"])
def test_a_node_that_lies_about_its_addresses_changes_nothing_for_others(work: WorkDirectory, policy: str) -> None:
    write_cluster(work, build.service(externalIPs=["203.0.113.2"]), build.slice_of("web", "10.244.1.5"))
    lie = {**FACTS, "addresses": [{"interface": "eth1", "address": "203.0.113.2", "prefix": 24}]}

    def go_on(facts: dict[str, Any]) -> Outcome:
        targets = [*hosts("n1"), *hosts("n2", facts=facts)]
        return render(work, work.snapshot, Choices(CONFIG, vip_policy=policy), targets)

    before, after = go_on(FACTS), go_on(lie)
    assert after.generations["n1"] == before.generations["n1"]
    assert (work.bundles / "n1" / "iptables-2-dispatch.rules").read_text().count("203.0.113.2") == 1
    told = "203.0.113.2 is an address of an interface of the node n2"
    if policy == "refuse":
        assert told in after.errors["n2"]
    else:
        assert told in after.warnings[0].text
        assert after.rendered == 1, "only the node that says something new is looked at"
        assert go_on(lie).warnings == after.warnings, "it is said every time"


HOSTILE: dict[str, Any] = {
    "kernel": {"kernel": "6.².0"},
    "digits": {"cpus": 10**4000},
    "negative": {"cpus": -5},
    "truth": {"cpus": True},
    "null byte": {"addresses": [{"interface": "eth0", "address": "172.18.0.12\x00"}]},
    "surrogate": {"addresses": [{"interface": "\ud800", "address": "172.18.0.12"}], "zone": "\ud800"},
    "mapping": {"addresses": {}},
    "nested": {"capabilities": [[[]]]},
    "numbers": {"addresses": [1, None, {}], "podCIDRs": "x"},
    "kernel list": {"kernel": ["6"]},
}


@pytest.mark.parametrize("sort", HOSTILE)
def test_whatever_a_node_says_of_itself_the_others_are_served(work: WorkDirectory, sort: str) -> None:
    write_json(work.answer_file("n2"), {"host": "n2", "node": "n2", "facts": {**FACTS, **HOSTILE[sort]}})
    outcome = go(work, [target(work, "n1", ""), target(work, "n2", "")])
    assert outcome.written[0] == "n1"
    assert "n1" not in outcome.errors
    assert "n2" in outcome.generations or outcome.errors["n2"].isprintable()


def test_without_hosts_every_node_gets_a_bundle(work: WorkDirectory) -> None:
    assert go(work, None).written == ["n1", "n2"]


def test_one_host_that_cannot_be_served_does_not_stop_the_others(work: WorkDirectory) -> None:
    outcome = go(work, [*hosts("n1"), Target("host9", "n9", FACTS, ""), Target("n2", "n2", {"addresses": ["x"]}, "")])
    assert outcome.written == ["n1"]
    assert "the cluster has no Node n9; it has n1, n2" in outcome.errors["host9"]
    assert "kube_proxy_node_name" in outcome.errors["host9"]
    assert "'x' is not an IP address" in outcome.errors["n2"]
    assert outcome.stale == ["host9", "n1", "n2"]


def test_objects_that_were_left_out_are_told_of_every_time(work: WorkDirectory) -> None:
    write_cluster(work, build.service("bad", ports=[{"port": 70000}]), build.service("head", clusterIP="None"))
    first = go(work, hosts("n1"))
    second = go(work, hosts("n1", current=first.generations["n1"]))
    assert second.rendered == 0
    assert first.problems == second.problems
    assert "70000" in first.problems[0]
    assert second.ignored == {"headless Service": 1}


def test_a_wrong_configuration_names_the_field(work: WorkDirectory) -> None:
    with pytest.raises(InvalidConfig, match="clusterCIDR"):
        go(work, hosts("n1"), build.document(clusterCIDR="nonsense"))


def test_a_service_may_have_a_scheduler_of_its_own_in_ipvs_mode(work: WorkDirectory) -> None:
    annotated = build.service("b", clusterIP="10.96.0.2", annotations={"kube-proxy.agentless.io/scheduler": "sh"})
    write_cluster(work, build.service(), annotated)
    config = build.document(mode="ipvs")
    found = {}
    for name, choices in {
        "none": Choices(config),
        "annotated": Choices(config, scheduler_annotations=True),
        "named": Choices(config, schedulers={"shop/web": "lc"}, scheduler_annotations=True),
    }.items():
        render(work, work.snapshot, choices, hosts("n1"))
        lines = (work.bundles / "n1" / "ipvs-1-frontends.rules").read_text().splitlines()
        found[name] = [line.split()[4] for line in lines]
    assert found == {"none": ["rr", "rr"], "annotated": ["sh", "rr"], "named": ["sh", "lc"]}


def test_without_a_snapshot_there_is_nothing(work: WorkDirectory) -> None:
    work.snapshot.unlink()
    with pytest.raises(UnreadableFile, match="is not a snapshot"):
        go(work, hosts("n1"))


def test_a_configuration_is_a_file_or_a_mapping_without_its_head(tmp_path: Path) -> None:
    file = tmp_path / "kube-proxy.yaml"
    file.write_text(json.dumps(CONFIG))
    assert load_config(str(file)) == CONFIG
    assert load_config({"clusterCIDR": "10.244.0.0/16"}) == CONFIG
    assert load_config(None) == load_config({}) == load_config("")
    file.write_text("---\na: 1\n---\nb: 2\n")
    with pytest.raises(UnreadableFile, match="must hold one KubeProxyConfiguration"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("status", "old", "current"),
    [
        ({"state": "applied", "generation": "g"}, False, "g"),
        ({"state": "applied", "generation": "g", "drift": 0}, False, "g"),
        ({"state": "applied", "generation": "g", "drift": 2}, False, ""),
        ({"state": "applied", "generation": "g"}, True, ""),
        ({"state": "flushed", "generation": "g"}, False, ""),
        ({"state": "partial", "generation": "g"}, False, ""),
        ({"state": "absent", "generation": None}, False, ""),
    ],
    ids=["as it was left", "verified", "drifted", "old program", "flushed", "partial", "absent"],
)
def test_what_a_host_answered_decides_what_it_has(
    work: WorkDirectory, status: dict[str, Any], old: bool, current: str
) -> None:
    answer = {"host": "h", "node": "n1", "facts": FACTS, "status": status, "oldProgram": old}
    write_json(work.answer_file("h"), answer)
    assert target(work, "h", "") == Target("h", "n1", FACTS, current, str(status.get("generation") or ""))


def test_a_host_that_was_not_asked_is_a_node_of_its_own_name(work: WorkDirectory) -> None:
    assert target(work, "n1", "") == Target("n1", "n1", None, "")
    assert target(work, "h", "n1") == Target("h", "n1", None, "")
