"""iptables mode, what a Service adds: each test is one statement about its packets, and the rules that make it true."""

from __future__ import annotations

import re
from typing import Any

import pytest
from agentless_kube_proxy.backends.iptables import _probability
from agentless_kube_proxy.backends.state import State

from tests.unit.build import Object, chain, dual_stack, endpoint, file, node, port, render, service, slice_of, text

H = "67NZLRHBNDSAWJRO"  # shop/web:http tcp
SVC, SVL, EXT, FW = (f"KUBE-{kind}-{H}" for kind in ("SVC", "SVL", "EXT", "FW"))
HERE, AWAY = endpoint("10.244.1.1"), endpoint("10.244.2.1", node="n2")
SEP_HERE, SEP_AWAY = "KUBE-SEP-3B5XO7OSMV7VPARF", "KUBE-SEP-OA26CPEPWTDPMPAE"
NODE_PORT: Object = {"ports": [port(nodePort=30080)]}
LOAD_BALANCER: Object = {"type": "LoadBalancer", "ingress": ("198.51.100.9",)}
EXT_LOCAL: Object = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
EVERYWHERE: Object = {**NODE_PORT, **LOAD_BALANCER, "externalIPs": ["192.0.2.1"]}


def web(*endpoints: Any, on: str = "n1", config: Any = None, facts: Any = None, **spec: Any) -> State:
    """The state of a node in a cluster with the Service shop/web and these endpoints."""
    slices = [slice_of("web", *endpoints)] if endpoints else []
    return render(service(**spec), *slices, on=on, facts=facts, **(config or {}))


def mentioning(state: State, *words: str, family: str = "IPv4") -> list[str]:
    """All rules that contain one of the words, file order."""
    name = "iptables.rules" if family == "IPv4" else "ip6tables.rules"
    return [line for line in file(state, name).splitlines() if line.startswith("-A") and any(w in line for w in words)]


def chains(state: State, family: str = "IPv4") -> list[str]:
    """The Service's own chains."""
    return [name for (fam, *rest), _ in state.objects() if fam == family for name in rest[1:] if re.match(r"KUBE-(SV|EXT-|FW-|SEP-)", name) and name not in ("KUBE-SERVICES",)]  # fmt: skip


def targets(state: State, table: str, name: str, family: str = "IPv4") -> list[str]:
    return [rule.partition(" -j ")[2] for rule in chain(state, table, name, family).splitlines()]


# ------------------------------------------------------------------ where packets go


def test_a_cluster_ip_with_endpoints() -> None:
    state = web(HERE, AWAY)
    assert chains(state) == [SVC, SEP_HERE, SEP_AWAY]
    assert chain(state, "nat", SVC) == text(f"""
        -A {SVC} ! -s 10.244.0.0/16 -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.1.1:8080" -m statistic --mode random --probability 0.50000000000 -j {SEP_HERE}
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.2.1:8080" -j {SEP_AWAY}
    """)


def test_connections_from_an_endpoint_to_itself_are_masqueraded_also_for_endpoints_elsewhere() -> None:
    state = web(AWAY)
    assert chain(state, "nat", SEP_AWAY) == text(f"""
        -A {SEP_AWAY} -s 10.244.2.1/32 -m comment --comment "shop/web:http" -j KUBE-MARK-MASQ
        -A {SEP_AWAY} -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.2.1:8080
    """)


def test_without_endpoints_every_destination_is_rejected_and_nothing_is_dispatched() -> None:
    state = web(**EVERYWHERE)
    reject = "REJECT --reject-with icmp-port-unreachable"
    assert (
        mentioning(state, "shop/web")
        == text(f"""
        -A KUBE-SERVICES -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http has no endpoints" -m tcp --dport 80 -j {reject}
        -A KUBE-EXTERNAL-SERVICES -d 192.0.2.1/32 -p tcp -m comment --comment "shop/web:http has no endpoints" -m tcp --dport 80 -j {reject}
        -A KUBE-EXTERNAL-SERVICES -d 198.51.100.9/32 -p tcp -m comment --comment "shop/web:http has no endpoints" -m tcp --dport 80 -j {reject}
        -A KUBE-EXTERNAL-SERVICES -p tcp -m comment --comment "shop/web:http has no endpoints" -m addrtype --dst-type LOCAL -m tcp --dport 30080 -j {reject}
    """).splitlines()
    )
    assert chains(state) == []


