# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What an operator should look at, though nothing stops for it."""

from __future__ import annotations

from typing import NamedTuple


class Warned(NamedTuple):
    """A sentence, and the heading that it belongs under. In JSON a list, from which it can be made again."""

    heading: str
    text: str

    def __str__(self) -> str:
        return self.text
