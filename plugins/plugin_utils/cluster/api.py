# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The API server: complete, consistent lists of what rules depend on, or an error that says why there is none.

The kubernetes package finds and refreshes credentials and makes the connection; the data is read as plain JSON, page
by page, because turning it into that package's classes would take longer than everything else together.
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
import random
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeAlias

from .. import __version__
from ..texts import shortened, visible
from .access import Access, open_transport
from .record import CONFIGURATION_KEY, Listing, Record, item_of
from .refusals import Expired, Forbidden, Malformed, NotServed, Unreachable, refusal
from .resources import CONFIGURATION, ENDPOINT_SLICES, ENDPOINTS, RESOURCES, SERVICE_CIDRS, Resource
from .transport import Transport, TransportError
from .trigger import trigger_text

# Pages keep the server's memory and ours flat; larger ones were no faster.
PAGE_SIZE = 500
# Of one list. A server that goes on beyond these has no end; its own memory of a list ends after five minutes.
MOST_OBJECTS = 2_000_000
MOST_PAGES = 20_000
LIST_SECONDS = 900.0
ATTEMPTS = 5
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
AGENT = f"agentless-kube-proxy/{__version__}"
Query: TypeAlias = list[tuple[str, str]]
_EVENTS = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR")
_RETRIED = (408, 429, 500, 502, 503, 504)