def test_every_external_destination_leads_to_one_chain() -> None:
    state = web(HERE, **EVERYWHERE)
    assert targets(state, "nat", "KUBE-SERVICES") == [SVC, EXT, EXT, "KUBE-NODEPORTS"]
    assert targets(state, "nat", "KUBE-NODEPORTS") == [EXT, EXT]
    assert chain(state, "nat", EXT) == text(f"""
        -A {EXT} -m comment --comment "masquerade traffic for shop/web:http external destinations" -j KUBE-MARK-MASQ
        -A {EXT} -j {SVC}
    """)


def test_external_ips_and_load_balancer_addresses_keep_the_order_and_duplicates_of_the_api() -> None:
    state = web(HERE, externalIPs=["192.0.2.9", "192.0.2.1", "192.0.2.9"], ingress=("198.51.100.9", "198.51.100.1"))
    assert re.findall(r"-d (\S+)/32 .*(?:external IP|loadbalancer IP)", chain(state, "nat", "KUBE-SERVICES")) == [
        "192.0.2.9",
        "192.0.2.1",
        "192.0.2.9",
        "198.51.100.9",
        "198.51.100.1",
    ]


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_type_of_a_service_does_not_matter_for_its_node_ports_and_addresses(kind: str) -> None:
    rules = mentioning(web(HERE, **{**EVERYWHERE, "type": kind}), "shop/web")
    assert rules == mentioning(web(HERE, **EVERYWHERE), "shop/web")


def test_addresses_that_a_load_balancer_proxies_are_ignored_everywhere() -> None:
    proxied: Object = {"ingress": ({"ip": "198.51.100.9", "ipMode": "Proxy"},), "type": "LoadBalancer"}
    udp: Object = {"ports": [port(53, "http", "UDP")]}
    slices = slice_of("web", HERE, ports=[port(53, "http", "UDP")])
    state = render(service(**proxied, **udp, loadBalancerSourceRanges=["192.0.2.0/24"]), slices)
    assert not mentioning(state, "198.51.100.9", "KUBE-FW", "KUBE-EXT-")
    assert "198.51.100.9" not in file(state, "conntrack.udp")


def test_an_address_with_leading_zeros_is_decimal() -> None:
    state = render(
        service(clusterIP="172.30.0.041", externalIPs=["192.168.099.022"], ingress=("1.2.03.4",), loadBalancerSourceRanges=["0203.0.113.000/025"]),
        slice_of("web", "10.180.00.001"),
    )  # fmt: skip
    rules = file(state, "iptables.rules")
    for address in ("172.30.0.41/32", "192.168.99.22/32", "1.2.3.4/32", "203.0.113.0/25", "10.180.0.1:8080"):
        assert address in rules
    assert not re.search(r"\b0\d", re.sub(r"generation.*|GEN-.*", "", rules))


def test_both_families_of_a_service_have_chains_of_the_same_name() -> None:
    state = render(dual_stack(), slice_of("web", "10.244.1.1"), slice_of("web", "fd00:10:244:1::1"))
    assert chains(state, "IPv4")[0] == chains(state, "IPv6")[0] == SVC
    assert "-d fd00:10:96::77/128" in chain(state, "nat", "KUBE-SERVICES", "IPv6")
    assert "-d 10.96.7.7/32" in chain(state, "nat", "KUBE-SERVICES", "IPv4")


def test_of_two_services_that_claim_one_address_only_that_which_has_it_is_written() -> None:
    a, b = (service(name, clusterIP=f"10.96.0.{i}", externalIPs=["192.0.2.1"]) for i, name in enumerate(("a", "b"), 1))
    for objects in ((a, b), (b, a)):
        state = render(*objects, slice_of("a", "10.244.1.1"), slice_of("b", "10.244.1.2"))
        claims = [rule for rule in chain(state, "nat", "KUBE-SERVICES").splitlines() if "192.0.2.1" in rule]
        assert [re.search(r'"(\S+) external IP"', rule)[1] for rule in claims] == ["shop/a:http"]  # type: ignore[index]


# ------------------------------------------------------------------ externalTrafficPolicy: Local


