# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.bundle: what each node shall have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import peek
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.base import (
    DIR_OPTION,
    ControlAction,
    without_collection,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.directory import Stopwatch, read_json
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.render import (
    Outcome,
    Schedulers,
    load_config,
    render,
    target,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.report import plan_digest, plan_snapshot


class ActionModule(ControlAction):
    """Renders bundles for the hosts of a play, or for all nodes."""

    SPEC: ClassVar[dict[str, Any]] = {
        **DIR_OPTION,
        "snapshot": {"type": "path"},
        "digest": {"type": "str"},
        "config": {"type": "raw"},
        "hosts": {"type": "list", "elements": "str"},
        "node_names": {"type": "dict", "default": {}},
        "compat": {"type": "str", "default": "1.37"},
        "schedulers": {"type": "dict", "default": {}},
        "scheduler_annotations": {"type": "bool", "default": False},
        "plan": {"type": "path"},
        "plan_digest": {"type": "str"},
    }
    VARIABLES: ClassVar[dict[str, str]] = {
        "snapshot": "kube_proxy_snapshot",
        "digest": "kube_proxy_snapshot_digest",
        "config": "kube_proxy_config",
        "compat": "kube_proxy_compat",
        "schedulers": "kube_proxy_schedulers",
        "scheduler_annotations": "kube_proxy_scheduler_annotations",
        "plan": "kube_proxy_plan",
        "plan_digest": "kube_proxy_plan_digest",
    }
    RULES: ClassVar[dict[str, Any]] = {"required_together": [("plan", "plan_digest")]}

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Render what is not known, write what is needed, and say who needs it."""
        watch = Stopwatch()
        directory = self.directory(options)
        plan = Path(options["plan"]).expanduser() if options["plan"] else None
        snapshot = plan_snapshot(plan) if plan else directory.snapshot
        if options["snapshot"]:
            snapshot = Path(options["snapshot"]).expanduser()
        if options["digest"] and peek(snapshot) != options["digest"]:
            raise AnsibleActionFail(
                f"{snapshot}: has the digest {peek(snapshot) or 'of no snapshot'}, but {options['digest']} was asked "
                "for: this is not the cluster that the other runs see"
            )
        names = options["node_names"]
        targets = None
        if options["hosts"] is not None:
            targets = [target(directory, host, names.get(host, "")) for host in options["hosts"]]
        schedulers = Schedulers(options["schedulers"], options["scheduler_annotations"])
        outcome: Outcome = without_collection(
            lambda: render(directory, snapshot, load_config(options["config"]), targets, options["compat"], schedulers)
        )
        if plan:
            _compare_with_plan(plan, options["plan_digest"], snapshot, outcome)
        times = watch.fields()
        directory.note("render", "localhost", {**times, "problems": outcome.problems, "ignored": outcome.ignored})
        for host, error in outcome.errors.items():
            directory.note("refused", host, {"error": error})
        for host, generation in outcome.generations.items():
            if host not in outcome.stale and directory.noted("push", host) is None:
                directory.note("push", host, {**times, "changed": False, "generation": generation})
        directory.forget_old_runs()
        return {
            "changed": bool(outcome.written),
            "path": str(directory.bundles),
            "generations": outcome.generations,
            "counts": outcome.counts,
            "stale": outcome.stale,
            "written": outcome.written,
            "rendered": outcome.rendered,
            "errors": outcome.errors,
            "problems": outcome.problems,
            "ignored": outcome.ignored,
            "seconds": round(times["ended"] - times["began"], 2),
        }


def _compare_with_plan(path: Path, digest: str, snapshot: Path, outcome: Outcome) -> None:
    """What was approved is what will be applied, or nothing is."""
    plan = read_json(path)
    if plan is None:
        raise AnsibleActionFail(f"{path}: there is no plan")
    if plan_digest(plan) != digest:
        raise AnsibleActionFail(f"{path}: its digest is {plan_digest(plan)}, but {digest} was approved")
    if plan.get("snapshot") != peek(snapshot):
        raise AnsibleActionFail(f"{snapshot}: is not the cluster that the plan was made for; make a new plan")
    for host, generation in outcome.generations.items():
        planned = plan["hosts"].get(host, {}).get("generation")
        if planned != generation:
            outcome.errors[host] = f"would get generation {generation}, but the plan says {planned}; make a new plan"
            if host not in outcome.stale:
                outcome.stale.append(host)
