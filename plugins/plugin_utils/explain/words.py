# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""An Explanation in words: the verdict first, then why, then the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..addresses import endpoint_text
from ..proxy.reasons import Reason
from ..proxy.traffic import Decision, Frontend, Reach, Why
from .answer import Candidate, Explanation, problems
from .packet import End, Origin, Path, Step

_VERBS = {"endpoints": "delivered", "dropped": "dropped", "refused": "refused", "passed": "passed on"}
_REACH = {
    Reach.CLUSTER_IP: "its cluster IP",
    Reach.EXTERNAL_IP: "an external IP",
    Reach.LOAD_BALANCER: "its load balancer IP",
    Reach.NODE_PORT: "its node port, on an address of the node",
}

# What a rule is there for, by what stands in it; the first that fits.
_MEANINGS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"-j DNAT|dnat (?:ip6? |addr |to )|^-a ", "the destination becomes an endpoint"),
        (r"MASQUERADE|masquerade fully|masquerade$", "the source becomes the node's"),
        (r"--set-xmark \S+/0x0\b|mark set mark xor", "the mark is taken off"),
        (r"--set-xmark|mark set mark or|mark set meta mark", "marked: its source shall be replaced"),
        (r"-j KUBE-MARK-MASQ", "its source shall be replaced"),
        (r"! --mark \S+ -j RETURN", "not marked: its source stays"),
        (r"-j DROP|\bdrop\b", "dropped here"),
        (r"-j REJECT|\breject\b", "refused here"),
        (r"-j KUBE-SEP-|numgen|goto endpoint-", "an endpoint is chosen"),
        (r"-j KUBE-(?:SVC|SVL)-|goto (?:service|local)-", "the endpoints of this Service"),
        (r"-j KUBE-EXT-|goto external-", "this Service, from outside"),
        (r"-j KUBE-FW-|firewall-ips|-j KUBE-SOURCE-RANGES", "the source ranges of this Service"),
        (r"vmap @no-endpoint", "has it endpoints?"),
        (r"vmap @service-ips|vmap @service-nodeports|^-A ", "this Service"),
        (r"KUBE-NODE-?PORTS?\b", "is it a node port?"),
        (r"FIREWALL|firewall-check", "may this source use it?"),
        (r"POSTROUTING|masquerading", "shall its source be replaced?"),
        (r"SERVICES|services|KUBE-LOAD-BALANCER|endpoints-check|cluster-ips", "is it for a Service?"),
        (r"-j ACCEPT", "accepted"),
    )
)
_JUMP = re.compile(r"(?:-j|jump|goto) (KUBE-\S+|[a-z]\S*)$")


def lines(told: Explanation, help_: str = "") -> Iterator[str]:
    """The text, a line each."""
    yield headline(told)
    yield f"  from {_source(told)}  to {told.packet.target}/{told.packet.protocol}  on {told.node}"
    yield ""
    yield from _facts(told)
    if told.candidates:
        yield ""
        yield from _endpoints(told)
    yield ""
    yield from _ways(told)
    yield from _notes(told, help_)


def headline(told: Explanation) -> str:
    """The verdict, in a sentence."""
    outcome = told.verdict.end.value
    title = told.frontend.view.port.name_string if told.frontend else ""
    why = told.decision.why if told.decision else None
    if outcome == "endpoints":
        used = len(told.verdict.shares)
        count = "the one endpoint" if used == 1 else f"one of {used} endpoints"
        return f"delivered: to {count} of {title or 'no Service'}"
    if outcome == "passed":
        if why is Why.LEFT_ALONE:
            return f"passed on: {title} has no endpoints, and no rule refuses what the node itself sends there"
        return "passed on: no Service has this destination, and the rules leave the packet as it is"
    reasons = {
        Why.NO_ENDPOINTS: f"{title} has no endpoints",
        Why.NO_LOCAL_ENDPOINTS: f"{title} has endpoints, but none on {told.node}, and its policy is Local",
        Why.SOURCE_RANGES: "the source is in none of the ranges that may use this load balancer",
    }
    reason = reasons.get(why) if why else None
    return f"{_VERBS[outcome]}: {reason or 'no Service has this destination, and a rule guards it'}"