def test_policy_local_keeps_the_source_address_of_clients_outside_and_sends_them_to_this_nodes_pods() -> None:
    state = web(HERE, AWAY, **EXT_LOCAL, **NODE_PORT)
    assert chain(state, "nat", EXT) == text(f"""
        -A {EXT} -s 10.244.0.0/16 -m comment --comment "pod traffic for shop/web:http external destinations" -j {SVC}
        -A {EXT} -m comment --comment "masquerade LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
        -A {EXT} -m comment --comment "route LOCAL traffic for shop/web:http external destinations" -m addrtype --src-type LOCAL -j {SVC}
        -A {EXT} -j {SVL}
    """)
    assert targets(state, "nat", SVC) == ["KUBE-MARK-MASQ", SEP_HERE, SEP_AWAY]
    assert targets(state, "nat", SVL) == [SEP_HERE]
    assert not mentioning(state, "has no")


def test_policy_local_without_a_local_endpoint_drops_clients_outside_but_still_serves_pods_and_the_node() -> None:
    state = web(AWAY, **EXT_LOCAL, **NODE_PORT, externalIPs=["192.0.2.1"])
    assert targets(state, "filter", "KUBE-EXTERNAL-SERVICES") == ["DROP", "DROP"]
    assert "has no local endpoints" in chain(state, "filter", "KUBE-EXTERNAL-SERVICES")
    # The chain stays, and so do the rules that lead to it; only its last rule is missing.
    assert targets(state, "nat", EXT) == [SVC, "KUBE-MARK-MASQ", SVC]
    assert targets(state, "nat", "KUBE-NODEPORTS") == [EXT, EXT]
    assert targets(state, "nat", "KUBE-SERVICES") == [SVC, EXT, "KUBE-NODEPORTS"]
    assert chains(state) == [SVC, EXT, SEP_AWAY]


def test_policy_local_with_no_endpoint_anywhere_rejects() -> None:
    state = web(**EXT_LOCAL, **NODE_PORT)
    assert [target.split()[0] for target in targets(state, "filter", "KUBE-EXTERNAL-SERVICES")] == ["REJECT"]
    assert chains(state) == []


def test_policy_local_is_ignored_on_a_cluster_ip_without_external_ips() -> None:
    plain, local = web(AWAY), web(AWAY, externalTrafficPolicy="Local")
    assert plain.generation == local.generation


def test_external_ips_of_the_other_family_do_not_make_this_family_reachable() -> None:
    state = web(AWAY, externalTrafficPolicy="Local", externalIPs=["2001:db8::1"])
    assert chains(state) == [SVC, SEP_AWAY]
    assert not mentioning(state, "has no")


def test_terminating_local_endpoints_serve_until_others_are_there() -> None:
    going = endpoint("10.244.1.1", ready=False, serving=True, terminating=True)
    state = web(going, AWAY, **EXT_LOCAL, **NODE_PORT)
    assert targets(state, "nat", SVL) == [SEP_HERE]
    assert targets(state, "nat", SVC) == ["KUBE-MARK-MASQ", SEP_AWAY]
    assert chains(state) == [SVC, SVL, EXT, SEP_HERE, SEP_AWAY]


def test_hints_never_take_the_local_endpoints_chain_away() -> None:
    hinted = [endpoint("10.244.1.1", zones=("b",)), endpoint("10.244.2.1", node="n2", zones=("a",))]
    state = render(service(**EXT_LOCAL, **NODE_PORT), slice_of("web", *hinted), node("n1", zone="a"))
    assert targets(state, "nat", SVC) == ["KUBE-MARK-MASQ", SEP_AWAY]
    assert targets(state, "nat", SVL) == [SEP_HERE]
    assert chains(state) == [SVC, SVL, EXT, SEP_HERE, SEP_AWAY]


# ------------------------------------------------------------------ internalTrafficPolicy: Local


def test_internal_policy_local_serves_the_cluster_ip_from_this_node_alone() -> None:
    state = web(HERE, AWAY, internalTrafficPolicy="Local")
    assert targets(state, "nat", "KUBE-SERVICES") == [SVL, "KUBE-NODEPORTS"]
    # The masquerade rule is on the chain that is used.
    assert targets(state, "nat", SVL) == ["KUBE-MARK-MASQ", SEP_HERE]
    assert chains(state) == [SVL, SEP_HERE]


