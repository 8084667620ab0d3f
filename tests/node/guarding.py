"""The node program's guard over many bundles at once, and what a host has that is not ours."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from agentless_kube_proxy.bundle.program import node_program

from .bundles import JUMPS, STATIC
from .host import Host

# The program without its last line, which runs a verb; in its place the steps of `check` before the kernel is read.
_MAIN = 'main "$@"\n'
_BATCH = """
verify='' operand='' previous='' want_node='' verb=check
die() { printf '%s\\n' "$2"; exit "$1"; }
set +e
while read -r dir; do
    (
        set -e
        work=$dir.work
        mkdir "$work" "$work/bundle"
        open_bundle "$dir"
        if [ "$kind" = Delta ]; then guard_delta; else guard; fi
    ) </dev/null >"$dir.answer" 2>/dev/null
    echo "$?"
done
"""


def guarded(directories: Iterable[Path], host: Host) -> list[int]:
    """The exit code of the guard for each bundle: 0 lets it through."""
    text = node_program()
    assert text.endswith(_MAIN)
    program = host.directory / "guard"
    program.write_text(text.removesuffix(_MAIN) + _BATCH)
    shell = ["busybox", "ash"] if host.shell == "busybox" else ["dash"]
    done = subprocess.run(
        [*shell, program],
        input="".join(f"{directory}\n" for directory in directories),
        env=host.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not host.state.exists() or host.state.is_dir()
    return [int(line) for line in done.stdout.split()]


# Rules, tables, sets, addresses and settings of somebody else, some of which look like ours.
_FOREIGN = """
ip link add foreign0 type dummy && ip address add 192.0.2.77/32 dev foreign0 && ip link set foreign0 up
ip rule add from 192.0.2.77 lookup 77
for t in $ipt $ip6t; do
    $t -N FOREIGN; $t -A FOREIGN -p tcp --dport 22 -j DROP
    $t -I INPUT -j FOREIGN; $t -A FORWARD -j FOREIGN; $t -P FORWARD DROP
    $t -t nat -N FOREIGN; $t -t nat -A POSTROUTING -j FOREIGN
    $t -t mangle -N KUBE-KUBELET-CANARY; $t -t nat -N KUBE-KUBELET-CANARY; $t -t nat -N KUBE-SVC-SHORT
    $t -t raw -A PREROUTING -j ACCEPT
