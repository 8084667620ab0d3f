# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.bundle: the bundle of each node."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a run begins with."""

    options: Mapping[str, Any]
    directory: WorkDirectory
    targets: list[Target] | None  # the hosts of the play; without a play, all nodes
    frontends: Frontends
    clusters: approval.Clusters  # snapshots, each with the hosts that get its rules
    waiting: tuple[Warned, ...]  # what has to be approved first
    approved: approval.Approval | None
    planning: bool

    @property
    def snapshot(self) -> Path:
        """The cluster that most hosts are to serve."""
        return self.clusters[0][0]


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
        run = self._facts_of_run(options)
        configuration, settings = self._configuration(run)
        choices = configuration.choices
        outcome = self._rendered(run, configuration, settings)
        steps = _steps(run.targets or (), outcome)
        refuse_shrinkage(run.frontends, steps, options["max_removed_percent"])
        if options["prove"]:
            for cluster, its in run.clusters:
                _prove(cluster, choices, run.targets if its is None else its, steps)
        run.directory.note(Configured(choices.proxy.mode, configuration.origin, Kept.of(choices).document), CONTROL)
        if not run.planning:
            self._agreed(run, steps, outcome)
        if not self.check and outcome.generations.keys() - outcome.errors.keys():
            Kept.of(choices).write(run.directory.config)
        steps = _steps(run.targets or (), outcome)
        self._begin(run, steps, outcome)
        times = watch.fields()
        _note(run.directory, outcome, times)
        run.directory.forget_old_runs()
        if outcome.rendered:
            run.frontends.forget(run.directory.recorded() | {*outcome.generations.values()})
        told = {} if not outcome.warnings else {"warnings": limited([each.text for each in outcome.warnings])}
        return {
            **told,
            "ansible_facts": {"kube_proxy_run": self._run(list(steps))},
            "changed": bool(outcome.written),
            "path": str(run.directory.bundles),
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

    def _facts_of_run(self, options: dict[str, Any]) -> Run:
        """What is to be rendered for which hosts: the cluster as it was read, as it was planned, or as approved."""
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
        names, hosts = options["node_names"], options["hosts"]
        targets = None if hosts is None else [target(directory, host, names.get(host, "")) for host in hosts]
        frontends = Frontends(directory.frontends)
        waiting: tuple[Warned, ...] = ()
        clusters: approval.Clusters = [(snapshot, targets)]
        # A plan is for those who have yet to agree. It changes nothing, so the word alone is not enough.
        planning = bool(options["planning"] and self.check)
        if options["approval"] == "frontends" and not plan and not planning:
            clusters, waiting = approval.approved_clusters(directory, snapshot, targets, frontends)
        return Run(options, directory, targets, frontends, clusters, waiting, approved, planning)

    def _rendered(self, run: Run, configuration: Configuration, settings: tuple[str, ...]) -> Outcome:
        """The states of all hosts, and which of them must stay as they are, with the reasons."""
        outcome = Outcome(warnings=configuration.warnings)
        for cluster, its in run.clusters:
            outcome.include(without_collection(partial(render, run.directory, cluster, configuration.choices, its)))
        outcome.warnings += run.waiting
        mode = configuration.choices.proxy.mode
        modes = _other_modes(run.directory, run.targets or (), mode)
        outcome.warnings += announced(settings, modes, mode)
        if not run.approved and not run.options["allow_mode_change"]:
            outcome.errors.update({host: other_mode(had, mode) for host, had in modes.items()})
            outcome.stale = sorted({*outcome.stale, *modes})
        if run.targets is not None:
            outcome.warnings += self._uncovered(run.targets, outcome)
            if not run.options["allow_running"]:
                self._contested(run.directory, run.targets, outcome)
        if run.approved:
            _compare_with_plan(run.approved.plan, run.snapshot, run.targets or (), outcome)
        return outcome

    def _begin(self, run: Run, steps: Mapping[str, tuple[str, str]], outcome: Outcome) -> None:
        """Write down what is about to change, by whose approval, before the first node is touched."""
        about, directory = About(peek(run.snapshot)), run.directory
        if run.approved:
            about = About(about.snapshot, run.approved.plan["digest"], run.approved.approvers)
            for host in steps:
                entry = run.approved.plan["hosts"][host]
                directory.note(Planned(entry.get("generation") or "", entry.get("digest") or ""), host)
            if not self.check and outcome.generations.keys() - outcome.errors.keys():
                following.begin(directory, run.approved.plan, run.snapshot, run.frontends)
        directory.note(about, CONTROL)
        if steps and not self.check:
            nodes = {host: {"before": before, "after": after} for host, (before, after) in steps.items()}
            TaskAuditor(directory, run.options, self.task_vars).write("sync", "begun", nodes)

    def _configuration(self, run: Run) -> tuple[Configuration, tuple[str, ...]]:
        """What holds in this run, and what of it is not as in the last one; or OtherSettings."""
        plan = Kept.read(run.approved.plan.get("configuration")) if run.approved else None
        kept = read_kept(run.directory.config)
        found = Configuration.of(run.options, kept=kept, cluster=peek_configuration(run.snapshot), plan=plan)
        # The approvers of a plan were told of its settings.
        return found, found.refuse_changes(kept, allowed=bool(run.approved) or run.options["allow_mode_change"])

    def _approved(self, plan: Path | None, options: Mapping[str, Any]) -> approval.Approval | None:
        """The plan to follow, if enough have agreed to it."""
        if plan is None:
            return None
        allowed = Path(options["allowed_signers"]).expanduser() if options["allowed_signers"] else None
        return approval.approval_of(plan, options["plan_digest"] or "", allowed, options["signatures"])

    def _agreed(self, run: Run, steps: Mapping[str, tuple[str, str]], outcome: Outcome) -> None:
        """Leave out hosts whose change was not approved, and lay the signatures beside the bundles of the others."""
        nodes = {host: run.directory.bundles / outcome.nodes[host] for host in steps}
        if run.approved:
            outcome.errors.update(approval.uncovered(run.approved, nodes))
        else:
            names = following.approved_frontends(run.directory)
            outcome.errors.update(approval.unapproved(run.options["approval"], run.frontends, steps, names))
        if self.check:
            return
        good = [each for host, each in nodes.items() if host not in outcome.errors]
        if run.approved and run.approved.text:
            approval.lay_down(run.approved.text, run.approved.signatures, good)
        elif run.options["signing_key"]:
            cluster = str(self.task_vars.get("kube_proxy_cluster_name") or "default")
            approval.sign_for(cluster, good, Path(run.options["signing_key"]).expanduser())

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


def _note(directory: WorkDirectory, outcome: Outcome, times: Mapping[str, float]) -> None:
    """For the summary: what was rendered, who was refused, and who has been current all along."""
    directory.note(Rendered(**times, problems=outcome.problems, warned=outcome.warnings), CONTROL)
    for host, error in outcome.errors.items():
        directory.note(Refused(error), host)
    for host, generation in outcome.generations.items():
        if host not in outcome.stale and directory.noted(Pushed, host) is None:
            directory.note(Pushed(**times, node=outcome.nodes[host], generation=generation), host)


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
