"""The node program's guard over many bundles at once, and what a host has that is not ours."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentless_kube_proxy.bundle.program import MODES, node_program

from .bundles import JUMPS, STATIC
from .host import Host

# The program without its last line, which runs a verb; in its place the steps of `check` before the kernel is read.
_MAIN = 'main "$@"\n'
_BATCH = """
verb=check
die() { printf '%s' "$2"; exit "$1"; }
set +e
while read -r dir; do
    (
        set -e
        bundle=$dir.taken
        rm -rf "$bundle"
        mkdir "$bundle"
        take_directory "$dir"
        verify "$bundle" || die 2 "$refused"
        case " $MODES " in *" $b_mode "*) ;; *) die 2 "a bundle of another mode" ;; esac
        guard "$bundle"
    ) </dev/null >"$dir.answer" 2>"$dir.errors"
    echo "$?"
done
"""
# What interprets the guard: the shell of the program, and the awk in its PATH.
AWKS = {"mawk": "dash", "gawk": "dash", "original-awk": "dash", "busybox": "busybox"}
HERE = [awk for awk in AWKS if shutil.which(awk)]


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a bundle: 0 lets it through."""

    code: int
    reason: str


def guarded(directories: Iterable[Path], awk: str = "mawk", **settings: str) -> list[Verdict]:
    """The guard's verdict on each bundle, by the program of its mode, with these lines in node.conf."""
    asked = list(directories)
    if not asked:
        return []
    place = asked[0].parent / f"guard-{awk}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "bin").mkdir(parents=True)
    (place / "bin/awk").symlink_to(str(shutil.which(awk)))
    (place / "node.conf").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    found: dict[Path, Verdict] = {}
    for mode in MODES:
        mine = [each for each in asked if _mode(each) == mode]
        text = node_program(mode)
        assert text.endswith(_MAIN)
        (place / mode).write_text(text.removesuffix(_MAIN) + _BATCH)
        shell = ["busybox", "ash"] if AWKS[awk] == "busybox" else ["dash"]
        env = {"AKP_PATH": str(place / "bin"), "AKP_ETC": str(place), "AKP_STATE": str(place / "state")}
        given = "".join(f"{each}\n" for each in mine)
        done = subprocess.run(
            [*shell, place / mode], input=given, env=os.environ | env, capture_output=True, text=True, check=True
        )
        codes = [int(line) for line in done.stdout.split()]
        for each, code in zip(mine, codes, strict=True):
            answer, errors = (Path(f"{each}.{name}") for name in ("answer", "errors"))
            assert errors.read_text() == "", (each, errors.read_text())
            found[each] = Verdict(code, answer.read_text(errors="replace"))
    assert not (place / "state").exists()
    return [found[each] for each in asked]


def _mode(directory: Path) -> str:
    """The mode that a manifest claims, or any."""
    text = (directory / "manifest.json").read_bytes().decode("utf-8", "replace")
    claimed = re.search(r'^  "mode": "(\w+)"', text, re.M)
    return claimed[1] if claimed and claimed[1] in MODES else "iptables"


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

_TABLE = re.compile(r"^table ip6? kube-proxy \{\n.*?^\}\n", re.M | re.S)
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
        marker = re.fullmatch(r"KUBE-PROXY-GEN-[0-9A-F]{13}", chain) and table != "mangle"
        return bool(marker) or chain in STATIC.get(table, ()) or (table == "nat" and bool(_OWN_CHAIN.fullmatch(chain)))
    return line.replace("-A", "-I", 1) in JUMPS.get(table, ())


# What a line of a bundle may speak of, told in another way than the guard tells it.
_RESTORE = re.compile(
    r"(?:-A|-X|-F) KUBE-|:KUBE-[A-Za-z0-9-]+ - \[0:0\]$|\*(?:mangle|filter|nat)$|COMMIT$"
    r"|-[IC] (?:INPUT|OUTPUT|FORWARD|PREROUTING|POSTROUTING) (?:-m conntrack --ctstate NEW )?(?:-m comment --comment "
    r'"(?:kube-proxy|kubernetes) [a-z -]+" )?-j KUBE-[A-Z-]+$'
)
_SPEAKS_OF = {
    r"ip6?tables.*\.rules": _RESTORE,
    r"nftables.*\.nft": re.compile(
        r"(?:add|flush|delete) (?:table|chain|rule|set|map|element|counter) ip6? kube-proxy(?: |$)"
    ),
    r"ipset.*\.rules": re.compile(r"(?:create|add|del) KUBE-[A-Z0-9-]+ "),
    r"ipvs.*\.rules": re.compile(r"-[AaEDd] (?:-[tu]|--sctp-service) \S+(?: |$)"),
    r"ip\.batch": re.compile(r"addr (?:add|del) \S+ dev kube-ipvs0$|link add kube-ipvs0 type dummy$"),
    r"sysctls\.conf": re.compile(
        r"net\.(?:netfilter\.nf_conntrack|ipv4\.(?:vs|conf\.all|ip_forward))[a-z0-9_.]* = \d+$"
    ),
    r"nfacct\.rules": re.compile(r"(?:ct_state_invalid_dropped|localhost_nps_accepted)_pkts$"),
}
_KUBELET = re.compile(r"KUBE-KUBELET|KUBE-IPTABLES-HINT|KUBE-SVC-SHORT")
# Where an endpoint stands, in all modes; and where none may be.
_ENDPOINT = re.compile(
    r"--to-destination (\S+)|dnat to (\S+)|\d+ : ([0-9a-f:.]+) \. \d+|-a .* -r (\S+) -m|^add KUBE-\S*LOOP-BACK ([^,]+),"
)
_NOWHERE = [
    ipaddress.ip_network(each)
    for each in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32")
] + [ipaddress.ip_network(each) for each in ("::/96", "::ffff:0:0/96", "fe80::/10", "ff00::/8")]


def speaks_of_others(files: dict[str, bytes]) -> list[str]:
    """Lines of a bundle that speak of what is not ours, or lead to where no endpoint is."""
    found: list[str] = []
    for name, content in files.items():
        known = [speech for pattern, speech in _SPEAKS_OF.items() if re.fullmatch(pattern, name)]
        lines = content.decode("utf-8", "replace").split("\n")
        for line in (each for each in lines if known and each and not each.startswith("#")):
            if not known[0].match(line) or _KUBELET.search(line):
                found.append(f"{name}: {line}")
            for groups in _ENDPOINT.findall(line if line.startswith(("-A", "-a", "add")) else ""):
                address = (
                    re.sub(r":\d+$", "", text).strip("[]")
                    if (text := "".join(groups)).count(":") != 0 and ("." in text or "]" in text)
                    else text
                )
                if any(ipaddress.ip_address(address) in network for network in _NOWHERE):
                    found.append(f"{name}: {line}")
    return found