def test_internal_policy_local_leaves_external_traffic_alone() -> None:
    state = web(HERE, AWAY, internalTrafficPolicy="Local", **NODE_PORT)
    assert targets(state, "nat", SVL) == ["KUBE-MARK-MASQ", SEP_HERE]
    assert targets(state, "nat", SVC) == [SEP_HERE, SEP_AWAY]
    assert targets(state, "nat", EXT) == ["KUBE-MARK-MASQ", SVC]


@pytest.mark.parametrize(
    ("endpoints", "verdict"),
    [
        ([AWAY], '"shop/web:http has no local endpoints" -m tcp --dport 80 -j DROP'),
        ([endpoint("10.244.2.1", node="n2", ready=False, terminating=True)], '"shop/web:http has no local endpoints" -m tcp --dport 80 -j DROP'),
        ([endpoint("10.244.2.1", node="n2", ready=False)], '"shop/web:http has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable'),
        ([], '"shop/web:http has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable'),
    ],
)  # fmt: skip
def test_internal_policy_local_drops_where_another_node_could_serve_and_rejects_where_none_can(
    endpoints: Any, verdict: str
) -> None:
    state = web(*endpoints, internalTrafficPolicy="Local")
    assert (
        chain(state, "filter", "KUBE-SERVICES")
        == f"-A KUBE-SERVICES -d 10.96.7.7/32 -p tcp -m comment --comment {verdict}\n"
    )
    assert chains(state) == []
    assert targets(state, "nat", "KUBE-SERVICES") == ["KUBE-NODEPORTS"]


# ------------------------------------------------------------------ detecting local pods, masquerading

MODES = [
    ({}, "! -s 10.244.0.0/16 -d 10.96.7.7/32", "-s 10.244.0.0/16"),
    ({"detectLocalMode": "NodeCIDR"}, "! -s 10.244.1.0/24 -d 10.96.7.7/32", "-s 10.244.1.0/24"),
    (
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}},
        "-d 10.96.7.7/32 ! -i cbr0",
        "-i cbr0",
    ),
    (
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
        "-d 10.96.7.7/32 ! -i veth+",
        "-i veth+",
    ),
]


@pytest.mark.parametrize(("config", "unless_local", "if_local"), MODES)
def test_traffic_to_the_cluster_ip_is_masqueraded_unless_it_comes_from_a_pod(
    config: Any, unless_local: str, if_local: str
) -> None:
    state = web(HERE, config=config, **EXT_LOCAL, **NODE_PORT)
    assert chain(state, "nat", SVC).splitlines()[0] == (
        f'-A {SVC} {unless_local} -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ'
    )
    assert chain(state, "nat", EXT).splitlines()[0] == (
        f'-A {EXT} {if_local} -m comment --comment "pod traffic for shop/web:http external destinations" -j {SVC}'
    )


def test_where_local_pods_cannot_be_told_the_rules_that_need_it_are_left_out() -> None:
    state = web(HERE, config={"clusterCIDR": "fd00:10:244::/56"}, **EXT_LOCAL, **NODE_PORT)
    assert targets(state, "nat", SVC) == [SEP_HERE]
    assert targets(state, "nat", EXT) == ["KUBE-MARK-MASQ", SVC, SVL]


@pytest.mark.parametrize("config", [{}, {"clusterCIDR": ""}, MODES[2][0]])
def test_masquerade_all_asks_for_no_source(config: Any) -> None:
    state = web(HERE, config={**config, "iptables": {"masqueradeAll": True}})
    assert chain(state, "nat", SVC).splitlines()[0] == (
        f'-A {SVC} -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ'
    )


# ------------------------------------------------------------------ source ranges


