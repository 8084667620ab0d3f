# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who we are to the API server, and the wire to it.

Options and environment variables have the names that kubernetes.core gave them, so that what users know, and the
credentials that AWX injects, work here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import UserError
from ..texts import shortened, visible

# option -> the environment variables that stand in for it
ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "kubeconfig": ("K8S_AUTH_KUBECONFIG",),
    "context": ("K8S_AUTH_CONTEXT",),
    "host": ("K8S_AUTH_HOST",),
    "api_key": ("K8S_AUTH_API_KEY",),
    "username": ("K8S_AUTH_USERNAME",),
    "password": ("K8S_AUTH_PASSWORD",),
    "client_cert": ("K8S_AUTH_CERT_FILE", "K8S_AUTH_CLIENT_CERT"),
    "client_key": ("K8S_AUTH_KEY_FILE", "K8S_AUTH_CLIENT_KEY"),
    "ca_cert": ("K8S_AUTH_SSL_CA_CERT", "K8S_AUTH_CA_CERT"),
    "validate_certs": ("K8S_AUTH_VERIFY_SSL", "K8S_AUTH_VALIDATE_CERTS"),
    "proxy": ("K8S_AUTH_PROXY",),
    "no_proxy": ("K8S_AUTH_NO_PROXY",),
    "impersonate_user": ("K8S_AUTH_IMPERSONATE_USER",),
    "impersonate_groups": ("K8S_AUTH_IMPERSONATE_GROUPS",),
}


class InvalidAccess(UserError):
    """No way to the API server can be made of the options; the message says what is missing."""


class TransportError(Exception):
    """A request that got no whole answer."""

    def __init__(self, reason: str, *, may_heal: bool) -> None:
        super().__init__(reason)
        self.may_heal = may_heal


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """How to reach and convince an API server. With nothing set: from inside a pod, else the user's kubeconfig."""

    kubeconfig: str | Mapping[str, Any] | None = None
    context: str | None = None
    host: str | None = None
    api_key: str | None = None
    username: str | None = None
    password: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    ca_cert: str | None = None
    validate_certs: bool | None = None
    proxy: str | None = None
    no_proxy: str | None = None
    proxy_headers: Mapping[str, str] | None = None
    impersonate_user: str | None = None
    impersonate_groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Access:
        """From options; those that are not set may stand in the environment."""
        environ = os.environ if environ is None else environ
        headers = {
            name: environ[f"K8S_AUTH_PROXY_HEADERS_{name.upper()}"]
            for name in ("proxy_basic_auth", "basic_auth", "user_agent")
            if environ.get(f"K8S_AUTH_PROXY_HEADERS_{name.upper()}")
        }
        set_headers = {name: value for name, value in (options.get("proxy_headers") or {}).items() if value}
        chosen: dict[str, Any] = {"proxy_headers": set_headers or headers or None}
        for name, variables in ENVIRONMENT.items():
            value: Any = options.get(name)
            if value in (None, ""):
                value = next((environ[variable] for variable in variables if environ.get(variable)), None)
            if name == "validate_certs" and isinstance(value, str):
                value = value.lower() not in ("0", "false", "no", "off")
            if name == "impersonate_groups":
                value = tuple(value.split(",") if isinstance(value, str) else value or ())
            chosen[name] = value
        return cls(**chosen)

    @property
    def complete(self) -> bool:
        """Whether the options alone are enough, without a kubeconfig."""
        proven = self.api_key or (self.username and self.password) or (self.client_cert and self.client_key)
        return bool(self.host and proven)


class Transport:
    """HTTP with the user's TLS settings and credentials."""

    def __init__(self, configuration: Any, pool: Any, headers: Iterable[tuple[str, str]], close: Callable[[], None]):
        import urllib3

        self._urllib3 = urllib3
        self._configuration = configuration
        self._pool = pool
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
            timeout=self._urllib3.Timeout(connect=min(timeout, 10.0), read=timeout),
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


# An event is one object, and those have at most a few megabytes. A page has 500 of them.
_LONGEST_LINE = 64 * 1024 * 1024
_LARGEST_BODY = 512 * 1024 * 1024
_CHUNK = 256 * 1024
# A body may come in pieces, each within the time for one; all of it takes no longer than so many times that.
_WHOLE_TIMEOUTS = 5


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


