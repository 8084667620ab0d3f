# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The manifest: one key per line, so that a shell can read it. Its SHA-256 is the digest of a bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

API_VERSION = "akp/v2"
FILE = "manifest.json"
SERVICES_FILE = "services.jsonl"


def sha256(content: str | bytes) -> str:
    """Hex digest of a file's content."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def manifest_text(fields: Mapping[str, Any], files: Iterable[tuple[str, bytes]]) -> str:
    """The text of a manifest: its fields, and digest and size of each file in the order in which they are loaded."""
    listed = {name: f"{sha256(data)} {len(data)}" for name, data in files}
    return json.dumps({"apiVersion": API_VERSION, **fields, "files": listed}, indent=2) + "\n"


def manifest_digest(text: str) -> str:
    """The digest of the bundle that a manifest is of."""
    return sha256(text)


def bundle_digest(directory: Path) -> str:
    """The digest of a bundle that lies in a directory; empty if there is none."""
    try:
        return sha256((directory / FILE).read_bytes())
    except OSError:
        return ""


def file_digests(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Name -> digest of the files that a manifest lists."""
    return {name: str(entry).partition(" ")[0] for name, entry in manifest["files"].items()}


def described(directory: Path) -> dict[str, Any]:
    """What the manifest of a bundle directory says, and its digest; OSError or ValueError if there is none."""
    text = (directory / FILE).read_text(encoding="utf-8")
    return {**json.loads(text), "digest": manifest_digest(text)}