def test_sources_outside_the_ranges_are_dropped_at_the_load_balancer_address() -> None:
    state = web(HERE, **LOAD_BALANCER, loadBalancerSourceRanges=["203.0.113.0/24", "192.0.2.0/25"])
    assert targets(state, "nat", "KUBE-SERVICES") == [SVC, FW, "KUBE-NODEPORTS"]
    assert chain(state, "nat", FW) == text(f"""
        -A {FW} -s 203.0.113.0/24 -m comment --comment "shop/web:http loadbalancer IP" -j {EXT}
        -A {FW} -s 192.0.2.0/25 -m comment --comment "shop/web:http loadbalancer IP" -j {EXT}
        -A {FW} -m comment --comment "other traffic to shop/web:http will be dropped by KUBE-PROXY-FIREWALL"
    """)
    assert chain(state, "filter", "KUBE-PROXY-FIREWALL") == (
        f'-A KUBE-PROXY-FIREWALL -d 198.51.100.9/32 -p tcp -m comment --comment "shop/web:http traffic not accepted by {FW}" -m tcp --dport 80 -j DROP\n'
    )


def test_a_node_within_the_ranges_may_call_the_address_that_it_calls_from() -> None:
    both: Object = {"type": "LoadBalancer", "ingress": ("198.51.100.9", "198.51.100.8")}
    state = web(HERE, **both, loadBalancerSourceRanges=["172.18.0.0/16"])
    sources = re.findall(r"-s (\S+)", chain(state, "nat", FW))
    assert sources == ["172.18.0.0/16", "198.51.100.9/32", "198.51.100.8/32"]
    assert targets(state, "filter", "KUBE-PROXY-FIREWALL") == ["DROP", "DROP"]


def test_whether_a_node_is_within_the_ranges_is_its_own_affair() -> None:
    objects = [service(**LOAD_BALANCER, loadBalancerSourceRanges=["172.18.0.11/32"]), slice_of("web", HERE)]
    nodes = [node("n1", "172.18.0.11"), node("n2", "172.18.0.12")]
    n1, n2 = (render(*objects, *nodes, on=name) for name in ("n1", "n2"))
    assert len(chain(n1, "nat", FW).splitlines()) == 3
    assert len(chain(n2, "nat", FW).splitlines()) == 2


def test_source_ranges_say_nothing_about_node_ports_and_external_ips() -> None:
    state = web(HERE, **EVERYWHERE, loadBalancerSourceRanges=["203.0.113.0/24"])
    assert targets(state, "nat", "KUBE-SERVICES") == [SVC, EXT, FW, "KUBE-NODEPORTS"]
    assert targets(state, "nat", "KUBE-NODEPORTS") == [EXT, EXT]


@pytest.mark.parametrize(
    ("fields", "endpoints"),
    [
        ({**LOAD_BALANCER, "loadBalancerSourceRanges": ["203.0.113.0/24", "0.0.0.0/0"]}, [HERE]),
        ({**LOAD_BALANCER, "loadBalancerSourceRanges": ["fd00::/8"]}, [HERE]),
        ({**NODE_PORT, "loadBalancerSourceRanges": ["203.0.113.0/24"]}, [HERE]),
        # nobody to protect: the address is rejected anyway
        ({**LOAD_BALANCER, "loadBalancerSourceRanges": ["203.0.113.0/24"]}, []),
    ],
    ids=["a range for everybody", "ranges of the other family", "no load balancer address", "no endpoints"],
)
def test_where_there_is_no_firewall(fields: Any, endpoints: Any) -> None:
    state = web(*endpoints, **fields)
    assert FW not in chains(state)
    assert chain(state, "filter", "KUBE-PROXY-FIREWALL") == ""


def test_an_address_that_is_external_ip_and_load_balancer_address_gets_past_the_firewall() -> None:
    state = web(HERE, **LOAD_BALANCER, externalIPs=["198.51.100.9"], loadBalancerSourceRanges=["203.0.113.0/24"])
    assert targets(state, "nat", "KUBE-SERVICES") == [SVC, EXT, FW, "KUBE-NODEPORTS"]


# ------------------------------------------------------------------ node ports and health checks


def test_a_node_port_on_localhost_is_counted_where_the_kernel_can_count() -> None:
    state = web(HERE, **NODE_PORT)
    assert chain(state, "nat", "KUBE-NODEPORTS") == text(f"""
        -A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j {EXT}
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j {EXT}
    """)


@pytest.mark.parametrize(
    ("facts", "config"),
    [
        ({"capabilities": {"nfacct": False}}, {}),
        ({}, {"iptables": {"localhostNodePorts": False}}),
        ({}, {"nodePortAddresses": ["primary"]}),
    ],
)
def test_otherwise_it_has_one_rule(facts: Any, config: Any) -> None:
    assert targets(web(HERE, facts=facts, config=config, **NODE_PORT), "nat", "KUBE-NODEPORTS") == [EXT]


