"""What a Service becomes in nftables mode, and what of it depends on the node."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.nftables_file import NFT
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.unit.build import (
    Object,
    config,
    dual_stack,
    endpoint,
    file,
    node,
    port,
    render,
    service,
    slice_of,
    snapshot,
    text,
)

WEB = "KHN6ECMT-shop/web/tcp/http"
LOAD_BALANCER: Object = {"type": "LoadBalancer", "ports": [port(nodePort=31080)], "ingress": ("198.51.100.9",)}


def nft(*objects: Any, **fields: Any) -> State:
    return render(*objects, **{"mode": "nftables", **fields})


def elements(state: State, container: str, family: str = "IPv4") -> list[str]:
    """The elements of a set or map, without the words around them."""
    objects = dict(state.objects())
    lines = next(value for key, value in objects.items() if key[0] == family and key[2] == container).splitlines()
    start = f"add element {NFT[family]} kube-proxy {container} {{ "
    assert all(line.startswith(start) and line.endswith(" }") for line in lines)
    return [line[len(start) : -2] for line in lines]


def rules(state: State, chain: str, family: str = "IPv4") -> list[str]:
    """The rules of a chain, without the words before them."""
    start = f"add rule {NFT[family]} kube-proxy {chain} "
    lines = dict(state.objects())[family, "chain", chain].splitlines()
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start) for line in lines]


def own_chains(state: State) -> list[str]:
    return [
        name for _family, kind, name in (obj for each in state.fragments for obj, _text in each.own) if kind == "chain"
    ]


# ------------------------------------------------------------------ where traffic goes

VERDICTS = {
    "endpoints on this node": (["n1"], {}, f"goto service-{WEB}", f"goto external-{WEB}", None, None),
    "endpoints elsewhere": (["n2"], {}, f"goto service-{WEB}", f"goto external-{WEB}", None, None),
    "no endpoints": ([], {}, None, None, "goto reject-chain", "goto reject-chain"),
    "internal policy, endpoint here": (
        ["n1"],
        {"internalTrafficPolicy": "Local"},
        f"goto local-{WEB}",
        f"goto external-{WEB}",
        None,
        None,
    ),
    "internal policy, endpoint elsewhere": (
        ["n2"],
        {"internalTrafficPolicy": "Local"},
        None,
        f"goto external-{WEB}",
        "drop",
        None,
    ),
    "external policy, endpoint elsewhere": (
        ["n2"],
        {"externalTrafficPolicy": "Local"},
        f"goto service-{WEB}",
        f"goto external-{WEB}",
        None,
        "drop",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_where_maps_send_the_traffic_of_a_service(case: str) -> None:
    nodes, policies, internal, external, no_internal, no_external = VERDICTS[case]
    endpoints = [endpoint(f"10.244.9.{i}", node=name) for i, name in enumerate(nodes)]
    state = nft(service(**LOAD_BALANCER, externalIPs=["192.0.2.1"], **policies), slice_of("web", *endpoints))
    cluster, outside = ["10.96.7.7 . tcp . 80"], ["192.0.2.1 . tcp . 80", "198.51.100.9 . tcp . 80"]
    comment = ' comment "shop/web:http"'
    assert elements(state, "cluster-ips") == ["10.96.7.7"]
    assert elements(state, "service-ips") == [
        *(f"{key} : {internal}" for key in cluster if internal),
        *(f"{key} : {external}" for key in outside if external),
    ]
    assert elements(state, "service-nodeports") == [f"tcp . 31080 : {external}"] * bool(external)
    assert elements(state, "no-endpoint-services") == [
        *(f"{key}{comment} : {no_internal}" for key in cluster if no_internal),
        *(f"{key}{comment} : {no_external}" for key in outside if no_external),
    ]
    assert elements(state, "no-endpoint-nodeports") == [f"tcp . 31080{comment} : {no_external}"] * bool(no_external)


def test_chains_exist_only_where_something_leads_to_them() -> None:
    assert own_chains(nft(service())) == []
    assert own_chains(nft(service(), slice_of("web", "10.244.1.1"))) == [f"service-{WEB}"]
    local = service(**LOAD_BALANCER, externalTrafficPolicy="Local", internalTrafficPolicy="Local")
    assert own_chains(nft(local, slice_of("web", "10.244.1.1"))) == [
        f"service-{WEB}",
        f"local-{WEB}",
        f"external-{WEB}",
    ]
    remote = slice_of("web", endpoint("10.244.2.1", node="n2"))
    assert own_chains(nft(local, remote)) == [f"service-{WEB}", f"external-{WEB}"]


@pytest.mark.parametrize(
    ("compat", "lone"),
    [
        ("1.37", "meta l4proto tcp dnat to 10.244.1.1:8080"),
        ("1.36", "meta l4proto tcp dnat ip addr . port to numgen random mod 1 map { 0 : 10.244.1.1 . 8080 }"),
    ],
)
def test_a_lone_endpoint_needs_no_map_since_1_37(compat: str, lone: str) -> None:
    read = snapshot(service(), slice_of("web", "10.244.1.1"), node())
    settings = config(mode="nftables")
    view = ClusterView(read, settings).node_view(node_facts(read.nodes[0]))
    assert rules(backends.renderer(settings, compat).state(view), f"service-{WEB}") == [lone]


def test_several_endpoints_are_drawn_from_a_map_in_the_order_of_their_text() -> None:
    state = nft(
        dual_stack(),
        slice_of("web", "10.244.1.2", "10.244.1.10", "10.244.1.1"),
        slice_of("web", "fd00:10:244:1::2", "fd00:10:244:1::1"),
    )
    assert rules(state, f"service-{WEB}") == [
        "meta l4proto tcp dnat ip addr . port to numgen random mod 3 map { 0 : 10.244.1.10 . 8080 , 1 : 10.244.1.1 . 8080 , 2 : 10.244.1.2 . 8080 }"
    ]
    assert rules(state, f"service-{WEB}", "IPv6") == [
        "meta l4proto tcp dnat ip6 addr . port to numgen random mod 2 map { 0 : fd00:10:244:1::1 . 8080 , 1 : fd00:10:244:1::2 . 8080 }"
    ]


def test_sessions_are_kept_in_a_set_per_endpoint() -> None:
    state = nft(
        service(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 600}}),
        slice_of("web", "10.244.1.1", "10.244.1.2"),
    )
    own = [obj[1:] for each in state.fragments for obj, _text in each.own]
    names = {name.partition("-")[2] for kind, name in own if kind == "set"}
    one, two = sorted(names, key=lambda name: name.partition("__")[2])
    assert own[:4] == [
        ("set", f"affinity-{one}"),
        ("set", f"affinity-{two}"),
        ("chain", f"endpoint-{one}"),
        ("chain", f"endpoint-{two}"),
    ]
    assert dict(state.objects())["IPv4", "set", f"affinity-{one}"] == (
        f"add set ip kube-proxy affinity-{one} {{ type ipv4_addr ; flags dynamic,timeout ; timeout 600s ; }}\n"
    )
    assert rules(state, f"endpoint-{one}") == [
        f"update @affinity-{one} {{ ip saddr }}",
        "meta l4proto tcp dnat to 10.244.1.1:8080",
    ]
    assert rules(state, f"service-{WEB}") == [
        f"ip saddr @affinity-{one} goto endpoint-{one}",
        f"ip saddr @affinity-{two} goto endpoint-{two}",
        f"numgen random mod 2 vmap {{ 0 : goto endpoint-{one} , 1 : goto endpoint-{two} }}",
    ]


MASQUERADE = "mark set mark or 0x00004000"
SHORT_CUTS = [
    f'fib saddr type local {MASQUERADE} comment "masquerade local traffic"',
    f'fib saddr type local goto service-{WEB} comment "short-circuit local traffic"',
]
POD_MATCHES = {
    "ClusterCIDR": ({}, "ip saddr 10.244.0.0/16"),
    "NodeCIDR": ({"detectLocalMode": "NodeCIDR"}, "ip saddr 10.244.1.0/24"),
    "BridgeInterface": (
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}},
        'iifname "cni0"',
    ),
    "InterfaceNamePrefix": (
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
        'iifname "veth*"',
    ),
    "nothing": ({"clusterCIDR": ""}, None),
}


@pytest.mark.parametrize("mode", POD_MATCHES)
def test_policy_local_lets_pods_and_the_node_itself_reach_every_endpoint(mode: str) -> None:
    fields, match = POD_MATCHES[mode]
    state = nft(service(**LOAD_BALANCER, externalTrafficPolicy="Local"), slice_of("web", "10.244.1.1"), **fields)
    pods = [f'{match} goto service-{WEB} comment "short-circuit pod traffic"'] if match else []
    assert rules(state, f"external-{WEB}") == [*pods, *SHORT_CUTS, f"goto local-{WEB}"]
    outside = [
        f"ip daddr @cluster-ips {match.replace('saddr ', 'saddr != ').replace('iifname ', 'iifname != ')} {MASQUERADE} "
        'comment "masquerade clusterIP traffic from outside cluster"'
        for match in [match]
        if match
    ]
    assert rules(state, "services")[: len(outside)] == outside
    assert len(rules(state, "services")) == len(outside) + 2


def test_policy_cluster_masquerades_what_comes_from_outside() -> None:
    state = nft(service(**LOAD_BALANCER), slice_of("web", "10.244.1.1"), nftables={"masqueradeBit": 0})
    assert rules(state, f"external-{WEB}") == [
        'mark set mark or 0x00000001 comment "masquerade"',
        f"goto service-{WEB}",
    ]
    assert (
        rules(state, "masquerading")[0]
        == "mark and 0x00000001 != 0 mark set mark xor 0x00000001 masquerade fully-random"
    )


def test_masquerade_all_asks_for_no_source() -> None:
    state = nft(nftables={"masqueradeAll": True}, iptables={"masqueradeAll": False})
    assert (
        rules(state, "services")[0] == f'ip daddr @cluster-ips {MASQUERADE} comment "masquerade all clusterIP traffic"'
    )


def test_a_firewall_stands_whether_there_are_endpoints_or_not() -> None:
    ranges = ["203.0.113.0/24", "2001:db8::/32"]
    state = nft(service(**LOAD_BALANCER, loadBalancerSourceRanges=ranges))
    assert elements(state, "firewall-ips") == [f"198.51.100.9 . tcp . 80 : goto firewall-{WEB}"]
    assert rules(state, f"firewall-{WEB}") == ["ip saddr != { 203.0.113.0/24 } drop"]


def test_a_node_that_may_use_a_load_balancer_does_so_from_its_address() -> None:
    ranges = ["203.0.113.0/24", "172.18.0.0/16"]
    state = nft(service(**LOAD_BALANCER, loadBalancerSourceRanges=ranges))
    assert rules(state, f"firewall-{WEB}") == ["ip saddr != { 203.0.113.0/24 , 172.18.0.0/16 , 198.51.100.9 } drop"]


# ------------------------------------------------------------------ the node

HERE, THERE = endpoint("10.244.1.1", node="n1"), endpoint("10.244.2.1", node="n2")


def test_hairpins_are_the_nodes_own_endpoints_each_once() -> None:
    objects = (service(), slice_of("web", HERE, THERE), service("also", clusterIP="10.96.7.8"), slice_of("also", HERE))
    nodes = (node("n1"), node("n2"), node("n3"))
    found = {name: elements(nft(*objects, *nodes, on=name), "hairpin-connections") for name in ("n1", "n2", "n3")}
    assert found == {
        "n1": ["10.244.1.1 . 10.244.1.1 . tcp . 8080"],
        "n2": ["10.244.2.1 . 10.244.2.1 . tcp . 8080"],
        "n3": [],
    }


def test_an_endpoint_that_nothing_leads_to_has_no_hairpin() -> None:
    unready = endpoint("10.244.1.1", node="n1", ready=False)
    assert elements(nft(service(), slice_of("web", unready, THERE)), "hairpin-connections") == []


def test_nodes_share_the_text_of_a_service_that_looks_the_same_from_everywhere() -> None:
    read = snapshot(service(), slice_of("web", HERE, THERE), node("n1"), node("n2"))
    settings = config(mode="nftables", clusterCIDR="10.244.0.0/16")
    cluster, renderer = ClusterView(read, settings), backends.renderer(settings)
    one, two = (renderer.state(cluster.node_view(node_facts(each))) for each in read.nodes)
    assert one.fragments[0] is two.fragments[0]
    assert one.generation != two.generation


SERVED_ON = {
    "primary": ([], ["172.18.0.11"]),
    "a network of the node": (["127.0.0.0/8", "172.18.0.0/16"], ["172.18.0.11"]),
    "none of its addresses": (["198.51.100.0/24"], []),
    "localhost only": (["localhost"], []),
}


@pytest.mark.parametrize("case", SERVED_ON)
def test_node_ports_are_served_on_the_chosen_addresses_but_never_on_loopback(case: str) -> None:
    addresses, expected = SERVED_ON[case]
    state = nft(nodePortAddresses=addresses)
    assert elements(state, "nodeport-ips") == expected
    assert rules(state, "services")[-1] == "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports"


def test_unallocated_cluster_ips_are_dropped_where_service_cidrs_are_known() -> None:
    cidrs = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "more"},
        "spec": {"cidrs": ["10.96.0.0/12", "172.30.0.0/16", "fd00:10:96::/112"]},
    }
    state = nft(cidrs)
    assert rules(state, "cluster-ips-check")[1:] == [
        'ip daddr { 10.96.0.0/12 , 172.30.0.0/16 } drop comment "Drop traffic to unallocated ClusterIPs"'
    ]
    assert rules(state, "cluster-ips-check", "IPv6")[1:] == [
        'ip6 daddr { fd00:10:96::/112 } drop comment "Drop traffic to unallocated ClusterIPs"'
    ]
    assert len(rules(nft(), "cluster-ips-check")) == 1


@pytest.mark.parametrize(
    ("addresses", "rejected"),
    [(["primary"], ["tcp", "udp", "sctp"]), (["localhost"], ["udp", "sctp"])],
)
def test_node_ports_are_rejected_on_localhost_where_the_gate_asks_for_it(
    addresses: list[str], rejected: list[str]
) -> None:
    ports = [port(80, "a", nodePort=30001), port(53, "b", "UDP", nodePort=30002), port(99, "c", "SCTP", nodePort=30003)]
    gate = {"KubeProxyNFTablesLocalhostNodePorts": True}
    state = nft(service(type="NodePort", ports=ports), nodePortAddresses=addresses, featureGates=gate)
    numbers = {"tcp": 30001, "udp": 30002, "sctp": 30003}
    assert elements(state, "localhost-nodeport-reject-ports") == [
        f"{proto} . {numbers[proto]} : goto localhost-nodeport-reject-{proto}" for proto in rejected
    ]
    for proto in rejected:
        assert rules(state, f"localhost-nodeport-reject-{proto}") == [
            f'counter name "localhost-nodeport-rejected-{proto}" reject'
        ]
    assert rules(state, "nodeport-endpoints-check")[1:] == [
        "ip daddr 127.0.0.0/8 meta l4proto . th dport vmap @localhost-nodeport-reject-ports"
    ]
    assert f"add counter ip kube-proxy localhost-nodeport-rejected-{rejected[0]}\n" in file(state, "nftables.nft")
    assert "localhost" not in file(nft(service(type="NodePort", ports=ports)), "nftables.nft")


# ------------------------------------------------------------------ what must not break the rest


def test_long_names_are_cut_where_kernel_and_nft_have_limits() -> None:
    long = {"name": "s" * 63, "namespace": "n" * 63}
    state = nft(
        service(**long, ports=[port(80, "p" * 15)], sessionAffinity="ClientIP"),
        slice_of(long["name"], "10.244.1.1", namespace=long["namespace"], ports=[port(80, "p" * 15)]),
        service(**long | {"name": "t" * 63}, clusterIP="10.96.7.8", ports=[port(80, "p" * 15)]),
    )
    comments = [element.split('"')[1] for element in elements(state, "no-endpoint-services")]
    assert comments == [f"{'n' * 63}/{'t' * 63}:"[:128]]
    assert max(len(obj[2]) for obj, _text in state.objects() if obj[0] != "file") < 256


def test_a_destination_that_two_services_claim_goes_to_the_first_by_name() -> None:
    shared = {"type": "ClusterIP", "externalIPs": ["192.0.2.1"]}
    state = nft(
        service("zoo", **shared, clusterIP="10.96.7.9"),
        slice_of("zoo", "10.244.1.9"),
        service(**shared),
        slice_of("web", "10.244.1.1"),
    )
    claimed = [element for element in elements(state, "service-ips") if element.startswith("192.0.2.1")]
    assert claimed == [f"192.0.2.1 . tcp . 80 : goto external-{WEB}"]
    # The other one is written as if it had never claimed it.
    assert sum(name.startswith("external-") for name in own_chains(state)) == 1


def test_an_address_given_twice_stands_once() -> None:
    twice = service(**LOAD_BALANCER, externalIPs=["198.51.100.9", "198.51.100.9"])
    state = nft(twice, slice_of("web", "10.244.1.1"))
    assert elements(state, "service-ips")[1:] == [f"198.51.100.9 . tcp . 80 : goto external-{WEB}"]


# ------------------------------------------------------------------ deltas


def commands(old: State, new: State) -> str:
    """The commands of a delta for IPv4, without the markers."""
    files = dict(backends.delta_files(delta(old, new), new))
    first = files["nftables-1-endpoints.nft"].splitlines()[1:]
    assert first[:2] == [f"delete chain {ip} kube-proxy gen-{old.generation}" for ip in ("ip", "ip6")]
    assert first[-2:] == [f"add chain {ip} kube-proxy gen-{new.generation}" for ip in ("ip", "ip6")]
    rest = [
        line
        for name in sorted(files)
        if name.endswith(".nft") and "-1-" not in name
        for line in files[name].splitlines()
    ]
    return "".join(f"{line}\n" for line in (*first[2:-2], *rest) if line.split()[2] == "ip")


def test_a_delta_of_an_endpoint_is_one_chain() -> None:
    old = nft(service(), slice_of("web", endpoint("10.244.2.1", node="n2")))
    new = nft(service(), slice_of("web", endpoint("10.244.2.2", node="n2")))
    assert commands(old, new) == text(f"""
        add chain ip kube-proxy service-{WEB}
        flush chain ip kube-proxy service-{WEB}
        add rule ip kube-proxy service-{WEB} meta l4proto tcp dnat to 10.244.2.2:8080
    """)


def test_a_delta_changes_only_the_elements_that_changed() -> None:
    both = [port(80, "http"), port(81, "more")]
    old = nft(service(ports=both), service("gone", clusterIP="10.96.7.8"), slice_of("gone", "10.244.1.8"))
    new = nft(service())
    gone = next(name for name in own_chains(old))
    assert commands(old, new) == text(f"""
        delete element ip kube-proxy hairpin-connections {{ 10.244.1.8 . 10.244.1.8 . tcp . 8080 }}
        flush chain ip kube-proxy {gone}
        delete element ip kube-proxy service-ips {{ 10.96.7.8 . tcp . 80 }}
        delete element ip kube-proxy no-endpoint-services {{ 10.96.7.7 . tcp . 81 }}
        delete element ip kube-proxy cluster-ips {{ 10.96.7.8 }}
        delete chain ip kube-proxy {gone}
    """)


def test_a_delta_removes_the_sessions_of_an_endpoint_that_is_gone_and_of_no_other() -> None:
    sticky = service(sessionAffinity="ClientIP")
    old, new = (nft(sticky, slice_of("web", *ips)) for ips in (("10.244.1.1", "10.244.1.2"), ("10.244.1.1",)))
    lines = commands(old, new).splitlines()
    sets = [line for line in lines if " affinity-" in line and line.split()[1] == "set"]
    assert len(sets) == 1
    assert sets[0].startswith("delete set ip kube-proxy affinity-")
    assert sets[0].endswith("__10.244.1.2/8080")


def test_a_delta_of_the_nodes_addresses_makes_and_removes_the_set_of_them() -> None:
    every, some = nft(nodePortAddresses=["0.0.0.0/0"]), nft(nodePortAddresses=["172.18.0.0/16"])
    assert commands(every, some).splitlines()[0].startswith("add set ip kube-proxy nodeport-ips {")
    assert "add element ip kube-proxy nodeport-ips { 172.18.0.11 }" in commands(every, some).splitlines()
    assert commands(some, every).splitlines()[-1] == "delete set ip kube-proxy nodeport-ips"


def test_no_delta_leads_to_another_family() -> None:
    both, one = nft(), nft(facts={"capabilities": {"ipv6": False}})
    assert delta(both, one).needs_full
    assert delta(one, both).needs_full
