# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""State `gathered`: what the node has, kept for the tasks that render and push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..bundle.owners import Owners
from ..carry import rival
from ..carry.answers import Answer, NoAnswer
from ..plan import report
from ..plan.metrics import note_drift
from ..proxy.facts import CONTROL_PORT
from ..tasks.directory import write_json
from .errors import NotDone, Unreachable
from .visit import Visit

_LEFT = (
    "{host}: net.ipv4.conf.all.route_localnet is 1, so that packets to 127.0.0.0/8 may come from outside, and nothing "
    "that was applied asks for it; kube-proxy left it, or an earlier bundle. sysctl -w "
    "net.ipv4.conf.all.route_localnet=0 switches it off"
)


def gather(visit: Visit) -> dict[str, Any]:
    """Ask the node, and keep its answer in the work directory."""
    known = visit.known
    arguments = ["ask"]
    if known.get("facts") and known.get("key"):
        arguments += ["--known", known["key"]]
    if visit.request.verify:
        arguments.append("--verify")
    answer = visit.ask(arguments)
    facts = _facts(visit, answer, known.get("facts") or {})
    status = answer.required("status")
    if not status.get("state"):
        raise NoAnswer("the answer of the node program has no status.state")
    _refuse_second_host(visit, str(status.get("node") or ""))
    if status.get("differences"):
        status["differences"] = _attributed(visit, status["differences"], status.get("generation"))
    # The node may undo what is not confirmed, and that would be no loss.
    held = "" if status.get("unconfirmed") else status.get("generation")
    recorded = held or known.get("recorded")
    rivals = rival.signs(answer.result)
    write_json(
        visit.work.answer_file(visit.host),
        {
            "host": visit.host,
            "node": visit.name,
            "key": answer.result.get("key") or known.get("key") or answer.required("key"),
            "facts": facts,
            "status": status,
            "recorded": recorded,
            "oldProgram": visit.carried,
            "kubeProxy": rivals,
        },
    )
    drifted = report.drift_lines(visit.host, status, recorded)
    if drifted or visit.request.verify:
        note_drift(visit.work, visit.host, visit.name, found=bool(drifted))
    return {
        **_result(visit, facts, status, drifted),
        "kube_proxy": rivals,
        "kube_proxy_runs": rival.runs(answer.result),
    }


def _facts(visit: Visit, answer: Answer, known: Mapping[str, Any]) -> dict[str, Any]:
    """The node's facts: those that it told anew, and the others as it told them last."""
    result = answer.result
    facts = {**(result.get("facts") or known)}
    told = answer.required("addresses")
    facts["addresses"] = told if isinstance(told, list) else []
    facts["tcpBeLiberal"] = result.get("tcpBeLiberal", facts.get("tcpBeLiberal", 0))
    facts["routeLocalnetLeft"] = result.get("routeLocalnetLeft", facts.get("routeLocalnetLeft", False))
    facts[CONTROL_PORT] = visit.connection.control_port()
    return facts


def _refuse_second_host(visit: Visit, node: str) -> None:
    """Two hosts must not lead to one machine: a Node can name the address of another as its own."""
    if node in ("", visit.name.lower()):
        return
    other = visit.work.host_of(node)
    if other is not None and other != visit.host and other in visit.hosts:
        raise NotDone(
            f"{visit.host} leads to the machine that has the rules of the node {node}, which is the host {other}: "
            "one of the two has an address of the other. If the machine was given another name, clean it up first"
        )


def _attributed(
    visit: Visit, differences: Sequence[Mapping[str, Any]], generation: str | None
) -> Sequence[Mapping[str, Any]]:
    """What the node found, with the Services that it concerns; without them if they cannot be learned."""
    try:
        return Owners(visit.held(generation)).named(differences)
    except Unreachable:
        raise
    except (NotDone, NoAnswer, KeyError, RecursionError, ValueError):
        return differences


def _result(
    visit: Visit, facts: Mapping[str, Any], status: Mapping[str, Any], drifted: Sequence[str]
) -> dict[str, Any]:
    warned = facts["routeLocalnetLeft"] and visit.request.verify
    return {
        **({"warnings": [_LEFT.format(host=visit.host)]} if warned else {}),
        "changed": False,
        "node": visit.name,
        "state": status["state"],
        "generation": status.get("generation"),
        "applied_at": status.get("appliedAt"),
        "drift": status.get("drift"),
        "unconfirmed": status.get("unconfirmed"),
        "intact": not drifted,
        "differences": status.get("differences") or [],
        "drifted": drifted,
        "kept": status.get("kept") or [],
        "mode": status.get("mode"),
        "facts": facts,
    }
