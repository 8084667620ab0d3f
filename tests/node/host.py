"""A host for the node program: a network namespace of its own, a state directory, a shell and a flavour of iptables."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.program import PROGRAMS, VERIFY

_serial = itertools.count(1)
_APPLETS = (
    *("awk", "cat", "cmp", "cp", "cut", "date", "grep", "ls", "mkdir", "mv", "printf", "readlink", "rm"),
    *("rmdir", "sed", "sha256sum", "sleep", "sort", "tail", "touch", "tr", "uname", "wc"),
)


@dataclass
class Result:
    """What a verb answered."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return answer


def with_path(env: dict[str, str]) -> dict[str, str]:
    """The same for programs that take tools from fixed directories first: a test's come before them."""
    return {"AKP_PATH": env["PATH"], **env}


@dataclass
class Host:
    """A namespace in which `akp-node` runs. `shell` is dash or busybox, `flavour` nft or legacy."""

    directory: Path
    flavour: str = "nft"
    shell: str = "dash"
    mode: str = "iptables"  # of the bundles that a test makes for it
    name: str = field(default_factory=lambda: f"akpnode-{os.getpid()}-{next(_serial)}")

    def __post_init__(self) -> None:
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        self.sh("ip link set lo up")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=True)

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def proxies(self) -> Path:
        """Where the proxies of userspace mode have their files; the name of a socket must be short."""
        return Path("/run") / f"{self.name}-proxies"

    @property
    def environment(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("AKP_")}
        env |= {"AKP_STATE": str(self.state), "AKP_ETC": str(self.directory / "etc")}
        env |= {"AKP_RUN": str(self.directory / "run"), "AKP_IPTABLES": self.flavour, "LANG": "C"}
        env |= {"AKP_VERIFY": str(VERIFY), "AKP_PROXY": str(self.proxies)}
        env |= {"XTABLES_LOCKFILE": str(self.directory / "xtables.lock"), "TMPDIR": str(self.directory)}
        if self.shell == "busybox":
            env["PATH"] = f"{self._applets()}:{env['PATH']}"
        return env

    def _applets(self) -> Path:
        """A directory in which the common tools are busybox's."""
        directory = self.directory / "busybox"
        if not directory.exists():
            directory.mkdir()
            for applet in _APPLETS:
                (directory / applet).symlink_to(str(shutil.which("busybox")))
        return directory

    def sh(self, script: str, *, check: bool = True, **env: str) -> str:
        """Run a line of shell in the namespace; `$ipt` and `$ip6t` are iptables of the host's flavour."""
        variables = {"ipt": f"iptables-{self.flavour}", "ip6t": f"ip6tables-{self.flavour}"}
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, "sh", "-euc", script],
            env=with_path(self.environment | variables | env),
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def akp(
        self, *arguments: str | Path, program: Path | None = None, prefix: tuple[str, ...] = (), **env: str
    ) -> Result:
        """Run a node program; unless told otherwise, that of the bundle or else of the host's mode."""
        program = program or next(filter(None, map(program_of, arguments)), PROGRAMS[self.mode])
        shell = ["busybox", "ash"] if self.shell == "busybox" else ["dash"]
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, *prefix, *shell, program, *arguments],
            env=with_path({key: value for key, value in (self.environment | env).items() if value}),
            capture_output=True,
            text=True,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def apply(self, bundle: Path, *options: str) -> dict[str, Any]:
        """Apply a bundle that must be accepted."""
        result = self.akp("apply", *options, bundle)
        assert result.code == 0, result.stdout + result.stderr
        return result.json

    def rules(self) -> str:
        """All rules of both families, without counters and dates, chains in a fixed order."""
        text = self.sh("for save in $ipt-save $ip6t-save; do for t in mangle filter nat; do $save -t $t; done; done")
        lines = [re.sub(r" \[\d+:\d+\]$", "", line) for line in text.splitlines() if not line.startswith("#")]
        sections = "\n".join(lines).split("COMMIT")
        return "COMMIT".join(_sorted_chains(section) for section in sections)

    def kernel(self) -> str:
        """Everything a cleanup must put back: rule sets, counters, sysctls."""
        text = self.sh(
            "nft list ruleset 2>/dev/null; nfacct list;"
            "for f in /proc/net/ip_tables_names /proc/net/ip6_tables_names; do"
            "  case $f in *ip6*) save=ip6tables-legacy-save;; *) save=iptables-legacy-save;; esac;"
            "  [ ! -e $f ] || for t in $(sort $f); do $save -t $t; done;"
            "done;"
            "sysctl net.ipv4.conf.all.route_localnet net.ipv4.ip_forward; sysctl -a -r 'nf_conntrack_(tcp|udp|max)'"
        )
        text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        return _without_empty_tables(_sorted_nft(text))

    def chains(self, pattern: str = "") -> set[str]:
        """Names of the user chains of both families that match."""
        return {name for name in re.findall(r"^:(\S+) -", self.rules(), re.M) if re.search(pattern, name)}


def program_of(argument: str | Path) -> Path | None:
    """The program of a bundle: its own, or that of its mode."""
    manifest = Path(argument) / "manifest.json"
    if not isinstance(argument, Path) or not manifest.is_file():
        return None
    if (own := argument / "akp-node").is_file():
        return own
    found = re.search(r'"mode": "(\w+)"', manifest.read_text())
    return PROGRAMS.get(found[1]) if found else None


def _sorted_chains(section: str) -> str:
    """nft lists chains by name, legacy by age: neither is what a comparison is about."""
    lines = section.split("\n")
    head = sorted(line for line in lines if line.startswith(":"))
    rest = sorted((line for line in lines if line.startswith("-A")), key=lambda line: line.split()[1])
    return "\n".join([*(line for line in lines if line.startswith("*")), *head, *rest, ""])


def _sorted_nft(text: str) -> str:
    """nft lists chains by age, which no rule depends on."""

    def table(found: re.Match[str]) -> str:
        blocks = re.findall(r"\tchain .*?\n\t}\n", found[2], re.S)
        return found[1] + "\n".join(sorted(blocks)) + "}\n"

    return re.sub(r"^(table .*?{\n)(.*?)^}\n", table, text, flags=re.M | re.S)


def _without_empty_tables(text: str) -> str:
    """A legacy table cannot be removed from a namespace once it is there; empty, it is as good as absent."""
    return re.sub(r"^\*\w+\n(?::\w+ ACCEPT \[\d+:\d+\]\n)+COMMIT\n?", "", text, flags=re.M)


def failing_restores(host: Host, directory: Path, *, back: bool = False) -> str:
    """A PATH where the first restore is carried out and yet fails; those that would take it back work, or fail too."""
    directory.mkdir()
    for tool in (f"{ip}tables-{host.flavour}-restore" for ip in ("ip", "ip6")):
        real = shutil.which(tool)
        later = f'exec {real} "$@"' if back else "exit 1"
        tried = directory / "tried"
        (directory / tool).write_text(f'#!/bin/sh\n[ ! -e {tried} ] || {later}\ntouch {tried}\n{real} "$@"\nexit 1\n')
        (directory / tool).chmod(0o755)
    return f"{directory}:{host.environment['PATH']}"
