# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.node: one question to a node, and its bundle if the answer asks for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.manifest import FILE, SERVICES_FILE
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller import report
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.audit import TaskAuditor
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.base import (
    DIR_OPTION,
    LEDGER_OPTION,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.directory import (
    Stopwatch,
    read_json,
    write_json,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.guard import Frontends
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.probes import (
    InvalidProbe,
    Probe,
    ProbeFailed,
    node_script,
    parse_probes,
    run_probes,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.push import (
    INSTALLED,
    STATE_DIR,
    Answer,
    Command,
    NoAnswer,
    Way,
    parse_answer,
    program_digest,
    settled,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.wire import RemoteAction

# Once, in the process that all workers are forked from.
program_digest()

# Seconds for the confirmation of what an earlier run left unconfirmed, where changes are otherwise made for good.
_TERM = 60
_LEFT = (
    "{host}: net.ipv4.conf.all.route_localnet is 1, so that packets to 127.0.0.0/8 may come from outside, and nothing "
    "that was applied asks for it; kube-proxy left it, or an earlier bundle. sysctl -w "
    "net.ipv4.conf.all.route_localnet=0 switches it off"
)
_NOT_SENT = (
    "kube_proxy_keep has no effect with kube_proxy_command: who may run one command can set nothing for it. The line "
    "`keep N` in /etc/akp/node.conf on the node does it"
)
_KEPT = 3  # bundles, by a node that is not told otherwise
_STATES = ["applied", "confirmed", "gathered", "restored", "rolled_back", "absent"]
_ACTIONS = {
    "applied": "sync",
    "confirmed": "sync",
    "restored": "heal",
    "rolled_back": "rollback",
    "absent": "cleanup",
}


def _named(bundle: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in bundle.items())


class _AsBefore(AnsibleActionFail):
    """A failure that leaves the node with what it had."""


class ActionModule(RemoteAction):
    """Makes a node's kernel equal to its bundle, asks what is there, goes back, or takes everything away."""

    SPEC: ClassVar[dict[str, Any]] = {
        **DIR_OPTION,
        **LEDGER_OPTION,
        "state": {"type": "str", "default": "applied", "choices": _STATES},
        "name": {"type": "str"},
        "bundle": {"type": "path"},
        "delta": {"type": "path"},
        "generation": {"type": "str"},
        "verify": {"type": "bool", "default": False},
        "max_removed_percent": {"type": "int", "default": 100},
        "confirm_within": {"type": "int", "default": 0},
        "confirm": {"type": "bool", "default": True},
        "token": {"type": "str"},
        "probes": {"type": "list", "elements": "dict", "default": []},
        "install": {"type": "bool", "default": False},
        "install_path": {"type": "str", "default": INSTALLED},
        "state_dir": {"type": "str", "default": STATE_DIR},
        "keep": {"type": "int", "default": 0},
        "command": {"type": "str"},
    }
    RULES: ClassVar[dict[str, Any]] = {"required_if": [("state", "confirmed", ("token",))]}
    VARIABLES: ClassVar[dict[str, str]] = {
        "name": "kube_proxy_node_name",
        "verify": "kube_proxy_verify",
        "ledger": "kube_proxy_ledger",
        "max_removed_percent": "kube_proxy_max_removed_percent",
        "confirm_within": "kube_proxy_confirm_within",
        "probes": "kube_proxy_probes",
        "install": "kube_proxy_install",
        "install_path": "kube_proxy_install_path",
        "state_dir": "kube_proxy_state_dir",
        "keep": "kube_proxy_keep",
        "command": "kube_proxy_command",
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Do it, and leave a note for the summary whatever happens."""
        self._host = str(self.task_vars["inventory_hostname"])
        self._name = options["name"] or self._host
        self._options = options
        self._work = self.directory(options)
        self._way = Way(
            restricted=options["command"] or "",
            installed=options["install_path"],
            state_dir=options["state_dir"],
            only_installed=options["install"],
            keep=options["keep"],
        )
        phase = "ask" if options["state"] == "gathered" else "push"
        watch = Stopwatch()
        try:
            if options["keep"] < 0:
                raise AnsibleActionFail(f"kube_proxy_keep: {options['keep']} is no number of bundles, nor 0")
            result: dict[str, Any] = getattr(self, f"_{options['state']}")()
        except AnsibleConnectionFailure as error:
            self._work.note(phase, self._host, {**watch.fields(), "failed": f"unreachable: {error.message}"})
            self._audit({**self._generations(), "error": f"unreachable: {error.message}"})
            raise
        except (AnsibleError, NoAnswer) as error:
            message = str(error) if isinstance(error, NoAnswer) else error.message
            self._work.note(phase, self._host, {**watch.fields(), "failed": message})
            told = self._audit({**self._generations(same=isinstance(error, _AsBefore)), "error": message})
            # What it came from would be printed once more.
            raise AnsibleActionFail(message, result={"ledger": told}) from None
        if options["command"] and options["keep"] not in (0, _KEPT):
            result["warnings"] = [*result.get("warnings", ()), _NOT_SENT]
        noted = {} if phase == "ask" else {key: value for key, value in result.items() if key != "diff"}
        self._work.note(phase, self._host, {**watch.fields(), **noted})
        # What somebody else has to confirm is entered when he does: until then the node may go back.
        told = ""
        if result["changed"] and not result.get("confirm"):
            told = self._audit({"before": result.get("previous"), "after": result.get("generation")})
        return {**result, "ledger": told}

    # Whether something was sent that may have changed the node.
    _tried = False

    def _generations(self, *, same: bool = False) -> dict[str, Any]:
        """Before and after a failure, as far as they are known: what is not is left out."""
        if self._options["state"] == "confirmed":
            before = self._options["generation"]
        else:
            answered = self._work.answer(self._host)
            if answered is None:
                return {}
            before = answered["status"].get("generation")
        return {"before": before, **({"after": before} if same else {})}

    def _audit(self, fields: Mapping[str, Any]) -> str:
        """Enter what became of the node, and say where that is; questions and rehearsals are not worth an entry."""
        if self.check or not self._tried:
            return ""
        result = "failed" if "error" in fields else "changed"
        entry = {"node": self._name, **fields, "result": result}
        auditor = TaskAuditor(self._work, self._options["ledger"], self.task_vars)
        action = _ACTIONS[self._options["state"]]
        auditor.write(action, "failed" if "error" in fields else "ok", {self._host: entry})
        return auditor.told

    # -- states

    def _gathered(self) -> dict[str, Any]:
        """Ask, and keep the answer for those who render."""
        known = self._work.answer(self._host) or {}
        arguments, quick = ["ask"], ""
        if known.get("facts") and known.get("key"):
            arguments += ["--known", known["key"]]
            quick = "" if self._options["verify"] else known["key"]
        if self._options["verify"]:
            arguments.append("--verify")
        answer = self._ask(arguments, quick)
        result = answer.result
        facts = {**(result.get("facts") or known.get("facts") or {})}
        # What a quick answer leaves out has not changed.
        facts["addresses"] = result.get("addresses") or list(answer.addresses)
        facts["tcpBeLiberal"] = result.get("tcpBeLiberal", facts.get("tcpBeLiberal", 0))
        facts["routeLocalnetLeft"] = result.get("routeLocalnetLeft", facts.get("routeLocalnetLeft", False))
        status = result["status"]
        # What is not confirmed may go again, and nobody would have to be told.
        held = "" if status.get("unconfirmed") else status.get("generation")
        recorded = held or known.get("recorded")
        write_json(
            self._work.answer_file(self._host),
            {
                "host": self._host,
                "node": self._name,
                "key": result.get("key") or known["key"],
                "facts": facts,
                "status": status,
                "recorded": recorded,
                "oldProgram": self._carried,
            },
        )
        self._differences = status.get("differences") or []
        drifted = report.drift_lines(self._host, status, recorded)
        left = (
            {"warnings": [_LEFT.format(host=self._host)]}
            if facts["routeLocalnetLeft"] and self._options["verify"]
            else {}
        )
        return {
            **left,
            "changed": False,
            "node": self._name,
            "state": status["state"],
            "generation": status.get("generation"),
            "applied_at": status.get("appliedAt"),
            "drift": status.get("drift"),
            "unconfirmed": status.get("unconfirmed"),
            "intact": not drifted,
            "differences": self._differences,
            "drifted": drifted,
            "kept": status.get("kept") or [],
            "facts": facts,
        }

    def _applied(self) -> dict[str, Any]:
        """Give the node its bundle, unless it has it."""
        refusal = self._work.noted("refused", self._host)
        if refusal is not None:
            raise AnsibleActionFail(refusal["error"])
        if self._options["delta"] and not self.check:
            return self._stepped(Path(self._options["delta"]).expanduser())
        directory = Path(self._options["bundle"] or self._work.bundles / self._name).expanduser()
        try:
            sealed = (directory / FILE).read_bytes()
            manifest = json.loads(sealed)
        except (OSError, ValueError):
            raise AnsibleActionFail(
                f"{directory}: there is no bundle for node {self._name}; run the bundle module first"
            ) from None
        self._as_planned(directory, manifest)
        answered = self._work.answer(self._host) or {}
        if self._work.noted("ask", self._host) is None:
            self._gathered()
            answered = self._work.answer(self._host) or {}
        status = answered.get("status") or {}
        wanted, there = manifest["generation"], status.get("generation")
        if settled(status) and there == wanted and not answered.get("oldProgram"):
            return {"changed": False, "node": self._name, "generation": wanted, "previous": there}
        arguments = [
            *(["check", "--unsigned"] if self.check else ["apply"]),
            "--verify",
            "--node",
            str(manifest["node"]),
        ]
        arguments += ["--max-removed", str(self._options["max_removed_percent"])]
        # The node can tell which service ports change; if it has none yet, we know without asking.
        if there is not None:
            arguments.append("--services")
        answer = self._sent(
            arguments,
            lambda all_: self._way.carry(
                all_, directory, manifest=sealed, install=self._options["install"] and not self.check
            ),
            waiting=bool(status.get("unconfirmed")),
        )
        self._remember(answer)
        told = self._told(answer, directory, status.get("differences") or (), known=there is not None)
        return {**told, "digest": manifest["digest"]}

    def _as_planned(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """A node whose turn comes late still gets what was approved, whoever else writes bundles here."""
        planned = self._work.noted("planned", self._host)
        if planned is None:
            return
        # A host that the plan leaves as it is has no bundle there, only a generation.
        wanted = {key: planned[key] for key in ("generation", "digest") if planned[key]}
        found = {key: manifest.get(key) for key in wanted}
        if found != wanted:
            raise _AsBefore(
                f"{directory}: holds another bundle than the plan that is followed has for {self._host}: "
                f"{_named(found)} and not {_named(wanted)}. Something else has written there since this run began, as "
                "akp watch or another run does; see that nothing does while a plan is followed, and follow it again"
            )

    def _stepped(self, archive: Path) -> dict[str, Any]:
        """Give the node what changed, without a question before; where that will not do, the result says so."""
        arguments = ["apply", "--node", self._name, "--max-removed", str(self._options["max_removed_percent"])]
        answer = self._sent(arguments, lambda all_: self._way.give(all_, archive.read_bytes()))
        if answer.needs_program or answer.result.get("need"):
            reason = answer.result.get("reason") or "the node does not have the program"
            return {"changed": False, "node": self._name, "need": "full", "reason": reason}
        self._remember(answer)
        return self._told(answer, None, ())

    def _sent(
        self, arguments: Sequence[str], command: Callable[[Sequence[str]], Command], *, waiting: bool = False
    ) -> Answer:
        """Have the node change, and confirm the change where that is asked for, or where an earlier run left it so."""
        probes: list[Probe] = []
        term = self._options["confirm_within"] or (_TERM if waiting else 0)
        if term and not self.check:
            probes = self._probes()
            arguments = [*arguments, "--confirm-within", str(term)]
        self._tried = True
        answer = self._answer(command(arguments))
        if answer.result.get("confirm") and self._options["confirm"]:
            self._confirm(answer.result, probes)
        return answer

    def _confirmed(self) -> dict[str, Any]:
        """Make good a change that was applied and left unconfirmed."""
        token, previous = self._options["token"], self._options["generation"]
        if self.check:
            return {"changed": True, "node": self._name}
        self._tried = True
        term = {"confirm": token, "confirmWithin": self._options["confirm_within"], "previous": previous}
        answer = self._confirm(term, self._probes())
        generation = answer.result.get("generation")
        changed = bool(answer.result["changed"])
        return {"changed": changed, "node": self._name, "generation": generation, "previous": previous}

    def _probes(self) -> list[Probe]:
        """What must answer before the change is confirmed."""
        address = self.task_vars.get("ansible_host") or self._host
        try:
            probes = parse_probes(self._options["probes"], str(self._templar.template(address)))
        except InvalidProbe as error:
            raise AnsibleActionFail(str(error)) from None
        if self._way.restricted and any(each.place == "node" for each in probes):
            raise AnsibleActionFail(
                "kube_proxy_probes: an account that may run nothing but the node program cannot probe from the node; "
                "use from: control"
            )
        return probes

    def _confirm(self, applied: Mapping[str, Any], probes: Sequence[Probe]) -> Answer:
        """Say over a new connection that all is well. Whatever keeps us from it, the node goes back by itself."""
        deadline = time.monotonic() + int(applied["confirmWithin"]) - 2
        back = f"generation {applied['previous']}" if applied.get("previous") else "having nothing applied"
        alone = f"the node goes back by itself to {back}, {applied['confirmWithin']} s after the change"
        arguments, script = ["confirm", str(applied["confirm"])], node_script(probes)
        try:
            run_probes(probes)
            while True:
                try:
                    self._new_connection()
                    answer = parse_answer(**self._exec_answer(self._way.ask(arguments, before=script)))
                    break
                except AnsibleConnectionFailure:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(1)
            if answer.needs_program:
                answer = self._answer(self._way.carry(arguments))
            if answer.result.get("probe"):
                raise ProbeFailed(str(answer.result["error"]))
            if not answer.result["ok"]:
                raise AnsibleActionFail(str(answer.result.get("error") or answer.result))
            return answer
        except ProbeFailed as error:
            message = f"not confirmed: probe {error}"
            if self._went_back(applied):
                raise _AsBefore(f"{message}; the node went back to {back}") from None
            raise AnsibleActionFail(f"{message}; {alone}") from None
        except (AnsibleError, NoAnswer) as error:
            message = str(error) if isinstance(error, NoAnswer) else error.message
            raise AnsibleActionFail(f"not confirmed over a new connection: {message}; {alone}") from None

    def _went_back(self, applied: Mapping[str, Any]) -> bool:
        """A node that can be reached need not wait for its own clock."""
        if not applied.get("previous"):
            return False
        try:
            self._answer(self._way.ask(["rollback", str(applied["previous"])]))
        except (AnsibleError, NoAnswer):
            return False  # then it does so by itself
        return True

    def _new_connection(self) -> None:
        """Connections that were open before the change prove nothing: the kernel knows them."""
        if hasattr(self._connection, "reset"):
            self._connection.reset()

    def _restored(self) -> dict[str, Any]:
        """Apply again what was applied last, whatever somebody made of it; the cluster is not asked."""
        answered = self._work.answer(self._host) or {}
        status = answered.get("status") or {}
        arguments = ["restore", "--verify"]
        if self.check:
            intact = self._gathered()["intact"]
            return {"changed": not intact, "node": self._name, "generation": status.get("generation")}
        if answered.get("recorded") and not status.get("generation"):
            return self._given_again(answered["recorded"])
        self._tried = True
        answer = self._ask(arguments)
        return self._told(answer, None, status.get("differences") or ())

    def _given_again(self, generation: str) -> dict[str, Any]:
        """A node that lost its own copy gets ours, if that is still the one."""
        manifest = read_json(self._work.bundles / self._name / FILE) or {}
        if manifest.get("generation") != generation:
            raise AnsibleActionFail(
                f"{self._host} has lost generation {generation}, and the bundle of it is not here any more either: "
                "a run of sync_services gives it what it shall have now"
            )
        return self._applied()

    def _rolled_back(self) -> dict[str, Any]:
        """Go back to the bundle before, or to a kept one."""
        arguments = ["rollback", "--services"]
        arguments += ["--max-removed", str(self._options["max_removed_percent"])]
        arguments += ["--dry-run"] if self.check else []
        arguments += [self._options["generation"]] if self._options["generation"] else []
        self._tried = True
        answer = self._ask(arguments)
        self._remember(answer)
        return self._told(answer, None, ())

    def _absent(self) -> dict[str, Any]:
        """Take away everything that was ever applied."""
        arguments = ["cleanup", "--services"] + (["--dry-run"] if self.check else [])
        before = (self._work.answer(self._host) or {}).get("status") or {}
        self._tried = True
        told = self._told(self._ask(arguments), None, ())
        told["previous"] = told["previous"] or before.get("generation")
        if self._options["install"] and not self._way.restricted:
            told["changed"] |= bool(self._answer(self._way.uninstall(dry_run=self.check)).result["removed"])
        if not self.check:
            self._work.answer_file(self._host).unlink(missing_ok=True)
        return told

    def _remember(self, answer: Answer) -> None:
        """What the node has now, so that another task of this run need not ask again."""
        known = self._work.answer(self._host)
        if known is not None and not self.check:
            generation = answer.result["generation"]
            known |= {"status": {"state": "applied", "generation": generation}, "oldProgram": False}
            if not answer.result.get("confirm") or self._options["confirm"]:
                known["recorded"] = generation
            write_json(self._work.answer_file(self._host), known)

    # -- results

    def _told(
        self, answer: Answer, bundle: Path | None, differences: Sequence[Mapping[str, Any]], *, known: bool = True
    ) -> dict[str, Any]:
        """The node's answer as a result, with a diff that a person can read."""
        result = answer.result
        after: Sequence[str] = answer.after
        if not known and bundle is not None:
            after = (bundle / SERVICES_FILE).read_text(encoding="utf-8").splitlines()
        changes = report.service_changes(answer.before, after)
        previous, generation = str(result.get("previous") or ""), str(result.get("generation") or "")
        frame = Frontends(self._work.frontends).frame_changes(previous, generation) if generation else []
        other = []
        if result.get("sysctls"):
            other.append(f"sysctls: {result['sysctls']}")
        if answer.installed:
            other.append(f"node program: {self._options['install_path']}")
        if result["changed"] and not changes and not frame and not differences and not other:
            other.append("rules or files that belong to no Service")
        counted = report.tally(changes)
        told: dict[str, Any] = {
            "changed": bool(result["changed"]) or answer.installed,
            "node": self._name,
            "generation": result.get("generation"),
            "previous": result.get("previous"),
            "mode": result.get("mode"),
            "chains": result.get("chains") or {},
            "sysctls": result.get("sysctls", 0),
            "flows": result.get("flows", 0),
            "services": counted["services"],
            "endpoints": counted["endpoints"],
            "changes": report.as_data(changes),
            "frame": report.as_data(frame),
            "differences": list(differences),
            "seconds": result.get("seconds"),
        }
        if result.get("confirm") and not self._options["confirm"]:
            told |= {"confirm": result["confirm"], "confirm_within": result["confirmWithin"]}
        if result.get("warnings"):
            told["warnings"] = [f"{self._host}: {warning}" for warning in result["warnings"]]
        if told["changed"] and self._task.diff:
            told["diff"] = {"prepared": report.diff_text([*frame, *changes], differences, other)}
        return told

    # -- the wire

    _carried = False

    def _ask(self, arguments: Sequence[str], known_key: str = "") -> Answer:
        """Ask the program that the node has; if it has none of ours, the program travels with the question."""
        answer = self._answer(self._way.ask(arguments, known_key))
        if answer.needs_program:
            self._carried = True
            answer = self._answer(self._way.carry(arguments))
        return answer

    def _exec_answer(self, command: Command) -> dict[str, Any]:
        done = self.execute(command, restricted=bool(self._way.restricted))
        return {"code": done["rc"], "stdout": done["stdout"], "stderr": done["stderr"]}

    def _answer(self, command: Command) -> Answer:
        answer = parse_answer(**self._exec_answer(command))
        if not answer.result["ok"] and not answer.needs_program:
            error = str(answer.result.get("error") or json.dumps(answer.result))
            raise _AsBefore(error) if answer.as_before else AnsibleActionFail(error)
        return answer
