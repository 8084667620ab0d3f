"""Tools that do something else than they should, at a chosen call."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.node.host import Host


def shim(host: Host, directory: Path, tool: str, pattern: str, action: str = "exit 137", calls: str = "-eq 1") -> Path:
    """A directory whose `tool` does `action` instead at those calls, of the ones whose words match, that `test` picks.

    In `action`, `$real` is the tool itself. What was called is in the file `calls`, one call a line.
    """
    directory.mkdir(exist_ok=True)
    script = directory / tool
    script.write_text(
        "#!/bin/sh\n"
        f"real={shutil.which(tool, path=host.environment['PATH'])}\n"
        f'case "$*" in {pattern})\n'
        f'    printf "%s\\n" "$*" | tr "\\n" " " >>{directory}/calls.{tool}; echo >>{directory}/calls.{tool}\n'
        f"    if [ $(grep -c '' {directory}/calls.{tool}) {calls} ]; then {action}; fi ;;\n"
        'esac\nexec "$real" "$@"\n'
    )
    script.chmod(0o755)
    return directory


def path_with(host: Host, *directories: Path) -> str:
    """The host's PATH with these before it."""
    return ":".join([*map(str, directories), host.environment["PATH"]])


def called(directory: Path, tool: str) -> list[str]:
    """The words of the calls that matched."""
    calls = directory / f"calls.{tool}"
    return [line.strip() for line in calls.read_text().splitlines()] if calls.exists() else []