done
nft -f - <<END
add table inet foreign
add chain inet foreign input { type filter hook input priority 10 ; policy drop ; }
add rule inet foreign input tcp dport 22 drop
add set inet foreign names { type ipv4_addr ; elements = { 192.0.2.1 } ; }
add table ip kube-proxy-x
add chain ip kube-proxy-x services
END
ipset create FOREIGN hash:ip && ipset add FOREIGN 192.0.2.1 && ipset create KUBE-FOREIGN hash:ip
nfacct add foreign_counter
"""

_TABLE = re.compile(r"^table ip6? kube-proxy(?:-generation)? \{\n.*?^\}\n", re.M | re.S)
_NFT_TABLES = re.compile(r"^table ip6? (?:filter|nat|mangle|raw) \{.*?^\}\n", re.M | re.S)
_COUNTS = re.compile(r" \[\d+:\d+\]$")
_OWN_CHAIN = re.compile(r"KUBE-(?:SVC|SVL|EXT|SEP|FW)-[A-Z2-7]{16}")


def furnish(host: Host) -> None:
    """Put them there."""
    host.sh(_FOREIGN)


def foreign(host: Host) -> str:
    """Everything on a host but what is ours, as text. Ours is what this lists, and nothing that a bundle says."""
    lines = []
    for save in ("$ipt-save", "$ip6t-save"):
        table = ""
        for line in host.sh(save).splitlines():
            if line.startswith("*"):
                table = line[1:]
            if not line.startswith("#") and not _ours(table, line):
                lines.append(f"{table} {_COUNTS.sub('', line)}")
    # An empty table of a bundle that had one is no rule.
    empty = re.compile(r"(\w+) \*\1\n(?:\1 :[A-Z]+ ACCEPT\n)*\1 COMMIT\n")
    rules = empty.sub("", "\n".join(lines) + "\n")
    ruleset = _NFT_TABLES.sub("", _TABLE.sub("", host.sh("nft list ruleset")))
    rest = host.sh(
        "ip -o address; ip -o -6 route; ip -o route; ip rule; ipset save | sort; nfacct list | sed 's/.*= //';"
        "sysctl -a -r '^net' 2>/dev/null | grep -v -e nf_conntrack_count -e neigh -e hashsize -e route_localnet "
        "-e ip_forward -e nf_conntrack_tcp -e nf_conntrack_udp"
    )
    rest = re.sub(r"^(?:ct_state_invalid_dropped_pkts|localhost_nps_accepted_pkts);?\n", "", rest, flags=re.M)
    return "\n=====\n".join((rules, ruleset, rest))


def _ours(table: str, line: str) -> bool:
    if line.startswith(("-A KUBE-", ":KUBE-")):
        chain = line[1:].split()[0] if line[0] == ":" else line.split()[1]
        return chain in STATIC.get(table, ()) or (table == "nat" and bool(_OWN_CHAIN.fullmatch(chain)))
    return line.replace("-A", "-I", 1) in JUMPS.get(table, ())


# What a line of a bundle may speak of, told in another way than the guard tells it.
_SPEAKS_OF = {
    "iptables.rules": re.compile(
        r"(?:-A|-X) KUBE-|:KUBE-[A-Z0-9-]+ - \[0:0\]$|\*(?:mangle|filter|nat)$|COMMIT$"
        r"|-I (?:INPUT|OUTPUT|FORWARD|PREROUTING|POSTROUTING) (?:-m conntrack --ctstate NEW )?(?:-m comment --comment "
        r'"(?:kube-proxy|kubernetes) [a-z -]+" )?-j KUBE-[A-Z-]+$'
    ),
    "nftables.nft": re.compile(
        r"(?:add|flush|delete) (?:table|chain|rule|set|map|element|counter) ip6? kube-proxy(?:-generation)?(?: |$)"
    ),
    "ipset.rules": re.compile(r"(?:create|add|del|flush|destroy) KUBE-[A-Z0-9-]+(?: |$)"),
    "ipvs.rules": re.compile(r"-[AaEeDd] -[tu] \S+(?: |$)|-[AaEeDd] --sctp-service \S+(?: |$)"),
    "ip.batch": re.compile(r"addr(?:ess)? (?:add|del|replace) \S+ dev kube-ipvs0$|link add kube-ipvs0 type dummy$"),
    "sysctls.conf": re.compile(r"net\.(?:netfilter\.nf_conntrack|ipv4\.(?:vs|conf\.all|ip_forward))[a-z0-9_.]* = \d+$"),
    "nfacct.rules": re.compile(r"(?:ct_state_invalid_dropped|localhost_nps_accepted)_pkts$"),
}
_SPEAKS_OF["ip6tables.rules"] = _SPEAKS_OF["iptables.rules"]
_KUBELET = re.compile(r"KUBE-KUBELET|KUBE-IPTABLES-HINT|KUBE-SVC-SHORT")


def speaks_of_others(files: dict[str, bytes], mode: str) -> list[str]:
    """Lines, of those files that the mode reads, that speak of what is not ours."""
    read = {"iptables": ("iptables.rules", "ip6tables.rules"), "nftables": ("nftables.nft",)}.get(
        mode, ("iptables.rules", "ip6tables.rules", "ipset.rules", "ipvs.rules", "ip.batch")
    )
    found: list[str] = []
    for name in (*read, "sysctls.conf", "nfacct.rules"):
        lines = files.get(name, b"").decode("utf-8", "replace").split("\n")
        said = [line.strip(" ") for line in lines if line and not line.startswith("#")]
        found += [f"{name}: {line}" for line in said if not _SPEAKS_OF[name].match(line) or _KUBELET.search(line)]
    return found
