"""Small texts of rules, and where packets end in them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from agentless_kube_proxy.addresses import Family
from agentless_kube_proxy.explain.packet import End, Origin, Packet, Verdict
from agentless_kube_proxy.explain.ruleset import NoRules, Ruleset

NODE = frozenset({"172.18.0.11"})


def walked(files: dict[str, str], to: str = "10.96.0.1", source: str = "10.244.1.5", **fields: object) -> Verdict:
    """What becomes of a packet to port 80."""
    origin = fields.pop("origin", Origin.NODE if source in NODE else Origin.OUTSIDE)
    packet = Packet(source, to, 80, "tcp", origin, **fields)  # type: ignore[arg-type]
    return Ruleset(files).walker(Family.IPV4, NODE).walk(packet)


IPTABLES = """\
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SEP-1 - [0:0]
:KUBE-SEP-2 - [0:0]
-A PREROUTING -m comment --comment "portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "shop/web \\"quoted\\" cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SVC-A ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-1
-A KUBE-SVC-A -j KUBE-SEP-2
-A KUBE-SEP-1 -s 10.244.1.1/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-1 -p tcp -m tcp -j DNAT --to-destination 10.244.1.1:8080
-A KUBE-SEP-2 -s 10.244.2.1/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-2 -p tcp -m tcp -j DNAT --to-destination 10.244.2.1:8080
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES
-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A KUBE-SERVICES -d 10.96.0.2/32 -p tcp -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
-A KUBE-SERVICES -d 10.96.0.3/32 -p tcp -m tcp --dport 80 -j DROP
-A KUBE-EXTERNAL-SERVICES -p tcp -m addrtype --dst-type LOCAL -m tcp --dport 80 -j DROP
COMMIT
"""


@pytest.mark.parametrize(
    ("to", "source", "end", "masked"),
    [
        ("10.96.0.1", "10.244.1.5", End.DELIVERED, set()),
        ("10.96.0.1", "192.0.2.1", End.DELIVERED, {"10.244.1.1:8080", "10.244.2.1:8080"}),
        ("10.96.0.1", "172.18.0.11", End.DELIVERED, {"10.244.1.1:8080", "10.244.2.1:8080"}),
        ("10.96.0.1", "10.244.1.1", End.DELIVERED, {"10.244.1.1:8080"}),
        ("10.96.0.2", "10.244.1.5", End.REFUSED, set()),
        ("10.96.0.3", "10.244.1.5", End.DROPPED, set()),
        ("172.18.0.11", "192.0.2.1", End.DROPPED, set()),
        ("10.96.0.9", "10.244.1.5", End.PASSED, set()),
    ],
)
def test_iptables(to: str, source: str, end: End, masked: set[str]) -> None:
    verdict = walked({"iptables.rules": IPTABLES}, to, source)
    assert verdict.end is end
    assert {each for each, replaced in verdict.masquerades.items() if replaced} == masked
    if end is End.DELIVERED:
        assert verdict.shares == {"10.244.1.1:8080": Fraction(1, 2), "10.244.2.1:8080": Fraction(1, 2)}


def test_the_rules_on_the_way_are_told_in_order() -> None:
    (first, _second) = walked({"iptables.rules": IPTABLES}).paths
    assert [step.place for step in first.steps] == [
        "nat PREROUTING",
        "nat KUBE-SERVICES",
        "nat KUBE-SVC-A",
        "nat KUBE-SEP-1",
        "filter FORWARD",
        "nat POSTROUTING",
        "nat KUBE-POSTROUTING",
    ]


def test_a_rule_that_is_not_known_is_named_and_passed_over() -> None:
    text = IPTABLES.replace("-A KUBE-SVC-A -j KUBE-SEP-2", "-A KUBE-SVC-A -m time --datestop 2026 -j KUBE-SEP-2")
    verdict = walked({"iptables.rules": text})
    assert verdict.skipped == ("nat KUBE-SVC-A -m time --datestop 2026 -j KUBE-SEP-2",)
    assert verdict.lost == Fraction(1, 2)


@pytest.mark.parametrize(
    ("written", "chance"),
    [
        ("0.33333333349", Fraction(1, 3)),
        ("0.50000000000", Fraction(1, 2)),
        ("0.25", Fraction(1, 4)),
        ("0.3", Fraction("0.3")),
    ],
)
def test_probabilities_are_the_fractions_that_are_meant(written: str, chance: Fraction) -> None:
    verdict = walked({"iptables.rules": IPTABLES.replace("0.50000000000", written)})
    assert verdict.shares["10.244.1.1:8080"] == chance
    assert sum(verdict.shares.values()) == 1


# What nft list prints, and commands that make the same.
LISTED = """\
table ip kube-proxy {
    comment "rules for kube-proxy"

    set cluster-ips {
        type ipv4_addr
        elements = { 10.96.0.1, 10.96.0.2,
                 10.96.0.4 }
    }

    set affinity-x {
        type ipv4_addr
        flags dynamic,timeout
        timeout 3h
        elements = { 10.244.9.9 timeout 3h expires 2h59m }
    }

    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.1 . tcp . 80 : goto service-web,
                 10.96.0.4 . tcp . 80 : goto sticky }
    }

    map no-endpoint-services {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.2 . tcp . 80 comment "shop/empty, really" : goto reject-chain }
    }

    chain nat-prerouting {
        type nat hook prerouting priority dstnat; policy accept;
        jump services
    }

    chain nat-postrouting {
        type nat hook postrouting priority srcnat; policy accept;
        meta mark & 0x00004000 != 0x00000000 meta mark set meta mark ^ 0x00004000 masquerade fully-random
    }

    chain filter-forward {
        type filter hook forward priority filter - 10; policy accept;
        ct state new ip daddr . meta l4proto . th dport vmap @no-endpoint-services
    }

    chain services {
        ip daddr @cluster-ips ip saddr != 10.244.0.0/16 meta mark set meta mark | 0x00004000
        ip daddr . meta l4proto . th dport vmap @service-ips
    }

    chain service-web {
        meta l4proto tcp dnat ip addr . port to numgen random mod 2 map { 0 : 10.244.1.1 . 8080, 1 : 10.244.2.1 . 8080 }
    }

    chain sticky {
        ip saddr @affinity-x goto endpoint-1
        numgen random mod 1 vmap { 0 : goto endpoint-2 }
    }

    chain endpoint-1 {
        update @affinity-x { ip saddr }
        meta l4proto tcp dnat to 10.244.1.1:8080
    }

    chain endpoint-2 {
        meta l4proto tcp dnat to 10.244.2.1:8080
    }

    chain reject-chain {
        reject with icmp port-unreachable
    }
}
"""


@pytest.mark.parametrize(
    ("to", "source", "end", "shares", "masked"),
    [
        ("10.96.0.1", "10.244.1.5", End.DELIVERED, {"10.244.1.1:8080", "10.244.2.1:8080"}, False),
        ("10.96.0.1", "192.0.2.1", End.DELIVERED, {"10.244.1.1:8080", "10.244.2.1:8080"}, True),
        ("10.96.0.2", "10.244.1.5", End.REFUSED, set(), False),
        ("10.96.0.3", "10.244.1.5", End.PASSED, set(), False),
        ("10.96.0.4", "10.244.1.5", End.DELIVERED, {"10.244.2.1:8080"}, False),
        ("10.96.0.4", "10.244.9.9", End.DELIVERED, {"10.244.1.1:8080"}, False),
    ],
)
def test_nft_as_it_is_listed(to: str, source: str, end: End, shares: set[str], masked: bool) -> None:
    verdict = walked({"nftables.nft": LISTED}, to, source)
    assert (verdict.end, set(verdict.shares)) == (end, shares)
    assert any(verdict.masquerades.values()) is masked
    assert not verdict.skipped


def test_a_chain_of_an_earlier_priority_comes_first() -> None:
    rules = """\
