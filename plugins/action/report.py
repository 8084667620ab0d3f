# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.report: a page that people look at."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import read_record, snapshot_of
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.snapshot import Snapshot
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.configuration import Configuration, read_kept
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.files import write_atomic
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.report.changes import plan_of
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.report.collect import About, collect
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.report.page import plan_page, report_page
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import (
    RULE_VARIABLES,
    ControlAction,
    without_collection,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import WorkDirectory
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec


class ActionModule(ControlAction):
    """Writes the page of a cluster, or of a plan."""

    SPEC: ClassVar[dict[str, Any]] = spec("report")
    VARIABLES: ClassVar[dict[str, str]] = {
        **RULE_VARIABLES,
        "path": "kube_proxy_report",
        "plan": "kube_proxy_plan_file",
        "allowed_signers": "kube_proxy_allowed_signers",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Write it."""
        directory = self.directory(options)
        make = _plan if options["content"] == "plan" else partial(_cluster, self._cluster)
        file = Path(options["path"]).expanduser()
        write_atomic(file, without_collection(partial(make, directory, options)), 0o644)
        # That a page was written says nothing of nodes.
        return {"changed": False, "path": str(file)}

    @property
    def _cluster(self) -> str:
        return str(self.task_vars.get("kube_proxy_cluster_name") or "default")


def _plan(directory: WorkDirectory, options: Mapping[str, Any]) -> str:
    file = _path(options, "plan") or directory.plan
    plan = plan_of(file, directory, _path(options, "allowed_signers"))
    if plan is None:
        raise AnsibleActionFail(f"{file}: there is no plan that can be read")  # type: ignore[no-untyped-call,unused-ignore]
    return plan_page(plan)


def _cluster(name: str, directory: WorkDirectory, options: Mapping[str, Any]) -> str:
    file = _path(options, "snapshot") or directory.snapshot
    snapshot, source, configuration = Snapshot((), (), (), ()), "not read: there is no snapshot yet", ""
    if file.is_file():
        record = read_record(file)
        snapshot, source, configuration = snapshot_of(record), record.source or "files", record.configuration
    choices = Configuration.of(options, kept=read_kept(directory.config), cluster=configuration).choices
    about = About(name, source, directory, _path(options, "plan"), _path(options, "allowed_signers"))
    return report_page(collect(snapshot, choices, directory.gathered(), about))


def _path(options: Mapping[str, Any], name: str) -> Path | None:
    return Path(options[name]).expanduser() if options[name] else None
