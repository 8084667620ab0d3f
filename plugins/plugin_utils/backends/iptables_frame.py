# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""iptables mode: what belongs to no Service. Chains and rules that every node has, and the jumps to them."""

from __future__ import annotations

from collections.abc import Iterator

from ..addresses import Family, host_cidr, is_loopback
from ..proxy.view import FamilyView, NodeView
from .common import conntrack_sysctls
from .state import DispatchObject, FrameObject, Object

INVALID_COUNTER = "ct_state_invalid_dropped_pkts"
LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"
COUNTERS: Object = ("file", "nfacct.rules")

CANARY_CHAIN = "KUBE-PROXY-CANARY"
MASQUERADE_CHAIN = "KUBE-MARK-MASQ"
FIREWALL_CHAIN = "KUBE-FIREWALL"  # kubelet has rules in it too

_FILTER_CHAINS = (
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-FORWARD",
    "KUBE-NODEPORTS",
    "KUBE-PROXY-FIREWALL",
    FIREWALL_CHAIN,
    CANARY_CHAIN,
)
_NAT_CHAINS = ("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", MASQUERADE_CHAIN, CANARY_CHAIN)
# Chains whose rules come and go with the endpoints of service ports.
_DISPATCH = {
    ("nat", "KUBE-SERVICES"),
    ("nat", "KUBE-NODEPORTS"),
    ("filter", "KUBE-SERVICES"),
    ("filter", "KUBE-EXTERNAL-SERVICES"),
}

# In the order in which kube-proxy installs them; each goes to the top of its chain.
JUMPS = {
    "filter": """\
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-I INPUT -j KUBE-FIREWALL
-I OUTPUT -j KUBE-FIREWALL
""",
    "nat": """\
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
""",
}

_NODEPORTS_COMMENT = (
    '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain"'
)


def sysctls(view: NodeView) -> Iterator[tuple[str, int]]:
    yield from conntrack_sysctls(view)
    if any(family.localhost_node_ports for family in view.families):
        yield "net.ipv4.conf.all.route_localnet", 1


def frame(view: NodeView, family: FamilyView) -> Iterator[tuple[Object, FrameObject]]:
    """The chains that exist whatever Services there are."""
    name = family.family.value
    yield (name, "mangle", CANARY_CHAIN), FrameObject()
    rules = _static_rules(view, family)
    for table, chains in (("filter", _FILTER_CHAINS), ("nat", _NAT_CHAINS)):
        for chain in chains:
            head, tail = rules.get((table, chain), ("", ""))
            fixed = head if chain == FIREWALL_CHAIN else ""
            yield chain_object(name, table, chain), FrameObject(head, tail, fixed=fixed)


def chain_object(family: str, table: str, chain: str) -> Object:
    """The name of a chain of the frame."""
    name = (family, table, chain)
    return DispatchObject(name) if (table, chain) in _DISPATCH else name


def allowed_rules(family: Family, table: str, rules: str) -> Iterator[str]:
    """Rules as frontends.allow has them."""
    digit = "4" if family is Family.IPV4 else "6"
    return (f"{digit} {table} {rule}" for rule in rules.splitlines())


def _static_rules(view: NodeView, family: FamilyView) -> dict[tuple[str, str], tuple[str, str]]:
    """The rules before and after those of the service ports."""
    mark = f"{view.config.masquerade_mark:#x}"
    firewall = forward = ""
    if family.localhost_node_ports:
        firewall = (
            "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 "
            '-m comment --comment "block incoming localnet connections" '
            "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\n"
        )
    if not (view.facts.tcp_be_liberal or view.config.conntrack.tcp_be_liberal):
        counter = f"-m nfacct --nfacct-name {INVALID_COUNTER} " if view.facts.nfacct else ""
        forward = f"-A KUBE-FORWARD -m conntrack --ctstate INVALID {counter}-j DROP\n"
    forward += f"""\
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {mark}/{mark} -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
"""
    postrouting = f"""\
-A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark {mark}/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
"""
    return {
        ("filter", FIREWALL_CHAIN): (firewall, ""),
        ("filter", "KUBE-FORWARD"): (forward, ""),
        ("nat", "KUBE-POSTROUTING"): (postrouting, ""),
        ("nat", MASQUERADE_CHAIN): (f"-A KUBE-MARK-MASQ -j MARK --set-xmark {mark}/{mark}\n", ""),
        ("nat", "KUBE-SERVICES"): ("", node_port_jump(family)),
    }


def node_port_jump(family: FamilyView) -> str:
    """The way from KUBE-SERVICES to the node ports."""
    with_loopback = family.family is Family.IPV4 and family.localhost_node_ports
    if family.node_ports.match_all:
        unless = "" if with_loopback else f"! -d {family.family.loopback} "
        return f"-A KUBE-SERVICES {unless}{_NODEPORTS_COMMENT} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"
    return "".join(
        f"-A KUBE-SERVICES -d {host_cidr(ip)} {_NODEPORTS_COMMENT} -j KUBE-NODEPORTS\n"
        for ip in family.node_ports.ips
        if with_loopback or not is_loopback(ip)
    )
