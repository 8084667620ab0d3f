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
from ..bundle.program import MODES, PROGRAM, node_program
from ..bundle.release import release_files

INSTALLED = "/usr/local/sbin/akp-node"
STATE_DIR = "/var/lib/akp"
DEFAULT_MODE = "iptables"  # whose program asks a node that has none

# Each program leaves a copy of itself when it applies a state of its mode; what another mode recorded, that copy tells.
# Its digest lies beside it, so that no program has to be started to find the copy.
_FIND = """\
for f in {candidates}; do
  [ -f "$f" ] || continue
  {{ read -r d <"$f.sum"; }} 2>/dev/null || d=$(sha256sum <"$f") || continue
  case " {digests} " in *" ${{d%% *}} "*) exec sh "$f" {arguments} ;; esac
done
cat >/dev/null
echo '{{"ok": false, "need": "program"}}'
"""

# The archive is what `akp-node apply -` reads; here the program itself has to be taken out of it first.
UNPACK = """\
set -eu
umask 077
mkdir -p /run/akp
d=$(mktemp -d /run/akp/carry.XXXXXX)
trap 'rm -rf "$d"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
gzip -dc | awk -v d="$d" '
  left > 0 {{ print > f; if (!--left) close(f); next }}
  /^== [A-Za-z0-9_][A-Za-z0-9._-]* [0-9]+$/ {{ f = d "/" $2; left = $3 + 0; printf "" > f; if (!left) close(f); next }}
  /^==$/ {{ whole = 1; exit }}
  {{ exit }}
  END {{ exit !whole }}' || {{
"""
_CARRY = (
    UNPACK
    + """\
  echo '{{"ok": false, "code": 2, "asBefore": true, "error": "the bundle was cut short on its way"}}'
  exit 2
}}
{install}sh "$d/akp-node" {arguments}
"""
)

_INSTALL = """\
if ! cmp -s "$d/akp-node" {installed}; then
  mkdir -p {folder}
  cp "$d/akp-node" {installed}.new
  chown 0:0 {installed}.new
  chmod 0755 {installed}.new
  mv {installed}.new {installed}
  echo '{{"installed": true}}'
fi
"""


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
        candidates = shlex.quote(self.installed)
        if not self.only_installed:
            candidates += f' "$AKP_STATE"/akp-node.{self.mode or "*"}'
        digests = " ".join(program_digest(mode) for mode in ([self.mode] if self.mode else MODES))
        script = _FIND.format(candidates=candidates, digests=digests, arguments=shlex.join(arguments))
        return self._shell(before + script)

    def give(self, arguments: Sequence[str], data: bytes) -> Command:
        """An archive for the program that the node has."""
        if self.restricted:
            return Command(f"{self.restricted} {shlex.join([*arguments, '-'])}", data)
        return dataclasses.replace(self.ask([*arguments, "-"]), stdin=data)

    def carry(
        self, arguments: Sequence[str], bundle: Path | None = None, *, manifest: bytes = b"", install: bool = False
    ) -> Command:
        """The program travels with the command, and the bundle if there is one; of that, the manifest that was read."""
        files = (
            bundle_files(bundle, manifest) if bundle else [(PROGRAM, node_program(self.mode or DEFAULT_MODE).encode())]
        )
        # What unpacks it knows gzip only.
        data = archive(files, plain_below=0)
        if self.restricted:
            return Command(f"{self.restricted} {shlex.join([*arguments, '-'])}", data)
        installed = shlex.quote(self.installed)
        folder = shlex.quote(str(Path(self.installed).parent))
        script = _CARRY.format(
            install=_INSTALL.format(installed=installed, folder=folder) if install else "",
            arguments=shlex.join(arguments) + (' "$d"' if bundle else ""),
        )
        return self._shell(script, data)

    def uninstall(self, *, dry_run: bool) -> Command:
        """Removes the installed program."""
        remove = "" if dry_run else 'rm -f "$f"; '
        return self._shell(
            f"f={shlex.quote(self.installed)}; removed=false; "
            f'if [ -e "$f" ]; then {remove}removed=true; fi; echo "{{\\"ok\\": true, \\"removed\\": $removed}}"'
        )

    def _shell(self, script: str, stdin: bytes = b"\n") -> Command:
        keep = f"AKP_KEEP={self.keep}; export AKP_KEEP; " if self.keep else ""
        return Command(f"AKP_STATE={shlex.quote(self.state_dir)}; export AKP_STATE; {keep}{script}", stdin)


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
