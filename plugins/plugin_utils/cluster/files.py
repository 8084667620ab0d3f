# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A Snapshot from YAML or JSON files, as `kubectl get -o yaml|json` prints them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .objects import Reader
from .snapshot import Snapshot

_SUFFIXES = (".json", ".yaml", ".yml")


class UnreadableFile(UserError):
    """A file that is not there or does not parse; the message names file and line."""


def load(path: Path, progress: Callable[[str], None] = lambda _name: None) -> Snapshot:
    """All objects of a file, or of the files of a directory, as a Snapshot."""
    reader = Reader()
    for file in cluster_files(path):
        progress(file.name)
        try:
            for document in documents(file):
                reader.add(document, str(file))
        except RecursionError as error:
            raise UnreadableFile(f"{file}: is nested too deeply") from error
    return reader.snapshot()


def cluster_files(path: Path) -> list[Path]:
    """The file itself, or the YAML and JSON files of a directory."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UnreadableFile(f"{path}: no such file or directory")
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise UnreadableFile(f"{path}: holds no file that ends in {', '.join(_SUFFIXES)}")
    return files


def documents(file: Path) -> Iterator[Any]:
    """The documents of a file; empty ones are passed over."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFile(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{file}: is not UTF-8 text (byte {error.start})") from error
    if file.suffix == ".json":
        yield _json(file, text)
        return
    # A cluster in JSON is read in less time than it takes to load the parser of YAML.
    from .yaml_files import yaml_documents

    yield from yaml_documents(file, text)


def _json(file: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"{file}:{error.lineno}:{error.colno}: is not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise UnreadableFile(f"{file}: is nested too deeply") from error
    except ValueError as error:
        raise UnreadableFile(f"{file}: holds a value that cannot be read: {error}") from error
