# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The words that pass between the control host and a node: shell commands, and what they get on stdin.

A node that has our program, installed or kept when it applied its last bundle, is asked in a few hundred bytes. One
that has not says so, and is asked again with the program on stdin. Where an administrator allows exactly one program,
the commands are that program and its arguments and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ..bundle.archive import archive
from ..bundle.manifest import FILE
from ..bundle.program import LEAVE, MODES, node_program, programs
from ..bundle.release import release_files
from .scripts import assignments, script

INSTALLED = "/usr/local/sbin/akp-node"
STATE_DIR = "/var/lib/akp"
DEFAULT_MODE = "iptables"  # whose program asks a node that has none
_BROKEN = '{"ok": false, "code": 2, "asBefore": true, "error": "the bundle was cut short on its way"}'


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A shell command and what it gets on stdin."""

    text: str
    stdin: bytes = b"\n"  # never empty: with nothing to send, ssh would be asked for a terminal


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How the program is run on a node."""

    restricted: str = ""  # the only command that is allowed there, e.g. "sudo -n /usr/local/sbin/akp-node"
    installed: str = INSTALLED
    state_dir: str = STATE_DIR
    only_installed: bool = False  # the copy that a program leaves does not count
    keep: int = 0  # states to keep for a rollback; 0: as the node has it
    mode: str = ""  # of the program that is run; empty: any will do

    def ask(self, arguments: Sequence[str], before: str = "") -> Command:
        """A question to the program that the node has. Shell that comes before it may answer in its place."""
        if self.restricted:
            return Command(f"{self.restricted} {shlex.join(arguments)}")
        digests = [program_digest(mode) for mode in ([self.mode] if self.mode else MODES)]
        variables = {
            "installed": self.installed,
            "kept": "none" if self.only_installed else self.mode or "*",
            "digests": " ".join(digests),
        }
        return self._shell(before, assignments(variables), _positional(arguments), script("ask"))

    def give(self, arguments: Sequence[str], data: bytes) -> Command:
        """An archive for the program that the node has."""
        if self.restricted:
            return Command(f"{self.restricted} {shlex.join([*arguments, '-'])}", data)
        return dataclasses.replace(self.ask([*arguments, "-"]), stdin=data)

    def carry(
        self, arguments: Sequence[str], bundle: Path | None = None, *, manifest: bytes = b"", install: bool = False
    ) -> Command:
        """The program travels with the command, and the bundle if there is one; of that, the manifest that was read."""
        files = bundle_files(bundle, manifest) if bundle else program_files(self.mode or DEFAULT_MODE)
        # What unpacks it knows gzip only.
        data = archive(files, plain_below=0)
        if self.restricted:
            return Command(f"{self.restricted} {shlex.join([*arguments, '-'])}", data)
        variables = {
            "broken": _BROKEN,
            "put": self.installed if install else "",
            "with_bundle": "yes" if bundle else "",
        }
        text = (assignments(variables), _positional(arguments), script("unpack"), script("carry"))
        return self._shell(*text, stdin=data)

    def uninstall(self, *, dry_run: bool) -> Command:
        """Removes the installed program."""
        variables = {"installed": self.installed, "dry": "yes" if dry_run else ""}
        return self._shell(assignments(variables), script("uninstall"))

    def _shell(self, *text: str, stdin: bytes = b"\n") -> Command:
        keep = f"AKP_KEEP={self.keep}; export AKP_KEEP; " if self.keep else ""
        return Command(f"AKP_STATE={shlex.quote(self.state_dir)}; export AKP_STATE; {keep}{''.join(text)}", stdin)


def _positional(arguments: Sequence[str]) -> str:
    """Shell that makes them "$@"."""
    return f"set -- {shlex.join(arguments)}\n"


def leave_path(installed: str) -> str:
    """Where the part of the program lies that few runs need: beside it."""
    return f"{installed.rpartition('/')[0]}/{LEAVE}"


def program_files(mode: str) -> list[tuple[str, bytes]]:
    """The program of a mode, and the part of it that few runs need."""
    return [(name, text.encode()) for name, text in programs(mode)]


@cache
def program_digest(mode: str) -> str:
    """Names the program of this collection for a mode."""
    return hashlib.sha256(node_program(mode).encode()).hexdigest()


def bundle_files(directory: Path, manifest: bytes = b"") -> list[tuple[str, bytes]]:
    """The files of a bundle: its release if it has one, the manifest, and those that it lists.

    A node checks the release and the manifest before it takes the rest.

    A manifest that is given is the one that travels: the node refuses files that are not those of it.
    """
    manifest = manifest or (directory / FILE).read_bytes()
    names = [file.name for file in release_files(directory)]
    listed = list(json.loads(manifest)["files"])
    first = [(name, (directory / name).read_bytes()) for name in names]
    return [*first, (FILE, manifest), *((name, (directory / name).read_bytes()) for name in listed)]
