# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.node: one question to a node, and its bundle if the answer asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.program import MODES
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.connection import RemoteAction
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.direct import Line
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.protocol import Command, program_digest
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.node.apply import delta_arguments
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.node.errors import NotDone, Unreachable
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.node.request import Request, way_of
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.node.states import Failed, reach
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.node.visit import Visit
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.audit import AUDITED, TaskAuditor
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import LEDGER_VARIABLES, plain
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec

# Once, in the process that all workers are forked from.
for _mode in MODES:
    program_digest(_mode)

_NOT_SENT = (
    "kube_proxy_keep has no effect with kube_proxy_command: a restricted account cannot pass environment variables. "
    "The line `keep N` in /etc/akp/node.conf on the node does it"
)
_KEPT = 3  # bundles, by a node that is not told otherwise


class ActionModule(RemoteAction):
    """Makes a node's kernel equal to its bundle, asks what is there, goes back, or takes everything away."""

    SPEC: ClassVar[dict[str, Any]] = spec("node")
    RULES: ClassVar[dict[str, Any]] = {
        "required_if": [("state", "confirmed", ("token",))],
        "mutually_exclusive": [("generation", "time")],
    }
    VARIABLES: ClassVar[dict[str, str]] = {
        "name": "kube_proxy_node_name",
        "verify": "kube_proxy_verify",
        **LEDGER_VARIABLES,
        "max_removed_percent": "kube_proxy_max_removed_percent",
        "confirm_within": "kube_proxy_confirm_within",
        "probes": "kube_proxy_probes",
        "install": "kube_proxy_install",
        "install_path": "kube_proxy_install_path",
        "state_dir": "kube_proxy_state_dir",
        "keep": "kube_proxy_keep",
        "command": "kube_proxy_command",
        "task_timeout": "kube_proxy_task_timeout",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Bring the host to the state; what became of it is noted either way."""
        self._options = options
        host = str(self.task_vars["inventory_hostname"])
        directory = self.directory(options)
        self._visit = Visit(
            host=host,
            name=options["name"] or host,
            request=Request.of(options),
            way=way_of(options),
            work=directory,
            ledger=Path(options["ledger"] or directory.ledger).expanduser(),
            connection=self,
            hosts=self.task_vars.get("groups", {}).get("all", ()),
            check=self.check,
            diff=bool(self._task.diff),
        )
        try:
            result = reach(self._visit, lambda: TaskAuditor(directory, options, self.task_vars))
        except Failed as error:
            if error.unreachable:
                raise AnsibleConnectionFailure(str(error)) from None
            # What it came from would be printed once more.
            raise AnsibleActionFail(str(error), result={"ledger": error.ledger}) from None
        if options["command"] and options["keep"] not in (0, _KEPT):
            result["warnings"] = [*result.get("warnings", ()), _NOT_SENT]
        return result

    def line(self) -> dict[str, Any] | None:
        """After a task: how this host is given deltas without one, as the fields of a Line; None if it cannot be."""
        visit = self._visit
        ways = {mode: dataclasses.replace(visit.way, mode=mode) for mode in MODES}
        commands = {mode: way.give(delta_arguments(visit), b"\n") for mode, way in ways.items()}
        found = self.kept_open(commands, restricted=bool(visit.way.restricted))
        if found is None:
            return None
        told = {key: self.task_vars[key] for key in AUDITED if key in self.task_vars}
        line = Line(
            socket=found[0],
            commands=found[1],
            node=visit.name,
            directory=str(visit.work.path),
            seconds=float(visit.request.task_timeout),
            ledger={key: self._options[key] for key in LEDGER_VARIABLES},
            variables=plain(told),
        )
        return dataclasses.asdict(line)

    # -- the connection of a Visit

    def run_command(self, command: Command, *, restricted: bool) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        with _in_words():
            done = self.execute(command, restricted=restricted)
        return done["rc"], done["stdout"], done["stderr"]

    def renew(self) -> None:
        """Close the connection that Ansible keeps open."""
        if hasattr(self._connection, "reset"):
            with _in_words():
                self._connection.reset()

    def control_port(self) -> int:
        """The port of the connection; 22 if ssh decides it, 0 if there are no ports."""
        try:
            return int(self._connection.get_option("port") or 22)
        except (KeyError, TypeError, ValueError, AnsibleError):
            return 0

    def address(self) -> str:
        """The address of the host."""
        return str(self._templar.template(self.task_vars.get("ansible_host") or self._visit.host))


@contextmanager
def _in_words() -> Iterator[None]:
    """What Ansible raises, as the engine knows it."""
    try:
        yield
    except AnsibleConnectionFailure as error:
        raise Unreachable(str(error.message)) from None
    except AnsibleError as error:
        raise NotDone(str(error.message)) from None
