# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who we are to the API server.

Options and environment variables have the names that kubernetes.core gave them, so that what users know, and the
credentials that AWX injects, work here too.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UserError
from .transport import Transport, keepalive

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
    configuration.socket_options = keepalive()
    try:
        pool = RESTClientObject(configuration).pool_manager
    except Exception as error:
        raise InvalidAccess(f"{configuration.host}: {error}") from error
    # The package removes the key files it writes at the exit of the interpreter, which a worker of Ansible never sees.
    return Transport(configuration, pool, headers, getattr(kube_config, "_cleanup_temp_files", lambda: None))


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
