# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.install: the node program and a few files, on hosts without Python."""

from __future__ import annotations

from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.base import DIR_OPTION
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.install import (
    ETC_DIR,
    File,
    Install,
    InvalidInstall,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.push import (
    INSTALLED,
    NoAnswer,
    parse_answer,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.wire import RemoteAction


class ActionModule(RemoteAction):
    """Puts the node program and small files on a host, or takes them away."""

    SPEC: ClassVar[dict[str, Any]] = {
        **DIR_OPTION,
        "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
        "program": {"type": "bool", "default": False},
        "install_path": {"type": "str", "default": INSTALLED},
        "files": {
            "type": "list",
            "elements": "dict",
            "default": [],
            "options": {
                "path": {"type": "str", "required": True},
                "content": {"type": "str", "default": ""},
                "mode": {"type": "str", "default": "0644"},
                "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
            },
        },
        "settings": {"type": "dict", "default": {}},
        "etc_dir": {"type": "str", "default": ETC_DIR},
        "then": {"type": "str", "default": ""},
        "command": {"type": "str"},
    }
    VARIABLES: ClassVar[dict[str, str]] = {
        "install_path": "kube_proxy_install_path",
        "etc_dir": "kube_proxy_etc_dir",
        "command": "kube_proxy_command",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """One command, whatever there is to do."""
        if options["command"]:
            raise AnsibleActionFail(
                "kube_proxy_command allows one program on this host and no other: files have to be put there by "
                "somebody who may"
            )
        here = options["state"] == "present"
        try:
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
                etc_dir=options["etc_dir"],
                then=options["then"],
            ).command(dry_run=self.check)
        except InvalidInstall as error:
            raise AnsibleActionFail(str(error)) from None
        done = self.execute(wanted)
        try:
            answer = parse_answer(done["rc"], done["stdout"], done["stderr"]).result
        except NoAnswer as error:
            raise AnsibleActionFail(str(error)) from None
        if not answer["ok"]:
            raise AnsibleActionFail(str(answer["error"]))
        result: dict[str, Any] = {"changed": bool(answer["files"]), "files": answer["files"]}
        if answer["files"] and self._task.diff:
            gone = {each["path"] for each in options["files"] if not here or each["state"] == "absent"}
            gone |= set() if here else {options["install_path"]}
            lines = [f"{'-' if path in gone else '+'} {path}\n" for path in answer["files"]]
            result["diff"] = {"prepared": "".join(lines)}
        return result
