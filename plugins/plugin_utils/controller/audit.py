# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What the tasks of a run write into the ledger: who wanted what, and what became of each node."""

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
    """Writes the entries of one run into the ledger of a cluster, unless that is switched off."""

    def __init__(self, directory: WorkDirectory, setting: str | None, variables: Mapping[str, Any]) -> None:
        self._directory = directory
        self._variables = variables
        self.file = None if setting == OFF else Path(setting).expanduser() if setting else directory.ledger

    def write(self, action: str, result: str, nodes: Mapping[str, Any], **fields: Any) -> None:
        """Add an entry; what the run as a whole is about comes from its note."""
        if self.file is None:
            return
        entry: dict[str, Any] = {
            "run": run_id(),
            "cluster": str(self._variables.get("kube_proxy_cluster_name") or "default"),
            "who": who(self._variables),
            "action": action,
            "result": result,
            **self.about(),
            **fields,
            "nodes": nodes,
        }
        head = append(self.file, {key: value for key, value in entry.items() if value})
        self._note(head, next(iter(nodes), "localhost"))

    def _note(self, head: Head, host: str) -> None:
        self._directory.note("ledger", host, {"number": head.number, "hash": head.hash, "file": str(self.file)})

    def about(self) -> dict[str, Any]:
        """Snapshot, plan and approvers of this run, and the reason that was given for it."""
        noted = self._directory.noted("about", "localhost") or {}
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
