"""A host as a machine: its phases, what brings it from one to the next, and what it needs in each."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.watch.machine import LONG_LOG, Held, Host, Phase, due, step
from agentless_kube_proxy.watch.results import event_of
from agentless_kube_proxy.watch.vocabulary import (
    Answered,
    Applied,
    Arrived,
    Ask,
    Begun,
    Confirm,
    Confirmed,
    Effect,
    Event,
    Failed,
    How,
    NeedsBundle,
    Push,
    Returned,
    Say,
    TakenBack,
    Task,
    Touched,
    Trial,
    Wanted,
)
from hypothesis import given
from hypothesis import strategies as st

from ..build import node as node_object
from ..build import render, service, slice_of

LATER = 30.0


def state(*addresses: str) -> State:
    return render(service("web"), slice_of("web", *addresses), node_object("n1"))


ONE, TWO, THREE = state("10.0.0.1"), state("10.0.0.2"), state("10.0.0.3")
STATES = (ONE, TWO, THREE)
TRIAL = Trial("token", ONE.generation, until=60.0)


def has(of: State | None, *, intact: bool = True, look_at: float = LATER) -> Answered:
    """The answer of a node."""
    return Answered(of.generation if of else "", intact and of is not None, look_at=look_at)


def took(of: State, trial: Trial | None = None, **fields: Any) -> Applied:
    return Applied(of.generation, trial=trial, look_at=LATER, **fields)


class Machine:
    """A host, and what it has done so far."""

    def __init__(self, host: Host | None = None) -> None:
        self.host = host or Host("n1", "n1")
        self.effects: tuple[Effect, ...] = ()

    def take(self, *events: Event) -> Machine:
        """Events, one after the other; the effects are those of the last."""
        for event in events:
            self.host, self.effects = step(self.host, event)
        return self

    def begin(self, now: float = 1.0) -> Task:
        """Its task of now is on its way."""
        task = due(self.host, now)
        assert task is not None, f"{self.host.phase} needs nothing"
        self.take(Begun(task))
        return task

    def need(self, now: float = 1.0) -> str:
        """What it needs, in a word."""
        task = due(self.host, now)
        return task.how.value if isinstance(task, Push) else type(task).__name__.lower() if task else "nothing"

    @property
    def said(self) -> list[str]:
        return [each.event for each in self.effects if isinstance(each, Say)]


def in_phase(phase: Phase) -> Machine:
    """A host that came to a phase as hosts do."""
    machine = Machine()
    if phase is Phase.UNKNOWN:
        return machine
    machine.begin()
    if phase is Phase.ASKED:
        return machine
    if phase is Phase.PAUSED:
        return machine.take(Failed("no route to host", at=0.0))
    machine.take(has(ONE))
    if phase is Phase.UNDECIDED:
        return machine
    machine.take(Wanted(ONE))
    if phase is Phase.CURRENT:
        return machine
    machine.take(Wanted(TWO))
    if phase is Phase.STALE:
        return machine
    machine.begin()
    if phase is Phase.PUSHED:
        return machine
    machine.take(took(TWO, TRIAL))
    if phase is Phase.CONFIRMING:
        machine.begin()
    return machine


@pytest.fixture
def current() -> Machine:
    """One that has what is desired."""
    return in_phase(Phase.CURRENT)


@pytest.mark.parametrize("phase", Phase)
def test_a_host_comes_to_every_phase(phase: Phase) -> None:
    assert in_phase(phase).host.phase is phase


@pytest.mark.parametrize(
    ("phase", "early", "late"),
    [
        (Phase.UNKNOWN, "ask", "ask"),
        (Phase.ASKED, "nothing", "nothing"),
        (Phase.UNDECIDED, "nothing", "ask"),
        (Phase.CURRENT, "nothing", "ask"),
        (Phase.STALE, "delta", "delta"),
        (Phase.PUSHED, "nothing", "nothing"),
        (Phase.TRIAL, "confirm", "confirm"),
        (Phase.CONFIRMING, "nothing", "nothing"),
        (Phase.PAUSED, "nothing", "ask"),
    ],
)
def test_what_a_host_needs_in_each_phase(phase: Phase, early: str, late: str) -> None:
    machine = in_phase(phase)
    assert (machine.need(0.5), machine.need(LATER)) == (early, late)
    assert (machine.host.wake_at == float("inf")) == machine.host.busy
    assert machine.host.busy == (late == "nothing")


EVENTS: dict[str, Event] = {
    "wanted": Wanted(THREE),
    "unusable": Wanted(None),
    "touched": Touched(),
    "answered": has(TWO),
    "applied": took(TWO),
    "on trial": took(TWO, TRIAL),
    "something else applied": took(THREE),
    "needs bundle": NeedsBundle("no base"),
    "confirmed": Confirmed(),
    "taken back": TakenBack(),
    "failed": Failed("no", at=5.0),
}
U, A, D, C, S, P, T, F, X = Phase
# The phase that follows, for each event, in the order of EVENTS. A host whose answer does not fit its task is asked.
TABLE = {
    U: (U, U, U, U, U, U, U, U, U, U, X),
    A: (A, A, A, D, U, U, U, U, U, U, X),
    D: (S, D, U, D, D, D, D, D, D, D, X),
    C: (S, D, U, C, C, C, C, C, C, C, X),
    S: (S, D, U, S, S, S, S, S, S, S, X),
    P: (P, P, P, U, C, T, U, U, U, S, X),
    T: (T, T, T, T, T, T, T, T, T, T, X),
    F: (F, F, F, U, U, U, U, U, C, T, X),
    X: (X, X, X, X, X, X, X, X, X, X, X),
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, EVENTS)))
def test_every_event_in_every_phase(phase: Phase, event: str) -> None:
    machine = in_phase(phase).take(EVENTS[event])
    assert machine.host.phase is TABLE[phase][list(EVENTS).index(event)]
    assert_sound(machine.host)


def assert_sound(host: Host) -> None:
    """What a phase promises."""
    assert (host.sent is not None) == (host.phase is Phase.PUSHED)
    assert (host.trial is not None) == (host.phase in (Phase.TRIAL, Phase.CONFIRMING))
    if host.phase is Phase.CURRENT:
        assert host.has is not None
        assert host.desired is not None
        assert host.has.generation == host.desired.generation
    if host.phase is Phase.STALE:
        assert host.stale
    if host.phase is Phase.UNDECIDED:
        assert host.desired is None
    if host.held.state is not None:
        assert host.held.state.generation == host.held.generation


def test_a_new_host_is_asked_and_gets_its_whole_bundle() -> None:
    machine = Machine()
    assert machine.begin() == Ask(urgent=True)
    machine.take(has(None), Wanted(ONE))
    assert machine.begin() == Push(How.BUNDLE, ONE)
    machine.take(took(ONE))
    assert machine.need() == "nothing"
    assert machine.effects == (
        Say("pushed", {"how": "bundle", "changed": True, "generation": ONE.generation}),
        Arrived(0.0, current=True),
    )


def test_a_host_that_has_it_already_gets_nothing_until_the_next_look() -> None:
    machine = Machine()
    machine.begin()
    machine.take(Wanted(ONE), has(ONE))
    assert machine.effects == (Arrived(0.0, current=True),)
    assert (machine.need(LATER - 1), machine.need(LATER)) == ("nothing", "ask")


def test_a_host_that_would_go_back_by_itself_is_given_it_again(current: Machine) -> None:
    current.begin(LATER)
    said = {"state": "applied", "generation": ONE.generation, "unconfirmed": {"generation": ONE.generation}}
    current.take(event_of(Phase.ASKED, said, LATER))
    assert current.need() == "bundle"


def test_a_change_is_a_delta_and_what_changes_meanwhile_is_one_more(current: Machine) -> None:
    current.take(Wanted(TWO))
    assert current.begin() == Push(How.DELTA, TWO, ONE)
    current.take(Wanted(THREE))
    assert current.need() == "nothing", "one at a time"
    current.take(took(TWO))
    assert current.effects[1:] == (Arrived(0.0, current=False),)
    assert current.begin() == Push(How.DELTA, THREE, TWO)
    current.take(took(THREE))
    assert current.effects[1:] == (Arrived(0.0, current=True),)


def test_a_change_that_is_taken_back_in_time_costs_nothing(current: Machine) -> None:
    assert current.take(Wanted(TWO), Wanted(ONE)).need() == "nothing"


def test_a_push_that_was_taken_back_is_still_to_be_made(current: Machine) -> None:
    current.take(Wanted(TWO))
    current.begin()
    assert current.take(TakenBack()).need() == "delta"
    assert current.effects == (Returned(),)


def test_where_nothing_may_be_pushed_it_is_asked_when_it_is_time_to(current: Machine) -> None:
    current.take(Wanted(TWO))
    assert due(current.host, 1.0, may_push=False) is None
    assert due(current.host, LATER, may_push=False) == Ask(urgent=False)


def test_a_long_log_of_deltas_is_replaced_when_nothing_else_is_to_be_done(current: Machine) -> None:
    current.take(Wanted(TWO))
    current.begin()
    current.take(took(TWO, deltas=LONG_LOG))
    assert (current.need(), current.need(LATER)) == ("nothing", "snapshot")
    assert isinstance(due(current.host, LATER, may_push=False), Ask)
    assert current.begin(LATER) == Push(How.SNAPSHOT, TWO)
    current.take(took(TWO, deltas=0))
    assert current.need(LATER) == "ask"


def test_after_a_delta_a_look_compares_every_rule(current: Machine) -> None:
    assert due(current.host, LATER) == Ask(urgent=False, deep=False)
    current.take(Wanted(TWO))
    current.begin()
    current.take(took(TWO))
    assert due(current.host, LATER) == Ask(urgent=False, deep=True)


def test_after_a_failure_it_is_asked_again_with_growing_pauses(current: Machine) -> None:
    current.take(Wanted(TWO))
    pauses = []
    for now in (100.0, 200.0, 300.0, 400.0):
        current.begin(now)
        current.take(Failed("no\nroute ", at=now))
        pauses.append(current.host.resume_at - now)
        assert (current.need(now), current.need(now + 70)) == ("nothing", "ask")
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert current.effects == (Say("failed", {"tries": 4, "again_in": 8.0, "problem": "no route"}), Returned())


def test_that_a_host_answers_again_is_said_once(current: Machine) -> None:
    for _each in range(2):
        current.begin(LATER)
        current.take(Failed("no", at=0.0))
    current.begin(LATER)
    assert current.take(has(ONE)).said == ["answers"]
    current.begin(2 * LATER)
    assert current.take(has(ONE)).said == []


def test_a_failed_push_that_came_through_is_not_repeated(current: Machine) -> None:
    current.take(Wanted(TWO))
    current.begin()
    current.take(Failed("cut off", at=1.0))
    current.begin(100)
    current.take(has(TWO, look_at=200))
    assert current.effects == (Arrived(0.0, current=True),)
    assert current.need(101) == "nothing"
    assert current.take(Wanted(THREE)).need(101) == "delta"


def test_a_node_that_cannot_take_the_delta_gets_the_whole_bundle(current: Machine) -> None:
    current.take(Wanted(TWO))
    current.begin()
    current.take(NeedsBundle("its program is another"))
    assert current.effects == (Say("whole", {"problem": "its program is another"}), Returned())
    assert current.begin() == Ask(urgent=True)
    current.take(has(ONE))
    assert current.need() == "bundle", "though it has the base: its program is another, perhaps"
    current.begin()
    assert current.take(took(TWO), Wanted(THREE)).need() == "delta"


@pytest.mark.parametrize(
    "answer",
    [has(ONE, intact=False), has(None), has(THREE)],
    ids=["not intact", "absent", "something else"],
)
def test_a_node_that_is_not_as_it_was_left_gets_its_whole_bundle(current: Machine, answer: Answered) -> None:
    current.begin(LATER)
    current.take(dataclasses.replace(answer, state="flushed", differences=3))
    assert current.effects == (Say("drift", {"state": "flushed", "differences": 3}),)
    assert current.need() == "bundle"


def test_an_older_state_that_is_known_is_where_a_delta_begins(current: Machine) -> None:
    current.take(Wanted(TWO), Touched())
    assert current.begin() == Ask(urgent=True)
    assert current.take(has(ONE)).need() == "delta"


def test_what_others_did_during_a_push_is_asked_for_after_it(current: Machine) -> None:
    current.take(Wanted(TWO))
    current.begin()
    current.take(Touched(), took(TWO, TRIAL))
    assert current.need() == "confirm", "it would go back"
    current.begin()
    assert current.take(Confirmed()).begin() == Ask(urgent=True, deep=True)
    assert current.take(has(TWO)).need() == "nothing"


def test_what_cannot_be_told_is_not_pushed(current: Machine) -> None:
    assert current.take(Wanted(None)).need() == "nothing"
    assert current.take(Wanted(ONE)).need() == "nothing", "it still has that"


def test_a_change_is_confirmed_before_anything_else(current: Machine) -> None:
    current.take(Wanted(TWO))
    current.begin()
    current.take(took(TWO, TRIAL, landed=7.0))
    assert current.effects == (), "it does not count yet"
    assert due(current.host, 1.0) == Confirm(dataclasses.replace(TRIAL, landed=7.0, how=How.DELTA), urgent=False)
    current.take(Wanted(THREE))
    task = current.begin(LATER)
    assert isinstance(task, Confirm)
    assert task.urgent, "the next change waits for it"
    current.take(Confirmed())
    assert current.said == ["pushed"]
    assert current.effects[1:] == (Arrived(7.0, current=False),)
    assert current.need() == "delta"


def test_what_could_not_be_confirmed_is_looked_at_once_the_node_has_gone_back() -> None:
    machine = in_phase(Phase.CONFIRMING).take(Failed("cut off", at=10.0))
    assert Returned() in machine.effects, "the change is still on its way"
    assert (machine.need(60), machine.need(62)) == ("nothing", "ask")
    machine.begin(62)
    assert machine.take(has(ONE)).need(62) == "bundle"


def test_a_confirmation_that_was_taken_back_is_still_to_be_made() -> None:
    assert in_phase(Phase.CONFIRMING).take(TakenBack()).need() == "confirm"


def test_a_host_that_answers_and_never_takes_a_push_is_tried_ever_less_often(current: Machine) -> None:
    current.take(Wanted(TWO))
    now, pushes = 0.0, []
    while now < 600:
        match due(current.host, now):
            case Ask():
                current.begin(now)
                current.take(has(ONE, look_at=now + LATER))
            case Push():
                current.begin(now)
                pushes.append(now)
                current.take(Failed("the kernel refused", at=now))
        now += 0.1
    assert len(pushes) < 18, "with pauses of 1, 2, 4 … 60 s"
    assert pushes[-1] - pushes[-2] > 50
    current.take(Wanted(ONE), Touched())
    current.begin(now + 100)
    current.take(has(ONE))
    assert current.host.failures == 0, "it has what is desired"


def test_a_change_that_can_never_be_confirmed_is_tried_ever_less_often(current: Machine) -> None:
    current.take(Wanted(TWO))
    pauses = []
    for now in range(0, 2000, 200):
        current.begin(now)
        current.take(took(TWO, dataclasses.replace(TRIAL, until=now + 0.5)))
        current.begin(now)
        current.take(Failed("no", at=float(now)))
        pauses.append(current.host.resume_at - now)
        current.begin(now + 150)
        current.take(has(ONE))
    assert pauses[0] < 3
    assert pauses[-1] > 50


def test_what_an_earlier_run_left_on_record_is_held_until_the_host_says_otherwise() -> None:
    machine = Machine(Host("n1", "n1", held=Held(ONE.generation))).take(Wanted(ONE))
    assert machine.host.held.state == ONE
    assert machine.host.stale, "it has not answered yet"
    assert machine.begin() == Ask(urgent=True)
    assert machine.take(has(ONE)).need() == "nothing"


# -- a node, and everything that can happen to it


class Node:
    """What is in a kernel: it takes what it can, goes back if nothing is confirmed, and may be lost at any time."""

    def __init__(self) -> None:
        self.has: State | None = None
        self.intact = True
        self.before: tuple[State | None, float] | None = None  # where it goes back to, and when

    def go_on(self, now: float) -> None:
        if self.before is not None and now >= self.before[1]:
            self.has, self.before = self.before[0], None

    def do(self, task: Task, now: float, *, trial: bool) -> Event:
        """What it makes of a task."""
        match task:
            case Ask():
                return has(self.has, intact=self.intact and self.before is None, look_at=now + LATER)
            case Confirm():
                assert task.trial.token == "token"
                if self.before is None:
                    return Failed("there is nothing to confirm", at=now)
                self.before = None
                return Confirmed()
            case Push(How.DELTA, _state, base):
                if self.has is None or not self.intact or base is None or self.has.generation != base.generation:
                    return NeedsBundle("not the base")
        previous, self.has, self.intact = self.has, task.state, True
        if trial:
            self.before = (previous, now + 10.0)
            return took(task.state, Trial("token", previous.generation if previous else "", now + 10.0))
        self.before = None
        return took(task.state)


MISHAPS = ("", "", "trial", "trial", "unreachable", "cut off", "reboot", "flush", "others", "taken back")


@given(st.lists(st.tuples(st.sampled_from(STATES), st.sampled_from(MISHAPS), st.booleans()), max_size=30))
def test_whatever_happens_to_a_node_it_ends_with_what_is_desired(happening: list[tuple[State, str, bool]]) -> None:
    """Changes come at any time, tasks fail before or after they arrive, nodes reboot, others push. Then it is quiet."""
    machine, node, now = Machine(), Node(), 0.0

    def act(mishap: str) -> None:
        node.go_on(now)
        task = due(machine.host, now)
        if task is None:
            return
        machine.take(Begun(task))
        assert machine.host.busy
        assert due(machine.host, now) is None, "one task at a time"
        if mishap == "taken back":
            machine.take(TakenBack())
        elif mishap == "unreachable":
            machine.take(Failed(mishap, at=now))
        else:
            event = node.do(task, now, trial=mishap == "trial")
            machine.take(Failed(mishap, at=now) if mishap == "cut off" else event)
        assert_sound(machine.host)

    for wanted, mishap, patient in happening:
        machine.take(Wanted(wanted))
        if mishap == "reboot":
            node.has, node.before = None, None
        elif mishap == "flush":
            node.intact = False
        elif mishap == "others":
            node.has, node.intact, node.before = THREE, True, None
            machine.take(Touched())
        act(mishap)
        now += 35.0 if patient else 0.3
    machine.take(Wanted(TWO), *([Touched()] if not machine.host.busy else ()))
    for _each in range(12):
        act("")
        now += 70.0
    assert machine.host.phase in (Phase.CURRENT, Phase.ASKED)
    assert node.has == TWO
    assert node.intact
    assert node.before is None, "it goes back by itself"
    assert machine.host.failures == 0
