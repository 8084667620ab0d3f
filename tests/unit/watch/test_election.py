"""One leader: with any number of candidates, slow requests, clocks that show different times, and hosts that die."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cluster import lease as leases
from agentless_kube_proxy.cluster.access import Access
from agentless_kube_proxy.cluster.lease import InvalidLease, Lease, LeaseObject
from agentless_kube_proxy.cluster.refusals import Forbidden, NotServed, Unreachable
from agentless_kube_proxy.watch import election
from agentless_kube_proxy.watch.election import DEADLINE_SECONDS, LEASE_SECONDS, LOOK_SECONDS, Candidate, Election
from hypothesis import given
from hypothesis import strategies as st

from .fakes import FakeNode, Running
from .test_running import cluster, eventually

PATH = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/akp-watch"
FREE = Lease("1")


def take(candidate: Candidate, lease: Lease, now: float) -> Candidate:
    """It claims a Lease that it sees, and nobody is quicker."""
    claim = candidate.saw(lease, now).claim(now, "now")
    assert claim is not None
    return candidate.took(dataclasses.replace(claim, version=f"{lease.version}+"), now, now)


def test_a_lease_that_is_free_is_taken_and_renewed() -> None:
    one = take(Candidate("one"), FREE, 100.0)
    assert one.leads(100.0 + DEADLINE_SECONDS - 0.1)
    assert not one.leads(100.0 + DEADLINE_SECONDS)
    claim = one.claim(103.0, "later")
    assert claim == Lease("1+", "one", "now", "later", round(LEASE_SECONDS), 1), "still the first term"
    assert one.took(claim, 103.0, 103.1).leads(106.0)


def test_a_lease_is_taken_from_a_holder_that_was_not_heard_of_for_long_enough() -> None:
    held = Lease("7", "other", "then", "then", round(LEASE_SECONDS), 3)
    two = Candidate("two").saw(held, 50.0)
    assert two.claim(50.0 + LEASE_SECONDS - 0.1, "now") is None
    renewed = two.saw(dataclasses.replace(held, version="8", renewed="later"), 55.0)
    assert renewed.claim(50.0 + LEASE_SECONDS, "now") is None, "it was heard of"
    claim = two.claim(50.0 + LEASE_SECONDS, "now")
    assert claim is not None
    assert (claim.holder, claim.version, claim.transitions) == ("two", "7", 4)


def test_whoever_sees_that_another_one_holds_the_lease_stops_to_lead() -> None:
    one = take(Candidate("one"), FREE, 0.0)
    assert not one.saw(Lease("9", "other"), 1.0).leads(1.0)


class Cluster:
    """The Lease where it lies; a write to a version that is not the last is refused."""

    def __init__(self) -> None:
        self.lease, self.history = FREE, list[str]()

    def write(self, lease: Lease) -> Lease | None:
        if lease.version != self.lease.version:
            return None
        self.lease = dataclasses.replace(lease, version=str(int(self.lease.version) + 1))
        self.history.append(lease.holder)
        return self.lease


STEP = st.tuples(
    st.integers(0, 2),  # who acts
    st.floats(0.01, 2.5),  # after how long
    st.floats(0.0, 2.0),  # how long the request took to arrive
    st.floats(0.0, 2.0),  # and the answer to come back
    st.sampled_from(("", "", "", "", "lost request", "lost answer", "dies")),
)


@given(st.lists(STEP, max_size=60), st.tuples(*[st.floats(-1e6, 1e6)] * 3))
def test_two_never_lead_at_a_time(steps: list[tuple[Any, ...]], clocks: tuple[float, float, float]) -> None:
    """Each acts as Election does. A request of one may lie about while others act."""
    cluster = Cluster()
    candidates = [Candidate(f"c{i}") for i in range(3)]
    free = [0.0, 0.0, 0.0]  # when the last request of each came back
    claims: list[tuple[float, int, Lease, float, float, str]] = []  # under way: arrival, who, what, began, back, mishap
    now = 0.0

    def land(until: float) -> None:
        for arrival, who, claim, began, back, mishap in sorted(claims, key=lambda each: each[0]):
            if arrival > until:
                continue
            claims.remove((arrival, who, claim, began, back, mishap))
            written = cluster.write(claim) if mishap != "lost request" else None
            if written is not None and mishap == "":
                offset = clocks[who]
                candidates[who] = candidates[who].took(written, began + offset, back + offset)

    for who, pause, there, back, mishap in steps:
        now += pause
        land(now)
        leading = [i for i, each in enumerate(candidates) if each.leads(now + clocks[i])]
        assert len(leading) <= 1
        if now < free[who]:
            continue
        if mishap == "dies":
            candidates[who] = Candidate(f"{candidates[who].name}'")
            continue
        candidate = candidates[who]
        if not candidate.leads(now + clocks[who]):
            candidate = candidates[who] = candidate.saw(cluster.lease, now + clocks[who])
        claim = candidate.claim(now + clocks[who], str(now))
        if claim is not None:
            claims.append((now + there, who, claim, now, now + there + back, mishap))
            free[who] = now + there + back


def test_after_the_leader_has_died_another_one_leads_within_eight_seconds() -> None:
    for phase in range(20):
        cluster, now = Cluster(), 0.0
        written = cluster.write(Candidate("one").saw(cluster.lease, 0.0).claim(0.0, "") or FREE)
        assert written is not None
        two, now = Candidate("two"), phase / 20
        while not two.leads(now):
            two = two.saw(cluster.lease, now)
            claim = two.claim(now, "")
            if claim is not None:
                two = two.took(cluster.write(claim) or FREE, now, now)
            else:
                now += LOOK_SECONDS
        assert now <= LEASE_SECONDS + 2 * LOOK_SECONDS <= 8.0


# -- over HTTP, with threads


class LeaseServer(BaseHTTPRequestHandler):
    """An API server with one Lease."""

    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(*self.server.trouble() or (200, self.server.object))

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.guard:
            trouble, obj = self.server.trouble(), self.server.object
            if trouble is None and body["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
                trouble = (409, {"kind": "Status", "message": "the object has been modified"})
            if trouble is None:
                version = str(int(obj["metadata"]["resourceVersion"]) + 1)
                self.server.object = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}
                self.server.holders.append(body["spec"]["holderIdentity"])
        self._answer(*trouble or (200, self.server.object))

    def _answer(self, status: int, obj: Any) -> None:
        data = json.dumps(obj).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tests say what matters."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One for candidates that look often, and lose nothing while the machine is busy."""
    for name, seconds in (("LEASE", 120.0), ("DEADLINE", 100.0), ("RENEW", 0.05), ("LOOK", 0.05)):
        monkeypatch.setattr(election, f"{name}_SECONDS", seconds)
    httpd: Any = ThreadingHTTPServer(("127.0.0.1", 0), LeaseServer)
    httpd.daemon_threads = True
    httpd.object = {"kind": "Lease", "metadata": {"name": "akp-watch", "resourceVersion": "1"}}
    httpd.guard, httpd.holders, httpd.trouble = threading.Lock(), [], lambda: None
    httpd.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def candidate(server: Any, name: str) -> Election:
    lease = LeaseObject(Access(host=server.url, api_key="x"), "kube-system/akp-watch", timeout=2.0)
    return Election(lease, name)


