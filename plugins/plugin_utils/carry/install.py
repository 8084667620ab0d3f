# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The programs of a node and a few small text files on a host: one command, and no Python there.

Files are compared first and replaced in one step, owned by root. Settings are lines of a file that others have settings
in too: only the named ones change.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import shlex
from collections.abc import Mapping, Sequence

from ..bundle.archive import archive
from ..bundle.program import LEAVE, MODES, PARTS, PROGRAM, part_program
from ..errors import UserError
from .protocol import INSTALLED, Command, leave_path, program_files
from .scripts import assignments, script

ETC_DIR = "/etc/akp"
VERIFY = "/usr/local/sbin/akp-verify"
_PATH = re.compile(r"/[A-Za-z0-9._@/+-]+")
_MODE = re.compile(r"0?[0-7]{3}")
_KEY = re.compile(r"[a-z_]+")

_BROKEN = '{"ok": false, "error": "the files were cut short on their way"}'


class InvalidInstall(UserError):
    """Something that cannot be put on a host; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file that shall be there with this content, or, without content, shall not be there."""

    path: str
    content: str | None
    mode: str = "0644"


@dataclasses.dataclass(frozen=True, slots=True)
class Install:
    """What is to be on a host."""

    files: Sequence[File] = ()
    settings: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # None: without this one
    program: bool | None = None  # True: shall be there; False: shall not; None: whatever
    program_path: str = INSTALLED
    mode: str = "iptables"  # of the program
    parts: Mapping[str, bool] = dataclasses.field(
        default_factory=dict
    )  # pull, health, metrics, verify: shall be there, or not
    etc_dir: str = ETC_DIR
    then: str = ""  # shell, run if anything changed

    def command(self, *, dry_run: bool) -> Command:
        """The command that makes it so."""
        files: list[tuple[str, bytes]] = []
        steps: list[str] = []
        if self.program:
            if self.mode not in MODES:
                raise InvalidInstall(f"{self.mode!r} is not a mode; {', '.join(MODES)} are")
            files += program_files(self.mode)
            steps.append(f"put {LEAVE} {_path(leave_path(self.program_path))} 0755")
            steps.append(f"put {PROGRAM} {_path(self.program_path)} 0755")
        for name, wanted in self.parts.items():
            if name not in PARTS:
                raise InvalidInstall(f"{name!r} is not a program; {', '.join(PARTS)} are")
            place = _path(part_path(name, self.program_path))
            if wanted:
                files.append((f"akp-{name}", part_program(name).encode()))
            steps.append(f"put akp-{name} {place} 0755" if wanted else f"drop {place}")
        for number, each in enumerate(self.files):
            path = _path(each.path)
            if each.content is None:
                steps.append(f"drop {path}")
                continue
            if not _MODE.fullmatch(each.mode):
                raise InvalidInstall(f"{each.path}: {each.mode!r} is no mode; write e.g. '0644'")
            content = each.content if each.content.endswith("\n") or not each.content else f"{each.content}\n"
            files.append((f"f{number}", content.encode()))
            steps.append(f"put f{number} {path} {each.mode}")
        if self.settings:
            files.append(("settings", "".join(_setting(key, self.settings[key]) for key in self.settings).encode()))
            steps.append(f"settle settings {_path(f'{self.etc_dir}/node.conf')}")
        if self.program is False:
            steps += [f"drop {_path(self.program_path)}", f"drop {_path(leave_path(self.program_path))}"]
        _path(self.etc_dir)
        variables = {
            "broken": _BROKEN,
            "dry": "yes" if dry_run else "",
            "etc": self.etc_dir,
            "follow": self.then or ":",
        }
        written = "".join(f"{step}\n" for step in steps)
        text = assignments(variables) + script("unpack") + script("install") + written + script("installed")
        data = archive(files)
        # What takes it apart there reads gzip only.
        return Command(text, data if data.startswith(b"\x1f\x8b") else gzip.compress(data, mtime=0))


def part_path(name: str, program_path: str) -> str:
    """Where a part is: beside the program, or where the program looks for it wherever it is itself."""
    return VERIFY if name == "verify" else f"{program_path.rpartition('/')[0]}/akp-{name}"


def _path(path: str) -> str:
    if not _PATH.fullmatch(path) or "/../" in f"{path}/":
        raise InvalidInstall(f"{path!r} is not the absolute path of a file")
    return shlex.quote(path)


def _setting(key: str, value: str | None) -> str:
    if not _KEY.fullmatch(key):
        raise InvalidInstall(f"{key!r} is no name of a setting")
    if value is None or value == "":
        return f"{key}\n"
    if "\n" in value or value != value.strip():
        raise InvalidInstall(f"setting {key}: {value!r} does not fit on a line")
    return f"{key} {value}\n"