def _source(told: Explanation) -> str:
    sender, source = told.sender, told.packet.source
    if sender.pod:
        return f"pod {sender.pod} ({source}, on {sender.node})"
    if told.packet.origin is Origin.NODE:
        return f"{told.node} itself ({source})"
    if sender.node:
        return f"{source} ({'a pod of ' if told.packet.origin is Origin.POD else ''}{sender.node})"
    return f"{source} (from outside)"


def _facts(told: Explanation) -> Iterator[str]:
    if told.frontend is None or told.decision is None:
        return
    port = told.frontend.view.port
    node_port = f", node port {port.node_port}" if port.node_port else ""
    yield f"service     {port.name_string}, {endpoint_text(port.cluster_ip, port.port)}/{port.protocol}{node_port}"
    yield f"reached by  {_REACH[told.frontend.reach]}"
    yield f"policy      {_policy(told, told.frontend, told.decision)}"
    if told.frontend.reach is Reach.LOAD_BALANCER and port.source_ranges:
        held = "is not in it" if told.decision.why is Why.SOURCE_RANGES else "may"
        yield f"sources     {', '.join(port.source_ranges)} may use the load balancer IP; {told.packet.source} {held}"
    if port.sticky_seconds:
        yield f"affinity    ClientIP: this client keeps its endpoint for {port.sticky_seconds} s after each connection"
    yield f"source      {_masquerade(told)}"


def _policy(told: Explanation, frontend: Frontend, decision: Decision) -> str:
    name = "externalTrafficPolicy" if frontend.external else "internalTrafficPolicy"
    if not frontend.policy_local:
        text = f"{name} Cluster: endpoints on any node"
    elif decision.local:
        text = f"{name} Local: only endpoints on {told.node}"
    elif told.mode == "ipvs" and decision.why is Why.SERVED:
        text = f"{name} Local, but {told.node} has none, and ipvs mode then uses those of all nodes"
    else:
        text = f"{name} Local; for the node and its pods, endpoints on any node"
    hinted = {each.judged.reason for each in told.candidates} & {Reason.OTHER_ZONE, Reason.NODE_HINT}
    if hinted:
        place = told.zone if Reason.OTHER_ZONE in hinted else told.node
        text += f", narrowed by topology hints to {place}"
    return text


def _masquerade(told: Explanation) -> str:
    if told.verdict.end is not End.DELIVERED:
        return "not looked at: the packet goes to no endpoint"
    if told.masquerade:
        return f"replaced: the endpoint sees an address of {told.node}"
    if told.other_way is not None:
        return f"kept: the endpoint sees {told.packet.source}, except if it is sent back to itself"
    return f"kept: the endpoint sees {told.packet.source}"


