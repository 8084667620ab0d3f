# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One command on a host with its input, whatever the connection can do; no Python is needed there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.utils.path import unfrackpath

from ..tasks.base import ControlAction
from .protocol import Command


class RemoteAction(ControlAction):
    """An action plugin that runs commands of ours on a host."""

    _requires_connection = True

    def execute(self, command: Command, *, restricted: bool = False) -> dict[str, Any]:
        """Exit code, stdout and stderr of a command."""
        self._refuse_options()
        how = _how(restricted)
        become = getattr(self._connection, "become", None)
        if self._connection.has_pipelining and getattr(become, "name", "") not in ("su", "ansible.builtin.su"):
            return dict(self._low_level_execute_command(command.text, in_data=command.stdin, **how))  # type: ignore[no-untyped-call,unused-ignore]
        return self._execute_with_file(command, how)

    def kept_open(
        self, commands: Mapping[str, Command], *, restricted: bool = False
    ) -> tuple[str, dict[str, str]] | None:
        """Where ssh listens that keeps the connection to the host open, and what each command is for ssh.

        None if that is not for us to know: another connection, a place of the user's, a password to become root.
        """
        connection: Any = self._connection
        become, path = getattr(connection, "become", None), getattr(connection, "control_path", None)
        if getattr(connection, "ansible_name", "") != "ansible.builtin.ssh" or not path:
            return None
        if become is not None and not restricted and (become.expect_prompt() or become.name == "su"):
            return None
        path %= {"directory": unfrackpath(connection.control_path_dir)}  # type: ignore[no-untyped-call,unused-ignore]
        if "%" in path:
            return None
        return path, {name: self._said(connection, each, restricted) for name, each in commands.items()}

    def _said(self, connection: Any, command: Command, restricted: bool) -> str:
        """What Ansible would have ssh run."""
        said: list[str] = []

        def listen(text: str, **_named: Any) -> tuple[int, bytes, bytes]:
            said.append(text)
            return 0, b"", b""

        connection.exec_command = listen
        try:
            self._low_level_execute_command(command.text, in_data=command.stdin, **_how(restricted))  # type: ignore[no-untyped-call,unused-ignore]
        finally:
            del connection.exec_command
        return said[0]

    def _refuse_options(self) -> None:
        """A name that begins with a dash would be an option of ssh, and some of those run commands here."""
        names = [self._play_context.remote_addr, self._play_context.remote_user]
        for option in ("host", "remote_user"):
            with contextlib.suppress(KeyError):  # not every connection has such an option
                names.append(self._connection.get_option(option))  # type: ignore[no-untyped-call,unused-ignore]
        for name in names:
            if name and str(name).startswith("-"):
                raise AnsibleActionFail(  # type: ignore[no-untyped-call,unused-ignore]
                    f"{str(name)!r} is an option for ssh and no host or user; mend ansible_host or ansible_user"
                )

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


def _how(restricted: bool) -> dict[str, Any]:
    """A restricted account has no shell and becomes no other user; its command goes as it is."""
    return {"executable": False, "sudoable": False} if restricted else {"executable": "/bin/sh"}
