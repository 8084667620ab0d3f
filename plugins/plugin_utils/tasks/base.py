# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What every action plugin of the collection does alike: options in, a result out, errors in words."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..choices import names
from ..errors import UserError, described
from ..list_variables import NotAList, as_list
from .directory import WorkDirectory
from .notes import CONTROL, Stopped
from .trust import OldAnsible, plain, require_ansible, untrusted

LEDGER_VARIABLES = {"ledger": "kube_proxy_ledger", "ledger_copy": "kube_proxy_ledger_copy"}
RULE_VARIABLES = {name: f"kube_proxy_{name}" for name in ("snapshot", *names())}
API_VARIABLES = {
    "kubeconfig": "kube_proxy_kubeconfig",
    "context": "kube_proxy_context",
    "host": "kube_proxy_api_host",
    "api_key": "kube_proxy_api_key",
    "ca_cert": "kube_proxy_api_ca_cert",
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
        try:
            require_ansible()
        except OldAnsible as error:
            raise AnsibleActionFail(str(error)) from None  # type: ignore[no-untyped-call,unused-ignore]
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.task_vars: Mapping[str, Any] = task_vars or {}
        self._take_variables()
        _validation, options = self.validate_argument_spec(argument_spec=self.SPEC, **self.RULES)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            # Nodes and the API server wrote most of it.
            result.update(untrusted(self.work(plain(options))))
        except Exception as error:
            message = described(error) if expected(error) else str(error)
            if not self._requires_connection:
                # What runs once for all hosts ends the run for all hosts; the summary says why, if it can be noted.
                with contextlib.suppress(OSError):
                    self.directory(plain(options)).note(Stopped(message), CONTROL)
            if not expected(error):
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

    @property
    def check(self) -> bool:
        """Whether nothing may be changed on nodes."""
        return bool(self._task.check_mode)

    def directory(self, options: Mapping[str, Any]) -> WorkDirectory:
        """The working directory of the cluster."""
        cluster = self.task_vars.get("kube_proxy_cluster_name") or "default"
        return WorkDirectory(Path(options["dir"] or f"~/.akp/{cluster}").expanduser()).make()


def expected(error: BaseException) -> bool:
    """Whether a user can cause and mend it."""
    return isinstance(error, UserError | OSError)


def without_collection(function: Callable[[], Any]) -> Any:
    """Run something that makes one large structure: looking for garbage in it would cost a fifth of the time."""
    gc.disable()
    try:
        return function()
    finally:
        gc.enable()


__all__ = [
    "API_VARIABLES",
    "LEDGER_VARIABLES",
    "RULE_VARIABLES",
    "ControlAction",
    "described",
    "expected",
    "plain",
    "without_collection",
]