def test_ipv6_has_no_node_ports_on_localhost() -> None:
    state = render(dual_stack(**NODE_PORT), slice_of("web", "fd00:10:244:1::1"))
    assert targets(state, "nat", "KUBE-NODEPORTS", "IPv6") == [EXT]


def test_the_health_check_port_is_open_with_or_without_endpoints_once_per_port_and_always_tcp() -> None:
    ports = [port(53, "dns", "UDP"), port(80)]
    state = web(ports=ports, healthCheckNodePort=32100, **EXT_LOCAL)
    assert chain(state, "filter", "KUBE-NODEPORTS") == text("""
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:dns health check node port" -m tcp --dport 32100 -j ACCEPT
        -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http health check node port" -m tcp --dport 32100 -j ACCEPT
    """)


def test_a_health_check_port_left_over_from_another_policy_is_not_opened() -> None:
    assert chain(web(HERE, healthCheckNodePort=32100, **LOAD_BALANCER), "filter", "KUBE-NODEPORTS") == ""


# ------------------------------------------------------------------ affinity and load balancing


def test_affinity_is_asked_before_the_dice_are_thrown_and_remembered_under_the_endpoints_chain() -> None:
    state = web(HERE, AWAY, sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}})
    rest = "--mask 255.255.255.255 --rsource"
    assert (
        chain(state, "nat", SVC).splitlines()[1:]
        == text(f"""
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.1.1:8080" -m recent --rcheck --seconds 60 --reap --name {SEP_HERE} {rest} -j {SEP_HERE}
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.2.1:8080" -m recent --rcheck --seconds 60 --reap --name {SEP_AWAY} {rest} -j {SEP_AWAY}
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.1.1:8080" -m statistic --mode random --probability 0.50000000000 -j {SEP_HERE}
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.2.1:8080" -j {SEP_AWAY}
    """).splitlines()
    )
    assert f"-m recent --set --name {SEP_HERE} {rest} -m tcp -j DNAT" in chain(state, "nat", SEP_HERE)


@pytest.mark.parametrize(
    ("choices", "probability"),
    [
        (1, "1.00000000000"),
        (2, "0.50000000000"),
        (3, "0.33333333349"),
        (4, "0.25000000000"),
        (5, "0.20000000019"),
        (6, "0.16666666651"),
        (7, "0.14285714272"),
        (10, "0.10000000009"),
        (11, "0.09090909082"),
        (100, "0.00999999978"),
        (1000, "0.00100000016"),
        (100001, "0.00001000008"),
    ],
)
def test_probabilities_are_what_the_kernel_keeps_of_them(choices: int, probability: str) -> None:
    assert _probability(choices) == probability


def test_every_endpoint_is_chosen_equally_often() -> None:
    count = 12
    state = web(*(f"10.244.1.{i}" for i in range(1, count + 1)))
    rules = chain(state, "nat", SVC).splitlines()[1:]
    left = 1.0
    for rule in rules:
        found = re.search(r"--probability (\S+)", rule)
        chance = left * (float(found[1]) if found else 1.0)
        assert chance == pytest.approx(1 / count, rel=1e-7)
        left -= chance
    assert len(rules) == count
    assert "--probability" not in rules[-1]


def test_endpoints_are_tried_in_the_order_of_their_text() -> None:
    state = web("10.244.1.2", "10.244.1.10", "10.244.1.1")
    assert re.findall(r"-> (\S+):8080", chain(state, "nat", SVC)) == ["10.244.1.10", "10.244.1.1", "10.244.1.2"]


# ------------------------------------------------------------------ large clusters


def crowd(count: int) -> list[Any]:
    """Endpoints, only ten of which are ready: the others count as well."""
    return [endpoint(f"10.244.{i // 250}.{i % 250 + 1}", ready=i < 10) for i in range(count)]


