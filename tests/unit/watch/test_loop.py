"""The loop of akp watch, with a cluster and hosts that say what they are told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.cluster.watch import Update
from agentless_kube_proxy.ledger import entries
from agentless_kube_proxy.plan.audit import TaskAuditor
from agentless_kube_proxy.plan.consent import Consent
from agentless_kube_proxy.tasks.directory import WorkDirectory
from agentless_kube_proxy.tasks.notes import CONTROL, About
from agentless_kube_proxy.watch.loop import Follower

from tests.unit.build import document, node, service, slice_of, snapshot


class Cluster:
    """A watch that waits for nothing."""

    url, trouble = "https://203.0.113.5:6443", ""
    malformed, last_malformed = 0, ""


class Hosts:
    """A carrier whose hosts take everything at once."""

    def __init__(self, *names: str) -> None:
        self.applied = dict.fromkeys(names, "")
        self.addresses: dict[str, list[str]] = {name: [] for name in names}
        self.answers: dict[str, Any] = {}  # what a host answers to everything
        self.tasks: list[tuple[str, dict[str, Any]]] = []
        self.about: dict[str, Any] = {}  # what the ledger shall say of the last push to a host

    def submit(self, host: str, arguments: dict[str, Any], *, about: Any = None, **_options: float) -> None:
        self.tasks.append((host, arguments))
        self.about |= {host: about} if about else {}


class Following:
    """A follower, step by step."""

    def __init__(self, path: Path, *names: str, **settings: Any) -> None:
        self.directory = WorkDirectory(path).make()
        self.hosts, self.said = Hosts(*names), list[tuple[str, dict[str, Any]]]()
        self._follower = Follower(
            Cluster(),  # type: ignore[arg-type,unused-ignore]
            self.hosts,  # type: ignore[arg-type,unused-ignore]
            self.directory,
            choices=lambda settings: Choices.of({"config": document(clusterCIDR="10.244.0.0/16"), **settings}),
            consent=Consent(self.directory, {}),
            say=lambda event, **fields: self.said.append((event, fields)),
        )
        self.settings(**{"max_removed_percent": 50, **settings})

    def settings(self, **settings: Any) -> None:
        """What the inventory says from now on."""
        self._turn("answer", {"settings": dict.fromkeys(self.hosts.applied, settings)})

    def _turn(self, *event: Any) -> None:
        """Something happens, and everything that follows from it."""
        if event:
            self._follower._events.put(event)
        self._follower._turn(0)
        for _each in range(100):
            if not self.hosts.tasks:
                break
            host, arguments = self.hosts.tasks.pop(0)
            self._follower._events.put(("answer", {"host": host, "result": self._result(host, arguments)}))
            self._follower._turn(0)

    def _result(self, host: str, arguments: dict[str, Any]) -> Any:
        if host in self.hosts.answers:
            return self.hosts.answers[host]
        if arguments["state"] == "applied":
            wanted = self._follower._hosts[host].wanted
            assert wanted is not None
            self.hosts.applied[host] = wanted.generation
            return {"generation": wanted.generation, "changed": True}
        has = self.hosts.applied[host]
        facts = {"addresses": [{"interface": "eth1", "address": each} for each in self.hosts.addresses[host]]}
        return {"facts": facts, "state": "applied" if has else "absent", "generation": has or None}

    def ask(self, host: str) -> None:
        """It is time to ask a host what it has."""
        self._follower._hosts[host].ask = True
        self._turn()

    @property
    def failing(self) -> set[str]:
        """The hosts that failed."""
        return {str(fields["host"]) for event, fields in self.said if event == "failed"}

    def recover(self, host: str) -> None:
        """The pause after failures is over."""
        self._follower._hosts[host].retry_at = 0.0
        self.ask(host)

    def give(self, host: str) -> None:
        """Somebody else gives a host what it shall have, as sync_services does."""
        wanted = self._follower._hosts[host].wanted
        assert wanted is not None
        self.hosts.applied[host] = wanted.generation
        self.ask(host)

    def cluster(self, objects: Snapshot, digest: str = "") -> None:
        """The cluster is like this now."""
        self._turn("update", Update(not self.told("watching"), (), objects, time.time(), {}, digest))

    def told(self, event: str) -> list[str]:
        """What was said of a sort of event."""
        return [str(fields.get("problem", "")) for name, fields in self.said if name == event]


@pytest.mark.parametrize("policy", ["refuse", "omit"])
def test_an_address_that_a_host_turns_out_to_have_concerns_that_host_alone(tmp_path: Path, policy: str) -> None:
    following = Following(tmp_path, "n1", "n2", vip_policy=policy)
    claim = snapshot(service(externalIPs=["203.0.113.2"]), slice_of("web", "10.244.1.1"), node("n1"), node("n2"))
    following.cluster(claim)
    before = dict(following.hosts.applied)
    assert all(before.values())
    following.hosts.addresses["n2"] = ["203.0.113.2"]
    following.ask("n2")
    claimed = "Service/shop/web: externalIPs 203.0.113.2 is an address of an interface of the node n2"
    assert following.told("refused") == []
    assert following.hosts.applied["n1"] == before["n1"]
    if policy == "refuse":
        assert following.told("unusable") == [f"refused: {claimed}"]
        assert following.hosts.applied["n2"] == before["n2"]
    else:
        assert following.told("warning") == [f"{claimed}; it is left out there"]
        assert following.hosts.applied["n2"] != before["n2"]


def test_the_address_that_leads_to_the_api_server_is_nobody_elses(tmp_path: Path) -> None:
    following = Following(tmp_path, "n1", vip_policy="refuse")
    following.cluster(snapshot(service(externalIPs=["203.0.113.5"]), node("n1")))
    assert following.told("refused") == ["Service/shop/web: externalIPs 203.0.113.5 is an address of the API server"]
    assert following.hosts.applied == {"n1": ""}


def test_the_ledger_names_the_cluster_of_each_push(tmp_path: Path) -> None:
    """Others may have been pushed something newer before a host confirms, or fails."""
    following = Following(tmp_path, "n1", "n2", vip_policy="refuse")
    nodes = [node("n1"), node("n2"), service("db", clusterIP="10.96.7.8"), slice_of("db", "10.244.1.3")]
    following.cluster(snapshot(service(), slice_of("web", "10.244.1.1"), *nodes), "first")
    local = service(internalTrafficPolicy="Local")
    following.cluster(snapshot(local, slice_of("web", "10.244.1.1"), *nodes), "second")
    following.cluster(snapshot(local, slice_of("web", "10.244.1.1", "10.244.1.2"), *nodes), "third")
    following.cluster(snapshot(service(externalIPs=["10.96.7.8"]), *nodes), "refused")
    about = following.hosts.about
    assert about == {"n1": About("third"), "n2": About("second")}, "the third is of no concern to n2"
    for host in ("n1", "n2"):
        TaskAuditor(following.directory, {}, {}, about[host]).write("sync", "ok", {host: {}})
    assert [each["snapshot"] for each in entries(following.directory.ledger)] == ["third", "second"]


def test_an_entry_says_what_its_run_noted_of_its_host_or_of_all(tmp_path: Path) -> None:
    directory = WorkDirectory(tmp_path).make()
    directory.note(About("of n1", "p"), "n1")
    for host in ("n1", "elsewhere"):
        TaskAuditor(directory, {}, {}).write("sync", "ok", {host: {}})
    directory.note(About("of all"), CONTROL)
    TaskAuditor(directory, {}, {}).write("sync", "ok", {"elsewhere": {}})
    found = [(each.get("snapshot"), each.get("plan")) for each in entries(directory.ledger)]
    assert found == [("of n1", "p"), (None, None), ("of all", None)]


def shrinking(following: Following, *counts: int) -> list[int]:
    """The cluster has so many Services, one after the other; of how many each push was."""
    pushed = []
    for count in counts:
        before = following.hosts.applied["n1"]
        services = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, count + 1)]
        following.cluster(snapshot(*services, node("n1")))
        if following.hosts.applied["n1"] != before:
            pushed.append(count)
    return pushed


def test_services_that_go_a_few_at_a_time_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    following = Following(tmp_path, "n1")
    assert shrinking(following, 10, 8, 6, 5, 4, 3) == [10, 8, 6, 5]
    assert "on n1, 6 of 10 service ports would be removed, more than 50 %" in following.told("refused")[0]
    assert shrinking(following, 6, 5) == [6, 5], "it goes on with what is allowed"
    late = time.monotonic() + 301
    monkeypatch.setattr(time, "monotonic", lambda: late)
    assert shrinking(following, 4, 3, 2) == [4, 3], "from here on, five are what there was"


def test_what_somebody_allowed_is_where_it_begins_anew(tmp_path: Path) -> None:
    following = Following(tmp_path / "inventory", "n1")
    assert shrinking(following, 10, 6, 2) == [10, 6]
    before = following.hosts.applied["n1"]
    following.settings(max_removed_percent=100)
    assert following.hosts.applied["n1"] != before
    following.settings(max_removed_percent=50)
    assert shrinking(following, 1) == [1]

    following = Following(tmp_path / "sync", "n1")
    assert shrinking(following, 10, 6, 2) == [10, 6]
    following.give("n1")
    assert shrinking(following, 1) == [1]


HOSTILE: dict[str, Any] = {
    "facts of text": {"facts": "x"},
    "facts of lists": {"facts": [1]},
    "kernel": {"facts": {"kernel": "6.².0"}},
    "addresses": {"facts": {"addresses": {"a": [[]]}}},
    "differences": {"facts": {}, "state": "partial", "differences": 7},
    "generation": {"facts": {}, "state": "applied", "generation": ["x"]},
    "surrogate": {"facts": {}, "state": "\ud800", "generation": "../../\x00"},
    "failure": {"failed": True, "msg": ["\x1b[2J"]},
    "need": {"need": {"a": 1}, "reason": None},
    "nothing": {},
    "number": 7,
    "null": None,
    "list": [],
}


@pytest.mark.parametrize("sort", HOSTILE)
def test_whatever_a_host_answers_the_loop_goes_on_and_others_are_served(tmp_path: Path, sort: str) -> None:
    following = Following(tmp_path, "n1", "n2", max_removed_percent=100)
    following.hosts.answers["n2"] = HOSTILE[sort]
    cluster = [service(), slice_of("web", "10.244.1.1"), node("n1"), node("n2", "172.18.0.12")]
    following.cluster(snapshot(*cluster))
    first = following.hosts.applied["n1"]
    assert first
    following.cluster(snapshot(*cluster, service("new", clusterIP="10.96.3.3")))
    assert following.hosts.applied["n1"] not in ("", first)
    if following.told("failed"):
        assert following.failing == {"n2"}
    # It is well as soon as it behaves.
    following.hosts.answers.clear()
    following.recover("n2")
    assert following.hosts.applied["n2"]


def test_the_ledger_is_not_flooded_by_a_host_that_keeps_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = WorkDirectory(tmp_path).make()
    start = time.time()
    for minute in range(180):
        monkeypatch.setattr(time, "time", lambda minute=minute: start + 60 * minute)
        failed = {"n1": {"before": "a", "error": f"not confirmed, {minute} s left", "result": "failed"}}
        TaskAuditor(directory, {}, {}).write("sync", "failed", failed)
    assert len(list(entries(directory.ledger))) == 3, "once an hour"
    for result, error in (("failed", "another"), ("ok", ""), ("failed", "another")):
        TaskAuditor(directory, {}, {}).write("sync", result, {"n1": {"error": error}})
    assert len(list(entries(directory.ledger))) == 6, "what is news is entered"
