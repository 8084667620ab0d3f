# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The manifest: one key per line, so that a shell can read it, and a digest over itself as its last key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

API_VERSION = "akp/v1"
FILE = "manifest.json"
SERVICES_FILE = "services.jsonl"


def sha256(content: str | bytes) -> str:
    """Hex digest of a file's content."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def manifest_text(fields: Mapping[str, Any]) -> str:
    """The text of a manifest. Its digest is that of the text without the digest's own line."""
    body = json.dumps({"apiVersion": API_VERSION, **fields, "digest": ""}, indent=2) + "\n"
    empty = '  "digest": ""\n'
    if body.count(empty) != 1:
        raise ValueError("a manifest has exactly one digest")
    return body.replace(empty, f'  "digest": "{sha256(body.replace(empty, ""))}"\n')


def manifest_digest(text: str) -> str:
    """The digest that a manifest carries."""
    return str(json.loads(text)["digest"])
