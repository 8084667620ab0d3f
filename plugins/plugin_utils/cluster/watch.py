# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The cluster as it is now: the five lists, and then every change of them, for as long as the caller wants.

    with Watch(lambda: connect(access)) as watch:
        while True:
            update = watch.next(timeout=30.0)       # blocks; None if nothing that matters happened in that time
            if update is not None:
                update.initial                      # True once, when all five lists are complete
                update.changes                      # (ObjectChange(kind, namespace, name, action), …), sorted
                update.snapshot                     # Snapshot of now; what did not change is the same object as before
                update.received, update.triggered   # when the oldest of it was heard of, and what caused it

`next` gives everything since the last call as one update, so a caller that acts at most once a second just does not
call more often. What changed and changed back in between is not told; an event that no rule depends on never ends the
wait. In asyncio: `await asyncio.to_thread(watch.next, 5.0)`. `watch.trouble` says why what is known may be old.
`watch.malformed` counts events that are none; after each of them the whole list is read again.

A `base` is a Record that the caller has seen already: the first update then tells what is different from it, without
an initial one. With `strict`, a missing right ends the watch at any time and not only at the beginning.

Five threads follow a resource each. A watch that ends goes on from its last resourceVersion; one whose past the server
has forgotten (410) starts with the whole list again, which is compared with what was known. A connection that breaks,
or that is silent for longer than a watch lasts, is made anew, with credentials read anew: a token that was rotated and
an API server that restarted are the same case.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from .access import InvalidAccess
from .api import Api
from .record import Listing, Record
from .refusals import ApiError, Expired, Forbidden, Malformed, NotServed, Unauthorized
from .resources import RESOURCES, Resource
from .slices import LABEL_SERVICE_NAME
from .snapshot import Snapshot
from .store import Entry, ObjectChange, Store, key_of, read_listing, read_object
from .trigger import trigger_text, trigger_time

__all__ = ["ObjectChange", "Update", "Watch", "wait_for_change"]

# How long one watch lasts. A connection that died without a word is noticed no later than this and GRACE_SECONDS.
WATCH_SECONDS = 60.0
GRACE_SECONDS = 10.0
RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 5.0
# A resource that the server does not have may come with its next version.
UNSERVED_SECONDS = 600.0