class Api:
    """A connection to an API server."""

    def __init__(self, transport: Transport, *, timeout: float = 60.0, sleep: Callable[[float], None] = time.sleep):
        self._transport = transport
        self._timeout = timeout
        self._sleep = sleep
        self.url = transport.url
        self.requests = 0

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that is under way."""
        self._transport.close()

    def record(self, progress: Callable[[str], None] = lambda _name: None) -> Record:
        """All five lists, complete, and of one moment wherever the server can still tell."""
        lists: list[Listing] = []
        at = ""
        for resource in RESOURCES:
            progress(resource.name)
            lists.append(self._list_served(resource, at, self.list))
            at = at or lists[0].resource_version
        return Record(tuple(lists), self.url)

    def record_at(self, resource_version: str) -> Record:
        """All five lists as they were at a resourceVersion, for runs that must all see the same; or Expired."""
        try:
            lists = [self._list_served(resource, resource_version, self._list_once) for resource in RESOURCES]
        except Expired as error:
            raise Expired(
                f"{error} The cluster as it was at resourceVersion {resource_version} cannot be read any more "
                "(a server keeps about five minutes): read it anew, and give its resourceVersion to all runs"
            ) from error
        return Record(tuple(lists), self.url)

    def configuration(self) -> str:
        """The configuration of the cluster's own kube-proxy, as text; NotServed if there is none."""
        data = self._get(CONFIGURATION, "get", [])
        try:
            text = json.loads(data)["data"].get(CONFIGURATION_KEY)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise Malformed(f"{self.url}: {CONFIGURATION.only} is no ConfigMap with data: {error!r}") from error
        if not isinstance(text, str) or not text.strip():
            raise NotServed(f"{self.url}: the ConfigMap {CONFIGURATION.only} has no {CONFIGURATION_KEY}")
        return text

    def configuration_if(self, wanted: str) -> str:
        """The same if it `must` be known; if it `may`, empty where there is none or RBAC does not grant it."""
        try:
            return self.configuration() if wanted else ""
        except (Forbidden, NotServed):
            if wanted == "must":
                raise
            return ""

    def list_served(self, resource: Resource) -> Listing:
        """One complete list, of the version that the server has; empty where it may be missing and is."""
        return self._list_served(resource, "", self.list)

    def _list_served(self, resource: Resource, at: str, read: Callable[[Resource, str], Listing]) -> Listing:
        try:
            return read(resource, at)
        except (Forbidden, NotServed) as error:
            if resource is ENDPOINTS:
                # A role without them is one of an operator whose Services all have EndpointSlices.
                return Listing(resource.kind, resource.api_version, "", ())
            if resource is not SERVICE_CIDRS or isinstance(error, Forbidden):
                raise
        # ServiceCIDRs are younger than the rest: v1 since 1.33, v1beta1 since 1.31. Without them the list is empty.
        try:
            return read(dataclasses.replace(resource, version="v1beta1"), at)
        except NotServed:
            return Listing(resource.kind, resource.api_version, "", ())

    def list(self, resource: Resource, at: str = "") -> Listing:
        """One complete list, at a resourceVersion if it is given and the server still has it, else the latest."""
        for attempt in range(1, ATTEMPTS):
            try:
                return self._list_once(resource, at)
            except Expired:
                # Either the state we asked for is gone or the pages took longer than the server remembers.
                self._backoff(attempt)
                at = ""
        return self._list_once(resource, at)

    def _list_once(self, resource: Resource, at: str) -> Listing:
        items: list[tuple[tuple[str, str], str]] = []
        triggers: dict[str, str] = {}
        query = [*resource.selectors, ("limit", str(PAGE_SIZE))]
        first = [("resourceVersion", at), ("resourceVersionMatch", "Exact")] if at else []
        pages, began = 0, time.monotonic()
        with ThreadPoolExecutor(1) as fetcher:
            pending: Future[dict[str, Any]] = fetcher.submit(self._page, resource, [*query, *first])
            while True:
                page = pending.result()
                metadata = page["metadata"]
                following = metadata.get("continue") or ""
                pages += 1
                if following:
                    self._check_end(resource, pages, len(items) + len(page["items"]), time.monotonic() - began)
                    # The server works on the next page while this one is read.
                    pending = fetcher.submit(self._page, resource, [*query, ("continue", following)])
                for item in page["items"]:
                    named = item["metadata"]
                    key = (named.get("namespace") or "", named["name"])
                    text = self._text(resource, item)
                    items.append((key, text))
                    if trigger := trigger_text(named) if resource.kind == ENDPOINT_SLICES.kind else "":
                        triggers[text] = trigger
                if not following:
                    break
        items.sort()
        version = str(metadata.get("resourceVersion") or "")
        return Listing(resource.kind, resource.api_version, version, tuple(text for _key, text in items), triggers)

    def _check_end(self, resource: Resource, pages: int, objects: int, seconds: float) -> None:
        """Unreachable if there is to be another page of a list that should have ended."""
        for count, most, what in (
            (objects, MOST_OBJECTS, "objects"),
            (pages, MOST_PAGES, "pages"),
            (seconds, LIST_SECONDS, "seconds"),
        ):
            if count > most:
                raise Unreachable(
                    f"{self.url}: the list of {resource.name} has no end: it goes on after {most:,g} {what}"
                )

    def _text(self, resource: Resource, item: dict[str, Any]) -> str:
        try:
            return item_of(resource.kind, item)
        except (RecursionError, TypeError, ValueError) as error:
            raise Malformed(f"{self.url}: the list of {resource.name} holds what cannot be read: {error}") from error

    def _page(self, resource: Resource, query: Query) -> dict[str, Any]:
        """One page, whole; everything that later steps rely on is checked here."""
        what = f"list of {resource.name}"
        for attempt in range(1, ATTEMPTS + 1):
            data = self._get(resource, "list", query)
            try:
                page = json.loads(data)
                if page["kind"] != f"{resource.kind}List":
                    raise Unreachable(
                        f"{self.url}: answered the {what} with a {visible(shortened(str(page['kind']), 60))}"
                    )
                if not isinstance(page["metadata"], dict):
                    raise TypeError("metadata is no mapping")
                if not isinstance(page["metadata"].get("continue") or "", str):
                    raise TypeError("metadata.continue is no text")
                page["items"] = page.get("items") or []
                if not isinstance(page["items"], list):
                    raise TypeError("items is no list")
                for item in page["items"]:
                    _check_names(item)
                return dict(page)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                if attempt == ATTEMPTS:
                    raise Unreachable(f"{self.url}: the {what} is no list of objects: {error}") from error
                self._backoff(attempt)
        raise AssertionError("unreachable")

    def _get(self, resource: Resource, verb: str, query: Query) -> bytes:
        """The body of a good answer; what may heal by itself is tried again."""
        url = f"{resource.path}?{urllib.parse.urlencode(query)}" if query else resource.path
        for attempt in range(1, ATTEMPTS + 1):
            self.requests += 1
            try:
                status, headers, data = self._transport.get(url, self._timeout)
            except TransportError as broken:
                if attempt == ATTEMPTS or not broken.may_heal:
                    raise Unreachable(f"{self.url}: {broken}") from broken
                self._backoff(attempt)
                continue
            if status == 200:
                return data
            error = refusal(self.url, resource, verb, status, data)
            if status not in _RETRIED or isinstance(error, Expired) or attempt == ATTEMPTS:
                raise error
            self._backoff(attempt, headers.get("Retry-After"))
        raise AssertionError("unreachable")

    def _backoff(self, attempt: int, retry_after: str | None = None) -> None:
        asked = _seconds(retry_after)
        delay = FIRST_DELAY * 2 ** (attempt - 1) * random.uniform(0.8, 1.2) if asked is None else asked
        self._sleep(min(delay, LONGEST_DELAY))

    def watch(
        self,
        resource: Resource,
        resource_version: str,
        seconds: float,
        grace: float = 10.0,
        opened: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """(type, object) of every event after a resourceVersion, bookmarks included, until the time is over.

        A server that neither says anything nor ends the watch in time, and some, is taken for gone. `opened` is called
        once the server has agreed.
        """
        query = [
            *resource.selectors,
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(max(1, round(seconds)))),
        ]
        url = f"{resource.path}?{urllib.parse.urlencode(query)}"
        try:
            with self._transport.stream(url, seconds + grace) as (status, lines):
                if status != 200:
                    raise refusal(self.url, resource, "watch", status, next(iter(lines), b""))
                opened()
                for line in lines:
                    kind, obj = self._event(resource, line)
                    if kind == "ERROR":
                        code = obj.get("code")
                        code = code if isinstance(code, int) else 500
                        raise refusal(self.url, resource, "watch", code, json.dumps(obj).encode())
                    yield kind, obj
        except (TransportError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise Unreachable(f"{self.url}: the watch of {resource.name} broke: {error}") from error

    def _event(self, resource: Resource, line: bytes) -> tuple[str, dict[str, Any]]:
        """Type and object of an event; everything that later steps rely on is checked here."""
        try:
            event = json.loads(line)
            kind, obj = event["type"], event["object"]
            if kind not in _EVENTS:
                raise TypeError("its type is none of " + ", ".join(_EVENTS))
            if not isinstance(obj, dict):
                raise TypeError("its object is no mapping")
            if kind not in ("ERROR", "BOOKMARK"):
                _check_names(obj)
            if kind != "ERROR" and obj.get("kind", resource.kind) != resource.kind:
                raise TypeError(f"its object is no {resource.kind}")
            if kind != "ERROR" and not isinstance((obj.get("metadata") or {}).get("resourceVersion") or "", str):
                raise TypeError("metadata.resourceVersion is no text")
        except json.JSONDecodeError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            said = visible(shortened(line.decode("utf-8", "replace"), 200))
            raise Malformed(
                f"{self.url}: the watch of {resource.name} told of what is no event: {error!r}: {said}"
            ) from error
        return kind, obj


def _check_names(item: dict[str, Any]) -> None:
    """TypeError unless an object is called as objects are."""
    named = item["metadata"]
    if not isinstance(named["name"], str) or not named["name"]:
        raise TypeError("an object has no name")
    if not isinstance(named.get("namespace") or "", str):
        raise TypeError("an object has a namespace that is no text")


def connect(access: Access, *, timeout: float = 60.0) -> Api:
    """A connection with the credentials that the user has."""
    return Api(open_transport(access, AGENT), timeout=timeout)


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After: seconds or a date."""
    if not retry_after:
        return None
    if re.fullmatch("[0-9]{1,9}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (OverflowError, TypeError, ValueError):
        return None
