# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.install: the node program and a few files, on hosts without Python."""

from __future__ import annotations

from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.answers import NoAnswer, parse_answer
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.connection import RemoteAction
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.install import File, Install, part_path
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.protocol import leave_path
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.time_limit import time_limit
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec


class ActionModule(RemoteAction):
    """Puts the node program and small files on a host, or takes them away."""

    SPEC: ClassVar[dict[str, Any]] = spec("install")
    VARIABLES: ClassVar[dict[str, str]] = {
        "install_path": "kube_proxy_install_path",
        "mode": "kube_proxy_mode",
        "etc_dir": "kube_proxy_etc_dir",
        "command": "kube_proxy_command",
        "task_timeout": "kube_proxy_task_timeout",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """One command, whatever there is to do."""
        if options["command"]:
            raise AnsibleActionFail(
                "kube_proxy_command allows one program on this host and no other: an account "
                "without that limit has to put files there"
            )
        here = options["state"] == "present"
        wanted = Install(
            files=[
                File(each["path"], each["content"] if here and each["state"] == "present" else None, each["mode"])
                for each in options["files"]
            ],
            settings={
                key: None if value is None or not here else str(value) for key, value in options["settings"].items()
            },
            program=here if options["program"] else None,
            program_path=options["install_path"],
            mode=options["mode"],
            parts=dict.fromkeys(options["parts"], here),
            etc_dir=options["etc_dir"],
            then=options["then"],
        ).command(dry_run=self.check)
        try:
            with time_limit(options["task_timeout"], str(self.task_vars["inventory_hostname"])):
                done = self.execute(wanted)
            answer = parse_answer(done["rc"], done["stdout"], done["stderr"])
            files = answer.required("files") if answer.ok else []
        except NoAnswer as error:
            raise AnsibleActionFail(str(error)) from None
        if not answer.ok:
            raise AnsibleActionFail(answer.error)
        result: dict[str, Any] = {"changed": bool(files), "files": files}
        if files and self._task.diff:
            gone = {each["path"] for each in options["files"] if not here or each["state"] == "absent"}
            if not here:
                program = options["install_path"]
                gone |= {program, leave_path(program), *(part_path(each, program) for each in options["parts"])}
            lines = [f"{'-' if path in gone else '+'} {path}\n" for path in files]
            result["diff"] = {"prepared": "".join(lines)}
        return result
