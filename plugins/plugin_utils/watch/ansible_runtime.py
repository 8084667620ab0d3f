# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ansible, loaded once: the user's inventory, variables and ways to connect, and single tasks on single hosts.

A task is executed by Ansible's own executor in a process of its own, as ansible-playbook does it; so connection,
become, vault and every variable mean what they mean there. What is saved is the start of ansible-playbook.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible import constants as C  # noqa: N812
from ansible import context
from ansible.cli import CLI
from ansible.cli.arguments import option_helpers
from ansible.errors import AnsibleError
from ansible.executor.task_executor import TaskExecutor
from ansible.playbook.play import Play
from ansible.playbook.play_context import PlayContext
from ansible.plugins import loader as plugin_loader
from ansible.template import Templar, trust_as_template
from ansible.utils.display import Display

from ..bundle.program import MODES
from ..carry import direct
from ..carry.protocol import program_digest
from ..errors import UserError
from ..tasks.base import plain
from ..tasks.directory import WorkDirectory
from ..tasks.notes import About
from ..tasks.trust import OldAnsible, require_ansible

# mypy: disable-error-code="no-untyped-call,arg-type,attr-defined"

NODE = "agentless.kube_proxy.node"
_COLLECTION = "ansible_collections.agentless.kube_proxy"
_PREFIX = "kube_proxy_"


class NoHosts(UserError):
    """The inventory, or what --limit leaves of it, has no host to push to."""


class NoCollection(UserError):
    """Ansible does not find this collection."""


class AnsibleOptions(CLI):
    """The options of ansible-playbook that say where and how to connect, and what they lead to."""

    name = "akp watch"
    USES_CONNECTION = True

    def __init__(
        self,
        arguments: list[str],
        *,
        add_own: Callable[[Any], None],
        own_variables: Mapping[str, str],
        **parser: Any,
    ) -> None:
        """Options of one's own may stand for variables."""
        require_ansible()
        self._add_own, self._own_variables, self._parser = add_own, own_variables, parser
        super().__init__(["akp watch", *arguments])
        # What ansible-playbook does before it reads an inventory.
        self.parse()
        plugin_loader.init_plugin_loader()

    def init_parser(self, *_arguments: Any, **_named: Any) -> None:
        """The parser, with the options of the caller."""
        super().init_parser(**self._parser)
        self._add_own(self.parser)
        for add in (
            option_helpers.add_inventory_options,
            option_helpers.add_runtask_options,
            option_helpers.add_vault_options,
            option_helpers.add_fork_options,
            option_helpers.add_connect_options,
            option_helpers.add_runas_options,
        ):
            add(self.parser)

    def post_process_args(self, options: Any) -> Any:
        """Complete the options, and complain where they contradict each other."""
        options = super().post_process_args(options)
        Display().verbosity = options.verbosity
        self.validate_conflicts(options, runas_opts=True, fork_opts=True)
        given = {variable: getattr(options, name) for name, variable in self._own_variables.items()}
        if any(given.values()):
            given = {variable: value for variable, value in given.items() if value}
            options.extra_vars = (*(options.extra_vars or ()), json.dumps(given))
        return options

    def own(self, name: str) -> Any:
        """An option of one's own that is no variable."""
        return context.CLIARGS.get(name)

    def inventory(self) -> Inventory:
        """What the options lead to; asks for passwords if they say so."""
        connection, become = self.ask_passwords()
        loader, inventory, variables = self._play_prereqs()
        return Inventory(loader, inventory, variables, {"conn_pass": connection, "become_pass": become})

    def run(self) -> None:
        """Not used: the caller runs."""


