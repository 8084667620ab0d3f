# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What runs write into the ledger: who wanted what, and what became of each node."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ledger import Head, append
from .directory import WorkDirectory, run_id

OFF = "none"
# Who started the job, as AWX and its relatives tell a playbook.
_NAMES = ("awx_user_name", "tower_user_name")
_JOBS = ("awx_job_id", "tower_job_id")


class Auditor:
    """Writes entries into a ledger, unless there is no file for it; all of them have what is shared."""

    def __init__(self, file: Path | None, shared: Mapping[str, Any]) -> None:
        self._file = file
        self._shared = shared
        self.told = ""  # where the last entry is, for people; nothing as long as there is none

    def write(self, action: str, result: str, nodes: Mapping[str, Any], **fields: Any) -> Head | None:
        """Add an entry."""
        if self._file is None:
            return None
        entry = {**self._shared, "action": action, "result": result, **fields, "nodes": nodes}
        head = append(self._file, {key: value for key, value in entry.items() if value})
        self.told = head.told(self._file)
        return head


class TaskAuditor(Auditor):
    """The same for a task of Ansible: its run is named, and notes what there is to say about it."""

    def __init__(self, directory: WorkDirectory, setting: str | None, variables: Mapping[str, Any]) -> None:
        cluster = str(variables.get("kube_proxy_cluster_name") or "default")
        file = None if setting == OFF else Path(setting).expanduser() if setting else directory.ledger
        super().__init__(file, {"run": run_id(), "cluster": cluster, "who": who(variables)})
        self._directory = directory
        self._variables = variables

    def write(self, action: str, result: str, nodes: Mapping[str, Any], **fields: Any) -> Head | None:
        """Add an entry, and note the head; what the run as a whole is about comes from its note."""
        host = next(iter(nodes), "localhost")
        head = super().write(action, result, nodes, **{**self._about(host), **fields})
        if head is not None:
            noted = {"number": head.number, "hash": head.hash, "file": str(self._file)}
            self._directory.note("ledger", host, noted)
        return head

    def _about(self, host: str) -> dict[str, Any]:
        """Snapshot, plan and approvers of this run, and the reason that was given for it."""
        # A watch is one run with a snapshot for each push.
        noted = self._directory.noted("about", host) or self._directory.noted("about", "localhost") or {}
        found = {key: noted[key] for key in ("snapshot", "plan", "approvers") if noted.get(key)}
        reason = self._variables.get("kube_proxy_reason")
        return {**found, "reason": str(reason)} if reason else found


def who(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Who does this: the account, and the person if that is known."""
    number = os.getuid()
    try:
        user = pwd.getpwuid(number).pw_name
    except KeyError:
        user = str(number)
    found: dict[str, Any] = {"user": user, "host": socket.gethostname()}
    names = [str(variables[key]) for key in _NAMES if variables.get(key)]
    name = next(iter(names), os.environ.get("SUDO_USER", ""))
    if name and name != user:
        found["name"] = name
    jobs = [str(variables[key]) for key in _JOBS if variables.get(key)]
    return {**found, "job": jobs[0]} if jobs else found
