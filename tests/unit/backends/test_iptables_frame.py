"""iptables mode, what every node has whatever its Services: static rules, jumps, sysctls and counters."""

from __future__ import annotations

import re
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State

from tests.unit.build import NO_NFACCT, Object, chain, file, node, render, service, slice_of, text


def lines(state: State, table: str, name: str, family: str = "IPv4") -> list[str]:
    return chain(state, table, name, family).splitlines()


# ------------------------------------------------------------------ jumps

REVERSED = {  # what a virgin chain looks like once each jump has gone to its top
    ("filter", "INPUT"): "KUBE-FIREWALL KUBE-PROXY-FIREWALL KUBE-NODEPORTS KUBE-EXTERNAL-SERVICES",
    ("filter", "FORWARD"): "KUBE-PROXY-FIREWALL KUBE-FORWARD KUBE-SERVICES KUBE-EXTERNAL-SERVICES",
    ("filter", "OUTPUT"): "KUBE-FIREWALL KUBE-PROXY-FIREWALL KUBE-SERVICES",
    ("nat", "PREROUTING"): "KUBE-SERVICES",
    ("nat", "OUTPUT"): "KUBE-SERVICES",
    ("nat", "POSTROUTING"): "KUBE-POSTROUTING",
}


@pytest.mark.parametrize("name", ["iptables.rules", "ip6tables.rules"])
def test_jumps_are_inserted_so_that_a_virgin_chain_has_them_in_kube_proxys_order(name: str) -> None:
    table = ""
    found: dict[tuple[str, str], list[str]] = {}
    for line in file(render(), name).splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif match := re.match(r"-I (\w+) .*-j (\S+)$", line):
            found.setdefault((table, match[1]), []).insert(0, match[2])
    assert {key: " ".join(targets) for key, targets in found.items()} == REVERSED


@pytest.mark.parametrize("name", ["iptables.rules", "ip6tables.rules"])
def test_jumps_for_new_connections_say_so_and_the_firewall_has_no_comment(name: str) -> None:
    jumps = [line for line in file(render(), name).splitlines() if line.startswith("-I")]
    new = {line.split()[-1] for line in jumps if "--ctstate NEW" in line}
    assert new == {"KUBE-EXTERNAL-SERVICES", "KUBE-SERVICES", "KUBE-PROXY-FIREWALL"}
    assert not any("--ctstate" in line for line in jumps if "nat" in line or "KUBE-POSTROUTING" in line)
    assert [line for line in jumps if "KUBE-FIREWALL" in line] == [
        "-I INPUT -j KUBE-FIREWALL",
        "-I OUTPUT -j KUBE-FIREWALL",
    ]


def test_the_canary_is_an_empty_chain_in_three_tables_of_both_families() -> None:
    objects = dict(render().objects())
    assert {key: rules for key, rules in objects.items() if key[-1] == "KUBE-PROXY-CANARY"} == {
        (family, table, "KUBE-PROXY-CANARY"): "" for family in ("IPv4", "IPv6") for table in ("mangle", "filter", "nat")
    }


# ------------------------------------------------------------------ KUBE-FIREWALL, KUBE-FORWARD, masquerading

ANTI_MARTIAN = (
    '-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" '
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, [ANTI_MARTIAN]),
        ({"nodePortAddresses": ["localhost"]}, [ANTI_MARTIAN]),
        ({"iptables": {"localhostNodePorts": False}}, []),
        ({"nodePortAddresses": ["primary"]}, []),
    ],
)
def test_localhost_node_ports_need_protection_from_the_outside(fields: Any, rules: list[str]) -> None:
    state = render(**fields)
    assert lines(state, "filter", "KUBE-FIREWALL") == rules
    # The chain exists and is jumped to in any case, in IPv6 always without a rule.
    assert lines(state, "filter", "KUBE-FIREWALL", "IPv6") == []
    assert file(state, "iptables.rules").count("-j KUBE-FIREWALL") == 2
    assert file(state, "ip6tables.rules").count("-j KUBE-FIREWALL") == 2


INVALID = "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP"
COUNTED = "-A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP"
FORWARD = text("""
    -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
    -A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
""").splitlines()


