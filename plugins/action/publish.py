# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.publish: signed bundles for nodes that fetch them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.configuration import (
    Configuration,
    Kept,
    announced,
    read_kept,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.errors import UserError, described
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.audit import TaskAuditor
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.proof import refuse_unproved
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import (
    LEDGER_VARIABLES,
    RULE_VARIABLES,
    ControlAction,
    without_collection,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import Stopwatch
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec

if TYPE_CHECKING:
    from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.publish.publishing import Inputs, Report


class ActionModule(ControlAction):
    """Publishes the rules of all nodes."""

    SPEC: ClassVar[dict[str, Any]] = spec("publish")
    VARIABLES: ClassVar[dict[str, str]] = {
        **RULE_VARIABLES,
        **LEDGER_VARIABLES,
        "path": "kube_proxy_publish_path",
        "cluster": "kube_proxy_cluster_name",
        "keys": "kube_proxy_publish_keys",
        "valid_hours": "kube_proxy_publish_valid_hours",
        "grace_minutes": "kube_proxy_publish_grace_minutes",
        "deltas": "kube_proxy_publish_deltas",
        "renew": "kube_proxy_publish_renew",
        "nodes": "kube_proxy_publish_nodes",
        "max_removed_percent": "kube_proxy_max_removed_percent",
        "prove": "kube_proxy_prove",
        "allow_mode_change": "kube_proxy_allow_mode_change",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Render, sign, switch over."""
        # Here and not above: the engine takes a while to import, and every process of Ansible would.
        from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import read_record
        from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.publish.publishing import (
            History,
            Inputs,
            publish,
        )
        from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.publish.store import Publication, Terms

        watch = Stopwatch()
        directory = self.directory(options)
        snapshot = Path(options["snapshot"]).expanduser() if options["snapshot"] else directory.snapshot
        record, kept = read_record(snapshot), read_kept(directory.config)
        configuration = Configuration.of(options, kept=kept, cluster=record.configuration)
        settings = configuration.refuse_changes(kept, allowed=options["allow_mode_change"])
        inputs = Inputs(record, configuration.choices, directory.gathered())
        told = (*configuration.warnings, *announced(settings, {}, inputs.choices.proxy.mode))
        terms = Terms(
            options["cluster"],
            tuple(Path(key).expanduser() for key in options["keys"]),
            options["valid_hours"] * 3600.0,
            options["grace_minutes"] * 60.0,
            options["renew"],
        )
        path = Path(options["path"]).expanduser()
        nodes = options["nodes"] or None
        history = History(directory.path / "published", options["deltas"])
        auditor = TaskAuditor(directory, options, self.task_vars)
        audit = partial(auditor.write, "publish", snapshot=inputs.record.digest)
        percent = options["max_removed_percent"]
        run = partial(publish, Publication(path, terms), history, inputs, nodes, percent, audit)
        try:
            if options["prove"]:
                without_collection(lambda: _prove(inputs, run(check=True)))
            report = without_collection(lambda: run(check=self.check))
        except (UserError, OSError) as error:
            raise AnsibleActionFail(described(error), result={"ledger": auditor.told}) from None
        if not self.check:
            Kept.of(inputs.choices).write(directory.config)
        times = watch.fields()
        by_action: dict[str, list[str]] = {"changed": [], "renewed": [], "unchanged": []}
        for each in report.nodes:
            by_action[each.action].append(each.node)
        result: dict[str, Any] = {
            "changed": bool(by_action["changed"] or by_action["renewed"] or report.withdrawn),
            "path": str(path),
            "generations": {each.node: each.generation for each in report.nodes},
            "updated": by_action["changed"],
            "renewed": by_action["renewed"],
            "unchanged": len(by_action["unchanged"]),
            "withdrawn": list(report.withdrawn),
            "errors": dict(report.errors),
            "problems": [str(problem) for problem in inputs.snapshot.problems],
            "ledger": auditor.told,
            "seconds": round(times["ended"] - times["began"], 2),
        }
        warnings = [
            *(f"{each.heading}: {each.text}" for each in told),
            *inputs.warnings,
            *(f"node {node} is not published: {why}" for node, why in report.errors.items()),
        ]
        return {**result, "warnings": warnings} if warnings else result


def _prove(inputs: Inputs, report: Report) -> None:
    """Stop unless what changes is proved."""
    changing = [each.node for each in report.nodes if each.action == "changed"]
    refuse_unproved(inputs.record, inputs.choices, inputs.facts, changing)
