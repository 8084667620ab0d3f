# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""ipvs mode: its sets, its chains, and the rules that ask the sets.

Rules stand here as iptables-save prints them. They name no Service: a Service is an entry of some of the sets.
"""

from __future__ import annotations

from ..addresses import Family
from ..proxy.view import FamilyView, NodeView

SET_NAME_LIMIT = 31

# Every set: type, and the comment of the rules that ask it.
SETS = {
    "KUBE-LOOP-BACK": (
        "hash:ip,port,ip",
        "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose",
    ),
    "KUBE-CLUSTER-IP": ("hash:ip,port", "Kubernetes service cluster ip + port for masquerade purpose"),
    "KUBE-EXTERNAL-IP": ("hash:ip,port", "Kubernetes service external ip + port for masquerade and filter purpose"),
    "KUBE-EXTERNAL-IP-LOCAL": (
        "hash:ip,port",
        "Kubernetes service external ip + port with externalTrafficPolicy=local",
    ),
    "KUBE-LOAD-BALANCER": ("hash:ip,port", "Kubernetes service lb portal"),
    "KUBE-LOAD-BALANCER-FW": (
        "hash:ip,port",
        "Kubernetes service load balancer ip + port for load balancer with sourceRange",
    ),
    "KUBE-LOAD-BALANCER-LOCAL": (
        "hash:ip,port",
        "Kubernetes service load balancer ip + port with externalTrafficPolicy=local",
    ),
    "KUBE-LOAD-BALANCER-SOURCE-IP": (
        "hash:ip,port,ip",
        "Kubernetes service load balancer ip + port + source IP for packet filter purpose",
    ),
    "KUBE-LOAD-BALANCER-SOURCE-CIDR": (
        "hash:ip,port,net",
        "Kubernetes service load balancer ip + port + source cidr for packet filter purpose",
    ),
    "KUBE-NODE-PORT-TCP": ("bitmap:port", "Kubernetes nodeport TCP port for masquerade purpose"),
    "KUBE-NODE-PORT-LOCAL-TCP": ("bitmap:port", "Kubernetes nodeport TCP port with externalTrafficPolicy=local"),
    "KUBE-NODE-PORT-UDP": ("bitmap:port", "Kubernetes nodeport UDP port for masquerade purpose"),
    "KUBE-NODE-PORT-LOCAL-UDP": ("bitmap:port", "Kubernetes nodeport UDP port with externalTrafficPolicy=local"),
    "KUBE-NODE-PORT-SCTP-HASH": (
        "hash:ip,port",
        r"Kubernetes nodeport SCTP port for masquerade purpose with type \'hash ip:port\'",
    ),
    "KUBE-NODE-PORT-LOCAL-SCTP-HASH": (
        "hash:ip,port",
        r"Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type \'hash ip:port\'",
    ),
    "KUBE-HEALTH-CHECK-NODE-PORT": ("bitmap:port", "Kubernetes health check node port"),
    "KUBE-IPVS-IPS": ("hash:ip", "Addresses on the ipvs interface"),
}

FILTER_CHAINS = (
    "KUBE-FORWARD",
    "KUBE-NODE-PORT",
    "KUBE-PROXY-FIREWALL",
    "KUBE-SOURCE-RANGES-FIREWALL",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
)
NAT_CHAINS = ("KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-MARK-MASQ")

# In the order in which kube-proxy installs them; each goes to the top of its chain.
JUMPS = {
    "filter": """\
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-I OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
""",
    "nat": """\
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
""",
}


def set_name(name: str, family: Family) -> str:
    """A set's name in a family; the kernel holds 31 characters of it."""
    return name if family is Family.IPV4 else ("KUBE-6-" + name.removeprefix("KUBE-"))[:SET_NAME_LIMIT]


def loop_back_rule(family: Family) -> str:
    """The one rule that is there for as long as a set of endpoints has entries."""
    own, comment = set_name("KUBE-LOOP-BACK", family), SETS["KUBE-LOOP-BACK"][1]
    return f'-A KUBE-POSTROUTING -m comment --comment "{comment}" -m set --match-set {own} dst,dst,src -j MASQUERADE'