@pytest.mark.parametrize(
    ("facts", "fields", "first"),
    [
        ({"capabilities": {"nfacct": True}}, {}, [COUNTED]),
        (NO_NFACCT, {}, [INVALID]),
        # whoever set be_liberal: then such packets are fine
        ({"tcpBeLiberal": True}, {}, []),
        ({}, {"conntrack": {"tcpBeLiberal": True}}, []),
        ({"tcpBeLiberal": True, **NO_NFACCT}, {}, []),
    ],
)
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_invalid_packets_are_dropped_unless_conntrack_is_liberal(
    facts: Any, fields: Any, first: list[str], family: str
) -> None:
    assert lines(render(facts=facts, **fields), "filter", "KUBE-FORWARD", family) == first + FORWARD


@pytest.mark.parametrize(("bit", "mark"), [(0, "0x1"), (14, "0x4000"), (31, "0x80000000")])
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_the_masquerade_mark_as_the_kernel_prints_it(bit: int, mark: str, family: str) -> None:
    state = render(iptables={"masqueradeBit": bit})
    assert chain(state, "nat", "KUBE-POSTROUTING", family) == text(f"""
        -A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN
        -A KUBE-POSTROUTING -j MARK --set-xmark {mark}/0x0
        -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
    """)
    assert chain(state, "nat", "KUBE-MARK-MASQ", family) == f"-A KUBE-MARK-MASQ -j MARK --set-xmark {mark}/{mark}\n"
    assert f"-m mark --mark {mark}/{mark} -j ACCEPT" in chain(state, "filter", "KUBE-FORWARD", family)


# ------------------------------------------------------------------ the way to the node ports

TO_NODE_PORTS = '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain"{} -j KUBE-NODEPORTS'
LOCAL = TO_NODE_PORTS.format(" -m addrtype --dst-type LOCAL")
TO_ONE = TO_NODE_PORTS.format("")
INTERFACES: Object = {"addresses": ["127.0.0.1", "::1", "172.18.0.11", "172.18.0.9", "fd00::11", "fe80::1"]}


@pytest.mark.parametrize(
    ("fields", "v4", "v6"),
    [
        ({}, [LOCAL], [f"! -d ::1/128 {LOCAL}"]),
        ({"iptables": {"localhostNodePorts": False}}, [f"! -d 127.0.0.0/8 {LOCAL}"], [f"! -d ::1/128 {LOCAL}"]),
        ({"nodePortAddresses": ["all"]}, [LOCAL], [f"! -d ::1/128 {LOCAL}"]),
        ({"nodePortAddresses": ["primary"]}, [f"-d 172.18.0.11/32 {TO_ONE}"], [f"-d fd00::11/128 {TO_ONE}"]),
        # loopback only where localhostNodePorts wants it, and never in IPv6
        ({"nodePortAddresses": ["localhost"]}, [f"-d 127.0.0.1/32 {TO_ONE}"], []),
        ({"nodePortAddresses": ["localhost"], "iptables": {"localhostNodePorts": False}}, [], []),
        (
            {"nodePortAddresses": ["172.18.0.0/16", "fe80::/10", "127.0.0.0/8"]},
            [f"-d {ip}/32 {TO_ONE}" for ip in ("127.0.0.1", "172.18.0.11", "172.18.0.9")],
            [f"-d fe80::1/128 {TO_ONE}"],
        ),
        ({"nodePortAddresses": ["192.0.2.0/24", "2001:db8::/32"]}, [], []),
    ],
)
def test_the_last_rule_of_kube_services_leads_to_the_node_ports(fields: Any, v4: list[str], v6: list[str]) -> None:
    state = render(node("n1", "172.18.0.11", "fd00::11"), facts=INTERFACES, **fields)
    assert lines(state, "nat", "KUBE-SERVICES") == [f"-A KUBE-SERVICES {rule}" for rule in v4]
    assert lines(state, "nat", "KUBE-SERVICES", "IPv6") == [f"-A KUBE-SERVICES {rule}" for rule in v6]


def test_it_comes_after_every_service() -> None:
    state = render(service(), slice_of("web", "10.244.1.1"))
    assert [line.split(" -j ")[1] for line in lines(state, "nat", "KUBE-SERVICES")] == [
        "KUBE-SVC-67NZLRHBNDSAWJRO",
        "KUBE-NODEPORTS",
    ]


def test_interface_addresses_are_part_of_the_state_only_where_rules_depend_on_them() -> None:
    moved = {"addresses": ["172.18.0.11", "198.51.100.77"]}
    stays = {"addresses": ["172.18.0.11"]}
    assert render(facts=moved).generation == render(facts=stays).generation
    by_interface: Object = {"nodePortAddresses": ["0.0.0.0/1", "128.0.0.0/1"]}
    assert render(facts=moved, **by_interface).generation != render(facts=stays, **by_interface).generation


