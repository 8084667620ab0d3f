"""A node as examples/access tells the reader to set it up, and the means to try to get out of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.lab import Lab
from tests.lab.node import Node
from tests.lab.program import PROGRAM

ROOT = Path(__file__).parents[2]
ACCESS = ROOT / "examples" / "access"
PORT = 2222

# An sshd that lets through and offers all that one can: what holds here holds behind any configuration.
_SSHD = f"""
Port {PORT}
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
PidFile none
Subsystem sftp internal-sftp
AcceptEnv *
AllowTcpForwarding yes
AllowStreamLocalForwarding yes
AllowAgentForwarding yes
X11Forwarding yes
PermitTunnel yes
PermitTTY yes
PermitUserRC yes
GatewayPorts yes
"""

_SETUP = f"""
install -m 0755 {PROGRAM.with_name("akp-leave")} /usr/local/sbin/akp-leave
install -m 0755 {PROGRAM} /usr/local/sbin/akp-node
install -m 0755 {ACCESS}/akp-ssh /usr/local/sbin/akp-ssh
install -m 0440 {ACCESS}/sudoers /etc/sudoers.d/akp
useradd --home-dir /var/akp --create-home --shell /bin/sh --password '*' akp
mkdir -p /var/akp/.ssh
cat >/var/akp/.ssh/authorized_keys
chmod 0644 /var/akp/.ssh/authorized_keys
echo 'touch /tmp/escaped-by-rc' >/var/akp/.ssh/rc
echo 'touch /tmp/escaped-by-profile' >/var/akp/.profile
chown -R root: /var/akp
# The machine's /tmp is not the node's here: what appears in it is the node's doing.
mount -t tmpfs tmpfs /tmp
mkdir -m 0755 /tmp/akp-bait
for name in rc x x.so node.conf sudo env sh id awk akp-node akp-ssh; do
    printf '#!/bin/sh\ntouch /tmp/escaped\n' >/tmp/akp-bait/$name
    chmod 0755 /tmp/akp-bait/$name
done
cat >/etc/ssh/escape_config <<'CONFIG'
{_SSHD}
CONFIG
setsid /usr/sbin/sshd -f /etc/ssh/escape_config </dev/null >/dev/null 2>&1
"""

# What the node can write, and what of it may change: the state directory; sshd and sudo note logins.
_TREES = "/etc /root /usr/local /var /tmp /run"
_MAY_CHANGE = "/var/lib/akp /run/akp /run/sshd /run/sudo /var/lib/sudo /var/log /run/xtables.lock /run/utmp"
# Of these only what is in them counts: a file that came and went is none.
_DIRECTORIES = "/tmp /run /run/akp /var/lib"


@dataclass
class Account:
    """The account akp of a node, and its key."""

    lab: Lab
    node: Node
    key: Path
    clean: str = ""  # the trace of a node where nothing was tried

    @classmethod
    def install(cls, lab: Lab, folder: Path) -> Account:
        node = lab.node("n1")
        key = folder / "stolen"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        (line,) = [each for each in (ACCESS / "authorized_keys").read_text().splitlines() if each[0] != "#"]
        options = line.split(" ssh-ed25519 ")[0]
        node.run(["sh", "-eu", "-c", _SETUP], input=f"{options} {key.with_suffix('.pub').read_text()}")
        made = cls(lab, node, key)
        # The program's own first steps make what an attempt would seem to have made.
        for verb in ("drain", "status --verify"):
            made.says(f"akp-node {verb}")
        # What changes from now on is found by its age.
        node.run(["touch", "/usr/local/sbin/akp-node"])
        made.clean = made.trace()
        return made

    def ssh(
        self, *command: str, options: tuple[str, ...] = (), stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """What the client says with that key; the stolen one, and no other."""
        argv = [str(self.lab.state / "ssh"), "-F", "/dev/null", "-i", str(self.key), "-p", str(PORT)]
        argv += ["-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none", "-o", "StrictHostKeyChecking=no"]
        if not any("ControlPath" in option for option in options):
            options = ("-o", "ControlPath=none", *options)
        argv += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", *options]
        argv += [f"akp@{self.node.addresses[0]}", *command]
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(argv, input=stdin, capture_output=True, env=path | (env or {}), check=False, timeout=120)

    def says(self, text: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A command over a connection that stays: each has a session and a forced command of its own."""
        shared = ("-o", "ControlMaster=auto", "-o", f"ControlPath={self.key}.mux", "-o", "ControlPersist=60")
        return self.ssh("--", text, options=shared, stdin=stdin)

    def trace(self) -> str:
        """All that an escape would leave: files, rules, settings, addresses, processes."""
        prune = " -o ".join(f"-path {path}" for path in _MAY_CHANGE.split())
        spare = " ".join(f"! -path {path}" for path in _DIRECTORIES.split())
        script = f"""
find {_TREES} -xdev \\( {prune} \\) -prune -o -cnewer /usr/local/sbin/akp-node {spare} \\
    -printf '%p %y %m %U %G %s %l %C@\\n' | sort
ls -A {_DIRECTORIES} | grep -v -x -e akp -e sudo -e xtables.lock -e utmp
iptables-save; ip6tables-save; iptables-save -t raw; nft list ruleset; ip -o address; ip rule; ipset save
sysctl -a -r '^net' 2>/dev/null | grep -v -e count -e neigh
ss -Hltun | awk '{{ print $1, $5 }}' | sort -u
ps -eo user:20,args | grep '^akp ' | grep -v 'sshd: akp' || :
"""
        text = self.node.run(["sh", "-c", script]).stdout
        return "\n".join(line for line in text.splitlines() if not line.startswith("#"))
