# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Following a cluster: what changes there is computed here and carried to the hosts that it concerns, at once.

    watch ──▶ updates ──▶ Engine ──▶ hosts whose state changed ──▶ Carrier ──▶ the node action of the collection

Updates are taken at most once per minSyncPeriod, the first one at once, as kube-proxy does. Every host is asked once
per syncPeriod whether it still has what it got; that also keeps its connection open. Hosts are independent of each
other: one that fails waits for its next try, the others do not wait for it. Rules come first: what is to be confirmed
is confirmed once all hosts have theirs, or before half of its term is over.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..backends.state import State, delta
from ..bundle.archive import archive
from ..bundle.release import DeltaEntry, SigningFailed
from ..bundle.write import delta_parts, only_endpoints, sealed, write_bundle
from ..carry.workers import Carrier, CarrierGone
from ..choices import Choices
from ..cluster.snapshot import Snapshot
from ..cluster.watch import Update, Watch
from ..engine import Engine
from ..errors import UserError
from ..files import write_atomic
from ..locks import Lock
from ..plan.consent import Consent
from ..plan.history import UNREACHABLE
from ..plan.metrics import Freshness
from ..plan.removal_limit import ERODING_SECONDS, Frontends, Most, Ports, losses, service_ports
from ..proxy.facts import InvalidFacts, UnusableNode
from ..proxy.policy import Known, RefusedVips
from ..proxy.warned import Warned
from ..tasks.directory import WorkDirectory
from ..tasks.notes import About
from .host import Change, Host, Need

Say = Callable[..., None]
# What ends the loop: nothing can be carried or signed any more.
_FATAL = (CarrierGone, SigningFailed)

# Up to so many service ports, comparing every rule costs a node no more than a look at the markers.
SMALL = 300
# How long an end waits for what is under way; a node that was reached finishes anyway.
PATIENCE_SECONDS = 20.0
# How long others go before a confirmation, and before a question that nobody waits for.
CONFIRM_SECONDS = 15.0
CHECK_SECONDS = 60.0
LOCKED_RETRY_SECONDS = 1.0
METRICS_SECONDS = 1.0
TROUBLE_SECONDS = 10.0
REFRESH_SECONDS = 5.0
# After so many generations, those that no node has are forgotten.
FORGET_AFTER = 500


