# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What every action plugin of the collection does alike: options in, a result out, errors in words."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..words import NotAList, as_list
from .directory import WorkDirectory

# What a user can cause and mend, by name: importing all of the engine would take longer than a run without news. Any
# other exception is a bug and shows as one.
EXPECTED = {
    "ApiError",
    "BrokenLedger",
    "InvalidAccess",
    "InvalidConfig",
    "InvalidPolicy",
    "InvalidProbe",
    "InvalidRelease",
    "RefusedVips",
    "Shrunken",
    "SigningFailed",
    "UnknownBackend",
    "UnreadableBundle",
    "UnreadableFile",
    "NotAList",
    "NotApproved",
    "OSError",
}

DIR_OPTION: dict[str, Any] = {"dir": {"type": "path"}}
LEDGER_OPTION: dict[str, Any] = {"ledger": {"type": "str"}}
RULE_OPTIONS: dict[str, Any] = {
    "snapshot": {"type": "path"},
    "config": {"type": "raw"},
    "compat": {"type": "str", "default": "1.37"},
    "schedulers": {"type": "dict", "default": {}},
    "scheduler_annotations": {"type": "bool", "default": False},
    "vip_policy": {"type": "str", "default": "warn", "choices": ["warn", "omit", "refuse"]},
    "external_ip_cidrs": {"type": "list", "elements": "str"},
    "load_balancer_cidrs": {"type": "list", "elements": "str"},
}
RULE_VARIABLES = {name: f"kube_proxy_{name}" for name in RULE_OPTIONS}
API_VARIABLES = {
    "kubeconfig": "kube_proxy_kubeconfig",
    "context": "kube_proxy_context",
    "host": "kube_proxy_api_host",
    "api_key": "kube_proxy_api_key",
    "ca_cert": "kube_proxy_api_ca_cert",
}
API_OPTIONS: dict[str, Any] = {
    "kubeconfig": {"type": "raw", "no_log": True},
    "context": {"type": "str"},
    "host": {"type": "str"},
    "api_key": {"type": "str", "no_log": True},
    "username": {"type": "str"},
    "password": {"type": "str", "no_log": True},
    "client_cert": {"type": "path", "aliases": ["cert_file"]},
    "client_key": {"type": "path", "no_log": False, "aliases": ["key_file"]},
    "ca_cert": {"type": "path", "aliases": ["ssl_ca_cert"]},
    "validate_certs": {"type": "bool", "aliases": ["verify_ssl"]},
    "proxy": {"type": "str"},
    "no_proxy": {"type": "str"},
    "proxy_headers": {
        "type": "dict",
        "options": {
            "proxy_basic_auth": {"type": "str", "no_log": True},
            "basic_auth": {"type": "str", "no_log": True},
            "user_agent": {"type": "str"},
        },
    },
    "impersonate_user": {"type": "str"},
    "impersonate_groups": {"type": "list", "elements": "str"},
}


class ControlAction(ActionBase):  # type: ignore[misc,unused-ignore]
    """An action plugin that works on the control host."""

    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False
    TRANSFERS_FILES = False

    SPEC: ClassVar[dict[str, Any]] = {}
    RULES: ClassVar[dict[str, Any]] = {}
    # option -> the variable of the host that holds where the option is not given
    VARIABLES: ClassVar[dict[str, str]] = {}

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Validate the options, do the work, turn what a user can mend into a message."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.task_vars: Mapping[str, Any] = task_vars or {}
        self._take_variables()
        _validation, options = self.validate_argument_spec(argument_spec=self.SPEC, **self.RULES)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            result.update(self.work(plain(options)))
        except Exception as error:
            expected = bool(EXPECTED & {kind.__name__ for kind in type(error).__mro__})
            message = self.described(error) if expected else str(error)
            if not self._requires_connection:
                # What runs once for all hosts ends the run for all hosts; the summary says why.
                self.directory(plain(options)).note("stopped", "localhost", {"failed": message})
            if not expected:
                raise
            raise AnsibleActionFail(message) from None  # type: ignore[no-untyped-call,unused-ignore]
        return result

    def _take_variables(self) -> None:
        """Options that are not given come from variables.

        Templating an argument costs a millisecond or two for each host, and most variables are no templates.
        """
        names = {"dir": "kube_proxy_dir", **self.VARIABLES}
        taken = {}
        for option, variable in names.items():
            value = None if option in self._task.args else self.task_vars.get(variable)
            if value is None or value == "":
                continue
            if isinstance(value, dict | list) or (isinstance(value, str) and "{" in value):
                value = self._templar.template(value)
            if isinstance(value, str) and value and self.SPEC[option]["type"] == "list":
                try:
                    value = as_list(value, variable)
                except NotAList as error:
                    raise AnsibleActionFail(str(error)) from None  # type: ignore[no-untyped-call,unused-ignore]
            if value is not None and value != "":
                taken[option] = value
        self._task.args = {**taken, **self._task.args}

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """What the plugin is for."""
        raise NotImplementedError

    @staticmethod
    def described(error: BaseException) -> str:
        """The message of an error that a user can mend."""
        if type(error).__name__ == "InvalidConfig":
            return f"the KubeProxyConfiguration is not valid: {'; '.join(str(error).splitlines())}"
        if type(error).__name__ == "RefusedVips":
            claims = "; ".join(str(error).splitlines())
            return (
                f"refused, and no node was touched: {claims}. Services may claim what lies in "
                "kube_proxy_external_ip_cidrs and kube_proxy_load_balancer_cidrs, and nobody else's addresses; "
                "kube_proxy_vip_policy=omit leaves such claims out, warn allows them"
            )
        if isinstance(error, OSError) and error.filename:
            return f"{error.filename}: {error.strerror}"
        return str(error) or type(error).__name__

    @property
    def check(self) -> bool:
        """Whether nothing may be changed on nodes."""
        return bool(self._task.check_mode)

    def directory(self, options: Mapping[str, Any]) -> WorkDirectory:
        """The working directory of the cluster."""
        cluster = self.task_vars.get("kube_proxy_cluster_name") or "default"
        return WorkDirectory(Path(options["dir"] or f"~/.akp/{cluster}").expanduser()).make()


def plain(value: Any) -> Any:
    """Plain strings, lists and mappings, without the tags that Ansible attaches: the engine knows nothing of them."""
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # str() of a subclass may give a subclass again
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), value)


def without_collection(function: Callable[[], Any]) -> Any:
    """Run something that makes one large structure: looking for garbage in it would cost a fifth of the time."""
    gc.disable()
    try:
        return function()
    finally:
        gc.enable()
