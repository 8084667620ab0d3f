"""ansible-playbook from a process that has read Ansible's modules already: each run is a fork of it.

Reading them takes more than half of the time of a short run. What runs is the same main function with the same
arguments, environment and directory; only its imports are done. As a program, this is that process: it takes a run
as a line of JSON and answers with a line that holds the exit code.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PLUGINS = Path(__file__).parents[2] / "plugins"
# Variables that each run has for itself. Ansible reads all others at its imports.
OF_A_RUN = ("AKP_RECORD", "PYTEST_CURRENT_TEST")


class Warm:
    """Starts the process when the first run is asked for, and ends it with ours. It has one run at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._environment: dict[str, str] = {}

    def run(
        self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str] | None:
        """Like subprocess.run. None if there is a run already, or if the environment is not that of earlier runs."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            basis = {key: value for key, value in environment.items() if key not in OF_A_RUN}
            if self._process is None:
                self._start(basis)
            elif basis != self._environment:
                return None
            with tempfile.TemporaryDirectory() as folder:
                variables = {key: environment[key] for key in OF_A_RUN if key in environment}
                code = self._order(json.dumps([list(argv), str(cwd), variables, folder]))
                out, err = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(list(argv), code, out, err)
        finally:
            self._lock.release()

    def _start(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        atexit.register(self._end)

    def _order(self, line: str) -> int:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return int(process.stdout.readline())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            self._end()
            raise

    def _end(self) -> None:
        """Without orders it ends by itself."""
        atexit.unregister(self._end)
        if self._process is not None:
            self._process.communicate()
            self._process = None


def read_modules() -> None:
    """Everything that a run of ours imports, and what Ansible reads of plugins when they are first used."""
    cli: Any = importlib.import_module("ansible.cli")
    importlib.import_module("ansible.cli.playbook")
    loader: Any = importlib.import_module("ansible.plugins.loader")

    loader.init_plugin_loader()
    # A run begins with this; twice is a warning.
    cli.init_plugin_loader = lambda *_: None
    for folder in ("action", "filter"):
        for path in sorted((PLUGINS / folder).glob("*.py")):
            importlib.import_module(f"ansible_collections.agentless.kube_proxy.plugins.{folder}.{path.stem}")
    for plugins, names in (
        (loader.action_loader, ("set_fact", "assert", "debug", "include_tasks", "meta", "fail", "command", "copy")),
        (loader.connection_loader, ("ssh", "local")),
        (loader.shell_loader, ("sh",)),
        (loader.become_loader, ("sudo",)),
        (loader.strategy_loader, ("linear",)),
        (loader.callback_loader, ("default",)),
        (loader.inventory_loader, ("host_list", "script", "auto", "yaml", "ini", "toml")),
    ):
        for name in names:
            plugins.get(f"ansible.builtin.{name}", class_only=True)


def become(argv: list[str], cwd: str, variables: dict[str, str], folder: str) -> NoReturn:
    """A run of ansible-playbook, to its end."""
    constants: Any = importlib.import_module("ansible.constants")
    playbook: Any = importlib.import_module("ansible.cli.playbook")
    for number, file in ((0, Path(os.devnull)), (1, Path(folder) / "stdout"), (2, Path(folder) / "stderr")):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.update(variables)
    # What was promised at the imports is the parent's to keep, such as the end of its temporary directory.
    atexit._clear()
    own = tempfile.TemporaryDirectory(prefix="ansible-local-")
    atexit.register(own.cleanup)
    constants.DEFAULT_LOCAL_TMP = own.name
    sys.argv = argv
    playbook.main(argv)
    sys.exit(0)


def serve() -> None:
    read_modules()
    with os.fdopen(os.dup(0)) as orders, os.fdopen(os.dup(1), "w") as answers:
        while line := orders.readline():
            child = os.fork()
            if child == 0:
                orders.close()
                answers.close()
                become(*json.loads(line))
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