add table ip kube-proxy { comment "x" ; }
add chain ip kube-proxy late { type filter hook forward priority 0 ; }
add chain ip kube-proxy early { type filter hook forward priority -110 ; }
add rule ip kube-proxy late reject
add rule ip kube-proxy early drop
"""
    assert walked({"nftables.nft": rules}).end is End.DROPPED


IPVS = {
    "iptables.rules": """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES ! -s 10.244.0.0/16 -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
COMMIT
*filter
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A INPUT -j KUBE-IPVS-FILTER
-A OUTPUT -j KUBE-IPVS-OUT-FILTER
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
-A KUBE-IPVS-OUT-FILTER -s 10.96.0.4/32 -m ipvs --vproto 6 --vaddr 10.96.0.4 --vport 80 -j DROP
COMMIT
""",
    "ipset.rules": """\
create KUBE-CLUSTER-IP hash:ip,port family inet
create KUBE-LOOP-BACK hash:ip,port,ip family inet
create KUBE-IPVS-IPS hash:ip family inet
add KUBE-CLUSTER-IP 10.96.0.1,tcp:80
add KUBE-CLUSTER-IP 10.96.0.2,tcp:80
add KUBE-CLUSTER-IP 10.96.0.4,tcp:80
add KUBE-LOOP-BACK 10.244.1.1,tcp:8080,10.244.1.1
add KUBE-IPVS-IPS 10.96.0.1
add KUBE-IPVS-IPS 10.96.0.2
add KUBE-IPVS-IPS 10.96.0.3
add KUBE-IPVS-IPS 10.96.0.4
""",
    "ipvs.rules": """\