def _endpoints(told: Explanation) -> Iterator[str]:
    rows = [("", "endpoint", "pod", "node", "zone", "share", "why")]
    for each in told.candidates:
        endpoint, share = each.judged.endpoint, f"{float(each.share):.1%}" if each.share else "-"
        mark = "in" if each.share else "out"
        rows.append((mark, each.address, endpoint.pod, endpoint.node_name, each.zone, share, reason(told, each)))
    rows += [
        ("in", to, "", "", "", f"{float(share):.1%}", "no endpoint of the Service") for to, share in told.strangers
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    for row in rows:
        cells = [
            text.rjust(width) if column == 5 else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cell for cell, width in zip(cells, widths, strict=True) if width).rstrip()


def reason(told: Explanation, each: Candidate) -> str:
    """Why an endpoint is in or out."""
    endpoint, hints = each.judged.endpoint, ", ".join(each.judged.hints)
    words = {
        Reason.READY: "ready",
        Reason.LAST_TERMINATING: "terminating, and no ready endpoint is left",
        Reason.NOT_READY: "not ready",
        Reason.TERMINATING: "terminating; used only if no ready endpoint is left",
        Reason.NOT_SERVING: "terminating, and does not serve any more",
        Reason.OTHER_NODE: f"is on {endpoint.node_name or 'no node'}, and policy Local allows only {told.node}",
        Reason.OTHER_ZONE: f"its hint is for {hints or 'no zone'}, this node is in {told.zone or 'no zone'}",
        Reason.NODE_HINT: f"its hint is for {hints or 'no node'}, this is {told.node}",
    }[each.judged.reason]
    if each.judged.used and not each.share:
        return f"{words}; would serve, but the packet does not come this far"
    return words


def _ways(told: Explanation) -> Iterator[str]:
    path = told.deciding
    several = len(told.verdict.shares) > 1
    yield f"rules it meets, mode {told.mode}, in order{f' if {path.packet.target} is chosen' if several else ''}"
    yield from _steps(path)
    other = told.other_way
    if other is not None and other is not path:
        yield ""
        yield f"the same, if it is sent to {other.packet.target}"
        yield from _steps(other)


def _steps(path: Path) -> Iterator[str]:
    """Rules with their meaning; chains that did nothing share a line."""
    idle: list[Step] = []
    shown: list[tuple[str, str]] = []
    for step, following in zip(path.steps, [*path.steps[1:], None], strict=True):
        if _JUMP.search(step.text) and (following is None or following.depth <= step.depth):
            idle.append(step)
            continue
        if idle:
            shown.append(_idle(idle))
            idle = []
        table = step.place if step.depth == 0 or step.place == "ipvs" else ""
        indent = "  " * step.depth
        shown.append((meaning(step.text), f"{indent}{table + ' ' if table else ''}{short(step.text)}"))
    if idle:
        shown.append(_idle(idle))
    width = max((len(words) for words, _rule in shown), default=0)
    yield from (f"  {words.ljust(width)}  {rule}" for words, rule in shown)
    if not shown:
        yield "  none"


def _idle(steps: list[Step]) -> tuple[str, str]:
    more = f", and {len(steps) - 1} more" if len(steps) > 1 else ""
    return "nothing here for this packet", f"{steps[0].place} {short(steps[0].text)}{more}"


def meaning(text: str) -> str:
    """What a rule is there for."""
    return next((words for pattern, words in _MEANINGS if pattern.search(text)), "matches")


def short(text: str) -> str:
    """A rule without its comment and the names of match modules, which say nothing more."""
    text = re.sub(r'(?:-m comment )?--comment (?:"[^"]*"|\S+) ?|-m \w+ (?=-)| comment "[^"]*"', "", text)
    return " ".join(text.split())


def _notes(told: Explanation, help_: str) -> Iterator[str]:
    yield ""
    for each in told.live or ():
        place = f" in {each.place}" if each.place else ""
        yield f"  = live: {each.what}{place}: {each.text}"
    if told.live == ():
        yield "  = live: the kernel does with this packet what was meant, by the same rules"
    yield from (f"  = wrong: {each}" for each in problems(told))
    if help_ := help_ or _help(told):
        yield f"  = help: {help_}"
    yield "  = note: only rules of kube-proxy were followed; a network policy or a firewall may still stop the packet"


def _help(told: Explanation) -> str:
    why = told.decision.why if told.decision else None
    port = told.frontend.view.port if told.frontend else None
    if why is Why.SOURCE_RANGES:
        return "add the client to loadBalancerSourceRanges of the Service; the ranges guard the load balancer IP only"
    if why is Why.NO_LOCAL_ENDPOINTS:
        nodes = sorted(
            {each.judged.endpoint.node_name for each in told.candidates if each.judged.endpoint.ready} - {""}
        )
        check = (
            f"; load balancers find them at health check port {port.health_check_node_port}"
            if port and port.health_check_node_port
            else ""
        )
        return f"send this traffic to a node that runs an endpoint ({', '.join(nodes[:5]) or 'none'}){check}"
    if why is Why.NO_ENDPOINTS and port is not None:
        known = "is ready" if told.candidates else "matches the selector of the Service"
        return (
            f"no Pod {known}: kubectl -n {port.namespace} get endpointslices -l kubernetes.io/service-name={port.name}"
        )
    return ""
