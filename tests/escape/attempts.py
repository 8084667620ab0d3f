# ruff: noqa: E501 -- an attempt stands on one line.
"""Ways out that somebody with the account's key would try. Each says what would have happened."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentless_kube_proxy.bundle.archive import archive
from agentless_kube_proxy.bundle.manifest import manifest_text

from .account import Account

PROOF = "/tmp/escaped"
Tried = tuple[int, bytes]


@dataclass(frozen=True)
class Attempt:
    """One way out."""

    group: str
    name: str
    run: Callable[[Account], Tried]
    heavy: bool = False  # it takes the node's time, and memory


ATTEMPTS: list[Attempt] = []


def _command(group: str, name: str, text: str, stdin: bytes = b"") -> None:
    def run(account: Account) -> Tried:
        done = account.says(text, stdin)
        return done.returncode, done.stdout + done.stderr

    ATTEMPTS.append(Attempt(group, name, run))


def _client(
    group: str, name: str, *command: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> None:
    def run(account: Account) -> Tried:
        done = account.ssh(*command, options=options, env=env)
        return done.returncode, done.stdout + done.stderr

    ATTEMPTS.append(Attempt(group, name, run))


# ---- words
for name, text in {
    "no command: a login shell": "",
    "another program": "id",
    "a shell": "sh -c id",
    "the program alone": "akp-node",
    "a second command after `;`": f"akp-node status; touch {PROOF}",
    "a second command after `&&`": f"akp-node status && touch {PROOF}",
    "a second command after a pipe": f"akp-node status | tee {PROOF}",
    "a second command in the background": f"akp-node status & touch {PROOF}",
    "command substitution": f"akp-node status $(touch {PROOF})",
    "command substitution with backquotes": f"akp-node status `touch {PROOF}`",
    "a substitution without blanks": "akp-node status ${IFS}id",
    "redirection of the output": f"akp-node status >{PROOF}",
    "redirection of the input": "akp-node apply - </etc/shadow",
    "a process substitution": f"akp-node apply <(touch {PROOF})",
    "a second line": f"akp-node status\ntouch {PROOF}",
    "a carriage return": f"akp-node status\rtouch {PROOF}",
    "a tab": "akp-node\tstatus",
    "a quoted name": "'akp-node' status",
    "a quote left open": "akp-node status 'x",
    "a wild card": "akp-node apply *",
    "a home directory": "akp-node apply ~root",
    "an assignment before the command": "AKP_STATE=/etc akp-node status",
    "the program by its path": "/usr/local/sbin/akp-node status",
    "another program of that name": "./akp-node status",
    "a prefix of another name": "akp-nodex status",
    "a name that is longer": "akp-node-x status",
    "a letter beyond ASCII": "akp-node status é",
    "a null byte, escaped": "akp-node status %00id",
    "ten thousand words": "akp-node " + "status " * 10000,
    "a word of 100 kB": "akp-node " + "a" * 100000,
}.items():
    _command("words", name, text)

# ---- verbs and options
for name, text in {
    "`apply` of a directory of the node": "akp-node apply /tmp/akp-bait",
    "`apply` of a relative directory": "akp-node apply akp-bait",
    "`apply` of the directory above": "akp-node apply ..",
    "`apply` of nothing": "akp-node apply",
    "`apply` of two": "akp-node apply - -",
    "`check` of a directory": "akp-node check /etc",
    "`restore` of a directory": "akp-node restore akp-bait",
    "`health`": "akp-node health 31000",
    "`undo`, which the node calls itself": "akp-node undo",
    "`await`, which the node calls itself": "akp-node await 1",
    "`pull`": "akp-node pull",
    "`--help` in place of a verb": "akp-node --help",
    "a verb that is none": "akp-node sh",
    "a function of the program as a verb": "akp-node make_work",
    "`rollback` to a path": "akp-node rollback ../../etc",
    "`rollback` to a pattern for sed": "akp-node rollback .*",
    "`show` of a path": "akp-node show ../../etc",
    "`show` of a pattern": "akp-node show .*",
    "`release`, which akp-pull calls": "akp-node release akp-bait",
    "`status` with an operand": "akp-node status x",
    "`facts` with an option": "akp-node facts --verify",
    "an unknown option": "akp-node status --exec",
    "an option in place of a value": "akp-node apply --node --verify -",
    "an option without its value": "akp-node apply - --node",
    "a number with more than digits": "akp-node apply --max-removed 1e9 -",
    "a number without end": "akp-node apply --max-removed 99999999999999999999 -",
    "`confirm` with an option": "akp-node confirm --force",
    "`cleanup` of another directory": "akp-node cleanup --state /etc",
}.items():
    _command("verbs", name, text)

# ---- environment: sshd accepts every variable here
for name, variable, value in (
    ("another state directory", "AKP_STATE", "/etc/akp-escape"),
    ("other settings", "AKP_ETC", "/tmp/akp-bait"),
    ("other units", "AKP_UNITS", "/etc/systemd/system"),
    ("system ports opened", "AKP_ACCEPT_PORTS", "1-65535"),
    ("another library", "LD_PRELOAD", "/tmp/akp-bait/x.so"),
    ("other libraries", "LD_LIBRARY_PATH", "/tmp/akp-bait"),
    ("a script for every shell", "ENV", "/tmp/akp-bait/rc"),
    ("a script for every bash", "BASH_ENV", "/tmp/akp-bait/rc"),
    ("other programs", "PATH", "/tmp/akp-bait"),
    ("other programs of the node program", "AKP_PATH", "/tmp/akp-bait"),
    ("another work directory", "AKP_RUN", "/etc/akp-escape"),
    ("another separator", "IFS", "k"),
    ("another place for files", "TMPDIR", "/etc"),
    ("another lock", "XTABLES_LOCKFILE", "/etc/akp-escape"),
    ("other modules of iptables", "XTABLES_LIBDIR", "/tmp/akp-bait"),
    ("a function in place of a program", "BASH_FUNC_id%%", "() { touch /tmp/escaped; }"),
    ("another command", "SSH_ORIGINAL_COMMAND", f"touch {PROOF}"),
    ("another sudo prompt", "SUDO_ASKPASS", "/tmp/akp-bait/x"),
):
    _client(
        "environment", f"{name}: `{variable}`", "akp-node", "status" if variable in ("PATH", "AKP_PATH", "XTABLES_LOCKFILE", "XTABLES_LIBDIR", "LD_PRELOAD") else "drain",
        options=("-o", f'SetEnv="{variable}={value}"'),
    )  # fmt: skip

# ---- what ssh offers beside commands
_client("ssh", "sftp", "-s", "sftp", options=())
_command("ssh", "scp, receiving", "scp -t /tmp/escaped")
_command("ssh", "scp, sending", "scp -f /etc/shadow")
_command("ssh", "the sftp server by its path", "/usr/lib/openssh/sftp-server")
_command("ssh", "rsync", "rsync --server --sender . /etc/shadow")
_client("ssh", "a terminal", "id", options=("-tt",))
_client("ssh", "a terminal for the program", "akp-node", "status;id", options=("-tt",))
_client("ssh", "X11 forwarding", "id", options=("-X",), env={"DISPLAY": "127.0.0.1:0"})
_client("ssh", "the agent forwarded", "ssh-add -l", options=("-A",))
_client("ssh", "a tunnel device", "id", options=("-w", "0:0"))
_client("ssh", "stdin to a port of the node", options=("-W", "127.0.0.1:22"))
_client(
    "ssh", "a port forwarded to the node", "id", options=("-o", "ExitOnForwardFailure=yes", "-R", "2223:127.0.0.1:22")
)
_client(
    "ssh",
    "a socket of the node made",
    "id",
    options=("-o", "ExitOnForwardFailure=yes", "-R", "/tmp/escaped:127.0.0.1:22"),
)
_client(
    "ssh",
    "no command, only forwarding",
    options=("-o", "ExitOnForwardFailure=yes", "-f", "-N", "-R", "2224:127.0.0.1:22"),
)


def _other_user(account: Account) -> Tried:
    done = account.ssh("id", options=("-l", "root"))
    return done.returncode, done.stdout + done.stderr


ATTEMPTS.append(Attempt("ssh", "the key for another account", _other_user))


# ---- what comes on stdin
def _stdin(name: str, make: Callable[[], bytes]) -> None:
    def run(account: Account) -> Tried:
        done = account.says("akp-node apply -", make())
        return done.returncode, done.stdout + done.stderr

    ATTEMPTS.append(Attempt("stdin", name, run, heavy="bomb" in name))


def _member(name: str, content: bytes = b"", **fields: object) -> bytes:
    """A tar with one member, as somebody would send who thinks that tar is spoken here."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _parts(*parts: tuple[str, bytes], end: bytes = b"==\n") -> bytes:
    """The form that is read, with names and counts as they are given."""
    text = b"".join(b"== " + name.encode() + b" %d\n" % content.count(b"\n") + content for name, content in parts)
    return gzip.compress(text + end)


