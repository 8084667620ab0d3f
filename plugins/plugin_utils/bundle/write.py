# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A State or a Delta as a directory of files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from .. import backends
from ..backends.common import CONNTRACK, SERVICES
from ..backends.state import Delta, State
from .manifest import FILE, manifest_digest, manifest_text, sha256
from .program import PROGRAM, node_program

# The fields of a manifest and the files that it lists, without the program.
Parts: TypeAlias = tuple[dict[str, Any], list[tuple[str, str]]]


def write_bundle(state: State, directory: Path) -> None:
    """The full bundle of a node. An earlier bundle of that directory is replaced in one step."""
    fields, contents = bundle_parts(state)
    _write(directory, fields, [*contents, (PROGRAM, node_program())])


def write_delta(change: Delta, state: State, directory: Path) -> None:
    """What turns a node's base generation into a new one; the node has the program that applied the base."""
    _write(directory, *delta_parts(change, state))


def bundle_parts(state: State) -> Parts:
    """What a full bundle is made of."""
    services = {text.split('"', 4)[3] for each in state.fragments for obj, text in each.open if obj == SERVICES}
    fields: dict[str, Any] = {
        "kind": "Bundle",
        "node": state.node,
        "mode": state.mode,
        "compat": state.compat,
        "generation": state.generation,
        "counts": {"services": len(services), "servicePorts": len(state.fragments)},
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
        "counts": {"changed": len(change.changed), "removed": len(change.removed)},
    }
    contents = dict(backends.delta_files(change, state))
    for obj in (SERVICES, CONNTRACK):
        if contents.pop(obj[1], None) is not None:
            contents[f"{obj[1]}.diff"] = _line_changes(change.before.get(obj, ""), change.changed[obj])
    return fields, list(contents.items())


def sealed(parts: Parts) -> tuple[str, list[tuple[str, bytes]]]:
    """The digest of the manifest, and all files with it: what travels to hosts that have the program."""
    fields, contents = parts
    files = [(name, text.encode()) for name, text in contents]
    manifest = manifest_text({**fields, "files": {name: sha256(data) for name, data in files}})
    return manifest_digest(manifest), [(FILE, manifest.encode()), *files]


# Where many nodes follow the same change, most of them have the same lines before and after it.
@lru_cache(maxsize=8)
def _line_changes(before: str, after: str) -> str:
    """The lines that go, after a -, and those that come, after a +."""
    old, new = dict.fromkeys(before.splitlines()), dict.fromkeys(after.splitlines())
    gone = [f"-{line}\n" for line in old if line not in new]
    return "".join(gone + [f"+{line}\n" for line in new if line not in old])


def _write(directory: Path, fields: dict[str, Any], contents: Iterable[tuple[str, str]]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        staged.chmod(0o755)
        digests: dict[str, str] = {}
        for name, content in contents:
            data = content.encode()
            (staged / name).write_bytes(data)
            digests[name] = sha256(data)
        if PROGRAM in digests:
            (staged / PROGRAM).chmod(0o755)
        (staged / FILE).write_text(manifest_text({**fields, "files": digests}), encoding="utf-8")
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            directory.rename(old / "old")
            staged.rename(directory)
            shutil.rmtree(old)
        else:
            staged.rename(directory)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