T = TypeVar("T")
Fatal = Forbidden | NotServed | Unauthorized | InvalidAccess


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What happened since the update before."""

    initial: bool
    changes: tuple[ObjectChange, ...]
    snapshot: Snapshot
    received: float  # seconds since the epoch: when the oldest of the changes was heard of
    triggered: Mapping[tuple[str, str], float]  # namespace, Service -> when the oldest change of its endpoints began
    digest: str  # of the snapshot, as a record of it has


class _Wire:
    """The connection that all threads share; a broken one is replaced once, by the thread that notices first."""

    def __init__(self, connect: Callable[[], Api]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._api: Api | None = None
        self.url = ""

    def api(self) -> Api:
        with self._lock:
            if self._api is None:
                self._api = self._connect()
                self.url = self._api.url
            return self._api

    def drop(self, broken: Api | None) -> None:
        """Have the next one who asks make a new one. Watches that are well on the old one stay there."""
        with self._lock:
            if self._api is broken:
                self._api = None

    def close(self) -> None:
        with self._lock:
            if self._api is not None:
                self._api.close()
            self._api = None


class Watch:
    """A cluster that is watched; see the text of this module."""

    def __init__(
        self,
        connect: Callable[[], Api],
        *,
        base: Record | None = None,
        strict: bool = False,
        seconds: float = WATCH_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._wire = _Wire(connect)
        self._strict = strict
        self._seconds = seconds
        self._grace = grace
        self._news = threading.Condition()
        self._stopped = threading.Event()
        # Everything from here on belongs to who holds the condition.
        self._store = Store()
        self._listings: tuple[Listing, ...] = ()
        self._fatal: Exception | None = None
        self.malformed = 0  # events that were none
        self.last_malformed = ""  # what was wrong with the last of them
        self._troubles: dict[str, tuple[float, Exception]] = {}
        self._initial = base is None
        self._last = 0.0
        self._received = 0.0
        self._triggered: dict[tuple[str, str], float] = {}
        if base is not None:
            for listing in base.lists:
                self._store.replace(listing.kind, read_listing(listing))
            self._store.take()
            self._listings = base.lists

    def __enter__(self) -> Watch:
        self._start("watch", self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it; a `next` that waits gives None."""
        self._stopped.set()
        with self._news:
            self._news.notify_all()
        self._wire.close()

    @property
    def url(self) -> str:
        """Where the API server is; empty before the first connection."""
        return self._wire.url

    @property
    def trouble(self) -> str:
        """Why what is known may be old, and since when; empty if all five watches are well."""
        with self._news:
            if not self._troubles:
                return ""
            since, error = min(self._troubles.values(), key=lambda each: each[0])
        return f"for {time.monotonic() - since:.0f} s: {error}"

    def raise_trouble(self) -> None:
        """Raise what is the matter, if something is."""
        with self._news:
            for _since, error in self._troubles.values():
                raise error

    def next(self, timeout: float | None = None, *, settle: float = 0.0) -> Update | None:
        """Everything since the last call, as soon as there is something; None if the time is over.

        With `settle`, more is collected until there was nothing for so long, for at most ten times that.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._news:
            while True:
                if self._stopped.is_set():
                    return None
                if self._fatal is not None:
                    raise self._fatal
                now = time.monotonic()
                end = deadline
                if self._ready:
                    first = now - (time.time() - self._received)
                    end = now if self._initial else min(self._last + settle, first + 10 * settle)
                    end = end if deadline is None else min(end, deadline)
                    if end <= now:
                        return self._take()
                elif end is not None and end <= now:
                    return None
                self._news.wait(None if end is None else end - now)

    @property
    def _ready(self) -> bool:
        return bool(self._listings) and (self._initial or self._store.pending)

    def _take(self) -> Update:
        initial, changes = self._initial, tuple(self._store.take())
        triggered, self._triggered = self._triggered, {}
        received, self._received = self._received, 0.0
        self._initial = False
        told, when = () if initial else changes, received or time.time()
        return Update(initial, told, self._store.snapshot(), when, triggered, self._store.digest())

    # -- the threads

    def _begin(self) -> None:
        """The five lists, of one moment where the server can tell; then a thread for each."""
        if not self._listings:
            lists = self._persist("lists", _lists)
            if lists is None:
                return
            read = [(listing, read_listing(listing)) for listing in lists]
            with self._news:
                for listing, entries in read:
                    self._store.replace(listing.kind, entries)
                self._store.take()
                self._listings = lists
                self._received = time.time()
                self._news.notify_all()
        known = {listing.kind: listing for listing in self._listings}
        for resource in RESOURCES:
            self._start(resource.name, partial(self._follow, resource, known.get(resource.kind)))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """A thread. If it ends by a mistake of ours, so does the watch: standing still would look like silence."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                with self._news:
                    self._fatal = error
                    self._news.notify_all()

        threading.Thread(target=run, daemon=True, name=name).start()

    def _follow(self, resource: Resource, known: Listing | None) -> None:
        """One resource, until the end."""
        version = known.resource_version if known else ""
        api_version = known.api_version if known else resource.api_version
        short = 0
        while not self._stopped.is_set():
            if not version:
                listing = self._persist(resource.name, partial(Api.list_served, resource=resource))
                if listing is None:
                    return
                self._replace(listing)
                version, api_version = listing.resource_version, listing.api_version
                if not version:
                    self._stopped.wait(UNSERVED_SECONDS)
                    continue
            served = dataclasses.replace(resource, version=api_version.rpartition("/")[2])
            began = time.monotonic()
            version = self._events(served, version)
            # A server that ends every watch at once must not keep us busy.
            short = short + 1 if time.monotonic() - began < 1 else 0
            if short > 1:
                self._stopped.wait(_delay(short - 1))

    def _events(self, resource: Resource, version: str) -> str:
        """The events of one watch; the resourceVersion that the next one goes on from, empty if it cannot."""
        api: Api | None = None
        try:
            api = self._wire.api()
            well = partial(self._well, resource.name)
            for event, obj in api.watch(resource, version, self._seconds, self._grace, well):
                if event != "BOOKMARK":
                    entry = None if event == "DELETED" else read_object(obj, resource.kind, resource.api_version)
                    self._put(resource.kind, obj, entry)
                version = str((obj.get("metadata") or {}).get("resourceVersion") or version)
        except Expired:
            return ""
        except Malformed as error:
            return self._malformed(resource, error)
        except (ApiError, InvalidAccess) as error:
            # What was heard before the connection broke is heard; the next watch goes on after it.
            self._trouble(resource.name, error, api)
        except Exception as error:
            # What an object holds must not end the watch: the whole list tells what it is now.
            return self._malformed(resource, Malformed(f"{resource.name}: {type(error).__name__}: {error}"))
        return version

    def _malformed(self, resource: Resource, error: Malformed) -> str:
        """Count an event that is none; no resourceVersion to go on from, so that all is listed again."""
        with self._news:
            self.malformed += 1
            self.last_malformed = str(error)
        self._trouble(resource.name, error, None)
        return ""

    def _persist(self, name: str, work: Callable[[Api], T]) -> T | None:
        """Do something until it succeeds; None if the watch ended before."""
        failed = 0
        while not self._stopped.is_set():
            api: Api | None = None
            try:
                api = self._wire.api()
                result = work(api)
                self._well(name)
                return result
            except (ApiError, InvalidAccess) as error:
                failed += 1
                self._trouble(name, error, api)
                self._stopped.wait(_delay(failed))
        return None

    def _trouble(self, name: str, error: Exception, api: Api | None) -> None:
        if not isinstance(error, Forbidden | Malformed | NotServed):
            self._wire.drop(api)
        with self._news:
            since = self._troubles[name][0] if name in self._troubles else time.monotonic()
            self._troubles[name] = (since, error)
            if isinstance(error, Fatal) and (self._strict or not self._listings):
                self._fatal = error
                self._news.notify_all()

    def _well(self, name: str) -> None:
        if name in self._troubles:
            with self._news:
                self._troubles.pop(name, None)

    def _replace(self, listing: Listing) -> None:
        entries = read_listing(listing)
        with self._news:
            if self._store.replace(listing.kind, entries):
                self._noticed()

    def _put(self, kind: str, obj: dict[str, Any], entry: Entry | None) -> None:
        trigger = _trigger(kind, obj) if entry is not None else None
        with self._news:
            if self._store.put(key_of(kind, obj), entry):
                if trigger is not None:
                    service, when = trigger
                    self._triggered[service] = min(when, self._triggered.get(service, when))
                self._noticed()

    def _noticed(self) -> None:
        self._last = time.monotonic()
        self._received = self._received or time.time()
        self._news.notify_all()


