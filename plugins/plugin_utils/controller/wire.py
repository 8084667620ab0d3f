# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One command on a host with its input, whatever the connection can do; no Python is needed there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from .base import ControlAction
from .push import Command


class RemoteAction(ControlAction):
    """An action plugin that runs commands of ours on a host."""

    _requires_connection = True

    def execute(self, command: Command, *, restricted: bool = False) -> dict[str, Any]:
        """Exit code, stdout and stderr of a command."""
        # A restricted account has no shell to speak to and nobody to become; its command goes as it is.
        how: dict[str, Any] = {"executable": "/bin/sh"}
        if restricted:
            how = {"executable": False, "sudoable": False}
        become = getattr(self._connection, "become", None)
        if self._connection.has_pipelining and getattr(become, "name", "") not in ("su", "ansible.builtin.su"):
            return dict(self._low_level_execute_command(command.text, in_data=command.stdin, **how))  # type: ignore[no-untyped-call,unused-ignore]
        return self._execute_with_file(command, how)

    def _execute_with_file(self, command: Command, how: Mapping[str, Any]) -> dict[str, Any]:
        """For connections that cannot send input with a command: the input goes ahead as a file."""
        temporary = self._make_tmp_path()  # type: ignore[no-untyped-call,unused-ignore]
        try:
            remote = self._connection._shell.join_path(temporary, "akp-stdin")
            with tempfile.NamedTemporaryFile() as local:
                local.write(command.stdin)
                local.flush()
                self._transfer_file(local.name, remote)  # type: ignore[no-untyped-call,unused-ignore]
            text = f"( {command.text}\n) <{remote}"
            return dict(self._low_level_execute_command(text, **how))  # type: ignore[no-untyped-call,unused-ignore]
        finally:
            self._remove_tmp_path(temporary)  # type: ignore[no-untyped-call,unused-ignore]
