"""What a host needs next: a question, a delta, its whole bundle, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.watch.host import Change, Host, Need

from tests.unit.build import node as node_object
from tests.unit.build import render, service, slice_of

LATER = 30.0


def state(*addresses: str) -> State:
    return render(service("web"), slice_of("web", *addresses), node_object("n1"))


ONE, TWO, THREE = state("10.0.0.1"), state("10.0.0.2"), state("10.0.0.3")


def answer(of: State | None, **fields: Any) -> dict[str, Any]:
    return {"facts": {}, "state": "applied" if of else "absent", "generation": of.generation if of else None, **fields}


@pytest.fixture
def settled() -> Host:
    """One that has what it shall have."""
    host = Host("n1", "n1")
    assert host.need(0) is Need.QUESTION
    host.sending(Need.QUESTION)
    host.answered(answer(ONE), LATER)
    host.want(ONE)
    assert host.need(1) is Need.NOTHING
    return host


def test_a_new_host_is_asked_and_gets_its_whole_bundle() -> None:
    host = Host("n1", "n1")
    host.sending(Need.QUESTION)
    host.answered(answer(None), LATER)
    assert host.want(ONE)
    assert host.need(0) is Need.BUNDLE
    host.sending(Need.BUNDLE)
    assert host.applied(ONE.generation, LATER)
    assert host.need(0) is Need.NOTHING


def test_a_host_that_has_it_already_gets_nothing_until_the_next_check(settled: Host) -> None:
    assert not settled.stale
    assert settled.need(LATER - 1) is Need.NOTHING
    assert settled.need(LATER) is Need.QUESTION


def test_a_host_that_would_go_back_by_itself_is_given_it_again(settled: Host) -> None:
    settled.sending(Need.QUESTION)
    settled.answered(answer(ONE, unconfirmed={"generation": ONE.generation, "seconds": 50}), LATER)
    assert settled.stale
    assert settled.need(1) is Need.BUNDLE


def test_a_change_is_a_delta_and_what_changes_meanwhile_is_one_more(settled: Host) -> None:
    first, second = Change("first", 0.0, (), {"n1"}), Change("second", 0.0, (), {"n1"})
    settled.want(TWO)
    settled.changes.append(first)
    assert settled.need(1) is Need.DELTA
    settled.sending(Need.DELTA)
    settled.want(THREE)
    settled.changes.append(second)
    assert settled.need(1) is Need.NOTHING, "one at a time"
    assert settled.applied(TWO.generation, LATER)
    assert settled.arrived() == [first]
    assert settled.need(1) is Need.DELTA
    settled.sending(Need.DELTA)
    assert settled.applied(THREE.generation, LATER)
    assert settled.arrived() == [second]
    assert settled.need(1) is Need.NOTHING


def test_a_change_that_is_taken_back_in_time_costs_nothing(settled: Host) -> None:
    settled.want(TWO)
    settled.want(ONE)
    assert settled.need(1) is Need.NOTHING


def test_after_a_failure_it_is_asked_again_with_growing_pauses(settled: Host) -> None:
    settled.want(TWO)
    pauses = []
    for now in (100.0, 200.0, 300.0, 400.0):
        settled.sending(settled.need(now))
        pauses.append(settled.failed(now))
        assert settled.need(now) is Need.NOTHING
        assert settled.need(now + 70) is Need.QUESTION
    assert pauses == sorted(pauses)
    assert pauses[0] < 2 < pauses[-1]


def test_a_failed_push_that_came_through_is_not_repeated(settled: Host) -> None:
    settled.want(TWO)
    settled.sending(Need.DELTA)
    settled.failed(1)
    settled.sending(settled.need(100))
    settled.answered(answer(TWO), 100 + LATER)
    assert settled.need(101) is Need.NOTHING


def test_a_node_that_cannot_take_the_delta_gets_the_whole_bundle(settled: Host) -> None:
    change = Change("it", 0.0, (), {"n1"})
    settled.want(TWO)
    settled.changes.append(change)
    settled.sending(Need.DELTA)
    settled.needs_whole()
    assert settled.need(1) is Need.QUESTION
    settled.sending(Need.QUESTION)
    settled.answered(answer(ONE), LATER)
    assert settled.need(1) is Need.BUNDLE, "though it has the base: its program is another, perhaps"
    settled.sending(Need.BUNDLE)
    assert settled.applied(TWO.generation, LATER)
    assert settled.arrived() == [change]
    settled.want(THREE)
    assert settled.need(1) is Need.DELTA


@pytest.mark.parametrize(
    "said",
    [answer(ONE, drift=2), answer(ONE, state="flushed"), answer(None), answer(THREE)],
    ids=["drift", "flushed", "absent", "something else"],
)
def test_a_node_that_is_not_as_it_was_left_gets_its_whole_bundle(settled: Host, said: dict[str, Any]) -> None:
    settled.sending(Need.QUESTION)
    settled.answered(said, LATER)
    assert settled.need(1) is Need.BUNDLE


def test_an_older_state_that_is_known_is_where_a_delta_begins(settled: Host) -> None:
    settled.want(TWO)
    settled.ask = True
    settled.sending(settled.need(1))
    settled.answered(answer(ONE), LATER)
    assert settled.need(1) is Need.DELTA


def test_a_node_that_says_it_has_something_else_than_was_sent_is_asked(settled: Host) -> None:
    settled.want(TWO)
    settled.sending(Need.DELTA)
    assert not settled.applied(THREE.generation, LATER)
    assert settled.need(1) is Need.QUESTION


def test_what_cannot_be_wanted_is_not_pushed(settled: Host) -> None:
    settled.want(None)
    assert settled.need(1) is Need.NOTHING


def test_a_change_that_has_to_be_confirmed_is_confirmed_before_anything_else(settled: Host) -> None:
    change = Change("it", 0.0, (), {"n1"})
    settled.want(TWO)
    settled.changes.append(change)
    settled.sending(Need.DELTA)
    assert settled.applied(TWO.generation, LATER)
    settled.waits("token", ONE.generation, 60.0, changed=True)
    settled.want(THREE)
    assert settled.need(LATER) is Need.CONFIRMATION
    settled.sending(Need.CONFIRMATION)
    assert settled.need(LATER) is Need.NOTHING, "one at a time"
    term = settled.confirmed()
    assert term is not None
    assert (term.token, term.how) == ("token", Need.DELTA)
    assert settled.arrived() == [change]
    assert settled.need(1) is Need.DELTA


def test_what_could_not_be_confirmed_is_looked_at_once_the_node_has_gone_back(settled: Host) -> None:
    change = Change("it", 0.0, (), {"n1"})
    settled.want(TWO)
    settled.changes.append(change)
    settled.sending(Need.DELTA)
    settled.applied(TWO.generation, LATER)
    settled.waits("token", ONE.generation, 60.0, changed=True)
    settled.sending(Need.CONFIRMATION)
    settled.failed(10)
    assert settled.need(60) is Need.NOTHING
    assert settled.need(62) is Need.QUESTION
    settled.sending(Need.QUESTION)
    settled.answered(answer(ONE), 100)
    assert settled.need(62) is Need.BUNDLE
    assert settled.arrived() == []
    assert settled.changes == [change], "it is still on its way"


def test_a_push_that_was_taken_back_is_still_to_be_made(settled: Host) -> None:
    settled.want(TWO)
    settled.sending(Need.DELTA)
    settled.dropped()
    assert settled.need(1) is Need.DELTA


def test_a_host_that_answers_and_never_takes_a_push_is_tried_ever_less_often(settled: Host) -> None:
    settled.want(TWO)
    now, pushes = 0.0, []
    while now < 600:
        need = settled.need(now)
        if need is Need.QUESTION:
            settled.sending(need)
            settled.answered(answer(ONE), now + LATER)
        elif need in (Need.DELTA, Need.BUNDLE):
            settled.sending(need)
            pushes.append(now)
            settled.failed(now)
        now += 0.1
    assert len(pushes) < 18, "with pauses of 1, 2, 4 … 60 s"
    assert pushes[-1] - pushes[-2] > 50
    settled.want(ONE)
    settled.sending(Need.QUESTION)
    settled.answered(answer(ONE), now + LATER)
    assert settled.failures == 0, "it has what it shall have"


def test_a_change_that_can_never_be_confirmed_is_tried_ever_less_often(settled: Host) -> None:
    settled.want(TWO)
    pauses = []
    for now in range(0, 2000, 200):
        settled.ask = False
        settled.sending(Need.DELTA)
        assert settled.applied(TWO.generation, now + LATER)
        settled.waits("token", ONE.generation, now + 0.5, changed=True)
        settled.sending(Need.CONFIRMATION)
        pauses.append(settled.failed(float(now)))
        settled.sending(Need.QUESTION)
        settled.answered(answer(ONE), now + LATER)
    assert pauses[0] < 3
    assert pauses[-1] > 50