def test_one_leads_and_gives_the_lease_to_the_next_when_it_ends(server: Any) -> None:
    with candidate(server, "two-late") as second:
        assert second.leads
    with candidate(server, "one") as first:
        assert first.leads
        assert first.problem == ""
        with candidate(server, "two") as second:
            renewed = len(server.holders)
            eventually(lambda: len(server.holders) > renewed + 3)
            assert not second.leads, "the first one renews"
            assert second.problem == "one leads, by the Lease kube-system/akp-watch"
            first.__exit__(None, None, None)
            eventually(lambda: second.leads)
    holders = [name for name, _all in itertools.groupby(server.holders)]
    assert holders == ["two-late", None, "one", None, "two", None]


def test_a_leader_that_cannot_renew_stops_to_lead_and_goes_on_when_it_can(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "DEADLINE_SECONDS", 1.0)
    with candidate(server, "one") as first:
        server.trouble = lambda: (503, {"message": "etcd is away"})
        eventually(lambda: "etcd is away" in first.problem)
        assert not first.leads
        server.trouble = lambda: None
        eventually(lambda: first.leads)


def test_a_playbook_learns_who_leads_and_takes_no_dead_holder_for_a_leader(server: Any) -> None:
    lease = LeaseObject(Access(host=server.url, api_key="x"), "kube-system/akp-watch", timeout=2.0)
    assert lease.leader() == ""
    with candidate(server, "one"):
        assert lease.leader() == "one"
    assert lease.leader() == "", "it was given back"
    dead = {"holderIdentity": "dead", "leaseDurationSeconds": 1}
    server.object = {**server.object, "spec": dead}
    assert lease.leader() == ""


