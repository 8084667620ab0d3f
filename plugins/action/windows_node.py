# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.windows_node: a bundle to a Windows node, and its answer back. A preview."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.program import (
    WINDOWS_BOOT,
    WINDOWS_STARTER,
    programs,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.answers import NoAnswer, parse_answer
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import ControlAction
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec

_POWERSHELL = "powershell.exe -NoProfile -NonInteractive -ExecutionPolicy Bypass -File"
_VERBS = {"absent": ["cleanup"], "rolled_back": ["rollback"], "status": ["status"]}


class ActionModule(ControlAction):
    """Copies a bundle, or the program alone, starts it, and returns what it answers."""

    _requires_connection = True
    SPEC: ClassVar[dict[str, Any]] = spec("windows_node")

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Files into a directory of this run, one program, and the directory goes."""
        state = options["state"]
        if self.check and state in ("absent", "rolled_back"):
            return {"skipped": True, "changed": False}
        files = self._files(options)
        directory = self._make_tmp_path()  # type: ignore[no-untyped-call,unused-ignore]
        try:
            for name, text in files.items():
                self._transfer_data(self._path(directory, name), text)  # type: ignore[no-untyped-call,unused-ignore]
            if state == "applied":
                words = ["check" if self.check else "apply", directory]
            elif state == "gathered":
                # "*" is no name: PowerShell 5.1 loses an empty argument on the way, and a lone dash ends it.
                words = ["facts", options["network"] or "*", options["root_endpoint"]]
            else:
                words = _VERBS[state]
            answer = self._answer(directory, WINDOWS_STARTER, words)
            if options["boot"] is not None and not self.check:
                self._answer(directory, WINDOWS_BOOT, [] if options["boot"] else ["-Remove"])
        finally:
            self._remove_tmp_path(directory)  # type: ignore[no-untyped-call,unused-ignore]
        return {"changed": bool(answer.get("changed")), "answer": answer}

    def _files(self, options: dict[str, Any]) -> dict[str, str]:
        """What the node needs for this; a bundle has the program in it."""
        if options["state"] != "applied":
            return dict(programs("kernelspace"))
        bundle = Path(options["bundle"]).expanduser()
        found = {each.name: each.read_text(encoding="utf-8") for each in sorted(bundle.iterdir()) if each.is_file()}
        if WINDOWS_STARTER not in found:
            raise AnsibleActionFail(f"{bundle}: no bundle of a Windows node: it has no {WINDOWS_STARTER}")  # type: ignore[no-untyped-call,unused-ignore]
        return found

    def _path(self, directory: str, name: str) -> str:
        return str(self._connection._shell.join_path(directory, name))

    def _answer(self, directory: str, script: str, words: list[str]) -> dict[str, Any]:
        """What a script answers: text from outside, so it is read like that of every other node."""
        if any('"' in each for each in words):
            raise AnsibleActionFail(f"{script}: no option may hold a quotation mark: {words}")  # type: ignore[no-untyped-call,unused-ignore]
        quoted = " ".join(f'"{each}"' for each in [self._path(directory, script), *words])
        done = self._low_level_execute_command(f"{_POWERSHELL} {quoted}", executable=False)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            answer = parse_answer(done["rc"], done["stdout"], done["stderr"])
        except NoAnswer as error:
            raise AnsibleActionFail(f"{script}: {error}") from None  # type: ignore[no-untyped-call,unused-ignore]
        if not answer.ok:
            raise AnsibleActionFail(f"{script}: {answer.error}")  # type: ignore[no-untyped-call,unused-ignore]
        return answer.result
