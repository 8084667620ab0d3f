# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The words that pass between the control host and a node: shell commands, what they get on stdin, what they answer.

A node that has our program, installed or beside the bundle that it applied last, is asked in a few hundred bytes. One
that has not says so, and is asked again with the program on stdin. Where an administrator allows exactly one program,
the commands are that program and its arguments and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..bundle.archive import archive
from ..bundle.manifest import FILE
from ..bundle.program import PROGRAM, node_program
from ..bundle.release import release_files

INSTALLED = "/usr/local/sbin/akp-node"
STATE_DIR = "/var/lib/akp"

# What the node left for this question at the last apply, if it is still true; then the program itself.
_QUICK = """\
set -- {key} {digest}
[ ! -r "$AKP_STATE/ask" ] || . "$AKP_STATE/ask"
"""

_FIND = """\
d=
[ ! -r "$AKP_STATE/applied" ] || while IFS='=' read -r k v; do [ "$k" != digest ] || d=$v; done <"$AKP_STATE/applied"
for f in {candidates}; do
  if [ -r "$f" ] && [ "$(sha256sum <"$f")" = "{digest}  -" ]; then exec sh "$f" {arguments}; fi
done
cat >/dev/null
echo '{{"ok": false, "need": "program"}}'
"""

# The archive is what `akp-node apply -` reads; here the program itself has to be taken out of it first.
UNPACK = """\
set -eu
umask 077
d=$(mktemp -d "${{TMPDIR:-/tmp}}/akp.XXXXXX")
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


class NoAnswer(Exception):
    """The node did not say what a node says; the message holds what it said instead."""


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
    only_installed: bool = False  # a copy beside the last bundle does not count
    keep: int = 0  # bundles to keep for a rollback; 0: as the node has it

    def ask(self, arguments: Sequence[str], known_key: str = "", before: str = "") -> Command:
        """A question to the program that the node has; a quick one if its key is known from last time.

        Shell that comes before it may answer in its place.
        """
        if self.restricted:
            return Command(f"{self.restricted} {shlex.join(arguments)}")
        candidates = shlex.quote(self.installed)
        if not self.only_installed:
            candidates += ' "$AKP_STATE/bundles/$d/akp-node"'
        script = _FIND.format(candidates=candidates, digest=program_digest(), arguments=shlex.join(arguments))
        if known_key and not self.only_installed:
            script = _QUICK.format(key=shlex.quote(known_key), digest=program_digest()) + script
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
        data = archive(bundle_files(bundle, manifest) if bundle else [(PROGRAM, node_program().encode())])
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
def program_digest() -> str:
    """Names the program of this collection."""
    return hashlib.sha256(node_program().encode()).hexdigest()


def bundle_files(directory: Path, manifest: bytes = b"") -> list[tuple[str, bytes]]:
    """The files of a bundle: those that its manifest lists, the manifest, and its release if it has one.

    A manifest that is given is the one that travels: the node refuses files that are not those of it.
    """
    manifest = manifest or (directory / FILE).read_bytes()
    names = [*json.loads(manifest)["files"], *(file.name for file in release_files(directory))]
    return [(FILE, manifest), *((name, (directory / name).read_bytes()) for name in names)]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What the program printed: its result, and the service ports that change."""

    result: dict[str, Any]
    before: tuple[str, ...]  # lines of services.jsonl that go
    after: tuple[str, ...]  # lines of services.jsonl that come
    installed: bool
    addresses: tuple[dict[str, Any], ...] = ()  # of the node's interfaces, if they were printed by ip

    @property
    def needs_program(self) -> bool:
        """Whether the node has to be given the program first."""
        return self.result.get("need") == "program"

    @property
    def as_before(self) -> bool:
        """Whether a failure left the kernel as it was. An older program does not say so: then it is not known."""
        return self.result.get("asBefore") is True


def parse_answer(code: int, stdout: str, stderr: str) -> Answer:
    """The answer in a command's output, or NoAnswer."""
    lines = stdout.replace("\r\n", "\n").rstrip("\n").split("\n")
    try:
        result = json.loads(lines[-1])
        if not isinstance(result, dict) or "ok" not in result:
            raise ValueError("no result")
    except ValueError as error:
        said = " / ".join(line for line in (*stderr.splitlines(), *lines) if line.strip())[-1500:]
        raise NoAnswer(f"the node program gave no answer (exit {code}): {said or 'no output at all'}") from error
    return Answer(
        result=result,
        before=tuple(line[1:] for line in lines[:-1] if line.startswith("-{")),
        after=tuple(line[1:] for line in lines[:-1] if line.startswith("+{")),
        installed='{"installed": true}' in lines[:-1],
        addresses=tuple(_addresses(lines[:-1])),
    )


def settled(status: Mapping[str, Any]) -> bool:
    """Whether a node has the generation that it names, and keeps it: what is not confirmed goes by itself."""
    return status.get("state") == "applied" and not status.get("drift") and not status.get("unconfirmed")


def _addresses(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Of `ip -o addr show`, as `akp-node facts` gives them."""
    for line in lines:
        number, _colon, rest = line.partition(": ")
        words = rest.split()
        if number.isdigit() and len(words) > 2 and words[1] in ("inet", "inet6"):
            address, _slash, prefix = words[2].partition("/")
            if not prefix or (prefix.isdecimal() and len(prefix) <= 3):
                yield {"interface": words[0], "address": address, "prefix": int(prefix or 0)}
