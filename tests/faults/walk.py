"""Walks: a verb is run again and again, and each time something happens at another step.

After every fault four questions: is each unit of the kernel as it was or as it shall be, do the Services of both states
answer, does the next run heal it, and did the program say what happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.faults.inject import Fault, changes_something
from tests.faults.site import NOTHING, Site, answer_of, other
from tests.faults.views import halves
from tests.node.host import Result

# Beside those of the program: apply --verify; apply and rollback where deltas have to be made whole; a first apply.
VERBS = ("apply", "verify", "delta", "rollback", "settle", "return", "restore", "cleanup", "first")
WITH_DELTAS = ("delta", "settle", "return")


@dataclass(frozen=True)
class Finding:
    """One fault and what followed."""

    mode: str
    verb: str
    kind: str
    where: str
    half: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def trouble(self) -> list[str]:
        return [f"{self.mode} {self.verb} {self.kind} at {self.where}: {each}"
                for each in (*self.half, *self.lost, *self.unhealed, *self.unsaid)]  # fmt: skip


@dataclass(frozen=True)
class Move:
    """A verb that leads from one state to another."""

    verb: str
    arguments: tuple[str, ...]
    old: str
    new: str


def prepare(site: Site, verb: str) -> Move:
    """Bring the node to where the verb starts, and say where it leads."""
    if verb == "restore":
        name = site.current if site.current != NOTHING else "A"
        site.go(name)
        site.flush()
        return Move(verb, ("restore",), NOTHING, name)
    if verb == "first":
        site.host.akp("cleanup")
        site.current = NOTHING
        return Move(verb, ("apply", str(site.bundles["A"])), NOTHING, "A")
    if site.current == NOTHING:
        site.go("A")
    here = site.current
    if verb == "cleanup":
        return Move(verb, ("cleanup",), here, NOTHING)
    there = other(here)
    if verb in ("settle", "return"):
        site.go(there)
        site.host.apply(site.deltas[here])
        return Move(verb, ("apply", str(site.bundles[there])) if verb == "settle" else ("rollback",), here, there)
    if verb == "verify":
        return Move(verb, ("apply", "--verify", str(site.bundles[there])), here, there)
    if verb == "rollback":
        if site.host.akp("status").json["kept"][-2:] != [site.states[there].generation, site.states[here].generation]:
            site.go(there)
            site.go(here)
        return Move(verb, ("rollback",), here, there)
    bundle = site.deltas[there] if verb == "delta" else site.bundles[there]
    return Move(verb, ("apply", str(bundle)), here, there)


def heal(site: Site, move: Move) -> list[str]:
    """The next run, as a carrier would make it. Why it did not put everything right, if so."""
    if move.verb == "unconfirmed":
        site.current = move.new
        return wait_for_undo(site)
    if move.new == NOTHING:
        result = site.host.akp("cleanup")
    elif move.verb == "restore":
        result = site.host.akp("restore")
    else:
        if move.verb == "delta":
            result = site.host.akp("apply", site.deltas[move.new])
        if move.verb != "delta" or (answer_of(result) or {}).get("need") == "full" or result.code:
            result = site.host.akp("apply", site.bundles[move.new])
    site.current = move.new
    if result.code:
        return [f"the next run failed: {result.stdout}{result.stderr}"]
    return []


def wait_for_undo(site: Site) -> list[str]:
    """Nobody does anything: the node itself goes back."""
    deadline = time.monotonic() + 90
    while site.host.sh(f"[ ! -e {site.host.state}/unconfirmed ] || echo waits"):
        if time.monotonic() > deadline:
            log = site.host.sh(f"cat {site.host.state}/undo.log || echo no try")
            return [f"the node did not go back by itself: {log}"]
        time.sleep(0.1)
    return []


def examine(site: Site, move: Move, kind: str, where: str, result: Result) -> Finding:
    """What a fault led to, and how it was healed."""
    now = site.view()
    half = halves(now, site.views[move.old], site.views[move.new])
    both = NOTHING not in (move.old, move.new)
    lost = [f"a Service was lost, {each}" for each in site.silent()] if both else []
    unsaid = []
    answer = answer_of(result)
    if not kind.startswith("kill-"):
        if answer is None:
            unsaid.append(f"no answer, exit {result.code}: {result.stdout}{result.stderr}")
        elif not answer["ok"] and not answer.get("error"):
            unsaid.append("a failure without a reason")
        elif move.verb == "carriers":
            pass  # what is there now may be the other one's
        elif not answer["ok"] and answer["asBefore"]:
            same = move.old == NOTHING or site.names() == site.all_names[move.old]
            half += [] if same and now == site.views[move.old] else ["it said that all is as before, and it is not"]
        elif answer["ok"] and answer.get("need") != "full" and now != site.views[move.new]:
            half.append("it said that all is well, and it is not")
    started = time.monotonic()
    unhealed = heal(site, move)
    seconds = time.monotonic() - started
    unhealed += site.settled(move.new)
    if unhealed:
        # Not to be taken for the next fault's doing.
        site.host.akp("apply", "--verify", site.bundles["A"])
        site.host.akp("cleanup")
        site.current = NOTHING
    return Finding(site.label, move.verb, kind, where, half, lost, unhealed, unsaid, seconds)


def points(calls: list[str], kind: str, stride: int) -> list[int]:
    """Steps at which to cut: around everything that changes something, and every stride-th of the others."""
    chosen = []
    for number, call in enumerate(calls, 1):
        if changes_something(call) or (number % stride == 0 and kind != "kill-after"):
            chosen.append(number)
    return chosen


def walk(site: Site, verb: str, kind: str, *, stride: int = 7, thin: int = 1, shift: int = 0) -> Iterator[Finding]:
    """Every fault of a kind at the steps of a verb; `thin` takes one point of so many."""
    move = prepare(site, verb)
    result = site.run(*move.arguments)
    assert result.code == 0, result.stdout + result.stderr
    site.current = move.new
    for step in points(site.steps.taken(), kind, stride)[shift % thin :: thin]:
        move = prepare(site, verb)
        result = site.run(*move.arguments, fault=Fault(kind, step))
        fired = site.steps.fired
        if fired:
            yield examine(site, move, kind, f"step {step}, {fired[:80]}", result)
        else:
            assert result.code == 0, f"{verb} without a fault: {result.stdout}{result.stderr}"
            site.current = move.new
