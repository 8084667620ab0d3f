# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What changes on a node between two bundles that lie in directories: all that is known of them is their text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..bundle.compare import Change, Records, compare_records, line_changes, parse_records
from ..bundle.manifest import FILE, SERVICES_FILE
from ..errors import UserError
from .attribution import Explained

_SETTINGS = (".conf", "nfacct.rules", "health.counts")
_RULES = (".rules", ".nft", "ip.batch", "haproxy.cfg")
_MARKER = re.compile("KUBE-PROXY-GEN-|kube-proxy gen-")


class UnreadableBundle(UserError):
    """A directory that is no bundle, or whose files are damaged; the message names the file."""


def bundle_records(directory: Path) -> Records:
    """The service ports of a bundle."""
    file = directory / SERVICES_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return parse_records(lines)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UnreadableBundle(f"{file}: {error}") from error


def bundles(path: Path) -> dict[str, Path]:
    """The bundles of a directory: itself, or one per node below it. Node name -> directory."""
    if (path / FILE).is_file():
        return {str(_manifest(path).get("node")): path}
    below = sorted(each.parent for each in path.glob(f"[!.]*/{FILE}"))
    return {str(_manifest(each).get("node")): each for each in below}


def _manifest(directory: Path) -> dict[str, Any]:
    file = directory / FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableBundle(f"{file}: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UnreadableBundle(f"{file}: is no manifest of a bundle")
    return manifest


def compare_bundles(old: Path | None, new: Path | None) -> list[Change]:
    """What changes on a node between two bundles; None stands for no bundle at all."""
    before = bundle_records(old) if old else {}
    after = bundle_records(new) if new else {}
    changes = list(compare_records(before, after))
    if old and new:
        touched = {(each.service, each.port, each.protocol, each.family) for each in changes}
        records = [side[key] for side in (before, after) for key in touched if key in side]
        changes.extend(_other_changes(old, new, Explained.by(records)))
    return changes


def _other_changes(old: Path, new: Path, explained: Explained) -> Iterator[Change]:
    """What no Service that changed explains: mode, sysctls, rules that every node has, and those of other Services."""
    before, after = _manifest(old), _manifest(new)
    details = [
        f"~ {field} {before.get(field)} -> {after.get(field)}"
        for field in ("mode", "compat")
        if before.get(field) != after.get(field)
    ]
    same_mode = before.get("mode") == after.get("mode")
    names = dict.fromkeys((*before["files"], *after["files"]))
    for name in names:
        if before["files"].get(name) == after["files"].get(name):
            continue
        # Of another mode, all rules are others.
        if name.endswith(_SETTINGS) or (same_mode and name.endswith(_RULES)):
            was, is_ = (list(explained.others(name, _content(each / name))) for each in (old, new))
            details += line_changes(was, is_, prefix=f"{name}: ")
    if details:
        yield Change("changed", "node", "", "", "", tuple(details))


def _content(file: Path) -> list[str]:
    """The lines that say something: headings as well, the generation not."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("# node ") and not _MARKER.search(line)]