class Inventory:
    """The hosts that shall have rules, and tasks on them."""

    def __init__(self, loader: Any, inventory: Any, variables: Any, passwords: Mapping[str, Any]) -> None:
        self._loader = loader
        self._inventory = inventory
        self._manager = variables
        self._passwords = dict(passwords)
        self._namespace = plugin_loader.get_plugin_loader_namespace()
        _require_collection()
        self.forks = int(context.CLIARGS.get("forks") or 5)
        self._read()
        settings = next(iter(self.settings().values()))
        self.directory = WorkDirectory.of(settings)

    def _read(self) -> None:
        """The hosts and their variables, as a play of sync_services would see them."""
        limit = context.CLIARGS.get("subset")
        if limit:
            self._inventory.subset(limit)
        pattern = self._manager.extra_vars.get(f"{_PREFIX}hosts")
        if not pattern:
            pattern = "nodes" if "nodes" in self._inventory.groups else "all"
        self._play = Play().load(
            {
                "name": "akp watch",
                "hosts": pattern,
                "gather_facts": False,
                "become": True,
                "tasks": [{"name": "Make the node equal to its bundle", NODE: {"state": "gathered"}}],
            },
            variable_manager=self._manager,
            loader=self._loader,
        )
        self._hosts = {host.name: host for host in self._inventory.list_hosts(pattern)}
        if not self._hosts:
            raise NoHosts(f"no host matches {pattern!r}" + (f" and --limit {limit!r}" if limit else ""))
        self._task = next(
            task for block in self._play.compile() for task in block.block if getattr(task, "action", "") == NODE
        )
        defaults = {**_role_defaults(), **_keepalive()}
        self._variables = {
            name: {**defaults, **self._manager.get_vars(play=self._play, host=host, task=self._task)}
            for name, host in self._hosts.items()
        }

    def warm_up(self) -> None:
        """Load what every task needs, so that the processes that are forked from this one find it loaded."""
        theirs = importlib.import_module(f"{_COLLECTION}.plugins.plugin_utils.carry.protocol")
        if [theirs.program_digest(mode) for mode in MODES] != [program_digest(mode) for mode in MODES]:
            folder = Path(str(theirs.__file__)).parents[3]
            raise NoCollection(f"akp and the collection in {folder} are not of the same version; install them as one")
        for variables in self._variables.values():
            name = variables.get("ansible_connection") or context.CLIARGS.get("connection") or "ssh"
            with contextlib.suppress(Exception):
                plugin_loader.connection_loader.get(str(name), class_only=True)
        for kind, name in ((plugin_loader.become_loader, "sudo"), (plugin_loader.shell_loader, "sh")):
            kind.get(name, class_only=True)

    def refresh(self) -> None:
        """Read the inventory anew: a Node came or went, or an operator edited it."""
        self._loader.cleanup_all_tmp_files()
        self._forget_files()
        self._inventory.refresh_inventory()
        self._manager.set_inventory(self._inventory)
        self._read()

    def _forget_files(self) -> None:
        """A play never sees group_vars and host_vars change, so Ansible reads them once and keeps what it found."""
        kept = [getattr(self._loader, "_FILE_CACHE", None)]
        for plugin in plugin_loader.vars_loader.all():
            module = sys.modules.get(type(plugin).__module__)
            kept += [getattr(module, name, None) for name in ("FOUND", "NAK")]
        for each in kept:
            if each is not None:
                each.clear()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Host -> its kube_proxy_* variables, without the prefix."""
        return {name: self._settings(variables) for name, variables in self._variables.items()}

    def _settings(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        templar = Templar(loader=self._loader, variables=variables)
        return {
            key.removeprefix(_PREFIX): plain(templar.template(value))
            for key, value in variables.items()
            if key.startswith(_PREFIX)
        }

    def execute(
        self, host: str, arguments: Mapping[str, Any], about: Mapping[str, Any], line: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Do what the node action does, by a line that it left if that will do; the result may have a new one."""
        if line and direct.takes(arguments):
            taken = direct.give(direct.Line(**line), host, Path(arguments["delta"]), About.of(about))
            if taken is not None:
                return taken
        if about:
            self.directory.note(About.of(about), host)
        task = self._task.copy(exclude_parent=True, exclude_tasks=True)
        task._parent = self._task._parent
        task.args = dict(arguments)
        executor = TaskExecutor(
            host=self._hosts[host],
            task=task,
            job_vars=dict(self._variables[host]),
            play_context=PlayContext(play=self._play, passwords=self._passwords),
            loader=self._loader,
            shared_loader_obj=self._namespace,
            final_q=_Nobody(),
            variable_manager=self._manager,
        )
        result: dict[str, Any] = plain(executor.run())
        if not result.get("failed") and not result.get("unreachable"):
            result["line"] = executor._handler.line()
        return result


def _require_collection() -> None:
    """Before a play is made of it: a Python package of akp alone cannot push anything."""
    try:
        found = importlib.util.find_spec(_COLLECTION)
    except ImportError:
        found = None
    if found is None:
        raise NoCollection(
            "akp watch pushes through Ansible, and the collection agentless.kube_proxy is missing there: "
            "ansible-galaxy collection install agentless.kube_proxy. If it is installed elsewhere, set "
            "ANSIBLE_COLLECTIONS_PATH"
        )


def _role_defaults() -> dict[str, Any]:
    """The defaults of the variables, as the role sync of this collection has them."""
    plugin = plugin_loader.action_loader.get(NODE, class_only=True)
    file = Path(inspect.getfile(plugin)).parents[2] / "roles" / "sync" / "defaults" / "main.yml"
    defaults = yaml.safe_load(file.read_text(encoding="utf-8"))
    # Templates of the role are ours.
    return {key: trust_as_template(value) if isinstance(value, str) else value for key, value in defaults.items()}


def _keepalive() -> dict[str, str]:
    """Have ssh notice within seconds that a host is gone, unless the user has options of his own in that place."""
    plugin_loader.connection_loader.get("ssh", class_only=True)  # which defines the option
    given = context.CLIARGS.get("ssh_extra_args") or C.config.get_config_value(
        "ssh_extra_args", plugin_type="connection", plugin_name="ssh"
    )
    return {} if given else {"ansible_ssh_extra_args": "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"}


class _Nobody:
    """Where a task would send what ansible-playbook shows while it runs."""

    def send_callback(self, *_arguments: Any, **_named: Any) -> None:
        """Not shown."""

    send_display = send_prompt = send_task_result = send_callback


def detach() -> None:
    """What Ansible does with its workers: a session of their own, and nothing of the terminal."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = io.StringIO()
    with contextlib.suppress(Exception):
        Display().set_queue(_Nobody())


__all__ = ["AnsibleError", "AnsibleOptions", "Inventory", "NoCollection", "NoHosts", "OldAnsible", "detach"]
