"""ipvs mode, what every node has: sets, rules that ask them, sysctls and settings."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.addresses import Family
from agentless_kube_proxy.backends.ipvs_rules import SETS, set_name
from agentless_kube_proxy.backends.state import State

from tests.unit.build import chain, endpoint, file, node, port, render, service, slice_of, text

NODE = node("n1", "172.18.0.11", cpu="")


def write(*objects: Any, **fields: Any) -> State:
    return render(NODE, *objects, mode="ipvs", **fields)


def test_the_longest_set_names_of_ipv6_are_cut_to_what_the_kernel_holds() -> None:
    names = [set_name(name, Family.IPV6) for name in SETS]
    assert max(map(len, names)) == 31
    assert {"KUBE-6-LOAD-BALANCER-SOURCE-CID", "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS", "KUBE-6-LOOP-BACK"} <= set(names)
    assert len(set(names)) == len(SETS) == 17


def test_every_set_exists_in_both_families_even_if_nothing_is_in_it() -> None:
    created = [line for line in file(write(), "ipset.rules").splitlines() if line.startswith("create")]
    assert len(created) == len(file(write(), "ipset.rules").splitlines()) == 34
    assert created[:2] == [
        "create KUBE-LOOP-BACK hash:ip,port,ip family inet hashsize 1024 maxelem 65536",
        "create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536",
    ]
    assert "create KUBE-6-LOAD-BALANCER-SOURCE-CID hash:ip,port,net family inet6 hashsize 1024 maxelem 65536" in created
    assert "create KUBE-6-NODE-PORT-TCP bitmap:port range 0-65535" in created


def test_without_services_only_the_rules_that_need_no_entry_are_there() -> None:
    assert (
        file(write(), "iptables.rules").splitlines()[1:]
        == text(f"""
        *nat
        :KUBE-SERVICES - [0:0]
        :KUBE-POSTROUTING - [0:0]
        :KUBE-NODE-PORT - [0:0]
        :KUBE-LOAD-BALANCER - [0:0]
        :KUBE-MARK-MASQ - [0:0]
        -A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
        -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
        -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
        -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
        -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
        -A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
        -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
        :KUBE-PROXY-GEN-{write().generation[:13].upper()} - [0:0]
        -A KUBE-PROXY-GEN-{write().generation[:13].upper()} -m comment --comment {write().generation}
        -I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
        COMMIT
        *filter
        :KUBE-FORWARD - [0:0]
        :KUBE-NODE-PORT - [0:0]
        :KUBE-PROXY-FIREWALL - [0:0]
        :KUBE-SOURCE-RANGES-FIREWALL - [0:0]
        :KUBE-IPVS-FILTER - [0:0]
        :KUBE-IPVS-OUT-FILTER - [0:0]
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
        -A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        -A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
        -A KUBE-SOURCE-RANGES-FIREWALL -j DROP
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN
        -A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
        -A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with icmp-port-unreachable
        :KUBE-PROXY-GEN-{write().generation[:13].upper()} - [0:0]
        -A KUBE-PROXY-GEN-{write().generation[:13].upper()} -m comment --comment {write().generation}
        -I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
        -I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
        -I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
        -I FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
        -I INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
        -I OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
        COMMIT
        """).splitlines()
    )


EVERYTHING = [
    service(
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        externalIPs=["192.0.2.7"],
        ingress=("203.0.113.7",),
        loadBalancerSourceRanges=["172.18.0.0/16"],
        ports=[port(80, nodePort=30080), port(80, "u", "UDP", nodePort=30080), port(80, "s", "SCTP", nodePort=30081)],
    ),
    service("plain", clusterIP="10.96.0.2", externalIPs=["192.0.2.8"]),
    slice_of("web", endpoint("10.244.1.5", node="n1")),
]


def targets(state: State, table: str, name: str) -> list[tuple[str, str]]:
    """Which set each rule of a chain asks, and where it leads."""
    found = []
    for line in chain(state, table, name).splitlines():
        words = line.split()
        asked = words[words.index("--match-set") + 1] if "--match-set" in words else ""
        found.append((asked, words[words.index("-j") + 1]))
    return found


def test_sets_with_entries_are_asked_in_kube_proxys_order() -> None:
    state = write(*EVERYTHING)
    assert targets(state, "nat", "KUBE-SERVICES") == [
        ("", "RETURN"),
        ("KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER"),
        ("KUBE-CLUSTER-IP", "KUBE-MARK-MASQ"),
        ("KUBE-EXTERNAL-IP", "KUBE-MARK-MASQ"),
        ("KUBE-EXTERNAL-IP", "ACCEPT"),
        ("KUBE-EXTERNAL-IP", "ACCEPT"),
        ("KUBE-EXTERNAL-IP-LOCAL", "ACCEPT"),
        ("KUBE-EXTERNAL-IP-LOCAL", "ACCEPT"),
        ("", "KUBE-NODE-PORT"),
        ("KUBE-CLUSTER-IP", "ACCEPT"),
        ("KUBE-LOAD-BALANCER", "ACCEPT"),
    ]
    assert targets(state, "nat", "KUBE-NODE-PORT") == [
        ("KUBE-NODE-PORT-LOCAL-TCP", "RETURN"),
        ("KUBE-NODE-PORT-TCP", "KUBE-MARK-MASQ"),
        ("KUBE-NODE-PORT-LOCAL-UDP", "RETURN"),
        ("KUBE-NODE-PORT-UDP", "KUBE-MARK-MASQ"),
        ("KUBE-NODE-PORT-LOCAL-SCTP-HASH", "RETURN"),
        ("KUBE-NODE-PORT-SCTP-HASH", "KUBE-MARK-MASQ"),
    ]
    assert targets(state, "nat", "KUBE-LOAD-BALANCER") == [
        ("KUBE-LOAD-BALANCER-LOCAL", "RETURN"),
        ("", "KUBE-MARK-MASQ"),
    ]
    assert targets(state, "nat", "KUBE-POSTROUTING")[0] == ("KUBE-LOOP-BACK", "MASQUERADE")
    assert targets(state, "filter", "KUBE-PROXY-FIREWALL") == [("KUBE-LOAD-BALANCER-FW", "KUBE-SOURCE-RANGES-FIREWALL")]
    assert targets(state, "filter", "KUBE-SOURCE-RANGES-FIREWALL") == [
        ("KUBE-LOAD-BALANCER-SOURCE-CIDR", "RETURN"),
        ("KUBE-LOAD-BALANCER-SOURCE-IP", "RETURN"),
        ("", "DROP"),
    ]


def test_apostrophes_in_comments_are_written_as_iptables_save_writes_them() -> None:
    rules = chain(write(*EVERYTHING), "nat", "KUBE-NODE-PORT")
    assert r"with type \'hash ip:port\'\" -m set" in rules.replace('" -m set', r"\" -m set")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, "! -s 10.244.0.0/16 {c} dst,dst"),
        ({"clusterCIDR": ""}, "{c} src,dst"),
        ({"iptables": {"masqueradeAll": True}}, "{c} dst,dst"),
        ({"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}}, "! -i cni0 {c} dst,dst"),
        (
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
            "! -i veth+ {c} dst,dst",
        ),
        ({"detectLocalMode": "NodeCIDR"}, "! -s 10.244.1.0/24 {c} dst,dst"),
    ],
)
def test_traffic_to_cluster_ips_is_masqueraded_unless_it_comes_from_a_pod_of_the_node(
    fields: dict[str, Any], rule: str
) -> None:
    comment = '-m comment --comment "Kubernetes service cluster ip + port for masquerade purpose"'
    wanted = f"-A KUBE-SERVICES {rule.format(c=comment + ' -m set --match-set KUBE-CLUSTER-IP')} -j KUBE-MARK-MASQ"
    assert wanted in chain(write(service(), **fields), "nat", "KUBE-SERVICES").splitlines()


def test_ipv6_has_its_own_loopback_sets_and_reject() -> None:
    rules = file(write(), "ip6tables.rules")
    assert "-A KUBE-SERVICES -s ::1/128 -j RETURN\n" in rules
    assert "--match-set KUBE-6-IPVS-IPS dst -j REJECT --reject-with icmp6-port-unreachable\n" in rules


BASE = {
    "net.ipv4.vs.conntrack": "1",
    "net.ipv4.vs.expire_nodest_conn": "1",
    "net.ipv4.vs.expire_quiescent_template": "1",
    "net.ipv4.ip_forward": "1",
}
NO_CONNTRACK = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}


@pytest.mark.parametrize(
    ("kernel", "strict", "more"),
    [
        (None, False, {}),
        ("3.10.0-1160", False, {}),
        ("4.1.0", False, {"net.ipv4.vs.conn_reuse_mode": "0"}),
        ("5.8.18", False, {"net.ipv4.vs.conn_reuse_mode": "0"}),
        ("5.9.0", False, {}),
        ("6.1.176", True, {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}),
    ],
)
def test_sysctls_follow_the_kernel_and_strict_arp(kernel: str | None, strict: bool, more: dict[str, str]) -> None:
    facts = {"kernel": kernel} if kernel else None
    written = file(write(conntrack=NO_CONNTRACK, ipvs={"strictARP": strict}, facts=facts), "sysctls.conf")
    assert dict(line.split(" = ") for line in written.splitlines()) == {**BASE, **more}


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({}, ""),
        ({"tcpTimeout": "1h", "udpTimeout": "1m30s"}, "timeouts 3600 0 90\n"),
        ({"excludeCIDRs": ["10.1.2.3/16", "fd00::/8"]}, "exclude 10.1.0.0/16\nexclude fd00::/8\n"),
    ],
)
def test_timeouts_and_what_is_left_alone_go_to_a_file_of_their_own(settings: dict[str, Any], written: str) -> None:
    assert file(write(ipvs=settings), "ipvs.conf") == written