class Locked(UserError):
    """Somebody else follows this cluster with this working directory."""


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
        cluster: str = "default",
        textfile: Path | None = None,
        say: Say,
    ) -> None:
        self._watch, self._carrier, self._directory = watch, carrier, directory
        self._choices_of = choices
        self._consent = consent
        self._say = say
        self._cluster, self._textfile = cluster, textfile
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._hosts: dict[str, Host] = {}
        self._choices: Choices | None = None
        self._desired: Engine | None = None
        self._ahead: Engine | None = None  # for hosts that took a plan which others do not have
        self._update: Update | None = None
        self._digest = ""  # names the cluster that hosts shall have
        self._frontends = Frontends(directory.frontends)
        self._unlearned: dict[str, State] = {}
        self._learned = 0
        self._percents: dict[str, int] = {}  # host -> the share of its service ports that it may lose
        self._confirmed_always: set[str] = set()  # hosts that confirm changes of endpoints as well
        self._shrunken = ""  # why nothing is pushed, if that is so
        self._judged = False  # that is still true
        self._lock = Lock(directory.path / "schedule" / "lock")
        self._locked_out = False
        self._pushing: set[str] = set()
        self._observed: list[Callable[[Freshness], None]] = []
        self._metrics_at = self._trouble_at = self._refresh_at = 0.0
        self._refresh_wanted = False
        self._trouble = ""
        self._malformed = 0  # events that were told of
        self._warnings: tuple[str, ...] = ()
        self._min_period = 1.0
        self._period = 30.0
        self._settled = False

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
                time.sleep(max(0.0, began + self._min_period - time.monotonic()))
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
        """Until somebody stops it. What the user can mend is raised."""
        lock = Lock(self._directory.path / "watch.lock")
        if not lock.take():
            raise Locked(
                f"{lock.path}: another akp watch follows this cluster; end it, or choose another kube_proxy_dir"
            )
        for target in (self._follow_carrier, self._follow_watch):
            threading.Thread(target=target, daemon=True, name=target.__name__).start()
        try:
            going = True
            while going and not self._settled:
                going = self._turn(self._wait())
            # What there is now stays: to look for garbage in it would hold up a change for as long as it takes.
            gc.collect()
            gc.freeze()
            while going:
                going = self._turn(self._wait())
        finally:
            self._end()
            lock.give_back()

    def _wait(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        due = min((host.next_need() for host in self._hosts.values()), default=now + 1)
        if self._locked_out:
            due = min(due, now + LOCKED_RETRY_SECONDS)
        return max(0.0, min(due - now, 1.0))

    def _turn(self, seconds: float) -> bool:
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
            self._settings(what["settings"])
        elif "error" in what:
            self._say("inventory", problem=what["error"])
        else:
            self._answer(what["host"], what["result"])
        return True

    def _answer(self, name: str, result: Mapping[str, Any]) -> None:
        """What came of a task. Whatever a node said, it hurts that node alone."""
        try:
            self._result(name, result)
        except _FATAL:
            raise
        except Exception as error:
            self._hurt(name, f"what it answered cannot be used: {type(error).__name__}: {error}")

    def _hurt(self, name: str, reason: str) -> None:
        """A host failed."""
        host = self._hosts.get(name)
        if host is None:
            return
        self._pushing.discard(name)
        delay = host.failed(time.monotonic())
        problem = " ".join(reason.split())
        self._say("failed", host=name, tries=host.failures, again_in=round(delay, 1), problem=problem)
        self._observed.append(lambda fresh: fresh.failed(host.name, host.node, problem))

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
                    self._answer(what["host"], what["result"])
                elif kind == "error":
                    break
        self._learn()
        self._write_metrics()
        self._lock.give_back()

    def _finish(self) -> None:
        """Wait for what is under way, and confirm what was applied: nodes would go back to what was before."""
        began, told = time.monotonic(), False
        self._carrier.cancel()
        while busy := sorted(host.name for host in self._hosts.values() if host.busy is not Need.NOTHING or host.term):
            now = time.monotonic()
            terms = [host.term.until for host in self._hosts.values() if host.term]
            if now >= max([began + PATIENCE_SECONDS, *terms]):
                return
            # What had not begun is taken back within moments.
            if not told and now > began + 0.5:
                told = True
                self._say("ending", waiting_for=busy)
            for host in self._hosts.values():
                if host.need(now) is Need.CONFIRMATION:
                    self._confirm(host, 0.0)
            with contextlib.suppress(queue.Empty):
                kind, what = self._events.get(timeout=0.2)
                if isinstance(what, CarrierGone):
                    return
                if kind == "answer" and "host" in what:
                    self._answer(what["host"], what["result"])

    # -- what the cluster says

    def _updated(self, update: Update) -> None:
        self._update = update
        if self._desired is None:
            return
        if update.initial:
            counts = {
                "services": len(update.snapshot.services),
                "slices": len(update.snapshot.slices),
                "nodes": len(update.snapshot.nodes),
            }
            self._say("watching", **counts, hosts=len(self._hosts))
        if any(each.kind == "Node" and each.action != "changed" for each in update.changes):
            self._refresh_wanted = True
        change = Change(_text(update), update.received, tuple(sorted(update.triggered.values())))
        self._recompute(None if update.initial else change)

    def _recompute(self, change: Change | None) -> None:
        """What every host shall have now; those for which that changed get it."""
        if self._desired is None or self._update is None:
            return
        snapshot, waiting = self._consent.allowed(self._update.snapshot)
        try:
            self._desired.update(snapshot, Known(url=self._watch.url))
            self._update_ahead(self._update.snapshot)
            self._digest = self._update.digest
        except RefusedVips as error:
            self._say("refused", problem="; ".join(str(error).splitlines()))
            return
        warnings = (*waiting, *(each.text for each in self._desired.warnings))
        for warning in warnings:
            if warning not in self._warnings:
                self._say("warning", problem=warning)
        self._warnings = warnings
        for host in self._hosts.values():
            self._want(host, change)
        if change is not None and change.hosts == 0 and self._settled:
            self._say("change", what=change.text, hosts=0)

    def _update_ahead(self, snapshot: Snapshot) -> None:
        allowed = self._consent.ahead(snapshot)
        if allowed is None or self._choices is None:
            self._ahead = None
            return
        self._ahead = self._ahead or Engine(self._choices)
        self._ahead.update(allowed, Known(url=self._watch.url))

    def _desired_of(self, host: Host) -> Engine | None:
        """What it is computed with. Where the frontends that it has were not learned yet, nothing moved it."""
        name = self._frontends.name(host.last) if self._ahead is not None else ""
        if name:
            host.ahead = self._consent.took_plan(host.name, name)
        return self._ahead if self._ahead is not None and host.ahead else self._desired

    def _want(self, host: Host, change: Change | None) -> None:
        self._judged = False
        desired = self._desired_of(host)
        if desired is None or self._update is None or host.facts is None:
            return
        state, unusable = None, ""
        try:
            state = desired.state(host.node, host.facts)
            self._warn(host, desired.warnings_of(host.node, host.facts))
        except Exception as error:
            # Whatever a node says of itself, the others get what they shall have.
            known = isinstance(error, UnusableNode | InvalidFacts)
            unusable = str(error) if known else f"{type(error).__name__}: {error}"
        new = host.want(state)
        if unusable and unusable != host.unusable:
            self._say("unusable", host=host.name, problem=unusable)
        host.unusable = unusable
        if change is not None and new:
            change.waiting.add(host.name)
            change.hosts += 1
            host.changes.append(change)

    def _warn(self, host: Host, warnings: Iterable[Warned]) -> None:
        texts = tuple(each.text for each in warnings)
        for text in texts:
            if text not in host.warnings:
                self._say("warning", problem=text)
        host.warnings = texts

    # -- what Ansible says

    def _settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """The hosts of the inventory, and what the variables say."""
        try:
            choices = self._choices_of(next(iter(settings.values())))
            percents = {name: int(each.get("max_removed_percent", 100)) for name, each in settings.items()}
        except Exception as error:
            if self._choices is None:
                raise
            self._say("configuration", problem=str(error))
            choices, percents = self._choices, self._percents
        now = time.monotonic()
        for name in self._hosts.keys() - settings.keys():
            self._say("host", host=name, what="is not in the inventory any more")
            del self._hosts[name]
        new = sorted(settings.keys() - self._hosts.keys())
        if self._hosts and new:
            self._say("host", host=", ".join(new), what="new in the inventory")
        for name, values in settings.items():
            node = str(values.get("node_name") or name)
            if name not in self._hosts or self._hosts[name].node != node:
                last = (self._directory.answer(name) or {}).get("status") or {}
                self._hosts[name] = Host(name, node, check_at=now, last=str(last.get("generation") or ""))
        self._percents, self._judged = percents, False
        self._confirmed_always = {name for name, each in settings.items() if each.get("confirm_endpoints")}
        if choices != self._choices:
            first = self._choices is None
            self._choices = choices
            self._min_period, self._period = choices.proxy.min_sync_period, choices.proxy.sync_period
            self._desired, self._ahead = Engine(choices), None
            if first and self._update is not None:
                self._updated(self._update)
            elif not first:
                self._recompute(Change("the configuration", time.time(), ()))

    def _result(self, name: str, result: Mapping[str, Any]) -> None:
        self._pushing.discard(name)
        host = self._hosts.get(name)
        if host is None:
            return
        what, now = host.busy, time.monotonic()
        if result.get("cancelled"):
            host.dropped()
        elif result.get("failed") or result.get("unreachable"):
            unreachable = UNREACHABLE if result.get("unreachable") else ""
            self._hurt(name, unreachable + str(result.get("msg") or "failed"))
        elif what is Need.QUESTION:
            self._answered(host, result, now)
        elif result.get("need"):
            self._say("whole", host=name, problem=str(result.get("reason")))
            host.needs_whole()
        elif what is Need.CONFIRMATION:
            term = host.confirmed()
            if term is not None:
                self._say("pushed", host=name, how=term.how.value, changed=term.changed, generation=host.recorded)
            self._confirmed(host)
        elif host.applied(str(result.get("generation") or ""), now + self._period):
            host.landed = time.time()
            host.log = int(result.get("deltas") or 0)
            changed = bool(result.get("changed"))
            if result.get("confirm"):
                until = now + float(result.get("confirm_within") or 0)
                host.waits(str(result["confirm"]), str(result.get("previous") or ""), until, changed=changed)
                self._pushing.add(name)
            else:
                self._say("pushed", host=name, how=what.value, changed=changed, generation=host.recorded)
                self._confirmed(host)

    def _answered(self, host: Host, result: Mapping[str, Any], now: float) -> None:
        had, facts, last = host.has, host.facts, host.last
        recovered = host.silent
        # Not all at the same moment.
        spread = self._period * (sorted(self._hosts).index(host.name) / len(self._hosts)) if facts is None else 0.0
        host.answered(result, now + self._period + spread)
        self._judged = False
        if last != host.last:
            # What somebody else gave it, or took back, is meant.
            host.most = Most()
        if facts != host.facts or (self._ahead is not None and last != host.last):
            self._want(host, None)
        if recovered:
            self._say("answers", host=host.name)
        if had is not None and host.has is None:
            state = str(result.get("state"))
            differences = len(result.get("differences") or ())
            self._say("drift", host=host.name, state=state, differences=differences)
        if not host.stale and host.has is not None:
            host.landed = time.time()
            self._confirmed(host)

    def _confirmed(self, host: Host) -> None:
        """The host has what was sent, or what it shall have."""
        when = time.time()
        host.well()
        if host.has is not None:
            self._unlearned[host.name] = host.has
        generation = host.has.generation if host.has else ""
        self._observed.append(lambda fresh: fresh.confirmed(host.name, host.node, generation, when))
        for change in host.arrived():
            self._observed += [
                lambda fresh, seconds=host.landed - each: fresh.programmed(max(0.0, seconds))  # type: ignore[misc]
                for each in change.triggered
            ]
            change.landed = max(change.landed, host.landed)
            change.waiting.discard(host.name)
            if not change.waiting:
                took, confirmed = (round(each - change.received, 3) for each in (change.landed, when))
                self._say("change", what=change.text, hosts=change.hosts, seconds=took, confirmed=confirmed)
        if not self._settled and not any(map(_unsettled, self._hosts.values())):
            self._settled = True
            self._say("settled", hosts=len(self._hosts))

    # -- what is done

    def _dispatch(self) -> None:
        now = time.monotonic()
        if self._shrunken:
            self._shrinks()
        for host in self._hosts.values():
            try:
                self._serve(host, now)
            except _FATAL:
                raise
            except Exception as error:
                self._hurt(host.name, f"{type(error).__name__}: {error}")

    def _serve(self, host: Host, now: float) -> None:
        """Give a host what it needs now."""
        need = host.need(now)
        if need in (Need.DELTA, Need.BUNDLE, Need.SNAPSHOT) and self._shrinks():
            # Somebody may give it to the host, who may.
            need = Need.QUESTION if now >= host.check_at else Need.NOTHING
        if need is Need.NOTHING:
            return
        if need is Need.CONFIRMATION:
            self._confirm(host, 0.0 if host.stale else CONFIRM_SECONDS)
        elif need is Need.QUESTION:
            # After a delta a node takes a long look only if it is told to.
            deep = host.stepped and host.has is not None and len(host.has.fragments) <= SMALL
            urgent = host.ask or host.facts is None
            host.sending(need)
            arguments = {"state": "gathered", **({"verify": True} if deep else {})}
            self._carrier.submit(host.name, arguments, patience=0.0 if urgent else CHECK_SECONDS)
        elif self._may_push():
            self._push(host, need)

    def _shrinks(self) -> bool:
        """Whether a host would lose more service ports than it may: then none is pushed to."""
        if not self._judged:
            told = losses(dict(self._steps()))
            if told and told != self._shrunken:
                self._say(
                    "refused",
                    problem=f"{told}, of what there was within {ERODING_SECONDS / 60:.0f} minutes. If that is meant, "
                    "run sync_services with kube_proxy_max_removed_percent=100, or set it in the inventory and reload "
                    "(SIGHUP)",
                )
            elif self._shrunken and not told:
                self._say("allowed")
            self._shrunken, self._judged = told, True
        return bool(self._shrunken)

    def _steps(self) -> Iterator[tuple[str, tuple[Ports, Ports, int]]]:
        """Of each host that what it has is known of: its service ports now and then, and the share it may lose."""
        for host in self._hosts.values():
            percent = self._percents.get(host.name, 100)
            if percent >= 100 or not host.last or (host.facts is not None and not host.stale):
                continue
            has, after = self._ports_of(host), self._wanted_of(host)
            if has is not None and after is not None:
                before = host.most.of(has, time.monotonic())
                yield host.name, (before, service_ports(after.fragments), percent)

    def _ports_of(self, host: Host) -> Ports | None:
        for known in (host.given, host.has):
            if known is not None and known.generation == host.last:
                return service_ports(known.fragments)
        return self._frontends.ports(host.last)

    def _wanted_of(self, host: Host) -> State | None:
        """What it shall have; of one that has not answered yet, as far as it answered before."""
        desired = self._desired_of(host)
        if host.facts is not None or desired is None or self._update is None:
            return host.wanted
        try:
            return desired.state(host.node, (self._directory.answer(host.name) or {}).get("facts"))
        except Exception:
            return None  # when it has answered, it is told why

    def _learn(self) -> None:
        """Keep what hosts have been given, to compare it with what comes after a restart."""
        unlearned, self._unlearned = self._unlearned, {}
        if self._choices is None:
            return
        for state in unlearned.values():
            self._frontends.learn(state, self._choices.frontends_text)
        self._learned += len(unlearned)
        if self._learned > FORGET_AFTER:
            self._learned = 0
            self._frontends.forget(self._directory.recorded() | {host.last for host in self._hosts.values()})

    def _confirm(self, host: Host, patience: float) -> None:
        """Tell a host that what it was given stays."""
        term = host.term
        if term is None:
            return
        left = max(1.0, term.until - time.monotonic())
        arguments: dict[str, Any] = {"state": "confirmed", "token": term.token, "generation": term.previous}
        host.sending(Need.CONFIRMATION)
        patience = min(patience, left / 4)
        # What it waits for its turn is missing to its term.
        arguments["confirm_within"] = int(left - patience)
        self._carrier.submit(host.name, arguments, patience=patience)

    def _may_push(self) -> bool:
        """Whether no scheduled run is at it, and none that follows a plan. Then every host is asked what that left."""
        planned = self._consent.under_way
        if planned or not self._lock.take():
            if not self._locked_out:
                why = "a plan is being followed" if planned else f"{self._lock.path}: a scheduled run goes on"
                self._say("waiting", problem=why)
            self._locked_out = True
            return False
        if self._locked_out:
            self._locked_out = False
            for host in self._hosts.values():
                host.ask = True
            return False
        return True

    def _push(self, host: Host, need: Need) -> None:
        arguments: dict[str, Any] = {"state": "applied", "confirm": False}
        wanted, has = host.wanted, host.has
        if wanted is None:
            return
        if need is Need.DELTA and has is not None:
            change = delta(has, wanted)
            if change.needs_full:
                need = Need.BUNDLE
            else:
                file = self._directory.path / "deltas" / host.node
                file.parent.mkdir(mode=0o700, exist_ok=True)
                digest, files = sealed(delta_parts(change, wanted))
                signed = self._consent.signed(DeltaEntry(wanted.node, change.base, change.generation, digest))
                # To replace a file waits for the disk; to make one does not, and nobody reads the last one any more.
                file.unlink(missing_ok=True)
                write_atomic(file, archive([*signed, *files]))
                arguments["delta"] = str(file)
                # A change of endpoints cannot cut the control host off.
                if host.name not in self._confirmed_always and only_endpoints(name for name, _data in files):
                    arguments["confirm_within"] = 0
        if need in (Need.BUNDLE, Need.SNAPSHOT):
            write_bundle(wanted, self._directory.bundles / host.node)
            self._consent.lay_down(self._directory.bundles / host.node)
            arguments["snapshot"] = need is Need.SNAPSHOT
        had = self._ports_of(host)
        if had is None or self._percents.get(host.name, 100) >= 100:
            host.most = Most()
        else:
            host.most.had(had, time.monotonic())
        host.sending(need)
        self._pushing.add(host.name)
        self._carrier.submit(host.name, arguments, about=About(self._digest))

    def _housekeeping(self) -> None:
        now = time.monotonic()
        if not self._pushing:
            self._lock.give_back()
            if self._unlearned:
                self._learn()
        if self._refresh_wanted and now >= self._refresh_at:
            self._refresh_wanted, self._refresh_at = False, now + REFRESH_SECONDS
            self._carrier.refresh()
        if self._consent.renewed and self._update is not None and self._desired is not None:
            self._recompute(Change("what was approved", time.time(), ()))
        if now >= self._trouble_at:
            self._trouble_at = now + TROUBLE_SECONDS
            trouble = self._watch.trouble
            if trouble:
                self._say("api", problem=trouble)
            elif self._trouble:
                self._say("api", what="answers again")
            self._trouble = trouble
        if self._watch.malformed != self._malformed:
            self._malformed = self._watch.malformed
            self._say("api", problem=f"{self._malformed} events that are none, the last: {self._watch.last_malformed}")
        if now >= self._metrics_at and self._observed:
            self._metrics_at = now + METRICS_SECONDS
            self._write_metrics()

    def _write_metrics(self) -> None:
        observed, self._observed = self._observed, []
        if not observed:
            return
        try:
            with Freshness(self._directory, self._cluster) as fresh:
                for each in observed:
                    each(fresh)
                if self._textfile is not None:
                    fresh.write(self._textfile)
        except OSError as error:
            self._say("metrics", problem=f"{error.filename}: {error.strerror}")


def _unsettled(host: Host) -> bool:
    """Whether it has not yet what it shall have, for good."""
    return host.stale or host.facts is None or host.term is not None


def _text(update: Update) -> str:
    """The changes of an update, for people; the names of the first few."""
    names = [f"{each.kind} {f'{each.namespace}/' if each.namespace else ''}{each.name}" for each in update.changes]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
