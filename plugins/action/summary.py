# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.summary: how a run went, for people and for those who approve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import peek
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.approval import (
    plan_file,
    plan_text,
    write_plan,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.groups import lines_of
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.metrics import Freshness, note_run
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.progress import conclude
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.removal_limit import Frontends, shown
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.report import plan_of, summarise
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import ControlAction, described
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import write_json
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec


class ActionModule(ControlAction):
    """Puts together what the tasks of this run noted."""

    SPEC: ClassVar[dict[str, Any]] = spec("summary")

    VARIABLES: ClassVar[dict[str, str]] = {
        "plan": "kube_proxy_plan_file",
        "snapshot": "kube_proxy_snapshot",
        "status_file": "kube_proxy_status_file",
        "textfile": "kube_proxy_textfile",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Read the notes of this run."""
        directory = self.directory(options)
        notes = list(directory.notes())
        summary = summarise(notes, options["hosts"], check=self.check)
        lines = summary.lines()
        result: dict[str, Any] = {
            "changed": False,
            "nodes": {
                "changed": list(summary.changed),
                "unchanged": list(summary.unchanged),
                "failed": dict(summary.failed),
                "untried": list(summary.untried),
            },
            "services": dict(summary.services),
            "endpoints": dict(summary.endpoints),
            "left_out": list(summary.left_out),
            "seconds": dict(summary.seconds),
        }
        if options["status_file"]:
            write_json(Path(options["status_file"]).expanduser(), result["nodes"])
        if not self.check:
            cluster = str(self.task_vars.get("kube_proxy_cluster_name") or "default")
            missing = conclude(directory, Frontends(directory.frontends))
            if missing:
                lines.append(
                    f"the plan is not carried out, not on {shown(missing, 20)}: follow it again, or make a new one"
                )
            with Freshness(directory, cluster) as fresh:
                untried = dict.fromkeys(summary.untried, summary.stopped or "the run ended before its turn")
                note_run(fresh, directory, notes, options["hosts"], {**untried, **summary.failed})
                if options["textfile"]:
                    try:
                        result["textfile"] = str(fresh.write(Path(options["textfile"])))
                    except OSError as error:
                        # The rules are on the nodes; a run without metrics is no failed run.
                        result["warnings"] = [f"no metrics were written: {described(error)}"]
        if not options["write_plan"] and summary.long:
            lines.append(f"all changes, by nodes and Services: {directory.keep_lines(lines_of(summary.changes))}")
        if options["write_plan"] and (summary.stopped or not (summary.changed or summary.unchanged)):
            lines.append("no plan was written")
        elif options["write_plan"]:
            path = Path(options["plan"]).expanduser() if options["plan"] else directory.plan
            snapshot = Path(options["snapshot"]).expanduser() if options["snapshot"] else directory.snapshot
            content = plan_of(notes, peek(snapshot))
            cluster = str(self.task_vars.get("kube_proxy_cluster_name") or "default")
            plan = write_plan(path, content, snapshot, cluster, [*plan_text(content), *lines])
            if summary.long:
                lines.append(f"all changes, by nodes and Services: {plan_file(path, 'txt')}")
            lines += [f"plan: {path}", f"digest: {plan['digest']}", f"it is signed with: akp approve {path} --key KEY"]
            result |= {"plan": str(path), "plan_digest": plan["digest"]}
        return {**result, "lines": lines}