def open_transport(access: Access, user_agent: str) -> Transport:
    """The wire, made from a kubeconfig, from inside a pod, or from the options alone."""
    try:
        # Here and not above: the package is large and takes longer to import than all else of a run without news.
        from kubernetes import client, config
        from kubernetes.client.rest import RESTClientObject
        from kubernetes.config import kube_config
    except ImportError as error:
        raise InvalidAccess(
            f"the Python package kubernetes is needed to read from an API server, and {error.name} is missing; "
            f"install it into the Python that runs this: {sys.executable} -m pip install 'kubernetes>=30'"
        ) from error
    configuration = client.Configuration()
    _load(access, configuration, config)
    _override(access, configuration)
    headers = [("Accept", "application/json"), ("User-Agent", user_agent)]
    if access.username and access.password:
        headers.append(("Authorization", str(configuration.get_basic_auth_token())))
    if access.impersonate_user:
        headers.append(("Impersonate-User", access.impersonate_user))
    headers.extend(("Impersonate-Group", group) for group in access.impersonate_groups)
    configuration.socket_options = _keepalive()
    try:
        pool = RESTClientObject(configuration).pool_manager
    except Exception as error:
        raise InvalidAccess(f"{configuration.host}: {error}") from error
    # The package removes the key files it writes at the exit of the interpreter, which a worker of Ansible never sees.
    return Transport(configuration, pool, headers, getattr(kube_config, "_cleanup_temp_files", lambda: None))


def _keepalive() -> list[tuple[int, int, int]]:
    """Notice within half a minute that the other end is gone: a watch may be silent for as long as it lasts."""
    wanted = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1), (socket.IPPROTO_TCP, "TCP_NODELAY", 1)]
    wanted += [
        (socket.IPPROTO_TCP, name, value)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25000))
    ]
    return [(level, getattr(socket, name), value) for level, name, value in wanted if hasattr(socket, name)]


def _load(access: Access, configuration: Any, config: Any) -> None:
    """Fill a configuration from where the user keeps it."""
    if access.complete:
        return
    named = access.kubeconfig or access.context
    try:
        if not named:
            try:
                config.load_incluster_config(client_configuration=configuration)
                return
            except config.ConfigException:
                pass
        if isinstance(access.kubeconfig, Mapping):
            config.load_kube_config_from_dict(
                dict(access.kubeconfig), context=access.context, client_configuration=configuration
            )
        else:
            path = os.path.expanduser(access.kubeconfig) if access.kubeconfig else None  # noqa: PTH111
            if path is not None and not os.path.isfile(path):  # noqa: PTH113
                raise InvalidAccess(f"kubeconfig {path}: there is no such file")
            config.load_kube_config(
                config_file=path, context=access.context, client_configuration=configuration, persist_config=False
            )
    except InvalidAccess:
        raise
    except Exception as error:
        where = (
            "the kubeconfig"
            if named
            else "no API server is named (kubeconfig, or host and api_key), and ~/.kube/config"
        )
        raise InvalidAccess(f"{where} cannot be used: {error}") from error


def _override(access: Access, configuration: Any) -> None:
    """Options win over the kubeconfig."""
    if access.host:
        configuration.host = access.host
    if access.api_key:
        configuration.api_key = {"authorization": f"Bearer {access.api_key}"}
        configuration.refresh_api_key_hook = None
    for option, field in (
        ("username", "username"),
        ("password", "password"),
        ("client_cert", "cert_file"),
        ("client_key", "key_file"),
        ("ca_cert", "ssl_ca_cert"),
        ("proxy", "proxy"),
        ("no_proxy", "no_proxy"),
    ):
        value = getattr(access, option)
        if value:
            setattr(configuration, field, value)
    if access.validate_certs is not None:
        configuration.verify_ssl = access.validate_certs
    if access.proxy_headers:
        import urllib3

        make_headers: Callable[..., dict[str, str]] = urllib3.util.make_headers
        configuration.proxy_headers = make_headers(**access.proxy_headers)
