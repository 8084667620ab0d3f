# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Variables that are lists, also where an operator typed them: -e key=value gives a text."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from .errors import UserError

# Of JSON, or of something that was to be JSON: it must not be split at its commas.
_MARKS = frozenset("[]{}\"'")


class NotAList(UserError):
    """A value that cannot be taken for a list."""


def as_list(value: Any, variable: str) -> list[Any]:
    """A list as it is, and a text as words with commas between."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",")] if value else []
        if all(words) and not _MARKS & set(value):
            return words
    meant = json.dumps({variable: _meant(str(value))})
    raise NotAList(
        f"{variable}: {value!r} is neither a list nor words with commas between; write it as JSON, such as "
        f"-e {shlex.quote(meant)}"
    )


def as_batches(value: Any, variable: str) -> list[Any]:
    """How many nodes at once, one batch after the other: numbers and percentages; one alone is a list of one."""
    alone = isinstance(value, int) and not isinstance(value, bool)
    batches = [value] if alone else as_list(value, variable)
    for each in batches:
        if isinstance(each, bool) or not re.fullmatch("[0-9]+%?", str(each)):
            raise NotAList(
                f"{variable}: {str(each)!r} is neither a number of nodes nor a percentage of them; write it such as "
                f"-e {variable}=1,10%,100%"
            )
    return batches


def _meant(text: str) -> list[str]:
    return re.findall(r"""[^\s,\[\]"']+""", text) if text.strip().startswith("[") else [text]
