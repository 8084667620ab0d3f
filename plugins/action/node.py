# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.node: one question to a node, and its bundle if the answer asks for it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.archive import lines_of
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.manifest import (
    FILE,
    SERVICES_FILE,
    manifest_digest,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.owners import Owners
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.bundle.program import MODES
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.answers import (
    Answer,
    NoAnswer,
    parse_answer,
    settled,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.connection import RemoteAction
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.direct import Line, remember
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.probes import (
    InvalidProbe,
    Probe,
    ProbeFailed,
    node_script,
    parse_probes,
    run_probes,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.protocol import Command, Way, program_digest
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.rival import LOOK, running
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.carry.time_limit import time_limit
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan import report
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.audit import AUDITED, TaskAuditor
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.held import Held, replayed
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.past import NotKnown, generation_at, parse_time
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.plan.removal_limit import Frontends
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.proxy.facts import CONTROL_PORT
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import LEDGER_VARIABLES, expected, plain
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import (
    Stopwatch,
    read_json,
    write_json,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.notes import Asked, Planned, Pushed, Refused
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.texts import visible_lines

# Once, in the process that all workers are forked from.
for _mode in MODES:
    program_digest(_mode)

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

    SPEC: ClassVar[dict[str, Any]] = spec("node")
    RULES: ClassVar[dict[str, Any]] = {
        "required_if": [("state", "confirmed", ("token",))],
        "mutually_exclusive": [("generation", "time")],
    }
    VARIABLES: ClassVar[dict[str, str]] = {
        "name": "kube_proxy_node_name",
        "verify": "kube_proxy_verify",
        **LEDGER_VARIABLES,
        "max_removed_percent": "kube_proxy_max_removed_percent",
        "confirm_within": "kube_proxy_confirm_within",
        "probes": "kube_proxy_probes",
        "install": "kube_proxy_install",
        "install_path": "kube_proxy_install_path",
        "state_dir": "kube_proxy_state_dir",
        "keep": "kube_proxy_keep",
        "command": "kube_proxy_command",
        "task_timeout": "kube_proxy_task_timeout",
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
        sort = Asked if options["state"] == "gathered" else Pushed
        watch = Stopwatch()
        try:
            if options["keep"] < 0:
                raise AnsibleActionFail(f"kube_proxy_keep: {options['keep']} is no number of bundles, nor 0")
            if options["task_timeout"] < 1:
                raise AnsibleActionFail(f"kube_proxy_task_timeout: {options['task_timeout']} is no number of seconds")
            with time_limit(self._patience(), self._host):
                result: dict[str, Any] = getattr(self, f"_{options['state']}")()
        except AnsibleConnectionFailure as error:
            # Most of it was said by the other side.
            message = visible_lines(error.message)
            self._work.note(sort(**watch.fields(), failed=f"unreachable: {message}"), self._host)
            self._audit({**self._generations(), "error": f"unreachable: {message}"})
            raise AnsibleConnectionFailure(message) from None
        except Exception as error:
            if expected(error):
                raise
            message = visible_lines(self._reason(error))
            self._work.note(sort(**watch.fields(), failed=message), self._host)
            told = self._audit({**self._generations(same=isinstance(error, _AsBefore)), "error": message})
            # What it came from would be printed once more.
            raise AnsibleActionFail(message, result={"ledger": told}) from None
        if options["command"] and options["keep"] not in (0, _KEPT):
            result["warnings"] = [*result.get("warnings", ()), _NOT_SENT]
        action = {"action": _ACTIONS[options["state"]]} if sort is Pushed else {}
        self._work.note(sort.of({**result, **watch.fields(), **action}), self._host)
        # What somebody else has to confirm is entered when he does: until then the node may go back.
        told = ""
        if result["changed"] and not result.get("confirm"):
            told = self._audit({"before": result.get("previous"), "after": result.get("generation")})
        return {**result, "ledger": told}

    @staticmethod
    def _reason(error: Exception) -> str:
        """Why a host failed. Whatever it was, it concerns this host alone."""
        if isinstance(error, AnsibleError):
            return str(error.message)
        return str(error) if isinstance(error, NoAnswer) else f"{type(error).__name__}: {error}"

    def _patience(self) -> float:
        """Seconds for all of a task: those of the node, and those that waiting for a confirmation may take."""
        if self._options["state"] not in ("applied", "confirmed", "rolled_back"):
            return float(self._options["task_timeout"])
        probes = [each.get("timeout", 5) for each in self._options["probes"] if isinstance(each, Mapping)]
        waiting = sum(int(each) for each in probes if str(each).isdecimal())
        return float(self._options["task_timeout"] + max(self._options["confirm_within"], _TERM) + waiting)

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
            before = (answered.get("status") or {}).get("generation")
        return {"before": before, **({"after": before} if same else {})}

    def _audit(self, fields: Mapping[str, Any]) -> str:
        """Enter what became of the node, and say where that is; questions and rehearsals are not worth an entry."""
        if self.check or not self._tried:
            return ""
        result = "failed" if "error" in fields else "changed"
        entry = {"node": self._name, **fields, "result": result}
        auditor = TaskAuditor(self._work, self._options, self.task_vars)
        action = _ACTIONS[self._options["state"]]
        auditor.write(action, "failed" if "error" in fields else "ok", {self._host: entry})
        return auditor.told

    # -- states

    def _gathered(self) -> dict[str, Any]:
        """Ask, and keep the answer for those who render."""
        known = self._work.answer(self._host) or {}
        arguments = ["ask"]
        if known.get("facts") and known.get("key"):
            arguments += ["--known", known["key"]]
        if self._options["verify"]:
            arguments.append("--verify")
        answer = self._ask(arguments, LOOK)
        result = answer.result
        facts = {**(result.get("facts") or known.get("facts") or {})}
        told = answer.required("addresses")
        facts["addresses"] = told if isinstance(told, list) else []
        facts["tcpBeLiberal"] = result.get("tcpBeLiberal", facts.get("tcpBeLiberal", 0))
        facts["routeLocalnetLeft"] = result.get("routeLocalnetLeft", facts.get("routeLocalnetLeft", False))
        facts[CONTROL_PORT] = self._control_port()
        status = answer.required("status")
        if not status.get("state"):
            raise NoAnswer("the answer of the node program has no status.state")
        self._be_the_only_one(str(status.get("node") or ""))
        if status.get("differences"):
            status["differences"] = self._attributed(status["differences"], status.get("generation"))
        # What is not confirmed may go again, and nobody would have to be told.
        held = "" if status.get("unconfirmed") else status.get("generation")
        recorded = held or known.get("recorded")
        write_json(
            self._work.answer_file(self._host),
            {
                "host": self._host,
                "node": self._name,
                "key": result.get("key") or known.get("key") or answer.required("key"),
                "facts": facts,
                "status": status,
                "recorded": recorded,
                "oldProgram": self._carried,
                "kubeProxy": self._rivals,
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
            "kube_proxy": self._rivals,
            "facts": facts,
        }

    def _be_the_only_one(self, node: str) -> None:
        """Two hosts must not lead to one machine: a Node can name the address of another as its own."""
        if node in ("", self._name.lower()):
            return
        other = self._work.host_of(node)
        if other not in (None, self._host) and other in self.task_vars.get("groups", {}).get("all", ()):
            raise AnsibleActionFail(
                f"{self._host} leads to the machine that has the rules of the node {node}, which is the host {other}: "
                "one of the two has an address of the other. If the machine was given another name, clean it up first"
            )

    def _control_port(self) -> int:
        """The port by which we came in, which no Service gets there; 22 if ssh decides it, 0 if there are no ports."""
        try:
            return int(self._connection.get_option("port") or 22)
        except (KeyError, TypeError, ValueError, AnsibleError):
            return 0

    def _attributed(
        self, differences: Sequence[Mapping[str, Any]], generation: str | None
    ) -> Sequence[Mapping[str, Any]]:
        """What the node found, with the Services that it concerns; without them if they cannot be learned."""
        try:
            return Owners(self._held(generation)).named(differences)
        except (AnsibleActionFail, NoAnswer, KeyError, RecursionError, ValueError):
            return differences

    def _applied(self) -> dict[str, Any]:
        """Give the node its bundle, unless it has it."""
        refusal = self._work.noted(Refused, self._host)
        if refusal is not None:
            raise AnsibleActionFail(refusal.error)
        if self._options["delta"] and not self.check:
            return self._stepped(Path(self._options["delta"]).expanduser())
        directory = Path(self._options["bundle"] or self._work.bundles / self._name).expanduser()
        try:
            sealed = (directory / FILE).read_bytes()
            manifest = {**json.loads(sealed), "digest": manifest_digest(sealed.decode())}
        except (OSError, ValueError):
            # The bundle module writes none for a host that has what it shall have.
            known = self._work.noted(Pushed, self._host)
            if known is not None and not known.changed and known.generation and not self._options["bundle"]:
                there = known.generation
                return {"changed": False, "node": self._name, "generation": there, "previous": there}
            raise AnsibleActionFail(
                f"{directory}: there is no bundle for node {self._name}; run the bundle module first"
            ) from None
        self._as_planned(directory, manifest)
        answered = self._work.answer(self._host) or {}
        if self._work.noted(Asked, self._host) is None:
            self._gathered()
            answered = self._work.answer(self._host) or {}
        status = answered.get("status") or {}
        wanted, there = manifest["generation"], status.get("generation")
        snapshot = self._options["snapshot"]
        if settled(status) and there == wanted and not answered.get("oldProgram") and not snapshot:
            return {"changed": False, "node": self._name, "generation": wanted, "previous": there}
        arguments = [
            *(["check", "--unsigned"] if self.check else ["apply"]),
            *([] if snapshot else ["--verify"]),
            "--node",
            str(manifest["node"]),
        ]
        arguments += ["--max-removed", str(self._options["max_removed_percent"])]
        before = self._held(there)
        answer = self._sent(
            arguments,
            lambda all_: self._way.carry(
                all_, directory, manifest=sealed, install=self._options["install"] and not self.check
            ),
            waiting=bool(status.get("unconfirmed")),
        )
        self._remember(answer)
        after = (directory / SERVICES_FILE).read_text(encoding="utf-8").splitlines()
        if not self.check:
            Held(self._work.held).keep(self._host, wanted, after)
        told = self._told(answer, before, after, status.get("differences") or ())
        return {**told, "digest": manifest["digest"]}

    def _as_planned(self, directory: Path, bundle: Mapping[str, Any]) -> None:
        """A node whose turn comes late still gets what was approved, whoever else writes bundles here."""
        planned = self._work.noted(Planned, self._host)
        if planned is None:
            return
        # A host that the plan leaves as it is has no bundle there, only a generation.
        wanted = {key: value for key, value in dataclasses.asdict(planned).items() if value}
        found = {key: bundle[key] for key in wanted}
        if found != wanted:
            raise _AsBefore(
                f"{directory}: holds another bundle than the plan that is followed has for {self._host}: "
                f"{_named(found)} and not {_named(wanted)}. Something else has written there since this run began, as "
                "akp watch or another run does; see that nothing does while a plan is followed, and follow it again"
            )

    def _stepped(self, archive: Path) -> dict[str, Any]:
        """Give the node what changed, without a question before; where that will not do, the result says so."""
        arguments, data = self._step, archive.read_bytes()
        way = dataclasses.replace(self._way, mode=json.loads("".join(lines_of(data, FILE)))["mode"])
        answer = self._sent(arguments, lambda all_: way.give(all_, data))
        if answer.needs_program or answer.result.get("need"):
            reason = answer.result.get("reason") or "the node does not have the program"
            return {"changed": False, "node": self._name, "need": "full", "reason": reason}
        self._remember(answer)
        changed = lines_of(data, f"{SERVICES_FILE}.diff")
        before, after = ([line[1:] for line in changed if line.startswith(sign)] for sign in "-+")
        return {**self._told(answer, before, after, ()), "deltas": answer.result.get("deltas", 0)}

    @property
    def _step(self) -> list[str]:
        """How the program is told to take a delta."""
        return ["apply", "--node", self._name, "--max-removed", str(self._options["max_removed_percent"])]

    def line(self) -> dict[str, Any] | None:
        """After a task: how this host is given deltas without one, as the fields of a Line; None if it cannot be."""
        restricted = bool(self._way.restricted)
        ways = {mode: dataclasses.replace(self._way, mode=mode) for mode in MODES}
        commands = {mode: way.give(self._step, b"\n") for mode, way in ways.items()}
        found = self.kept_open(commands, restricted=restricted)
        if found is None:
            return None
        told = {key: self.task_vars[key] for key in AUDITED if key in self.task_vars}
        line = Line(
            socket=found[0],
            commands=found[1],
            node=self._name,
            directory=str(self._work.path),
            seconds=float(self._options["task_timeout"]),
            ledger={key: self._options[key] for key in LEDGER_VARIABLES},
            variables=plain(told),
        )
        return dataclasses.asdict(line)

    def _held(self, generation: str | None) -> list[str]:
        """The Services of what the node holds, as lines: kept here, or as it prints them."""
        if generation is None:
            return []
        held = Held(self._work.held)
        known = held.lines(self._host, generation)
        if known is None:
            answer = self._ask(["show"])
            known = replayed(answer.lines)
            held.keep(self._host, str(answer.required("generation")), known)
        return known

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
            self._confirm({**answer.result, "confirmWithin": self._left(answer)}, probes)
        return answer

    def _left(self, answer: Answer) -> int:
        """Seconds for the confirmation: what is left of the term, and never more than it was given."""
        term, left = self._options["confirm_within"] or _TERM, answer.result.get("confirmWithin")
        return int(min(term, term if left is None else left))

    def _confirmed(self) -> dict[str, Any]:
        """Make good a change that was applied and left unconfirmed."""
        token, previous = self._options["token"], self._options["generation"]
        if self.check:
            return {"changed": True, "node": self._name}
        self._tried = True
        term = {"confirm": token, "confirmWithin": self._options["confirm_within"], "previous": previous}
        answer = self._confirm(term, self._probes())
        generation = answer.result.get("generation")
        changed = bool(answer.required("changed"))
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
                answer = self._answer(self._carrying.carry(arguments))
            if answer.result.get("probe"):
                raise ProbeFailed(answer.error)
            if not answer.ok:
                raise AnsibleActionFail(answer.error)
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
        self._remember(answer)
        return self._told(answer, (), (), status.get("differences") or ())

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
        arguments = ["rollback", *(["--dry-run"] if self.check else [])]
        status = (self._work.answer(self._host) or {}).get("status") or {}
        wanted = self._options["generation"] or self._at(status)
        operand = [wanted] if wanted else []
        there = status.get("generation")
        before = self._held(there) if there else replayed(self._ask(["show"]).lines)
        answer = self._sent(arguments, lambda all_: self._way.ask([*all_, *operand]))
        if answer.needs_program:
            answer = self._sent(arguments, lambda all_: self._carrying.carry([*all_, *operand]))
        self._remember(answer)
        goal = str(answer.required("generation"))
        after = replayed(self._ask(["show", goal]).lines) if self.check else self._held(goal)
        return self._told(answer, before, after, ())

    def _at(self, status: Mapping[str, Any]) -> str:
        """The generation that the host had at the time that is asked for, if one is, and if the node keeps it."""
        if not self._options["time"]:
            return ""
        ledger = Path(self._options["ledger"] or self._work.ledger).expanduser()
        try:
            when = parse_time(self._options["time"])
            wanted = generation_at(ledger, self._host, when)
        except NotKnown as error:
            raise _AsBefore(f"{error}; nothing was changed") from None
        kept = status.get("kept") or []
        if wanted not in (*kept, status.get("generation")):
            had = f"generation {wanted}" if wanted else "nothing applied"
            raise _AsBefore(
                f"at {when:%Y-%m-%d %H:%M:%SZ}, {self._host} had {had}, and it keeps {', '.join(kept) or 'nothing'}: "
                "kube_proxy_keep says how many states a node keeps. Nothing was changed"
            )
        return wanted

    def _absent(self) -> dict[str, Any]:
        """Take away everything that was ever applied."""
        arguments = ["cleanup"] + (["--dry-run"] if self.check else [])
        there = ((self._work.answer(self._host) or {}).get("status") or {}).get("generation")
        before = self._held(there)
        self._tried = True
        told = self._told(self._ask(arguments), before, (), ())
        told["previous"] = told["previous"] or there
        if self._options["install"] and not self._way.restricted:
            told["changed"] |= bool(self._answer(self._way.uninstall(dry_run=self.check)).required("removed"))
        if not self.check:
            self._work.answer_file(self._host).unlink(missing_ok=True)
        return told

    def _remember(self, answer: Answer) -> None:
        """What the node has now, so that another task of this run need not ask again."""
        if not self.check:
            stays = not answer.result.get("confirm") or self._options["confirm"]
            remember(self._work, self._host, answer, recorded=stays)

    # -- results

    def _told(
        self,
        answer: Answer,
        before: Iterable[str],
        after: Iterable[str],
        differences: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """The node's answer as a result, with a diff that a person can read."""
        result = answer.result
        try:
            changes = report.service_changes(before, after)
        except (KeyError, RecursionError, ValueError) as error:
            raise NoAnswer(f"the service ports that the node program printed cannot be read: {error}") from None
        node_changed = bool(answer.required("changed"))
        previous, generation = str(result.get("previous") or ""), str(result.get("generation") or "")
        frame = Frontends(self._work.frontends).frame_changes(previous, generation) if generation else []
        other = []
        if result.get("sysctls"):
            other.append(f"sysctls: {result['sysctls']}")
        if answer.installed:
            other.append(f"node program: {self._options['install_path']}")
        if node_changed and not changes and not frame and not differences and not other:
            other.append("rules or files that belong to no Service")
        counted = report.tally(changes)
        told: dict[str, Any] = {
            "changed": node_changed or answer.installed,
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
            told |= {"confirm": result["confirm"], "confirm_within": self._left(answer)}
        if result.get("warnings"):
            told["warnings"] = [f"{self._host}: {warning}" for warning in result["warnings"]]
        if told["changed"] and self._task.diff:
            told["diff"] = {"prepared": report.diff_text([*frame, *changes], differences, other)}
        return told

    # -- the wire

    _carried = False
    _rivals: Sequence[int] = ()

    def _ask(self, arguments: Sequence[str], before: str = "") -> Answer:
        """Ask the program that the node has; if it has none of ours, the program travels with the question."""
        answer = self._answer(self._way.ask(arguments, before))
        self._rivals = running(answer.lines) if before else self._rivals
        if answer.needs_program:
            self._carried = True
            answer = self._answer(self._carrying.carry(arguments))
        return answer

    @property
    def _carrying(self) -> Way:
        """The program that travels is that of the mode which the node was found with."""
        known = (self._work.answer(self._host) or {}).get("status") or {}
        mode = known.get("mode")
        return dataclasses.replace(self._way, mode=mode) if mode in MODES else self._way

    def _exec_answer(self, command: Command) -> dict[str, Any]:
        done = self.execute(command, restricted=bool(self._way.restricted))
        return {"code": done["rc"], "stdout": done["stdout"], "stderr": done["stderr"]}

    def _answer(self, command: Command) -> Answer:
        answer = parse_answer(**self._exec_answer(command))
        if not answer.ok and not answer.needs_program:
            raise _AsBefore(answer.error) if answer.as_before else AnsibleActionFail(answer.error)
        return answer
