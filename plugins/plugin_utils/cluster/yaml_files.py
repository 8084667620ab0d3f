# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documents of YAML, as people and kubectl write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .files import UnreadableFile

# Values of one document, each counted as often as it is used. A cluster of 100,000 endpoints has two million.
MOST_VALUES = 50_000_000
# Members of a mapping that merge keys bring.
MOST_MERGED = 1_000
# The C loader is ten times as fast, but not in every build of PyYAML.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _YamlLoader(_Loader):  # type: ignore[misc]
    """Reads a date as the text it is: the API has no other dates, and an impossible one does no harm here."""

    def flatten_mapping(self, node: Any) -> None:
        """Carry out merge keys, which can double what they name with every level, within a limit."""
        named = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        super().flatten_mapping(node)
        merges = sum(len(each.value) if isinstance(each, yaml.SequenceNode) else 1 for each in named)
        if named and max(merges, len(node.value)) > MOST_MERGED:
            problem = f"merge keys stand for more than {MOST_MERGED:,} members of a mapping"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_YamlLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def yaml_documents(file: Path | str, text: str) -> Iterator[Any]:
    """The documents of a text that was read from a file, or from something that is called so; without empty ones."""
    # An alias costs a few bytes and stands for all of its anchor: ten lines can mean more than a machine holds.
    aliases = "&" in text and "*" in text
    try:
        for document in yaml.load_all(text, Loader=_YamlLoader):
            if aliases and _values(document, {}) > MOST_VALUES:
                raise UnreadableFile(f"{file}: its aliases stand for more than {MOST_VALUES:,} values")
            if document is not None:
                yield document
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        if isinstance(error, yaml.reader.ReaderError):
            where = f"{file}:{_unprintable_line(text)}"
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UnreadableFile(f"{where}: is not valid YAML: {reason}") from error
    except RecursionError as error:
        raise UnreadableFile(f"{file}: is nested too deeply") from error
    except ValueError as error:
        raise UnreadableFile(f"{file}: holds a value that cannot be read: {error}") from error


def _values(value: Any, known: dict[int, int]) -> int:
    """How many values there are, those of an alias each time; RecursionError for what holds itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = 0  # for as long as it is being counted
        members = value if isinstance(value, list) else (*value, *value.values())
        known[id(value)] = 1 + sum(_values(each, known) for each in members)
    if not known[id(value)]:
        raise RecursionError
    return known[id(value)]


def _unprintable_line(text: str) -> int:
    """The line of the first character that YAML does not allow; the parser itself counts only bytes."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    return text.count("\n", 0, found.start() if found else 0) + 1
