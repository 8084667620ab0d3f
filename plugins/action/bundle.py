# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.bundle: the bundle of each node."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry import rival
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.choices import Choices
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import peek, peek_configuration
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.configuration import (
    Configuration,
    Kept,
    announced,
    other_mode,
    read_kept,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.list_variables import as_batches
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan import approval
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan import progress as following
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.audit import TaskAuditor
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.bundles import Outcome, Target, render, target
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.coverage import without_host
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.proof import refuse_unproved
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.removal_limit import Frontends, refuse_shrinkage
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.report import limited, plan_snapshot
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.proxy.warned import Warned
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import (
    LEDGER_VARIABLES,
    RULE_VARIABLES,
    ControlAction,
    plain,
    without_collection,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import Stopwatch, WorkDirectory
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.notes import (
    CONTROL,
    About,
    Configured,
    Planned,
    Pushed,
    Refused,
    Rendered,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec


class ActionModule(ControlAction):
    """Renders bundles for the hosts of a play, or for all nodes."""

    SPEC: ClassVar[dict[str, Any]] = spec("bundle")
    VARIABLES: ClassVar[dict[str, str]] = {
        **RULE_VARIABLES,
        "digest": "kube_proxy_snapshot_digest",
        **LEDGER_VARIABLES,
        "max_removed_percent": "kube_proxy_max_removed_percent",
        "prove": "kube_proxy_prove",
        "plan": "kube_proxy_plan",
        "plan_digest": "kube_proxy_plan_digest",
        "planning": "kube_proxy_planning",
        "approval": "kube_proxy_approval",
        "allowed_signers": "kube_proxy_allowed_signers",
        "signatures": "kube_proxy_signatures",
        "signing_key": "kube_proxy_signing_key",
        "allow_running": "kube_proxy_allow_running",
        "allow_mode_change": "kube_proxy_allow_mode_change",
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
        configuration, settings = self._configuration(options, directory, snapshot, approved)
        choices = configuration.choices
        outcome = Outcome(warnings=configuration.warnings)
        for cluster, its in clusters:
            outcome.include(without_collection(partial(render, directory, cluster, choices, its)))
        outcome.warnings += waiting
        modes = _other_modes(directory, targets or (), choices.proxy.mode)
        outcome.warnings += announced(settings, modes, choices.proxy.mode)
        if not approved and not options["allow_mode_change"]:
            outcome.errors.update({host: other_mode(had, choices.proxy.mode) for host, had in modes.items()})
            outcome.stale = sorted({*outcome.stale, *modes})
        if targets is not None:
            outcome.warnings += self._uncovered(targets, outcome)
            if not options["allow_running"]:
                self._contested(directory, targets, outcome)
        if approved:
            _compare_with_plan(approved.plan, snapshot, targets or (), outcome)
        steps = _steps(targets or (), outcome)
        refuse_shrinkage(frontends, steps, options["max_removed_percent"])
        if options["prove"]:
            for cluster, its in clusters:
                _prove(cluster, choices, targets if its is None else its, steps)
        directory.note(Configured(choices.proxy.mode, configuration.origin, Kept.of(choices).document), CONTROL)
        if not planning:
            self._agreed(options, directory, approved, frontends, steps, outcome)
        if not self.check and outcome.generations.keys() - outcome.errors.keys():
            Kept.of(choices).write(directory.config)
        steps = _steps(targets or (), outcome)
        about = About(peek(snapshot))
        if approved:
            about = About(about.snapshot, approved.plan["digest"], approved.approvers)
            for host in steps:
                entry = approved.plan["hosts"][host]
                directory.note(Planned(entry.get("generation") or "", entry.get("digest") or ""), host)
            if not self.check and outcome.generations.keys() - outcome.errors.keys():
                following.begin(directory, approved.plan, snapshot, frontends)
        directory.note(about, CONTROL)
        if steps and not self.check:
            nodes = {host: {"before": before, "after": after} for host, (before, after) in steps.items()}
            TaskAuditor(directory, options, self.task_vars).write("sync", "begun", nodes)
        times = watch.fields()
        directory.note(Rendered(**times, problems=outcome.problems, warned=outcome.warnings), CONTROL)
        for host, error in outcome.errors.items():
            directory.note(Refused(error), host)
        for host, generation in outcome.generations.items():
            if host not in outcome.stale and directory.noted(Pushed, host) is None:
                directory.note(Pushed(**times, node=outcome.nodes[host], generation=generation), host)
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

    def _configuration(
        self, options: dict[str, Any], directory: WorkDirectory, snapshot: Path, approved: approval.Approval | None
    ) -> tuple[Configuration, tuple[str, ...]]:
        """What holds in this run, and what of it is not as in the last one; or OtherSettings."""
        plan = Kept.read(approved.plan.get("configuration")) if approved else None
        kept = read_kept(directory.config)
        found = Configuration.of(options, kept=kept, cluster=peek_configuration(snapshot), plan=plan)
        # The approvers of a plan were told of its settings.
        return found, found.refuse_changes(kept, allowed=bool(approved) or options["allow_mode_change"])

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
        """Leave out hosts whose change was not approved, and lay the signatures beside the bundles of the others."""
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

    def _contested(self, directory: WorkDirectory, targets: Iterable[Target], outcome: Outcome) -> None:
        """Leave hosts alone where kube-proxy runs; who only looks is told."""
        for each in targets:
            signs = (directory.answer(each.host) or {}).get("kubeProxy")
            if not signs:
                continue
            told = rival.told(each.host, each.node, signs)
            if self.check:
                outcome.warnings += (Warned("kube-proxy runs beside", told),)
                continue
            outcome.errors.setdefault(each.host, told)
            outcome.stale = sorted({*outcome.stale, each.host})

    def _uncovered(self, targets: Iterable[Target], outcome: Outcome) -> tuple[Warned, ...]:
        """Nodes of the cluster that are no host of the inventory, in this play or not."""
        hosts = {each.host for each in targets}
        others = [host for host in (self.task_vars.get("groups") or {}).get("all", ()) if host not in hosts]
        covered = [each.node for each in targets]
        return without_host(outcome.members, covered, others, self.task_vars.get("hostvars") or {})

    def _run(self, changing: list[str]) -> dict[str, Any]:
        """What the play that changes nodes has to know before it has any of them."""
        batches = plain(self._templar.template(self.task_vars.get("kube_proxy_batches")))
        return {
            "changing": changing,
            "hosts": plain(self.task_vars.get("ansible_play_hosts_all") or []),
            **({"batches": as_batches(batches, "kube_proxy_batches")} if batches else {}),
        }


def _other_modes(directory: WorkDirectory, targets: Iterable[Target], mode: str) -> dict[str, str]:
    """Hosts that have something applied in another mode, and that mode."""
    found = {}
    for each in targets:
        status = (directory.answer(each.host) or {}).get("status") or {}
        if each.recorded and status.get("mode") not in (None, "", mode):
            found[each.host] = str(status["mode"])
    return found


def _steps(targets: Iterable[Target], outcome: Outcome) -> dict[str, tuple[str, str]]:
    """Host -> the generation that it has and the one that it is going to be given."""
    return {
        each.host: (each.recorded, outcome.generations[each.host])
        for each in targets
        if each.host in outcome.stale and each.host not in outcome.errors
    }


def _prove(snapshot: Path, choices: Choices, targets: Iterable[Target] | None, steps: Container[str]) -> None:
    """Stop unless what changes is proved."""
    changing = [each for each in targets or () if each.host in steps]
    facts = {each.node: each.facts for each in changing if each.facts}
    without_collection(partial(refuse_unproved, snapshot, choices, facts, [each.node for each in changing]))


def _compare_with_plan(plan: Mapping[str, Any], snapshot: Path, targets: Iterable[Target], outcome: Outcome) -> None:
    """What was approved is what will be applied, or nothing is."""
    if plan.get("snapshot") != peek(snapshot):
        raise AnsibleActionFail(f"{snapshot}: is not the cluster that the plan was made for; make a new plan")
    recorded = {each.host: each.recorded for each in targets}
    for host, error in approval.beside(plan, outcome.generations, recorded).items():
        outcome.errors[host] = error
        if host not in outcome.stale:
            outcome.stale.append(host)
