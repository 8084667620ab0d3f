# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.bundle: what each node shall have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import peek
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller import approval, following
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.audit import TaskAuditor
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.base import (
    DIR_OPTION,
    LEDGER_OPTION,
    RULE_OPTIONS,
    RULE_VARIABLES,
    ControlAction,
    plain,
    without_collection,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.directory import (
    Stopwatch,
    WorkDirectory,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.guard import Frontends, refuse_shrinkage
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.render import (
    Outcome,
    Schedulers,
    Target,
    Vips,
    load_config,
    render,
    target,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.report import limited, plan_snapshot
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.proxy.warned import Warned
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.words import as_batches


class ActionModule(ControlAction):
    """Renders bundles for the hosts of a play, or for all nodes."""

    SPEC: ClassVar[dict[str, Any]] = {
        **DIR_OPTION,
        **RULE_OPTIONS,
        **LEDGER_OPTION,
        "digest": {"type": "str"},
        "hosts": {"type": "list", "elements": "str"},
        "node_names": {"type": "dict", "default": {}},
        "max_removed_percent": {"type": "int", "default": 100},
        "plan": {"type": "path"},
        "plan_digest": {"type": "str"},
        "planning": {"type": "bool", "default": False},
        "approval": {"type": "str", "default": "none", "choices": ["none", "frontends", "all"]},
        "allowed_signers": {"type": "path"},
        "signatures": {"type": "int", "default": 1},
        "signing_key": {"type": "path", "no_log": False},
    }
    VARIABLES: ClassVar[dict[str, str]] = {
        **RULE_VARIABLES,
        "digest": "kube_proxy_snapshot_digest",
        "ledger": "kube_proxy_ledger",
        "max_removed_percent": "kube_proxy_max_removed_percent",
        "plan": "kube_proxy_plan",
        "plan_digest": "kube_proxy_plan_digest",
        "planning": "kube_proxy_planning",
        "approval": "kube_proxy_approval",
        "allowed_signers": "kube_proxy_allowed_signers",
        "signatures": "kube_proxy_signatures",
        "signing_key": "kube_proxy_signing_key",
    }
    RULES: ClassVar[dict[str, Any]] = {"required_by": {"plan_digest": "plan"}}

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Render what is not known, write what is needed, and say who needs it."""
        watch = Stopwatch()
        directory = self.directory(options)
        plan = Path(options["plan"]).expanduser() if options["plan"] else None
        approved = self._approved(plan, options)
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
        frontends = Frontends(directory.frontends)
        waiting: tuple[Warned, ...] = ()
        clusters: approval.Clusters = [(snapshot, targets)]
        # A plan is for those who have yet to agree. It changes nothing, so the word alone is not enough.
        planning = options["planning"] and self.check
        if options["approval"] == "frontends" and not plan and not planning:
            clusters, waiting = approval.approved_clusters(directory, snapshot, targets, frontends)
            snapshot = clusters[0][0]
        schedulers = Schedulers(options["schedulers"], options["scheduler_annotations"])
        vips = Vips(options["vip_policy"], options["external_ip_cidrs"], options["load_balancer_cidrs"])
        config = load_config(options["config"])
        outcome = Outcome()
        for cluster, its in clusters:
            rendered = partial(render, directory, cluster, config, its, options["compat"], schedulers, vips)
            outcome.include(without_collection(rendered))
        outcome.warnings += waiting
        if approved:
            _compare_with_plan(approved.plan, snapshot, targets or (), outcome)
        steps = _steps(targets or (), outcome)
        refuse_shrinkage(frontends, steps, options["max_removed_percent"])
        if not planning:
            self._agreed(options, directory, approved, frontends, steps, outcome)
        steps = _steps(targets or (), outcome)
        about = {"snapshot": peek(snapshot)}
        if approved:
            about |= {"plan": approved.plan["digest"], "approvers": approved.approvers}
            for host in steps:
                entry = approved.plan["hosts"][host]
                directory.note("planned", host, {key: entry.get(key) for key in ("generation", "digest")})
            if not self.check and outcome.generations.keys() - outcome.errors.keys():
                following.begin(directory, approved.plan, snapshot, frontends)
        directory.note("about", "localhost", about)
        if steps and not self.check:
            nodes = {host: {"before": before, "after": after} for host, (before, after) in steps.items()}
            TaskAuditor(directory, options["ledger"], self.task_vars).write("sync", "begun", nodes)
        times = watch.fields()
        noted = {"problems": outcome.problems, "ignored": outcome.ignored, "warned": outcome.warnings}
        directory.note("render", "localhost", {**times, **noted})
        for host, error in outcome.errors.items():
            directory.note("refused", host, {"error": error})
        for host, generation in outcome.generations.items():
            if host not in outcome.stale and directory.noted("push", host) is None:
                directory.note("push", host, {**times, "changed": False, "generation": generation})
        directory.forget_old_runs()
        if outcome.rendered:
            frontends.forget(directory.recorded() | {*outcome.generations.values()})
        told = {} if not outcome.warnings else {"warnings": limited([each.text for each in outcome.warnings])}
        return {
            **told,
            "ansible_facts": {"kube_proxy_run": self._run(list(steps))},
            "changed": bool(outcome.written),
            "path": str(directory.bundles),
            "generations": outcome.generations,
            "counts": outcome.counts,
            "stale": outcome.stale,
            "changing": list(steps),
            "written": outcome.written,
            "rendered": outcome.rendered,
            "errors": outcome.errors,
            "problems": outcome.problems,
            "ignored": outcome.ignored,
            "seconds": round(times["ended"] - times["began"], 2),
        }

    def _approved(self, plan: Path | None, options: Mapping[str, Any]) -> approval.Approval | None:
        """The plan to follow, if enough have agreed to it."""
        if plan is None:
            return None
        allowed = Path(options["allowed_signers"]).expanduser() if options["allowed_signers"] else None
        return approval.approval_of(plan, options["plan_digest"] or "", allowed, options["signatures"])

    def _agreed(
        self,
        options: Mapping[str, Any],
        directory: WorkDirectory,
        approved: approval.Approval | None,
        frontends: Frontends,
        steps: Mapping[str, tuple[str, str]],
        outcome: Outcome,
    ) -> None:
        """Leave out hosts whose change nobody agreed to, and lay the signatures beside the bundles of the others."""
        nodes = {host: directory.bundles / outcome.nodes[host] for host in steps}
        if approved:
            outcome.errors.update(approval.uncovered(approved, nodes))
        else:
            names = following.approved_frontends(directory)
            outcome.errors.update(approval.unapproved(options["approval"], frontends, steps, names))
        if self.check:
            return
        good = [each for host, each in nodes.items() if host not in outcome.errors]
        if approved and approved.text:
            approval.lay_down(approved.text, approved.signatures, good)
        elif options["signing_key"]:
            cluster = str(self.task_vars.get("kube_proxy_cluster_name") or "default")
            approval.sign_for(cluster, good, Path(options["signing_key"]).expanduser())

    def _run(self, changing: list[str]) -> dict[str, Any]:
        """What the play that changes nodes has to know before it has any of them."""
        batches = plain(self._templar.template(self.task_vars.get("kube_proxy_batches")))
        return {
            "changing": changing,
            "hosts": plain(self.task_vars.get("ansible_play_hosts_all") or []),
            **({"batches": as_batches(batches, "kube_proxy_batches")} if batches else {}),
        }


def _steps(targets: Iterable[Target], outcome: Outcome) -> dict[str, tuple[str, str]]:
    """Host -> the generation that it has and the one that it is going to be given."""
    return {
        each.host: (each.recorded, outcome.generations[each.host])
        for each in targets
        if each.host in outcome.stale and each.host not in outcome.errors
    }


def _compare_with_plan(plan: Mapping[str, Any], snapshot: Path, targets: Iterable[Target], outcome: Outcome) -> None:
    """What was approved is what will be applied, or nothing is."""
    if plan.get("snapshot") != peek(snapshot):
        raise AnsibleActionFail(f"{snapshot}: is not the cluster that the plan was made for; make a new plan")
    recorded = {each.host: each.recorded for each in targets}
    for host, error in approval.beside(plan, outcome.generations, recorded).items():
        outcome.errors[host] = error
        if host not in outcome.stale:
            outcome.stale.append(host)
