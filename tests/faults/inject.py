"""Faults from outside: every tool that the node program calls is a step, and at one of them something happens.

The program is not changed. It finds, first on its PATH, a directory in which each tool is a script that counts itself
and then runs the real one. At the chosen step the script kills the whole process group, before or after the real tool,
or the tool fails. So a run can be cut at every point where anything outside the shell happens.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

# Everything the program calls; a host has some of them.
TOOLS = (
    *("awk", "cat", "chmod", "cmp", "cp", "cut", "date", "flock", "grep", "head", "id", "logger", "mkdir", "mktemp"),
    *("mv", "readlink", "rm", "rmdir", "sed", "sha256sum", "sleep", "sort", "tail", "tr", "uname", "wc", "xargs"),
    *("conntrack", "ip", "ipset", "ipvsadm", "modprobe", "nfacct", "nft", "unshare"),
    *(f"{ip}tables{flavour}{verb}" for ip in ("ip", "ip6") for flavour in ("", "-nft", "-legacy")
      for verb in ("", "-save", "-restore")),
)  # fmt: skip
# Those that change something: kernel, state directory, or the files the next step reads.
WRITERS = ("cp", "mv", "rm", "mkdir", "rmdir", "conntrack", "ip", "ipset", "ipvsadm", "nfacct", "nft")

_SCRIPT = """\
#!/bin/sh
n=1
[ ! -s "$AKP_STEPS/last" ] || read -r n <"$AKP_STEPS/last" || n=1
set -C
while ! command : >"$AKP_STEPS/step.$n"; do n=$((n + 1)); done 2>/dev/null
set +C
echo "{name} $*" >"$AKP_STEPS/step.$n"
echo "$n" >"$AKP_STEPS/last"
if [ "$n" = "$AKP_FAULT_STEP" ]; then
    echo "{name} $*" >"$AKP_STEPS/fired"
    case $AKP_FAULT in
        kill-before) kill -s KILL -- "-$AKP_FAULT_GROUP" ;;
        kill-after) {real} "$@"; kill -s KILL -- "-$AKP_FAULT_GROUP" ;;
        session)
            process=$PPID
            while [ "$process" -gt 1 ]; do
                read -r _ program _ parent _ <"/proc/$process/stat"
                case $program in "(sshd"*) kill -s KILL "$process"; break ;; esac
                process=$parent
            done
            ;;
        hangup) kill -s HUP -- "-$AKP_FAULT_GROUP" ;;
        failed) echo "{name}: Cannot allocate memory" >&2; exit 1 ;;
        killed) exit 137 ;;
        killed-after) {real} "$@" || :; exit 137 ;;
    esac
fi
exec {real} "$@"
"""


@dataclass(frozen=True)
class Fault:
    """What happens at a step."""

    kind: str  # kill-before, kill-after, hangup: the program; session: its sshd; failed, killed, killed-after: the tool
    step: int


class Steps:
    """The tools as steps, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = self._log = directory
        self._runs = itertools.count(1)
        self.tools = directory / "bin"
        self.tools.mkdir(parents=True)
        for name in TOOLS:
            real = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
            if real:
                script = self.tools / name
                script.write_text(_SCRIPT.replace("{name}", name).replace("{real}", real))
                script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def environment(self, fault: Fault | None) -> dict[str, str]:
        """For a run with this fault; the count begins anew, elsewhere, as an undo of an earlier run may still count."""
        self._log = self.directory / f"log-{next(self._runs)}"
        self._log.mkdir()
        env = {"PATH": f"{self.tools}:{os.environ['PATH']}", "AKP_STEPS": str(self._log), "AKP_FAULT_STEP": "0"}
        if fault:
            env |= {"AKP_FAULT": fault.kind, "AKP_FAULT_STEP": str(fault.step)}
        return env

    @property
    def fired(self) -> str:
        """The call at which it happened; empty if the run ended before."""
        file = self._log / "fired"
        return file.read_text().strip() if file.exists() else ""

    def taken(self) -> list[str]:
        """The calls of the run, in their order."""
        files = sorted(self._log.glob("step.*"), key=lambda file: int(file.suffix[1:]))
        return [file.read_text().strip() for file in files]


def changes_something(call: str) -> bool:
    """Whether a call is one after which something outside the program is different."""
    tool, _blank, arguments = call.partition(" ")
    if tool.endswith("-restore"):
        return True
    if tool in ("nft", "ipset", "ipvsadm", "ip", "nfacct", "conntrack"):
        return arguments.startswith(("-f", "restore", "-R", "--set", "-batch", "-force", "link", "add", "delete", "-D"))
    return tool in WRITERS
