# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Texts that others wrote, as people may see them: nothing in them can steer a terminal or pass for a line of ours."""

from __future__ import annotations

import re

# Control characters, the separators that end a line, what changes the direction of writing, halves of characters.
_HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff\\ufff0-\\uffff"
    "\\U000e0000-\\U000e0fff]"
)


def visible(text: object) -> str:
    """One line, with an escape in place of each character that has no shape of its own."""
    return _HIDDEN.sub(_escape, str(text))


def visible_lines(text: object) -> str:
    """The same, but lines and tabs stay."""
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in str(text).split("\n"))


def shortened(text: str, most: int) -> str:
    """The text, or as much of its beginning as a message has room for."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