def rules(view: NodeView, family: FamilyView, used: set[str]) -> dict[str, list[str]]:
    """The rules of all chains, but those of single Services. A set without entries has no rule of its own."""
    mark = f"{view.config.masquerade_mark:#x}"

    def match(name: str, flags: str) -> str:
        return f"-m set --match-set {set_name(name, family.family)} {flags}"

    def ask(name: str, flags: str) -> str:
        return f'-m comment --comment "{SETS[name][1]}" {match(name, flags)}'

    nat = [f"-A KUBE-SERVICES -s {family.family.loopback} -j RETURN"]
    if "KUBE-LOOP-BACK" in used:
        nat.append(loop_back_rule(family.family))
    if "KUBE-LOAD-BALANCER" in used:
        nat.append(f"-A KUBE-SERVICES {ask('KUBE-LOAD-BALANCER', 'dst,dst')} -j KUBE-LOAD-BALANCER")
    if "KUBE-LOAD-BALANCER-LOCAL" in used:
        nat.append(f"-A KUBE-LOAD-BALANCER {ask('KUBE-LOAD-BALANCER-LOCAL', 'dst,dst')} -j RETURN")
    for proto, suffix, flags in (("tcp", "TCP", "dst"), ("udp", "UDP", "dst"), ("sctp", "SCTP-HASH", "dst,dst")):
        for name, target in (
            (f"KUBE-NODE-PORT-LOCAL-{suffix}", "RETURN"),
            (f"KUBE-NODE-PORT-{suffix}", "KUBE-MARK-MASQ"),
        ):
            if name in used:
                nat.append(f"-A KUBE-NODE-PORT -p {proto} {ask(name, flags)} -j {target}")
    if "KUBE-CLUSTER-IP" in used:
        nat.append(_cluster_ip_rule(view, family, ask("KUBE-CLUSTER-IP", "dst,dst"), ask("KUBE-CLUSTER-IP", "src,dst")))
    for name in ("KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL"):
        if name in used:
            asked = f"-A KUBE-SERVICES {ask(name, 'dst,dst')}"
            nat += [f"{asked} -j KUBE-MARK-MASQ"] if name == "KUBE-EXTERNAL-IP" else []
            nat.append(f"{asked} -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT")
            nat.append(f"{asked} -m addrtype --dst-type LOCAL -j ACCEPT")
    nat.append("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT")
    nat.append("-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ")
    for name in ("KUBE-CLUSTER-IP", "KUBE-LOAD-BALANCER"):
        if name in used:
            nat.append(f"-A KUBE-SERVICES {match(name, 'dst,dst')} -j ACCEPT")
    nat += [
        f"-A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN",
        f"-A KUBE-POSTROUTING -j MARK --set-xmark {mark}/0x0",
        '-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully',
        f"-A KUBE-MARK-MASQ -j MARK --set-xmark {mark}/{mark}",
    ]

    filter_: list[str] = []
    if "KUBE-LOAD-BALANCER-FW" in used:
        asked = ask("KUBE-LOAD-BALANCER-FW", "dst,dst")
        filter_.append(f"-A KUBE-PROXY-FIREWALL {asked} -j KUBE-SOURCE-RANGES-FIREWALL")
    filter_ += [
        f"-A KUBE-SOURCE-RANGES-FIREWALL {ask(name, 'dst,dst,src')} -j RETURN"
        for name in ("KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-LOAD-BALANCER-SOURCE-IP")
        if name in used
    ]
    reject = "icmp-port-unreachable" if family.family is Family.IPV4 else "icmp6-port-unreachable"
    filter_ += [
        "-A KUBE-SOURCE-RANGES-FIREWALL -j DROP",
        f'-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {mark}/{mark} -j ACCEPT',
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT',
        f"-A KUBE-NODE-PORT {ask('KUBE-HEALTH-CHECK-NODE-PORT', 'dst')} -j ACCEPT",
        f"-A KUBE-IPVS-FILTER {match('KUBE-LOAD-BALANCER', 'dst,dst')} -j RETURN",
        f"-A KUBE-IPVS-FILTER {match('KUBE-CLUSTER-IP', 'dst,dst')} -j RETURN",
        f"-A KUBE-IPVS-FILTER {match('KUBE-EXTERNAL-IP', 'dst,dst')} -j RETURN",
        f"-A KUBE-IPVS-FILTER {match('KUBE-EXTERNAL-IP-LOCAL', 'dst,dst')} -j RETURN",
        f"-A KUBE-IPVS-FILTER {match('KUBE-HEALTH-CHECK-NODE-PORT', 'dst')} -j RETURN",
        f"-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW {match('KUBE-IPVS-IPS', 'dst')} -j REJECT --reject-with {reject}",
    ]
    return {"nat": nat, "filter": filter_}


def _cluster_ip_rule(view: NodeView, family: FamilyView, asked: str, asked_by_source: str) -> str:
    """Which traffic to cluster IPs needs its replies back through this node."""
    detect = family.detect_local
    if view.config.masquerade_all:
        return f"-A KUBE-SERVICES {asked} -j KUBE-MARK-MASQ"
    if detect is None:
        return f"-A KUBE-SERVICES {asked_by_source} -j KUBE-MARK-MASQ"
    not_local = f"! -s {detect.cidr}" if detect.cidr else f"! -i {detect.interface or detect.prefix + '+'}"
    return f"-A KUBE-SERVICES {not_local} {asked} -j KUBE-MARK-MASQ"