_FIELDS = {"kind": "Bundle", "node": "n1", "mode": "iptables", "compat": "1.37", "generation": "0" * 64, "services": 0, "servicePorts": 0, "endpoints": 0}  # fmt: skip


def _sealed(fields: dict[str, object], files: dict[str, bytes]) -> bytes:
    """A bundle whose digests all fit."""
    return archive([("manifest.json", manifest_text(fields, [*files.items()]).encode()), *files.items()])


def _bundle(**files: bytes) -> bytes:
    """One with files that no bundle has."""
    return _sealed(_FIELDS, {name.replace("__", ".").replace("_", "-"): content for name, content in files.items()})


def _listed(name: str) -> bytes:
    """A manifest that lists a file by a path."""
    return archive([("manifest.json", manifest_text(_FIELDS, [(name, b"x\n")]).encode())])


def _values(**values: str) -> bytes:
    return _sealed({**_FIELDS, **values}, {"iptables-1-endpoints.rules": b""})


_TAR = tarfile
_RULES = b"*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n"
_MARK = b"touch /tmp/escaped\n"
_SEP = b"KUBE-SEP-AAAAAAAAAAAAAAAA"
_LOOPBACK = b"*nat\n:%b - [0:0]\n-A %b -p tcp -m tcp -j DNAT --to-destination 127.0.0.1:22\nCOMMIT\n" % (_SEP, _SEP)
_LOOPBACK_VIP = b'*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -d 127.0.0.1/32 -p tcp -m comment --comment "x" -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA\nCOMMIT\n'
_OPENED = b'*filter\n:KUBE-NODEPORTS - [0:0]\n-A KUBE-NODEPORTS -p tcp -m comment --comment "a/b health check node port" -m tcp --dport 22 -j ACCEPT\nCOMMIT\n'
for _name, _make in {
    "nothing": lambda: b"",
    "text": lambda: b"hello\n",
    "a shell script": lambda: b"#!/bin/sh\n" + _MARK,
    "gzip that ends early": lambda: gzip.compress(b"== a 1\nx\n" * 1000)[:40],
    "gzip with a false checksum": lambda: gzip.compress(b"== a 1\nx\n==\n")[:-8] + b"\0" * 8,
    "tar with `..`": lambda: _member("../../../../tmp/escaped", _MARK),
    "tar with an absolute path": lambda: _member("/tmp/escaped", _MARK),
    "tar with a symbolic link": lambda: _member("manifest.json", type=_TAR.SYMTYPE, linkname="/etc/shadow"),
    "tar with a hard link": lambda: _member("manifest.json", type=_TAR.LNKTYPE, linkname="/etc/shadow"),
    "tar with a device": lambda: _member("tmp/escaped", type=_TAR.BLKTYPE, devmajor=8, devminor=0),
    "tar with a pipe": lambda: _member("manifest.json", type=_TAR.FIFOTYPE),
    "tar with setuid": lambda: _member("tmp/escaped", _MARK, mode=0o6755, uid=0),
    "a name with `..`": lambda: _parts(("../../../tmp/escaped", _MARK)),
    "an absolute name": lambda: _parts(("/tmp/escaped", _MARK)),
    "a name with a slash": lambda: _parts(("x/y", _MARK)),
    "a name with a line break": lambda: _parts(("x\n/tmp/escaped", _MARK)),
    "a name with blanks": lambda: _parts(("x /tmp/escaped", _MARK)),
    "a name that is an option": lambda: _parts(("-rf", _MARK)),
    "a name with a command": lambda: _parts(("$(touch /tmp/escaped)", _MARK)),
    "a name of 300 characters": lambda: _parts(("a" * 300, _MARK)),
    "the name `.`": lambda: _parts((".", _MARK)),
    "a hidden name": lambda: _parts((".profile", _MARK)),
    "one name twice": lambda: _parts(("manifest.json", b"{}\n"), ("manifest.json", _MARK)),
    "ten thousand files": lambda: _parts(*((f"f{i}", b"x\n") for i in range(10000))),
    "a count of lines beyond all bounds": lambda: gzip.compress(b"== manifest.json 99999999999999999999\n{}\n"),
    "a negative count": lambda: gzip.compress(b"== manifest.json -1\n{}\n==\n"),
    "more after the end": lambda: _parts(("manifest.json", b"{}\n"), end=b"==\n== x 1\ntouch /tmp/escaped\n"),
    "no manifest": lambda: _parts(("iptables-1-endpoints.rules", _RULES)),
    "a gzip bomb of lines": lambda: _bomb(b"x" * 999 + b"\n", b"== manifest.json 99999999\n"),
    "a gzip bomb of one line": lambda: _bomb(b"x" * 1000, b"== manifest.json 1\n"),
    "a manifest that lists `..`": lambda: _listed("../../../etc/shadow"),
    "a manifest that lists a path": lambda: _listed("/etc/shadow"),
    "a manifest that lists a command": lambda: _listed("$(touch /tmp/escaped)"),
    "a manifest that lists an option": lambda: _listed("-e"),
    "a mode that is a command": lambda: _values(mode="';touch /tmp/escaped;'"),
    "a mode that is a function": lambda: _values(mode="undo"),
    "a node that is a command": lambda: _values(node="$(touch /tmp/escaped)", generation="x"),
    "a generation that is a path": lambda: _values(generation="../../../etc"),
    "rules of a foreign chain": lambda: _bundle(iptables_1_endpoints__rules=_RULES),
    "rules with a command in a comment": lambda: _bundle(
        iptables_1_endpoints__rules=b'*filter\n# $(touch /tmp/escaped)\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -m comment --comment "`touch /tmp/escaped`" -j DROP\nCOMMIT\n'
    ),
    "another program in the bundle": lambda: _bundle(
        **{"akp-node": b"#!/bin/sh\n" + _MARK, "iptables_3_frontends__rules": _RULES}
    ),
    "a sysctl that names a program": lambda: _bundle(sysctls__conf=b"kernel.core_pattern = |/tmp/escaped\n"),
    "a sysctl by a path": lambda: _bundle(sysctls__conf=b"../../tmp/escaped = 1\n"),
    "endpoints on the node's loopback": lambda: _bundle(iptables_1_endpoints__rules=_LOOPBACK),
    "a frontend on the node's loopback": lambda: _bundle(iptables_2_dispatch__rules=_LOOPBACK_VIP),
    "a port of the node opened": lambda: _bundle(iptables_3_frontends__rules=_OPENED),
    "a file that no table names": lambda: _bundle(iptables_9__rules=_RULES),
    "a null byte in a line": lambda: _sealed(_FIELDS, {"sysctls.conf": b"net.ipv4.ip_forward = 1\0\n"}),
    "a socket unit in the health file": lambda: _bundle(
        health__conf=b"listen ipv4 0.0.0.0\n[Service]\nExecStart=touch /tmp/escaped\n"
    ),
    "a release that names itself": lambda: archive(
        [("release", b"akp-release 1\n"), ("release.sig", b"x\n"), ("manifest.json", b"{}\n")]
    ),
}.items():
    _stdin(_name, _make)


def _bomb(part: bytes, head: bytes) -> bytes:
    """Two gigabytes, in two megabytes."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(2000):
            file.write(part * 1000)
    return out.getvalue()


def table(results: dict[str, str]) -> str:
    """The attempts as a table of Markdown."""
    lines = ["| | attempt | outcome |", "|---|---|---|"]
    lines += [f"| {each.group} | {each.name} | {results[f'{each.group}: {each.name}']} |" for each in ATTEMPTS]
    return "\n".join(lines) + "\n"


def groups() -> Iterator[tuple[str, int]]:
    for group in dict.fromkeys(each.group for each in ATTEMPTS):
        yield group, sum(each.group == group for each in ATTEMPTS)


DOCS = Path(__file__).parents[2] / "docs" / "security.md"