def test_up_to_a_thousand_endpoints_every_rule_says_whose_it_is_and_above_that_endpoint_rules_do_not() -> None:
    spec = {"sessionAffinity": "ClientIP", **EVERYWHERE, "loadBalancerSourceRanges": ["203.0.113.0/24"]}
    small, large = web(*crowd(1000), **spec), web(*crowd(1001), **spec)
    comment = re.compile(r' -m comment --comment "shop/web:http( -> [0-9.:]+)?"')
    without_comments = [
        comment.sub("", rule) if "KUBE-SEP-" in rule else rule
        for rule in mentioning(small, "-A")
        if "KUBE-PROXY-GEN-" not in rule
    ]
    assert [rule for rule in mentioning(large, "-A") if "KUBE-PROXY-GEN-" not in rule] == without_comments
    assert len([rule for rule in mentioning(small, "KUBE-SEP-") if comment.search(rule)]) == 10 * 4
    assert not [rule for rule in mentioning(large, "KUBE-SEP-") if "--comment" in rule]


def test_ports_times_endpoints_count_in_each_family_on_its_own_and_only_those_of_services() -> None:
    ports = [port(80), port(81, "admin")]
    over = render(service(ports=ports), slice_of("web", *crowd(501), ports=ports))
    assert '"shop/web:http -> ' not in file(over, "iptables.rules")
    both = render(
        dual_stack(ports=ports),
        slice_of("web", *crowd(500), ports=ports),
        slice_of("web", *(f"fd00:10:244:1::{i:x}" for i in range(1, 502)), ports=ports),
        slice_of("ghost", *crowd(900)),
    )
    assert '"shop/web:http -> ' in file(both, "iptables.rules")
    assert '"shop/web:http -> ' not in file(both, "ip6tables.rules")


# ------------------------------------------------------------------ the feature gate for external IPs


def test_forbidden_external_ips_lead_nowhere_but_their_chain_is_still_there() -> None:
    off = {"featureGates": {"AllowServiceExternalIPs": False}}
    state = web(HERE, config=off, externalIPs=["192.0.2.1"])
    assert "192.0.2.1" not in file(state, "iptables.rules")
    assert chains(state) == [SVC, EXT, SEP_HERE]


# ------------------------------------------------------------------ UDP frontends for conntrack


def dns(*endpoints: Any, **spec: Any) -> str:
    ports = [port(53, "dns", "UDP", nodePort=30053), port(53, "dns-tcp")]
    slices = slice_of("web", *endpoints, ports=[port(5353, "dns", "UDP"), port(5353, "dns-tcp")])
    return file(render(service(**{"ports": ports, **spec}), slices), "conntrack.udp")


def test_every_udp_frontend_names_the_sources_its_replies_may_have() -> None:
    going = endpoint("10.244.2.2", node="n2", ready=False, serving=True, terminating=True)
    unready = endpoint("10.244.3.3", node="n3", ready=False, serving=True)
    gone = endpoint("10.244.4.4", ready=False, serving=False, terminating=True)
    announced = endpoint("10.244.5.5", ready=True, serving=False)
    serving = "10.244.1.1:5353,10.244.2.2:5353,10.244.3.3:5353"
    # serving is all that counts; not readiness, policies, hints or the node
    for policy in ({}, {"externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"}):
        given = dns(
            HERE, going, unready, gone, announced, externalIPs=["192.0.2.1"], ingress=("198.51.100.9",), **policy
        )
        assert given == text(f"""
            ipv4 10.96.7.7 53 {serving}
            ipv4 198.51.100.9 53 {serving}
            ipv4 192.0.2.1 53 {serving}
            ipv4 * 30053 {serving}
        """)


def test_without_a_serving_endpoint_flows_to_addresses_go_but_those_to_node_ports_stay() -> None:
    assert dns(endpoint("10.244.1.1", ready=False, serving=False)) == "ipv4 10.96.7.7 53 -\n"


def test_udp_frontends_of_ipv6() -> None:
    state = render(
        service(clusterIP="fd00:10:96::a", ports=[port(53, "dns", "UDP")]),
        slice_of("web", "fd00:10:244:1::1", ports=[port(5353, "dns", "UDP")]),
    )
    assert file(state, "conntrack.udp") == "ipv6 fd00:10:96::a 53 [fd00:10:244:1::1]:5353\n"


def test_tcp_and_sctp_have_none() -> None:
    ports = [port(80), port(81, "sctp", "SCTP")]
    assert file(render(service(ports=ports), slice_of("web", HERE, ports=ports)), "conntrack.udp") == ""
