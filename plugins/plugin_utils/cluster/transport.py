# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The wire to the API server: HTTP with limits of time and size, whatever the other end does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..texts import shortened, visible

# An event is one object, and those have at most a few megabytes. A page has 500 of them.
_LONGEST_LINE = 64 * 1024 * 1024
_LARGEST_BODY = 512 * 1024 * 1024
_CHUNK = 256 * 1024
# A body may come in pieces, each within the time for one; all of it takes no longer than so many times that.
_WHOLE_TIMEOUTS = 5
_CONNECT_SECONDS = 10.0
# Where a socket has no timeout.
_HEADER_SECONDS = 60.0


class TransportError(Exception):
    """A request that got no whole answer."""

    def __init__(self, reason: str, *, may_heal: bool) -> None:
        super().__init__(reason)
        self.may_heal = may_heal


class Transport:
    """HTTP with the user's TLS settings and credentials."""

    def __init__(self, configuration: Any, pool: Any, headers: Iterable[tuple[str, str]], close: Callable[[], None]):
        import urllib3

        self._urllib3 = urllib3
        self._configuration = configuration
        self._pool = pool
        pool.pool_classes_by_scheme = _bounded_pools(urllib3)
        self._headers = list(headers)
        self._close = close
        self._streams: set[Any] = set()
        self.url = str(configuration.host).rstrip("/")

    def close(self) -> None:
        """Give the connections back, end streams, and remove the key files that were written for them."""
        for answer in list(self._streams):
            # Another thread waits for its next line; whatever state it is in, it ends.
            with contextlib.suppress(Exception):
                answer.shutdown()
        self._pool.clear()
        self._close()

    def _all_headers(self) -> Any:
        headers = self._urllib3._collections.HTTPHeaderDict()
        for name, value in self._headers:
            headers.add(name, value)
        # Asked for each time: a token from an exec plugin may have been renewed.
        for setting in self._configuration.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        return headers

    def get(self, path: str, timeout: float) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and the whole body, within limits of time and size."""
        return self._whole(path, timeout, "GET", None)

    def put(self, path: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        """Replace an object by one in JSON; status and body of the answer."""
        status, _headers, answer = self._whole(path, timeout, "PUT", body)
        return status, answer

    def _whole(
        self, path: str, timeout: float, method: str, sent: bytes | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        with self._errors():
            answer = self._answer(path, timeout, method, sent)
            try:
                body = b"".join(_chunks(answer, timeout * _WHOLE_TIMEOUTS, _LARGEST_BODY))
            finally:
                answer.close()  # one that was read to its end has given its connection back already
        return answer.status, answer.headers, body

    @contextlib.contextmanager
    def stream(self, path: str, timeout: float) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Status, and the lines of the body as they come, until the time is over, whatever still comes then."""
        with self._errors():
            answer = self._answer(path, timeout)
            self._streams.add(answer)
            try:
                yield answer.status, _lines(_chunks(answer, timeout, None))
            finally:
                self._streams.discard(answer)
                # A watch that is left early has an open end: its connection cannot be used again.
                answer.close()

    def _answer(self, path: str, timeout: float, method: str = "GET", sent: bytes | None = None) -> Any:
        headers = self._all_headers()
        if sent is not None:
            headers["Content-Type"] = "application/json"
        answer = self._pool.request(
            method,
            self.url + path,
            body=sent,
            headers=headers,
            timeout=self._urllib3.Timeout(connect=min(timeout, _CONNECT_SECONDS), read=timeout),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        packed = answer.headers.get("Content-Encoding", "identity")
        if packed.lower() != "identity":
            # It was not asked for, and a few bytes can mean gigabytes.
            answer.close()
            raise TransportError(f"the answer is packed ({visible(shortened(packed, 40))})", may_heal=False)
        return answer

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        errors = self._urllib3.exceptions
        try:
            yield
        except errors.SSLError as error:
            if "CERTIFICATE" in str(error).upper():
                raise TransportError(f"its certificate is not trusted (ca_cert): {error}", may_heal=False) from error
            raise TransportError(f"TLS: {error}", may_heal=True) from error
        except errors.LocationValueError as error:
            raise TransportError(f"is no URL: {error}", may_heal=False) from error
        except errors.NewConnectionError as error:
            raise TransportError(f"cannot be reached: {_last(error)}", may_heal=True) from error
        except errors.ConnectTimeoutError as error:
            raise TransportError("cannot be reached: no answer in time", may_heal=True) from error
        except errors.ReadTimeoutError as error:
            raise TransportError("the answer did not come in time", may_heal=True) from error
        except (errors.HTTPError, OSError) as error:
            raise TransportError(f"the connection broke: {error}", may_heal=True) from error


def _last(error: Exception) -> str:
    """What the system said, without the name of the connection object before it."""
    return str(error).rpartition(": ")[2]


def _chunks(answer: Any, seconds: float, most: int | None) -> Iterator[bytes]:
    """A body as it comes; TransportError if it has not ended in time, or has more bytes than it may."""
    deadline = time.monotonic() + seconds
    size = 0
    for chunk in _arriving(answer):
        size += len(chunk)
        if most is not None and size > most:
            raise TransportError(f"the answer has more than {most} bytes", may_heal=False)
        yield chunk
        if time.monotonic() > deadline:
            raise TransportError(f"the answer did not end within {seconds:g} s", may_heal=True)


def _arriving(answer: Any) -> Iterator[bytes]:
    """Pieces as they arrive: none is waited for until it is as large as it may be."""
    if not hasattr(answer, "read1"):  # urllib3 before 2.1
        yield from answer.stream(None, decode_content=False)
        return
    while chunk := answer.read1(_CHUNK, decode_content=False):
        yield chunk


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *whole = chunk.split(b"\n")
        rest.append(first)
        size += len(first)
        if size > _LONGEST_LINE:
            raise TransportError(f"a line has more than {_LONGEST_LINE} bytes", may_heal=True)
        if whole:
            line, rest, size = b"".join(rest), [whole[-1]], len(whole[-1])
            yield from (each for each in (line, *whole[:-1]) if each)
    if size:
        yield b"".join(rest)


def _bounded_pools(urllib3: Any) -> dict[str, Any]:
    """Connection pools, by scheme, whose answers begin in time.

    A timeout of a socket is one for each read, and a server that sends its headers byte by byte never exceeds it.
    """

    def bounded(connection: Any) -> Any:
        class Bounded(connection):  # type: ignore[misc]
            def getresponse(self) -> Any:
                late = threading.Event()
                # Which of the two is the time of a read by now depends on the version of urllib3; the longer one is.
                times = [each for each in (self.timeout, self.sock.gettimeout()) if isinstance(each, int | float)]
                timer = threading.Timer(max(times, default=_HEADER_SECONDS), _shut_down, [self.sock, late])
                timer.daemon = True
                timer.start()
                try:
                    answer = super().getresponse()
                except Exception:
                    if late.is_set():
                        raise TimeoutError from None
                    raise
                finally:
                    timer.cancel()
                if late.is_set():  # what had come by then was taken for all headers
                    answer.close()
                    raise TimeoutError
                return answer

        return Bounded

    return {
        scheme: type("BoundedPool", (pool,), {"ConnectionCls": bounded(pool.ConnectionCls)})
        for scheme, pool in (("http", urllib3.HTTPConnectionPool), ("https", urllib3.HTTPSConnectionPool))
    }


def _shut_down(sock: socket.socket, late: threading.Event) -> None:
    """End a connection that another thread reads from. TLS is not asked: its state belongs to that thread."""
    late.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def keepalive() -> list[tuple[int, int, int]]:
    """Notice within half a minute that the other end is gone: a watch may be silent for as long as it lasts."""
    wanted = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1), (socket.IPPROTO_TCP, "TCP_NODELAY", 1)]
    wanted += [
        (socket.IPPROTO_TCP, name, value)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25000))
    ]
    return [(level, getattr(socket, name), value) for level, name, value in wanted if hasattr(socket, name)]
