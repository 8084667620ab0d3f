# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Everything about one Service: frontends, endpoints by node, its objects on a node, and since when nodes have it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..addresses import endpoint_text
from ..ledger import FILE, entries
from ..proxy.endpoints import Endpoint
from ..proxy.port_view import PortView
from .intent import Intent
from .question import known_service


def about(intent: Intent, name: tuple[str, str], node: str, only: Collection[tuple[str, str]]) -> dict[str, Any]:
    """What the cluster and the rules of a node hold of a Service, as data."""
    service = known_service(intent.snapshot.services, *name)
    view = intent.place(node, only).view
    zones = {each.name: each.zone for each in intent.snapshot.nodes}
    ports = [each for family in view.families for each in family.ports if (each.port.namespace, each.port.name) == name]
    title = f"{name[0]}/{name[1]}"
    state = intent.renderer.state(view)
    return {
        "service": title,
        "type": service.type,
        "ports": [_port(each, zones) for each in ports],
        "node": node,
        "mode": state.mode,
        "objects": [
            {"object": " ".join(obj), "lines": text.splitlines()}
            for each in state.fragments
            if each.service == title
            for obj, text in (*each.own, *((obj, text) for obj, text in each.open if obj[0] != "file"))
        ],
    }


def _port(view: PortView, zones: Mapping[str, str]) -> dict[str, Any]:
    port = view.port
    frontends = [("cluster IP", endpoint_text(port.cluster_ip, port.port))]
    frontends += [("external IP", endpoint_text(ip, port.port)) for ip in port.external_ips]
    frontends += [("load balancer IP", endpoint_text(ip, port.port)) for ip in port.load_balancer_vips]
    frontends += [("node port", str(port.node_port))] if port.node_port else []
    by_node: dict[str, list[dict[str, Any]]] = {}
    for each in view.endpoints:
        by_node.setdefault(each.node_name, []).append({"address": each.text, "pod": each.pod, "state": state_of(each)})
    return {
        "port": port.port_name,
        "protocol": port.protocol,
        "family": port.family.value,
        "frontends": [{"kind": kind, "address": address} for kind, address in frontends],
        "internalTrafficPolicy": "Local" if port.internal_policy_local else "Cluster",
        "externalTrafficPolicy": "Local" if port.external_policy_local else "Cluster",
        "sourceRanges": list(port.source_ranges),
        "affinitySeconds": port.sticky_seconds,
        "healthCheckNodePort": port.health_check_node_port,
        "endpoints": [
            {"node": node, "zone": zones.get(node, ""), "endpoints": found} for node, found in sorted(by_node.items())
        ],
    }


def state_of(endpoint: Endpoint) -> str:
    """The conditions of an endpoint in a word or two."""
    if endpoint.ready:
        return "ready"
    if endpoint.terminating:
        return "terminating" if endpoint.serving else "terminating, not serving"
    return "not ready"


def history(directory: Path, service: str) -> Iterator[dict[str, Any]]:
    """Of each node, the entry of the ledger that brought it the frontends of a Service as they are now."""
    file = directory / FILE
    if not file.is_file():
        return
    found: dict[str, tuple[str | None, dict[str, Any]]] = {}
    served: dict[str, str | None] = {}
    for entry in entries(file):
        for host, change in (entry.get("nodes") or {}).items():
            node = str(change.get("node") or host)
            generation = str(change.get("after") or "")
            if not generation or entry.get("result") == "begun" or change.get("error"):
                continue
            if generation not in served:
                served[generation] = _served(directory / "frontends" / f"g-{generation}", service)
            if node not in found or found[node][0] != served[generation]:
                found[node] = (served[generation], entry)
    for node, (text, entry) in sorted(found.items()):
        who = entry.get("who") or {}
        yield {
            "node": node,
            "served": None if text is None else bool(text),
            "since": entry.get("time"),
            "run": entry.get("run"),
            "entry": entry["number"],
            "who": who.get("name") or who.get("user"),
            "action": entry.get("action"),
            "approvers": entry.get("approvers") or [],
            "reason": entry.get("reason") or "",
        }


def _served(file: Path, service: str) -> str | None:
    """The lines of a Service among the frontends of a generation; None if they are no longer known."""
    try:
        lines_ = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    wanted = json.dumps(service)
    return "\n".join(line for line in lines_ if f'"service":{wanted}' in line)


def lines(told: Mapping[str, Any], runs: Iterable[Mapping[str, Any]] | None) -> Iterator[str]:
    """The same in words; runs are None where no working directory tells of them."""
    yield f"{told['service']}, type {told['type']}"
    for port in told["ports"]:
        yield ""
        yield f"port {port['port'] or '(no name)'}, {port['protocol']}, {port['family']}"
        for each in port["frontends"]:
            yield f"  {each['kind']:17} {each['address']}"
        yield f"  {'policies':17} internal {port['internalTrafficPolicy']}, external {port['externalTrafficPolicy']}"
        if port["sourceRanges"]:
            yield f"  {'source ranges':17} {', '.join(port['sourceRanges'])}"
        if port["affinitySeconds"]:
            yield f"  {'affinity':17} ClientIP, {port['affinitySeconds']} s"
        yield from _endpoints(port["endpoints"])
    yield ""
    yield f"on {told['node']}, mode {told['mode']}"
    for each in told["objects"]:
        yield f"  {each['object']}"
        yield from (f"    {line}" for line in each["lines"])
    yield ""
    yield from _since(runs)


def _since(runs: Iterable[Mapping[str, Any]] | None) -> Iterator[str]:
    if runs is None:
        yield "since when, by which run and by whose approval: ask with --dir, the working directory of runs"
        return
    rows = [(each["node"], _SERVED[each["served"]], *_run(each)) for each in runs]
    if not rows:
        yield "the ledger has no run that gave it to a node"
        return
    yield "since when nodes have its frontends as they are now"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


_SERVED = {True: "served", False: "not served", None: "not known"}


def _run(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Since when, by which run of whom, approved by whom, and why."""
    approved = f"approved by {', '.join(entry['approvers'])}" if entry["approvers"] else "without approval"
    return f"since {entry['since']}", f"run {entry['run']} of {entry['who']}", approved, entry["reason"]


def _endpoints(nodes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    nodes = list(nodes)
    if not nodes:
        yield "  endpoints         none"
    for each in nodes:
        zone = f" ({each['zone']})" if each["zone"] else ""
        for endpoint in each["endpoints"]:
            told = "  ".join(word for word in (endpoint["address"], endpoint["pod"], endpoint["state"]) if word)
            yield f"  on {each['node'] or 'no node'}{zone}: {told}"
