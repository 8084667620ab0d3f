# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Following a cluster: what changes there is computed here and carried to the hosts that it concerns, at once.

    watch ──▶ updates ──▶ Desired ──▶ hosts whose state changed ──▶ Carrier ──▶ the node action of the collection

Updates are taken at most once per minSyncPeriod, the first one at once, as kube-proxy does. Every host is asked once
per syncPeriod whether it still has what it got; that also keeps its connection open. Hosts are independent of each
other: one that fails waits for its next try, the others do not wait for it. Rules come first: what is to be confirmed
is confirmed once all hosts have theirs, or before half of its term is over.

What a host needs is decided in machine.py, what it shall have in desired.py, whether it may get it in removals.py and
turn.py. Here events are taken, and tasks are given to the carrier.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..bundle.release import SigningFailed
from ..carry.workers import Carrier, CarrierGone
from ..choices import Choices
from ..cluster.watch import Update, Watch
from ..errors import UserError
from ..locks import Lock
from ..plan.consent import Consent
from ..plan.removal_limit import Frontends
from ..tasks.directory import WorkDirectory
from ..tasks.notes import About
from .api_trouble import ApiTrouble
from .changes import Change
from .desired import Desired
from .fleet import Fleet
from .machine import Host, Phase, due
from .measured import Measured
from .parcels import Parcels
from .removals import Removals
from .results import failed
from .turn import Leadership, Turn
from .vocabulary import Ask, Begun, Confirm, Push, Touched

# What ends the loop: nothing can be carried or signed any more.
_FATAL = (CarrierGone, SigningFailed)

# How long an end waits for what is under way; a node that was reached finishes anyway.
PATIENCE_SECONDS = 20.0
# How long others go before a confirmation, and before a question that is not urgent.
CONFIRM_SECONDS = 15.0
CHECK_SECONDS = 60.0
WAITING_RETRY_SECONDS = 1.0
REFRESH_SECONDS = 5.0


class Locked(UserError):
    """Another process follows this cluster with this working directory."""


