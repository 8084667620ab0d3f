# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters for variables that are lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError


def as_list(value: Any, variable: str) -> list[Any]:
    """A list as it is, and a text as the options of modules take it: words with commas between."""
    if isinstance(value, list | tuple):
        return list(value)
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) and value else []
    if value != "" and not (words and all(words)):
        meant = json.dumps({variable: [str(value)]})
        raise AnsibleFilterError(
            f"{variable}: {value!r} is neither a list nor words with commas between; write it as JSON, such as "
            f"-e '{meant}'"
        )
    return words


class FilterModule:
    """Of the collection, for its roles."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"as_list": as_list}