def _lists(api: Api) -> tuple[Listing, ...]:
    return api.record().lists


def _delay(failed: int) -> float:
    longest: float = min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2 ** min(failed - 1, 10))
    return longest * random.uniform(0.8, 1.2)


def _trigger(kind: str, obj: Mapping[str, Any]) -> tuple[tuple[str, str], float] | None:
    """The Service whose endpoints an object holds, and when the change of them began, if it says so."""
    metadata = obj.get("metadata") or {}
    labels = metadata.get("labels")
    service = metadata.get("name") if kind == "Endpoints" else None
    if kind == "EndpointSlice" and isinstance(labels, dict):
        service = labels.get(LABEL_SERVICE_NAME)
    when = trigger_time(trigger_text(metadata))
    if when is None or not isinstance(service, str):
        return None
    return (str(metadata.get("namespace") or ""), service), when


def wait_for_change(
    connect: Callable[[], Api], base: Record | None, *, timeout: float, settle: float = 0.0
) -> list[ObjectChange]:
    """Block until facts differ from those of a record, or until the time is over; what differs, perhaps nothing.

    After the first change more are collected until there was none for `settle` seconds, for at most ten times as long.
    Without a record, what the API server has now is what was known.
    """
    deadline = time.monotonic() + timeout
    with Watch(connect, base=base, strict=True) as watch:
        update = watch.next(timeout, settle=settle)
        if update is not None and update.initial:
            update = watch.next(max(0.0, deadline - time.monotonic()), settle=settle)
        if update is not None:
            return list(update.changes)
        watch.raise_trouble()
    return []