@pytest.mark.parametrize("seconds", [2**31 - 1, 10**400])
def test_a_lease_that_says_it_holds_for_years_does_not_hold_a_playbook_up(
    server: Any, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setattr(leases, "_LONGEST_LOOK", 0.5)
    lease = LeaseObject(Access(host=server.url, api_key="x"), "kube-system/akp-watch", timeout=2.0)
    server.object = {**server.object, "spec": {"holderIdentity": "dead", "leaseDurationSeconds": seconds}}
    assert lease.leader() == ""


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (403, Forbidden, 'the verb "get" on the resource "leases" of API group "coordination.k8s.io"'),
        (404, NotServed, "examples/access/lease.yaml"),
        (200, Unreachable, "what it sent is no Lease"),
    ],
)
def test_what_is_missing_is_an_error_at_the_beginning(
    server: Any, status: int, error: type[Exception], says: str
) -> None:
    server.trouble = lambda: (status, {"message": "no"})
    with pytest.raises(error, match=says), candidate(server, "one"):
        pass


@pytest.mark.parametrize("name", ["akp-watch", "/x", "a/b/c", "kube-system/", "Kube/x", "a/../x"])
def test_a_lease_has_a_namespace_and_a_name(name: str) -> None:
    with pytest.raises(InvalidLease, match="is no NAMESPACE/NAME"):
        LeaseObject(Access(), name, timeout=1.0)


# -- what a watch does with it


class Lead:
    """A leadership that a test gives and takes."""

    def __init__(self, problem: str) -> None:
        self.problem = problem


@contextlib.contextmanager
def two(path: Path, nodes: dict[str, FakeNode]) -> Iterator[tuple[Running, Running, Callable[[], None]]]:
    """A watch that leads and one that does not, with the same nodes, and what changes that."""
    leads = [Lead(""), Lead("first leads")]
    first, second = (Running(path / str(i), nodes, election=each) for i, each in enumerate(leads))

    def swap() -> None:
        leads[0].problem, leads[1].problem = "second leads", ""

    with first, second:
        yield first, second, swap


def test_only_the_leader_pushes_and_the_next_one_goes_on_where_it_was(tmp_path: Path) -> None:
    nodes = {"n1": FakeNode(), "n2": FakeNode()}
    with two(tmp_path, nodes) as (first, second, swap):
        for each in (first, second):
            each.watch.tell(cluster())
            each.wait("settled")
        assert second.told("follows") == [{"problem": "first leads"}]
        assert {what for _host, what, _patience in second.carrier.tasks} == {"gathered"}
        had = nodes["n1"].has
        for each in (first, second):
            change = each.watch.tell(cluster("10.244.1.2"))
        first.wait("change", what=change, hosts=2)
        assert nodes["n1"].has != had
        # Both hear of one more change, and the leader dies before it does anything about it.
        swap()
        change = second.watch.tell(cluster("10.244.1.3"))
        assert second.wait("change", what=change)["hosts"] == 2
        assert second.told("leads")
        assert first.wait("follows") == {"problem": "second leads"}
        pushed = len([what for _host, what, _patience in first.carrier.tasks if what != "gathered"])
        first.watch.tell(cluster("10.244.1.3"))
        time.sleep(0.3)
        assert len([what for _host, what, _patience in first.carrier.tasks if what != "gathered"]) == pushed
