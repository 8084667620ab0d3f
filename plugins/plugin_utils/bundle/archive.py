# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Files on one stream, as text that a shell and awk can take apart anywhere. The same files give the same bytes.

For each file a line `== NAME LINES` and then that many lines; `==` alone is the end. Only what is large is compressed:
to start another program costs a node more than a few packets do.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable

FAST = 1
SMALL = 9
PLAIN_BELOW = 32 * 1024  # bytes
_GZIP = b"\x1f\x8b"


class UnreadableArchive(Exception):
    """Bytes that are no archive, or not all of one."""


def archive(files: Iterable[tuple[str, bytes]], level: int = FAST, plain_below: int = PLAIN_BELOW) -> bytes:
    """The stream that `akp-node apply -` reads; text of so many bytes and more is compressed."""
    parts: list[bytes] = []
    for name, content in files:
        if content and not content.endswith(b"\n"):
            raise ValueError(f"{name}: its last line has no end")
        parts += [f"== {name} {content.count(10)}\n".encode(), content]
    text = b"".join([*parts, b"==\n"])
    return text if len(text) < plain_below else gzip.compress(text, compresslevel=level, mtime=0)


def lines_of(data: bytes, name: str) -> list[str]:
    """The lines of one file of a stream, none if it has no such file; UnreadableArchive if it is no stream."""
    try:
        text = gzip.decompress(data) if data.startswith(_GZIP) else data
        lines = text.decode().split("\n")
        at = 0
        while lines[at] != "==":
            _mark, found, count = lines[at].split(" ")
            first, at = at + 1, at + 1 + int(count)
            if found == name:
                return lines[first:at]
    except (EOFError, IndexError, OSError, ValueError, zlib.error) as error:
        raise UnreadableArchive(str(error)) from error
    return []
