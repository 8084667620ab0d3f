# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The shell that is sent to nodes: files of the folder `shell`, for shellcheck to read, and variables set before."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from importlib import resources


@cache
def script(name: str) -> str:
    """The text of a file, without its comments: it travels with every command."""
    text = resources.files(__package__).joinpath("shell").joinpath(f"{name}.sh").read_text(encoding="utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))


def assignments(values: Mapping[str, str]) -> str:
    """Shell that sets variables."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
