# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What belongs to no Service: settings, sysctls, health listeners, rules that all packets meet; and how it changes.

The frame of a State is that, and a few lines in it that follow from endpoints, which are left out here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..backends.state import Part, part_of
from ..bundle.compare import Change, line_changes
from ..choices import config_fields
from .bundles import engine_digest

if TYPE_CHECKING:
    from ..backends.state import FrameObject, State

_UNKNOWN = "~ what it had before was not computed here: this is all that it would have, and its rules are not compared"
NOT_KNOWN = Change("changed", "node: settings", "", "", "", ("~ were not computed here, and are not compared",))


def without_endpoints(each: FrameObject) -> tuple[str, str]:
    """Head and tail of an object of a frame, without the lines that come and go with endpoints."""
    if not each.of_endpoints:
        return each.head, each.tail
    head, tail = (
        "".join(line for line in text.splitlines(keepends=True) if line.rstrip("\n") not in each.of_endpoints)
        for text in (each.head, each.tail)
    )
    return head, tail


def frame_objects(state: State) -> dict[str, str]:
    """The objects of the node itself, without what follows from endpoints. Name -> text."""
    found = {}
    for obj, text in state.frame.items():
        if part_of(obj) is Part.ENDPOINTS:
            continue
        kept = "".join(without_endpoints(text))
        if kept:
            found[" ".join(obj).removeprefix("file ")] = kept
    return found


def frame_record(state: State, settings: str) -> dict[str, Any]:
    """What is kept of a state, to compare it with another."""
    return {
        "mode": state.mode,
        "compat": state.compat,
        "engine": engine_digest()[:16],
        "settings": settings,
        "objects": frame_objects(state),
    }


def frame_changes(before: Mapping[str, Any] | None, after: Mapping[str, Any], *, first: bool) -> list[Change]:
    """What differs between two records. Before is None if this is the first, or what was there is not known."""
    old: Mapping[str, Any] = before or {}
    details = [] if before or first else [_UNKNOWN]
    details += _named(old, after)
    if before and old["engine"] != after["engine"]:
        details.append(
            "~ another version of the engine computed it, which may write the rules of any Service otherwise"
        )
    found = [Change("added" if first else "changed", "node: settings", "", "", "", tuple(details))] if details else []
    return [*found, *_objects(old, after)]


def _named(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Mode, kube-proxy's minor, and the fields of the configuration."""
    before = {key: old[key] for key in ("mode", "compat") if key in old} | _fields(old.get("settings", ""))
    after = {key: new[key] for key in ("mode", "compat")} | _fields(new["settings"])
    for key in dict.fromkeys((*before, *after)):
        if key not in before:
            yield f"+ {key} {after[key]}"
        elif key not in after:
            yield f"- {key} {before[key]}"
        elif before[key] != after[key]:
            yield f"~ {key} {before[key]} -> {after[key]}"


def _fields(settings: str) -> dict[str, str]:
    """The fields of a configuration that say something, and the schedulers of single Services."""
    config, schedulers = json.loads(settings) if settings else ({}, {})
    own = {key: value for key, value in schedulers.items() if value}
    return config_fields({key: value for key, value in config.items() if key != "mode"}) | {
        f"schedulers.{key}": value for key, value in config_fields(own).items()
    }


def _objects(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Files and rules. Where the mode is another, or there is nothing to compare with, all rules are new."""
    before, after = old.get("objects") or {}, new["objects"]
    for name in dict.fromkeys((*before, *after)):
        is_rules = " " in name
        if is_rules and old.get("mode") != new["mode"]:
            continue
        details = line_changes(before.get(name, "").splitlines(), after.get(name, "").splitlines())
        if details:
            action = "changed" if name in before and name in after else "removed" if name in before else "added"
            yield Change(action, f"node: {name}", "", "", "", tuple(details))
