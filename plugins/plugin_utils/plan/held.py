# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The Services of what hosts hold, to tell what a change means: lines of services.jsonl, kept here by host.

What is not kept here, the host itself prints (`akp-node show`): the lines of its whole bundle, and then those that went
and came with each delta.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..files import write_atomic
from ..tasks.directory import file_name


class Held:
    """A folder with a file per host: the generation, and then its lines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lines(self, host: str, generation: str) -> list[str] | None:
        """The lines of what a host holds, if that is the generation; None if they are not known here."""
        try:
            first, *lines = self._file(host).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return None
        return lines if first == generation else None

    def keep(self, host: str, generation: str, lines: Iterable[str]) -> None:
        """Note what a host holds now."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._file(host), "".join(f"{line}\n" for line in (generation, *lines)))

    def _file(self, host: str) -> Path:
        return self._folder / f"{file_name(host)}.jsonl"


def replayed(lines: Iterable[str]) -> list[str]:
    """What `akp-node show` prints, with what deltas took and brought carried out."""
    found: dict[str, None] = {}
    for line in lines:
        if line.startswith("{"):
            found[line] = None
        elif line.startswith("-{"):
            found.pop(line[1:], None)
        elif line.startswith("+{"):
            found[line[1:]] = None
    return list(found)