# ------------------------------------------------------------------ rule counts of an empty and a small cluster


@pytest.mark.parametrize(
    ("endpoints", "filter_rules", "nat_rules"), [(None, 4, 5), (0, 5, 5), (1, 4, 10), (2, 4, 13), (10, 4, 37)]
)
def test_how_many_rules_a_cluster_ip_costs(endpoints: int | None, filter_rules: int, nat_rules: int) -> None:
    objects = [] if endpoints is None else [service()]
    if endpoints:
        objects.append(slice_of("web", *(f"10.244.1.{i}" for i in range(1, endpoints + 1))))
    rules = {"filter": 0, "nat": 0, "mangle": 0}
    for (family, *rest), text_ in render(*objects).objects():
        if family == "IPv4":
            rules[rest[0]] += text_.count("\n")
    # a dispatch and a masquerade rule, and three more per endpoint: chosen, hairpin, DNAT
    assert rules == {"filter": filter_rules, "nat": nat_rules, "mangle": 0}


# ------------------------------------------------------------------ sysctls and counters


@pytest.mark.parametrize(
    ("conntrack", "cpu", "expected"),
    [
        ({}, "2", "131072"),  # the minimum
        ({}, "8", "262144"),  # 8 x 32768
        ({"min": 300000}, "8", "300000"),
        ({"maxPerCore": 1}, "8", "131072"),
        ({"maxPerCore": 1, "min": 0}, "8", "8"),
        ({}, "64", "1048576"),  # the limit
        ({"min": 2000000}, "64", "1048576"),  # even then
        ({"min": 2000000}, "8", "2000000"),
        ({"maxPerCore": 0}, "8", None),
        ({}, "7910m", None),  # how many cores there are is not known
    ],
)
def test_the_size_of_the_conntrack_table_follows_the_cores(conntrack: Any, cpu: str, expected: str | None) -> None:
    found = re.search(r"nf_conntrack_max = (\d+)", file(render(node(cpu=cpu), conntrack=conntrack), "sysctls.conf"))
    assert (found and found[1]) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            """
            net.netfilter.nf_conntrack_max = 131072
            net.netfilter.nf_conntrack_tcp_timeout_established = 86400
            net.netfilter.nf_conntrack_tcp_timeout_close_wait = 3600
            net.ipv4.conf.all.route_localnet = 1
            """,
        ),
        (
            {"nodePortAddresses": ["primary"], "conntrack": {"maxPerCore": 0, "tcpCloseWaitTimeout": "0s"}},
            """
            net.netfilter.nf_conntrack_tcp_timeout_established = 86400
            """,
        ),
        (
            {
                "iptables": {"localhostNodePorts": False},
                "conntrack": {
                    "maxPerCore": 0,
                    "tcpEstablishedTimeout": "0s",
                    "tcpCloseWaitTimeout": "0s",
                    "tcpBeLiberal": True,
                    "udpTimeout": "30s",
                    "udpStreamTimeout": "3m",
                },
            },
            """
            net.netfilter.nf_conntrack_udp_timeout = 30
            net.netfilter.nf_conntrack_udp_timeout_stream = 180
            net.netfilter.nf_conntrack_tcp_be_liberal = 1
            """,
        ),
        ({"iptables": {"localhostNodePorts": False}, "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}}, ""),
    ],
)  # fmt: skip
def test_sysctls_are_those_of_the_configuration(fields: Any, expected: str) -> None:
    assert file(render(**fields), "sysctls.conf") == "".join(
        line.strip() + "\n" for line in expected.split("\n") if line.strip()
    )


def test_counters_exist_where_the_kernel_can_count() -> None:
    assert file(render(), "nfacct.rules") == "ct_state_invalid_dropped_pkts\nlocalhost_nps_accepted_pkts\n"
    assert file(render(facts=NO_NFACCT), "nfacct.rules") == ""
    assert "nfacct" not in file(render(facts=NO_NFACCT), "iptables.rules")


def test_a_node_without_ipv6_gets_no_ipv6_file() -> None:
    names = dict.fromkeys(key[0] for key, _ in render(facts={"capabilities": {"ipv6": False}}).objects())
    assert set(names) == {"IPv4", "file"}
