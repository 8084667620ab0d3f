"""ssh as a connection plugin of the old kind has it: input cannot be sent with a command."""

from __future__ import annotations

from ansible.errors import AnsibleError
from ansible.plugins.connection import ssh

DOCUMENTATION = ssh.DOCUMENTATION.replace("name: ssh", "name: plain")


class Connection(ssh.Connection):
    transport = "plain"
    has_pipelining = False

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        if in_data and "dd of=" not in cmd:  # which is how a file goes there
            raise AnsibleError("this connection cannot send input with a command")
        return super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
