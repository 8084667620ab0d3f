"""The commands of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_BLOCK = re.compile(
    r"^(?:<!-- illustration: (?P<why>[^\n]+) -->\n)?```sh\n(?P<text>.*?)^```\n(?:\n```\n(?P<shown>.*?)^```)?",
    re.M | re.S,
)
_HEREDOC = re.compile(r"<<'?(\w+)'?")


@dataclass(frozen=True)
class Block:
    """Commands that stand together, and the lines that the page shows of what they print."""

    commands: tuple[str, ...]
    shown: tuple[str, ...]
    illustration: str
    """Why no test runs it, if none does."""


def blocks(page: Path) -> list[Block]:
    return [
        Block(tuple(commands(each["text"])), tuple((each["shown"] or "").splitlines()), each["why"] or "")
        for each in _BLOCK.finditer(page.read_text())
    ]


def commands(text: str) -> list[str]:
    """Each command as it is typed; one goes on after a backslash, in quotes and in a here document."""
    found: list[str] = []
    waiting, end = "", ""
    for line in text.splitlines():
        waiting += f"{line}\n"
        if end:
            end = "" if line == end else end
        elif here := _HEREDOC.search(line):
            end = here[1]
        plain = re.sub(r"(^|\s)#.*", "", waiting)
        if not end and not line.endswith("\\") and plain.count("'") % 2 == 0:
            if plain.strip():
                found.append(waiting.rstrip("\n"))
            waiting = ""
    return found