class Follower:
    """The loop. Everything happens in the thread that calls `run`; others only put events into its queue."""

    def __init__(
        self,
        watch: Watch,
        carrier: Carrier,
        directory: WorkDirectory,
        *,
        choices: Callable[[Mapping[str, Any]], Choices],
        consent: Consent,
        measured: Measured,
        election: Leadership | None = None,
        say: Callable[..., None],
    ) -> None:
        self._watch, self._carrier, self._directory = watch, carrier, directory
        self._choices_of, self._consent = choices, consent
        self._measured, self._say = measured, say
        frontends = Frontends(directory.frontends)
        self._desired = Desired(consent, frontends, say)
        self._removals = Removals(directory, frontends, self._desired, say)
        self._turn = Turn(Lock(directory.path / "schedule" / "lock"), consent, election, say)
        self._parcels = Parcels(directory, consent)
        self._trouble = ApiTrouble(watch, say)
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._fleet = Fleet(directory, self._desired, self._removals, measured, say)
        self._refresh_wanted, self._refresh_at = False, 0.0
        self._config_stamp = 0  # when a run last left another configuration of the cluster

    # -- events from elsewhere

    def stop(self) -> None:
        """End soon; may be called from a signal handler."""
        self._events.put(("stop", None))

    def reload(self) -> None:
        """Read inventory and configuration anew; may be called from a signal handler."""
        self._events.put(("reload", None))

    def _follow_watch(self) -> None:
        """Updates, at most one per minSyncPeriod; the first after a quiet time comes at once."""
        try:
            while True:
                update = self._watch.next()
                if update is None:
                    return
                began = time.monotonic()
                self._events.put(("update", update))
                choices = self._desired.choices
                period = choices.proxy.min_sync_period if choices else 1.0
                time.sleep(max(0.0, began + period - time.monotonic()))
        except Exception as error:
            self._events.put(("error", error))

    def _follow_carrier(self) -> None:
        try:
            for answer in self._carrier.answers():
                self._events.put(("answer", answer))
        except Exception as error:
            self._events.put(("error", error))

    # -- the loop

    def run(self) -> None:
        """Until it is stopped. What an operator can mend is raised."""
        lock = Lock(self._directory.path / "watch.lock")
        if not lock.take():
            raise Locked(
                f"{lock.path}: another akp watch follows this cluster; end it, or choose another kube_proxy_dir"
            )
        for target in (self._follow_carrier, self._follow_watch):
            threading.Thread(target=target, daemon=True, name=target.__name__).start()
        try:
            going = True
            while going and not self._fleet.settled:
                going = self._once(self._wait())
            # What there is now stays: to look for garbage in it would hold up a change for as long as it takes.
            gc.collect()
            gc.freeze()
            while going:
                going = self._once(self._wait())
        finally:
            self._end()
            lock.give_back()

    def _wait(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        due = min((host.wake_at for host in self._fleet), default=now + 1)
        if self._turn.waits:
            due = min(due, now + WAITING_RETRY_SECONDS)
        return max(0.0, min(due - now, 1.0))

    def _once(self, seconds: float) -> bool:
        """Wait for events, take all that are there, and act on them. False at the end."""
        try:
            event = self._events.get(timeout=seconds) if seconds > 0 else self._events.get_nowait()
            while True:
                if not self._take(*event):
                    return False
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        self._dispatch()
        self._housekeeping()
        return True

    def _take(self, kind: str, what: Any) -> bool:
        if kind == "stop":
            return False
        if kind == "error":
            raise what
        if kind == "update":
            self._updated(what)
        elif kind == "reload":
            self._refresh_wanted, self._refresh_at = True, 0.0
        elif "settings" in what:
            self._inventory(what["settings"])
        elif "error" in what:
            self._say("inventory", problem=what["error"])
        else:
            self._fleet.answer(what["host"], what["result"])
        return True

    # -- what the cluster says

    def _updated(self, update: Update) -> None:
        self._desired.update = update
        if self._desired.choices is None:
            return
        if update.initial:
            counts = {
                "services": len(update.snapshot.services),
                "slices": len(update.snapshot.slices),
                "nodes": len(update.snapshot.nodes),
            }
            self._say("watching", **counts, hosts=len(self._fleet))
        if any(each.kind == "Node" and each.action != "changed" for each in update.changes):
            self._refresh_wanted = True
        self._recompute(None if update.initial else Change.of(update))

    def _recompute(self, change: Change | None) -> None:
        """What every host shall have now; those for which that changed get it."""
        if self._desired.compute(self._watch.url):
            self._fleet.want(change)

    # -- what Ansible says

    def _inventory(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """The hosts of the inventory, and what the variables say."""
        choices = self._desired.choices
        try:
            found = self._choices_of(next(iter(settings.values())))
            percents = {name: int(each.get("max_removed_percent", 100)) for name, each in settings.items()}
        except Exception as error:
            if choices is None:
                raise
            self._say("configuration", problem=str(error))
            self._fleet.roll_call(settings)
            return
        self._config_stamp = self._directory.config_stamp
        self._fleet.roll_call(settings)
        self._removals.allow(percents)
        self._parcels.confirm_endpoints = {name for name, each in settings.items() if each.get("confirm_endpoints")}
        if not self._desired.configure(found):
            return
        if choices is not None:
            self._recompute(Change("the configuration", time.time()))
        elif self._desired.update is not None:
            self._updated(self._desired.update)

    # -- what is done

    def _dispatch(self) -> None:
        now = time.monotonic()
        if self._removals.refusing:
            self._removals.refuse(self._fleet)
        for host in self._fleet:
            try:
                self._serve(self._fleet[host.name], now)
            except _FATAL:
                raise
            except Exception as error:
                self._fleet.step(host.name, failed(f"{type(error).__name__}: {error}"))

    def _serve(self, host: Host, now: float) -> None:
        """Give a host what it needs now."""
        task = due(host, now)
        if isinstance(task, Push) and not self._may_push():
            # Others may give the host what it shall have: it is asked from time to time.
            task = due(self._fleet[host.name], now, may_push=False)
        match task:
            case Ask():
                self._fleet.step(host.name, Begun(task))
                arguments = {"state": "gathered", **({"verify": True} if task.deep else {})}
                self._carrier.submit(host.name, arguments, patience=0.0 if task.urgent else CHECK_SECONDS)
            case Confirm():
                self._confirm(host, task, 0.0 if task.urgent else CONFIRM_SECONDS)
            case Push():
                self._push(host, task)

    def _may_push(self) -> bool:
        """Whether no host would lose too much, and it is our turn. If others had theirs, hosts are asked first."""
        if self._removals.refuse(self._fleet) or not self._turn.take():
            return False
        if self._turn.returned():
            for host in self._fleet:
                self._fleet.step(host.name, Touched())
            return False
        return True

    def _push(self, host: Host, push: Push) -> None:
        push, arguments = self._parcels.make(host, push)
        self._removals.pushing(host)
        self._fleet.step(host.name, Begun(push))
        self._carrier.submit(host.name, arguments, about=About(self._desired.digest))

    def _confirm(self, host: Host, task: Confirm, patience: float) -> None:
        """Tell a host that what it was given stays."""
        left = max(1.0, task.trial.until - time.monotonic())
        patience = min(patience, left / 4)
        arguments: dict[str, Any] = {
            "state": "confirmed",
            "token": task.trial.token,
            "generation": task.trial.previous,
            # What it waits for its turn is missing to its term.
            "confirm_within": int(left - patience),
        }
        self._fleet.step(host.name, Begun(task))
        self._carrier.submit(host.name, arguments, patience=patience)

    def _housekeeping(self) -> None:
        now = time.monotonic()
        if not any(host.phase in (Phase.PUSHED, Phase.TRIAL, Phase.CONFIRMING) for host in self._fleet):
            self._turn.give_back()
            self._removals.learn(self._fleet)
        if self._refresh_wanted and now >= self._refresh_at:
            self._refresh_wanted, self._refresh_at = False, now + REFRESH_SECONDS
            self._carrier.refresh()
        if self._directory.config_stamp != self._config_stamp:
            self._config_stamp, self._refresh_wanted = self._directory.config_stamp, True
        if self._consent.renewed and self._desired.update is not None and self._desired.choices is not None:
            self._recompute(Change("what was approved", time.time()))
        if self._turn.tell():
            # What has not begun is the next leader's.
            self._carrier.cancel()
        self._trouble.tell()
        self._write_metrics()

    def _write_metrics(self, *, at_once: bool = False) -> None:
        problem = self._measured.write(at_once=at_once)
        if problem:
            self._say("metrics", problem=problem)

    # -- the end

    def _end(self) -> None:
        """Finish or give up what is under way; either way every node has its old rules or its new ones."""
        self._watch.close()
        with contextlib.suppress(CarrierGone):
            self._finish()
        self._carrier.close(1.0)
        with contextlib.suppress(queue.Empty):
            while True:
                kind, what = self._events.get(timeout=0.2)
                if kind == "answer" and "host" in what:
                    self._fleet.answer(what["host"], what["result"])
                elif kind == "error":
                    break
        self._removals.learn(self._fleet)
        self._write_metrics(at_once=True)
        self._turn.give_back()

    def _finish(self) -> None:
        """Wait for what is under way, and confirm what was applied: nodes would go back to what was before."""
        began, told = time.monotonic(), False
        self._carrier.cancel()
        while busy := sorted(host.name for host in self._fleet if host.busy or host.trial):
            now = time.monotonic()
            terms = [host.trial.until for host in self._fleet if host.trial]
            if now >= max([began + PATIENCE_SECONDS, *terms]):
                return
            # What had not begun is taken back within moments.
            if not told and now > began + 0.5:
                told = True
                self._say("ending", waiting_for=busy)
            for host in self._fleet:
                task = due(host, now)
                if isinstance(task, Confirm):
                    self._confirm(host, task, 0.0)
            with contextlib.suppress(queue.Empty):
                kind, what = self._events.get(timeout=0.2)
                if isinstance(what, CarrierGone):
                    return
                if kind == "answer" and "host" in what:
                    self._fleet.answer(what["host"], what["result"])
