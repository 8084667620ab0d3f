# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The page: one file that makes no request. Its policy lets only the script and the style run that are in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from ..texts import visible
from .changes import Plan
from .collect import Report
from .nodes import RANKS, STATES, NodeRow, verdict
from .services import FILTERS, Texts
from .words import age, counted, moment

_TEMPLATES = Path(__file__).parent / "templates"
_MOST_FINDINGS = 5
_CONFIGURATION = "KubeProxyConfiguration"  # it may lie beside the cluster, and is read by itself


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at first."""

    state: str
    word: str
    what: str
    why: str
    href: str


def report_page(report: Report) -> str:
    """The page of a cluster."""
    states = [each.state for each in report.nodes]
    headline, lead = verdict(report.nodes)
    used, total = (sum(row.endpoints[index] for row in report.rows) for index in (0, 1))
    empty = sum(not row.endpoints[0] for row in report.rows)
    ports = sum(len(row.ports) for row in report.rows)
    script = _asset("app.js")
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            r=report,
            headline=headline,
            lead=lead,
            known=any(state != "unknown" for state in states),
            good=states.count("current"),
            counts=[(state, states.count(state)) for state in STATES if state in states],
            node_words=", ".join(_node_words(states)),
            service_words=f"{counted(ports, 'port')}; "
            + (f"{empty:,} without endpoints" if empty else "all have endpoints"),
            used=used,
            total=total,
            endpoint_words="all are used" if used == total else f"{total - used:,} not used by any node",
            findings=list(_findings(report)),
            left_out=_left_out(report),
            present=set(states),
            states=STATES,
            seen={block.state for block in report.freshness.blocks},
            data=htmlsafe_json_dumps(_data(report), dumps=_compact),
            script=Markup(script),
            policy=_policy(script),
        )
    )


def plan_page(plan: Plan) -> str:
    """The page of a plan alone; it needs no script."""
    return _environment().get_template("plan.html.j2").render(p=plan, policy=_policy())


def _policy(script: str = "") -> str:
    """Nothing may run, and nothing be fetched, that does not have the hash of what is in the page."""
    own = f" script-src '{_pin(script)}'; require-trusted-types-for 'script'; trusted-types 'none';" if script else ""
    style = _pin(_asset("style.css"))
    return f"default-src 'none';{own} style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"


def _pin(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # No name may hide or reverse what stands beside it.
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    words = {"moment": moment, "age": age, "counted": counted, "number": "{:,}".format}
    made.globals.update(words, style=Markup(_asset("style.css")))
    return made


def _compact(value: Any, **_options: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _shown(value: Any) -> Any:
    """The same with texts that people may see."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if isinstance(value, Mapping):
        return {_shown(key): _shown(each) for key, each in value.items()}
    return value


def _data(report: Report) -> dict[str, Any]:
    """What the script shows."""
    texts = Texts()
    _first = [texts[name] for name in FILTERS]
    services = [row.data(texts) for row in report.rows]
    changes = report.plan.changes if report.plan and report.plan.waits else ()
    found: dict[str, Any] = _shown(
        {
            "made": report.made,
            "directory": report.directory,
            "services": services,
            "texts": list(texts),
            "filters": FILTERS,
            "nodes": [_node(each, report.made) for each in report.nodes],
            "states": {name: {"word": each.word, "rank": RANKS[name]} for name, each in STATES.items()},
            "plan": {each.title.partition(":")[0]: each.action for each in changes if not each.endpoints_only},
        }
    )
    return found


def _node(row: NodeRow, now: float) -> dict[str, Any]:
    seconds = None if row.confirmed is None else max(0.0, now - row.confirmed)
    recent = seconds is not None and seconds < 86400
    return {
        "name": row.place.name,
        "host": row.place.host,
        "zone": row.place.zone,
        "address": row.place.address,
        "state": row.state,
        "note": row.note,
        "generation": row.generation,
        "wanted": row.wanted,
        "seconds": -1 if seconds is None else round(seconds),
        "age": "" if seconds is None else age(seconds),
        "when": "" if row.confirmed is None else moment(row.confirmed, "%H:%M:%S" if recent else "%d %b %H:%M"),
        "drift": row.drift,
    }


def _node_words(states: list[str]) -> Iterator[str]:
    bad = [state for state in reversed(STATES) if state in states and state != "current"]
    if not bad:
        yield "each was checked lately"
    elif set(states) == {"unknown"}:
        yield "what they have is not known here"
        return
    for state in bad:
        yield f"{states.count(state):,} {STATES[state].word}"


def _findings(report: Report) -> Iterator[Finding]:
    """What a reader should look at first: nodes, then what waits, then Services without endpoints."""
    bad = sorted(
        (each for each in report.nodes if each.state not in ("current", "unknown")), key=lambda each: -each.rank
    )
    for each in bad[:_MOST_FINDINGS]:
        word = STATES[each.state].word
        yield Finding(each.state, word, f"{each.place.name}: {word}", each.note, f"#nodes/{each.place.name}")
    if len(bad) > _MOST_FINDINGS:
        more = counted(len(bad) - _MOST_FINDINGS, "more node")
        yield Finding("warn", "more", f"{more} not as intended", "The table of nodes has the worst first.", "#nodes")
    for name, why in list(report.unusable.items())[:_MOST_FINDINGS]:
        yield Finding("bad", "no rules", f"{name} gets no rules", why, "#nodes")
    if report.plan and report.plan.waits:
        why = f"{report.plan.counts}; good until {moment(report.plan.expires)} UTC."
        yield Finding("warn", "waits", "A plan waits for approval", why, "#plan")
    for text in report.warnings[:_MOST_FINDINGS]:
        yield Finding("warn", text.heading, text.text, text.heading, "")
    empty = [row for row in report.rows if not row.endpoints[0]]
    for row in empty[:3]:
        name = f"{row.namespace}/{row.name}"
        yield Finding("off", "empty", f"{name} has no endpoints", "Callers are refused.", f"#service/{name}")
    if len(empty) > 3:
        rest = f"{len(empty) - 3:,} more Services have no endpoints"
        yield Finding("off", "empty", rest, "The filter 'without endpoints' lists them.", "#services")


def _left_out(report: Report) -> list[str]:
    problems = list(report.problems[:_MOST_FINDINGS])
    if len(report.problems) > _MOST_FINDINGS:
        problems.append(f"and {len(report.problems) - _MOST_FINDINGS:,} more objects that cannot be used")
    return problems + [
        f"{count:,} × {sort}, which needs no rules" for sort, count in report.ignored.items() if sort != _CONFIGURATION
    ]
