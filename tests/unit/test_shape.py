"""How large a piece of the code may be: a file has one subject, a function is a paragraph, a record can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
MOST_LINES = 400
MOST_FIELDS = 19
MOST_PARAMETERS = 9
LONGEST_FUNCTION = 70


def too_large(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(PLUGINS)
    if (lines := text.count("\n")) > MOST_LINES:
        yield f"{name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
            if fields > MOST_FIELDS:
                yield f"{name}: {node.name}: {fields} fields"
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            parameters = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            if parameters > MOST_PARAMETERS:
                yield f"{name}: {node.name}: {parameters} parameters"
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION:
                yield f"{name}: {node.name}: {lines} lines"


def test_no_piece_of_the_code_is_too_large_to_be_read() -> None:
    files = sorted(PLUGINS.rglob("*.py"))
    assert len(files) > 100
    assert [each for file in files for each in too_large(file)] == []
