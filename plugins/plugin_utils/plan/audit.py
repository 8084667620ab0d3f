# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What runs write into the ledger: who wanted what, and what became of each node."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pwd
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ledger import Head, append
from ..ledger_copy import copy_to
from ..tasks.directory import WorkDirectory, run_id
from ..tasks.notes import CONTROL, About, Audited, Entered

OFF = "none"
# How long the same failure of a host is not entered again.
REPEAT_SECONDS = 3600.0
# Who started the job, as AWX and its relatives tell a playbook.
_NAMES = ("awx_user_name", "tower_user_name")
_JOBS = ("awx_job_id", "tower_job_id")
# The variables of a host that entries tell of.
AUDITED = (*_NAMES, *_JOBS, "kube_proxy_cluster_name", "kube_proxy_reason")


class Auditor:
    """Writes entries into a ledger, unless there is no file for it; all of them have what is shared."""

    def __init__(self, file: Path | None, shared: Mapping[str, Any], copy: str = "") -> None:
        """A copy of each entry goes where `ledger_copy.copy_to` says."""
        self._file = file
        self._copy = copy_to(copy)
        self._shared = shared
        self.told = ""  # where the last entry is, for people; nothing as long as there is none

    def write(self, action: str, result: str, nodes: Mapping[str, Any], **fields: Any) -> Head | None:
        """Add an entry."""
        if self._file is None:
            return None
        entry = {**self._shared, "action": action, "result": result, **fields, "nodes": nodes}
        head = append(self._file, {key: value for key, value in entry.items() if value}, self._copy)
        self.told = head.told(self._file)
        return head


class TaskAuditor(Auditor):
    """The same for a task of Ansible: its run is named, and notes what there is to say about it."""

    def __init__(
        self,
        directory: WorkDirectory,
        options: Mapping[str, Any],
        variables: Mapping[str, Any],
        about: About | None = None,
    ) -> None:
        """Options are those of the fragment ledger. What a push is about is noted by its run, unless it is given."""
        cluster = str(variables.get("kube_proxy_cluster_name") or "default")
        setting, copy = options.get("ledger"), str(options.get("ledger_copy") or "")
        file = None if setting == OFF else Path(setting).expanduser() if setting else directory.ledger
        super().__init__(file, {"run": run_id(), "cluster": cluster, "who": who(variables)}, copy)
        self._directory = directory
        self._variables = variables
        self._given = about

    def write(self, action: str, result: str, nodes: Mapping[str, Any], **fields: Any) -> Head | None:
        """Add an entry, and note the head; what the run as a whole is about comes from its note."""
        host = next(iter(nodes), CONTROL)
        if result != "failed":
            self._directory.forget(Audited, host)
        elif self._repeated(host, action, result, nodes):
            return None
        head = super().write(action, result, nodes, **{**self._about(host), **fields})
        if head is not None and self._given is None:
            self._directory.note(Entered(head.number, head.hash, str(self._file)), host)
        return head

    def _repeated(self, host: str, action: str, result: str, nodes: Mapping[str, Any]) -> bool:
        """Whether this run failed in the same way a while ago: a watch that tries for days says so once an hour."""
        if self._file is None:
            return False
        # Messages tell how many seconds are left, and the like.
        text = re.sub("[0-9]+", "0", json.dumps([action, result, nodes], sort_keys=True))
        what, now = hashlib.sha256(text.encode()).hexdigest(), time.time()
        last = self._directory.noted(Audited, host)
        if last is not None and last.what == what and now - last.at < REPEAT_SECONDS:
            return True
        self._directory.note(Audited(what, now), host)
        return False

    def _about(self, host: str) -> dict[str, Any]:
        """Snapshot, plan and approvers of this run, and the reason that was given for it."""
        # A watch is one run with a snapshot for each push.
        noted = self._given or self._directory.noted(About, host) or self._directory.noted(About, CONTROL)
        found = {key: value for key, value in dataclasses.asdict(noted).items() if value} if noted else {}
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