-A -t 10.96.0.1:80 -s wrr
-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 1
-a -t 10.96.0.1:80 -r 10.244.2.1:8080 -m -w 3
-a -t 10.96.0.1:80 -r 10.244.3.1:8080 -m -w 0
-A -t 10.96.0.2:80 -s rr
-A -t 10.96.0.4:80 -s rr
-a -t 10.96.0.4:80 -r 10.244.2.1:8080 -m -w 1
""",
    "ip.batch": "".join(f"addr add 10.96.0.{last}/32 dev kube-ipvs0\n" for last in (1, 2, 3, 4)),
}


@pytest.mark.parametrize(
    ("to", "source", "end", "masked"),
    [
        ("10.96.0.1", "10.244.1.5", End.DELIVERED, set()),
        ("10.96.0.1", "10.244.1.1", End.DELIVERED, {"10.244.1.1:8080"}),
        ("10.96.0.1", "192.0.2.1", End.DELIVERED, {"10.244.1.1:8080", "10.244.2.1:8080"}),
        ("10.96.0.2", "10.244.1.5", End.REFUSED, set()),  # a virtual server without real ones
        ("10.96.0.3", "10.244.1.5", End.REFUSED, set()),  # a Service's address, but no port of it
        ("10.96.0.9", "10.244.1.5", End.PASSED, set()),
    ],
)
def test_ipvs(to: str, source: str, end: End, masked: set[str]) -> None:
    verdict = walked(IPVS, to, source)
    assert verdict.end is end
    assert {each for each, replaced in verdict.masquerades.items() if replaced} == masked
    if end is End.DELIVERED:
        # A real server of weight 0 drains: it gets no new connection.
        assert verdict.shares == {"10.244.1.1:8080": Fraction(1, 4), "10.244.2.1:8080": Fraction(3, 4)}


def test_what_the_node_sends_passes_the_filter_of_output_behind_ip_vs() -> None:
    assert walked(IPVS, "10.96.0.4", "10.96.0.4", origin=Origin.NODE).end is End.DROPPED
    assert walked(IPVS, "10.96.0.4", "172.18.0.11").end is End.DELIVERED


def test_addresses_of_the_device_as_ip_prints_them() -> None:
    listed = (
        "5: kube-ipvs0    inet 10.96.0.1/32 scope global kube-ipvs0\\       valid_lft forever preferred_lft forever\n"
    )
    assert Ruleset({"ip.batch": listed}).bound() == {"10.96.0.1"}


def test_texts_without_rules_are_refused() -> None:
    with pytest.raises(NoRules, match="no rules of iptables"):
        Ruleset({}).walker(Family.IPV4, NODE)
