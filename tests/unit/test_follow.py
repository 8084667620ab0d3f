"""The loop of akp watch, with a cluster and hosts that say what they are told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.cluster.watch import Update
from agentless_kube_proxy.controller import directory as directory_module
from agentless_kube_proxy.controller.audit import TaskAuditor
from agentless_kube_proxy.controller.consent import Consent
from agentless_kube_proxy.controller.desired import Choices
from agentless_kube_proxy.controller.directory import WorkDirectory
from agentless_kube_proxy.controller.follow import Follower
from agentless_kube_proxy.ledger import entries

from .build import document, node, service, slice_of, snapshot


class Cluster:
    """A watch that waits for nothing."""

    url, trouble = "https://203.0.113.5:6443", ""


class Hosts:
    """A carrier whose hosts take everything at once."""

    def __init__(self, *names: str) -> None:
        self.run = "carrier"
        self.applied = dict.fromkeys(names, "")
        self.addresses: dict[str, list[str]] = {name: [] for name in names}
        self.tasks: list[tuple[str, dict[str, Any]]] = []

    def submit(self, host: str, arguments: dict[str, Any], **_options: float) -> None:
        self.tasks.append((host, arguments))


class Following:
    """A follower, step by step."""

    def __init__(self, path: Path, *names: str, **settings: Any) -> None:
        self.directory = WorkDirectory(path).make()
        self.hosts, self.said = Hosts(*names), list[tuple[str, dict[str, Any]]]()
        self._follower = Follower(
            Cluster(),  # type: ignore[arg-type]
            self.hosts,  # type: ignore[arg-type]
            self.directory,
            choices=lambda settings: Choices.of(document(clusterCIDR="10.244.0.0/16"), settings),
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
        while self.hosts.tasks:
            host, arguments = self.hosts.tasks.pop(0)
            self._follower._events.put(("answer", {"host": host, "result": self._result(host, arguments)}))
            self._follower._turn(0)

    def _result(self, host: str, arguments: dict[str, Any]) -> dict[str, Any]:
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
def test_an_address_that_a_host_turns_out_to_have_is_nobody_elses(tmp_path: Path, policy: str) -> None:
    following = Following(tmp_path, "n1", "n2", vip_policy=policy)
    claim = snapshot(service(externalIPs=["203.0.113.2"]), slice_of("web", "10.244.1.1"), node("n1"), node("n2"))
    following.cluster(claim)
    before = dict(following.hosts.applied)
    assert all(before.values())
    following.hosts.addresses["n2"] = ["203.0.113.2"]
    following.ask("n2")
    claimed = "Service/shop/web: externalIPs 203.0.113.2 is an address of an interface of the node n2"
    if policy == "refuse":
        assert following.told("refused") == [claimed]
        assert following.hosts.applied == before
    else:
        assert following.told("warning") == [f"{claimed}; it is left out"]
        assert all(following.hosts.applied[name] != before[name] for name in before)


def test_the_address_that_leads_to_the_api_server_is_nobody_elses(tmp_path: Path) -> None:
    following = Following(tmp_path, "n1", vip_policy="refuse")
    following.cluster(snapshot(service(externalIPs=["203.0.113.5"]), node("n1")))
    assert following.told("refused") == ["Service/shop/web: externalIPs 203.0.113.5 is an address of the API server"]
    assert following.hosts.applied == {"n1": ""}


def test_the_ledger_names_the_cluster_of_each_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have been pushed something newer before a host confirms, or fails."""
    following = Following(tmp_path, "n1", "n2", vip_policy="refuse")
    nodes = [node("n1"), node("n2"), service("db", clusterIP="10.96.7.8"), slice_of("db", "10.244.1.3")]
    following.cluster(snapshot(service(), slice_of("web", "10.244.1.1"), *nodes), "first")
    local = service(internalTrafficPolicy="Local")
    following.cluster(snapshot(local, slice_of("web", "10.244.1.1"), *nodes), "second")
    following.cluster(snapshot(local, slice_of("web", "10.244.1.1", "10.244.1.2"), *nodes), "third")
    following.cluster(snapshot(service(externalIPs=["127.0.0.1"]), *nodes), "refused")
    monkeypatch.setattr(directory_module, "run_id", lambda: "carrier")
    auditor = TaskAuditor(following.directory, None, {})
    for host in ("n1", "n2", "elsewhere"):
        auditor.write("sync", "ok", {host: {}})
    found = [each.get("snapshot") for each in entries(following.directory.ledger)]
    assert found == ["third", "second", None], "the third is of no concern to n2"


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
