# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A State or a Delta as a directory of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from .. import backends
from ..backends.common import CONNTRACK, SERVICES
from ..backends.state import Delta, Fragment, Object, State
from ..files import write_directory
from .manifest import FILE, manifest_digest, manifest_text
from .program import PROGRAM, programs

# The fields of a manifest and the files that it lists, without the program.
Parts: TypeAlias = tuple[dict[str, Any], list[tuple[str, str]]]


def write_bundle(state: State, directory: Path) -> None:
    """The full bundle of a node. An earlier bundle of that directory is replaced in one step."""
    fields, contents = bundle_parts(state)
    _write(directory, fields, [*contents, *programs(state.mode)])


def write_delta(change: Delta, state: State, directory: Path) -> None:
    """What turns a node's base generation into a new one; the node has the program that applied the base."""
    _write(directory, *delta_parts(change, state))


def bundle_parts(state: State) -> Parts:
    """What a full bundle is made of."""
    fields: dict[str, Any] = {
        "kind": "Bundle",
        "node": state.node,
        "mode": state.mode,
        "compat": state.compat,
        "generation": state.generation,
        **state.totals,
    }
    return fields, list(backends.files(state))


def delta_parts(change: Delta, state: State) -> Parts:
    """What a delta is made of.

    Files of one line per Service are told as the lines that go and come, so that a delta is as small as the change.
    """
    if change.needs_full:
        raise ValueError(f"node {state.node}: only a full bundle leads from {change.base} to {change.generation}")
    fields: dict[str, Any] = {
        "kind": "Delta",
        "node": state.node,
        "mode": state.mode,
        "compat": state.compat,
        "generation": change.generation,
        "base": change.base,
        **state.totals,
    }
    contents = dict(backends.delta_files(change, state))
    for obj in (SERVICES, CONNTRACK):
        if contents.pop(obj[1], None) is not None:
            contents[f"{obj[1]}.diff"] = _line_changes(change, obj)
    return fields, list(contents.items())


# Files whose change can claim an address or a port, or open one; beside those of the part FRONTENDS.
_GRANTING = frozenset({"frontends.allow", "sysctls.conf", "nfacct.rules", "health.conf", "ipvs.conf", "ip.batch"})


def only_endpoints(names: Iterable[str]) -> bool:
    """Whether a delta of these files changes endpoints, and nothing else."""
    return not any("-frontends." in name or name in _GRANTING for name in names)


def sealed(parts: Parts) -> tuple[str, list[tuple[str, bytes]]]:
    """The digest of the manifest, and all files with it: what travels to hosts that have the program."""
    fields, contents = parts
    files = [(name, text.encode()) for name, text in contents]
    manifest = manifest_text(fields, files)
    return manifest_digest(manifest), [(FILE, manifest.encode()), *files]


def _line_changes(change: Delta, obj: Object) -> str:
    """The lines that go, after a -, and those that come, after a +. Only service ports that changed are looked at."""
    gone, come = (_lines_of((pair[side] for pair in change.pairs), obj) for side in (0, 1))
    # Two service ports may have the same line; it goes with the last of them.
    before, after = f"\n{change.before.get(obj, '')}", f"\n{change.changed[obj]}"
    lines = [f"-{line}" for line in gone if line not in come and f"\n{line}" not in after]
    return "".join(lines + [f"+{line}" for line in come if line not in gone and f"\n{line}" not in before])


def _lines_of(fragments: Iterable[Fragment | None], obj: Object) -> dict[str, None]:
    texts = (text for each in fragments if each is not None for name, text in each.open if name == obj)
    return dict.fromkeys(line for text in texts for line in text.splitlines(keepends=True))


def _write(directory: Path, fields: dict[str, Any], contents: Iterable[tuple[str, str]]) -> None:
    files = [(name, content.encode()) for name, content in contents]
    manifest = manifest_text(fields, files).encode()
    modes = {PROGRAM: 0o755}
    write_directory(directory, [(name, data, modes.get(name, 0o644)) for name, data in [*files, (FILE, manifest)]])
