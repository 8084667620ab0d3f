# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The rules that a node has, as its own tools print them, read over the connection that the inventory tells.

Ansible's own command does it, so connection, become and every variable mean what they mean there. Nothing is written
on the node. An account that may run one command only cannot be asked this way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..explain.ruleset import NoRules, Ruleset

# What a node prints, below lines that name the file which it stands for.
_MARK = "### akp "
_PRINTS = {
    "iptables.rules": "iptables-save",
    "ip6tables.rules": "ip6tables-save",
    "nftables-ip.nft": "nft list table ip kube-proxy",
    "nftables-ip6.nft": "nft list table ip6 kube-proxy",
    "ipset.rules": "ipset save",
    "ipvs.rules": "ipvsadm -Sn",
    "ip.batch": "ip -o addr show dev kube-ipvs0",
}
# For a shell of the node; a tool that is not there prints nothing.
SCRIPT = "; ".join(f"echo '{_MARK}{name}'; {command} 2>/dev/null" for name, command in _PRINTS.items())


def read_live(inventory: str, host: str) -> Ruleset:
    """The rules of a host of an inventory; NoRules if it cannot be reached, or has none."""
    beside = Path(sys.executable).parent / "ansible"
    program = str(beside) if beside.exists() else shutil.which("ansible")
    if program is None:
        raise NoRules("--live needs Ansible: pip install ansible-core")
    argv = [program, host, "-i", inventory, "--become", "-m", "ansible.builtin.raw", "-a", SCRIPT]
    # The plain output of the command: below its own line stands what the node printed.
    plain = {**os.environ, "ANSIBLE_LOAD_CALLBACK_PLUGINS": "false", "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=plain)
    if _MARK not in done.stdout:
        raise NoRules(f"{host}: Ansible did not reach it: {(done.stdout or done.stderr).strip()[-500:]}")
    return printed(done.stdout)


def printed(text: str) -> Ruleset:
    """The texts below their marks."""
    files: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            current = files.setdefault(line.removeprefix(_MARK).strip(), [])
        else:
            current.append(line)
    found = {name: "\n".join(lines) + "\n" for name, lines in files.items() if any(line.strip() for line in lines)}
    if not found:
        raise NoRules("the node has no rules that could be read")
    return Ruleset(found)
