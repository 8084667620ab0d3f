"""ipvs mode: which virtual servers, real servers, addresses and set entries follow from a Service, on which node."""

from __future__ import annotations

from typing import Any

import pytest
from agentless_kube_proxy.backends import ipvs
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.cluster.objects import SCHEDULERS
from agentless_kube_proxy.proxy.compat import COMPATS
from agentless_kube_proxy.proxy.config import InvalidConfig, ProxyConfig, with_schedulers
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.unit.build import config, dual_stack, endpoint, file, node, port, render, service, slice_of, snapshot

NODE = node("n1", "172.18.0.11", "fd00:172:18::11")
TWO_ENDPOINTS = slice_of("web", endpoint("10.244.1.5", node="n1"), endpoint("10.244.2.5", node="n2"))
EXPOSED: dict[str, Any] = {
    "type": "LoadBalancer",
    "ports": [port(80, nodePort=30080)],
    "externalIPs": ["192.0.2.7"],
    "ingress": ("203.0.113.7",),
}
EVERYWHERE = ("-t 10.96.7.7:80", "-t 192.0.2.7:80", "-t 203.0.113.7:80", "-t 172.18.0.11:30080")


def write(*objects: Any, **fields: Any) -> State:
    return render(*objects, mode="ipvs", **fields)


def servers(state: State) -> dict[str, list[str]]:
    """Each virtual server and its real servers."""
    found: dict[str, list[str]] = {}
    for line in file(state, "ipvs.rules").splitlines():
        action, option, address, *rest = line.split()
        if action == "-A":
            found[f"{option} {address}"] = []
        else:
            assert rest[0] == "-r"
            assert rest[2:] == ["-m", "-w", "1"]
            found[f"{option} {address}"].append(rest[1])
    return found


def scheduling(state: State) -> dict[str, str]:
    lines = [line.split(None, 3) for line in file(state, "ipvs.rules").splitlines() if line.startswith("-A")]
    return {f"{option} {address}": rest for _, option, address, rest in lines}


def entries(state: State, name: str) -> list[str]:
    """What a set holds."""
    return [line.split()[2] for line in file(state, "ipset.rules").splitlines() if line.startswith(f"add {name} ")]


def addresses(state: State) -> list[str]:
    first, *lines = file(state, "ip.batch").splitlines()
    assert first == "link add kube-ipvs0 type dummy"
    return [line.removeprefix("addr add ").removesuffix(" dev kube-ipvs0") for line in lines]


# ------------------------------------------------------------------ virtual servers


def test_every_destination_of_a_service_is_a_virtual_server_and_every_endpoint_a_real_server() -> None:
    made = servers(write(NODE, service(**EXPOSED), TWO_ENDPOINTS))
    assert made == {key: ["10.244.1.5:8080", "10.244.2.5:8080"] for key in EVERYWHERE}


def test_a_service_without_endpoints_has_its_virtual_servers_all_the_same() -> None:
    assert servers(write(NODE, service(**EXPOSED))) == {key: [] for key in EVERYWHERE}


@pytest.mark.parametrize(
    ("policies", "internal", "external"),
    [
        ({}, "12", "12"),
        ({"externalTrafficPolicy": "Local"}, "12", "1"),
        ({"internalTrafficPolicy": "Local"}, "1", "12"),
        ({"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local"}, "1", "1"),
    ],
)
def test_a_local_policy_means_the_nodes_own_endpoints(policies: dict[str, str], internal: str, external: str) -> None:
    made = servers(write(NODE, service(**EXPOSED, **policies), TWO_ENDPOINTS))
    first, *others = EVERYWHERE
    assert made == {
        first: [f"10.244.{n}.5:8080" for n in internal],
        **{key: [f"10.244.{n}.5:8080" for n in external] for key in others},
    }


@pytest.mark.parametrize("policy", ["internalTrafficPolicy", "externalTrafficPolicy"])
def test_a_local_policy_without_an_endpoint_on_the_node_falls_back_to_all_endpoints(policy: str) -> None:
    far = slice_of("web", endpoint("10.244.2.5", node="n2"))
    made = servers(write(NODE, service(**EXPOSED, **{policy: "Local"}), far))
    assert made == {key: ["10.244.2.5:8080"] for key in EVERYWHERE}


def test_an_internal_local_policy_that_nothing_outside_can_reach_has_nothing_to_fall_back_to() -> None:
    far = slice_of("web", endpoint("10.244.2.5", node="n2"))
    assert servers(write(NODE, service(internalTrafficPolicy="Local"), far)) == {"-t 10.96.7.7:80": []}


@pytest.mark.parametrize(("protocol", "option"), [("TCP", "-t"), ("UDP", "-u"), ("SCTP", "--sctp-service")])
def test_each_protocol_has_its_option_and_ipv6_its_brackets(protocol: str, option: str) -> None:
    ports = [port(53, "dns", protocol)]
    slices = [slice_of("web", ip, ports=[port(5353, "dns", protocol)]) for ip in ("10.244.1.5", "fd00:10:244:1::5")]
    assert servers(write(NODE, dual_stack(ports=ports), *slices)) == {
        f"{option} 10.96.7.7:53": ["10.244.1.5:5353"],
        f"{option} [fd00:10:96::77]:53": ["[fd00:10:244:1::5]:5353"],
    }


def test_session_affinity_is_persistence() -> None:
    timeout = {"clientIP": {"timeoutSeconds": 77}}
    state = write(NODE, dual_stack(sessionAffinity="ClientIP", sessionAffinityConfig=timeout))
    assert scheduling(state) == {"-t 10.96.7.7:80": "-s rr -p 77", "-t [fd00:10:96::77]:80": "-s rr -p 77"}


@pytest.mark.parametrize(("scheduler", "written"), [("", "-s rr"), ("lc", "-s lc"), ("mh", "-s mh -b mh-port")])
def test_the_scheduler_is_that_of_the_configuration_and_maglev_hashing_minds_the_port(
    scheduler: str, written: str
) -> None:
    assert scheduling(write(NODE, service(), ipvs={"scheduler": scheduler})) == {"-t 10.96.7.7:80": written}


def test_of_two_services_that_claim_one_destination_the_first_by_name_has_it() -> None:
    claims = [
        service(name, clusterIP=ip, externalIPs=["192.0.2.7"]) for name, ip in (("b", "10.96.0.2"), ("a", "10.96.0.1"))
    ]
    slices = [slice_of("b", "10.244.1.2"), slice_of("a", "10.244.1.1")]
    assert servers(write(NODE, *claims, *slices))["-t 192.0.2.7:80"] == ["10.244.1.1:8080"]


def test_a_node_port_stands_back_where_an_external_ip_of_the_node_has_that_port() -> None:
    external = service("z", clusterIP="10.96.0.2", externalIPs=["172.18.0.11"], ports=[port(30080)])
    made = servers(write(NODE, service(**EXPOSED), TWO_ENDPOINTS, external, slice_of("z", "10.244.1.9")))
    assert made["-t 172.18.0.11:30080"] == ["10.244.1.9:8080"]


# ------------------------------------------------------------------ addresses

FACTS = {
    "addresses": [
        {"address": "127.0.0.1/8", "interface": "lo"},
        {"address": "::1/128", "interface": "lo"},
        {"address": "172.18.0.11/16", "interface": "eth0"},
        {"address": "203.0.113.7/32", "interface": "eth1"},
        {"address": "fd00:172:18::11/64", "interface": "eth0"},
        {"address": "fe80::1/64", "interface": "eth0"},
        {"address": "10.96.7.7/32", "interface": "kube-ipvs0"},
        {"address": "203.0.113.9/32", "interface": "kube-ipvs0"},
    ]
}


def test_cluster_external_and_load_balancer_addresses_are_bound_to_the_dummy_device_and_node_addresses_are_not() -> (
    None
):
    state = write(NODE, service(**EXPOSED), service("v6", clusterIP="fd00:10:96::6"))
    assert addresses(state) == ["10.96.7.7/32", "192.0.2.7/32", "203.0.113.7/32", "fd00:10:96::6/128"]
    assert entries(state, "KUBE-IPVS-IPS") == ["10.96.7.7", "192.0.2.7", "203.0.113.7"]
    assert entries(state, "KUBE-6-IPVS-IPS") == ["fd00:10:96::6"]


def test_an_address_that_another_interface_holds_is_not_bound_again() -> None:
    state = write(NODE, service(**EXPOSED), facts=FACTS)
    assert addresses(state) == ["10.96.7.7/32", "192.0.2.7/32"]
    assert entries(state, "KUBE-IPVS-IPS") == ["10.96.7.7", "192.0.2.7"]
    assert "-t 203.0.113.7:80" in servers(state)


def test_services_of_many_ports_bind_their_address_once() -> None:
    state = write(NODE, service(ports=[port(80), port(81, "b"), port(80, "c", "UDP")]))
    assert addresses(state) == ["10.96.7.7/32"]
    assert entries(state, "KUBE-IPVS-IPS") == ["10.96.7.7"]


NODE_PORT = service(type="NodePort", ports=[port(80, nodePort=30080)])


@pytest.mark.parametrize(
    ("chosen", "served"),
    [
        ([], ["172.18.0.11", "203.0.113.7"]),
        (["0.0.0.0/0"], ["172.18.0.11", "203.0.113.7"]),
        (["primary"], ["172.18.0.11"]),
        (["172.18.0.0/16"], ["172.18.0.11"]),
        (["localhost"], []),
        (["127.0.0.0/8", "203.0.113.0/24"], ["203.0.113.7"]),
        (["198.51.100.0/24"], []),
        # kube-ipvs0 is an interface like any other for a list of CIDRs, with what will be bound to it
        (["10.0.0.0/8"], ["10.96.7.7"]),
        (["0.0.0.0/1", "128.0.0.0/1"], ["10.96.7.7", "172.18.0.11", "203.0.113.7"]),
        # a list for one family says nothing about the other
        (["fd00::/8"], ["172.18.0.11", "203.0.113.7"]),
    ],
)
def test_a_node_port_is_served_on_the_addresses_that_the_configuration_chooses(
    chosen: list[str], served: list[str]
) -> None:
    state = write(NODE, NODE_PORT, facts=FACTS, nodePortAddresses=chosen)
    assert sorted(key for key in servers(state) if key.endswith(":30080")) == [f"-t {ip}:30080" for ip in served]
    assert entries(state, "KUBE-NODE-PORT-TCP") == (["30080"] if served else [])


@pytest.mark.parametrize(("chosen", "served"), [([], ["fd00:172:18::11"]), (["fe80::/10"], ["fe80::1"])])
def test_link_local_addresses_serve_node_ports_only_if_asked_for(chosen: list[str], served: list[str]) -> None:
    exposed = dual_stack(type="NodePort", ports=[port(80, nodePort=30080)])
    made = servers(write(NODE, exposed, facts=FACTS, nodePortAddresses=chosen))
    assert [key for key in made if key.endswith("]:30080")] == [f"-t [{ip}]:30080" for ip in served]


# ------------------------------------------------------------------ sets


def test_a_node_port_of_sctp_is_listed_with_its_addresses_and_others_by_number() -> None:
    ports = [port(80, "a", nodePort=30080), port(80, "b", "UDP", nodePort=30080), port(80, "c", "SCTP", nodePort=30081)]
    state = write(NODE, service(type="NodePort", externalTrafficPolicy="Local", ports=ports))
    for local in ("", "-LOCAL"):
        assert entries(state, f"KUBE-NODE-PORT{local}-TCP") == ["30080"]
        assert entries(state, f"KUBE-NODE-PORT{local}-UDP") == ["30080"]
        assert entries(state, f"KUBE-NODE-PORT{local}-SCTP-HASH") == ["172.18.0.11,sctp:30081"]


def test_external_and_load_balancer_addresses_are_in_the_sets_of_their_policy() -> None:
    cluster, local = write(NODE, service(**EXPOSED)), write(NODE, service(**EXPOSED, externalTrafficPolicy="Local"))
    assert entries(cluster, "KUBE-CLUSTER-IP") == entries(local, "KUBE-CLUSTER-IP") == ["10.96.7.7,tcp:80"]
    found = {
        name: (entries(cluster, name), entries(local, name))
        for name in ("KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL", "KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER-LOCAL")
    }
    assert found == {
        "KUBE-EXTERNAL-IP": (["192.0.2.7,tcp:80"], []),
        "KUBE-EXTERNAL-IP-LOCAL": ([], ["192.0.2.7,tcp:80"]),
        "KUBE-LOAD-BALANCER": (["203.0.113.7,tcp:80"], ["203.0.113.7,tcp:80"]),
        "KUBE-LOAD-BALANCER-LOCAL": ([], ["203.0.113.7,tcp:80"]),
    }


OUT_FILTER = "-A KUBE-IPVS-OUT-FILTER -s 203.0.113.7/32 -m ipvs --vproto 6 --vaddr 203.0.113.7 --vport 80 -j DROP"


@pytest.mark.parametrize(
    ("ranges", "cidrs", "from_node"),
    [
        (["198.51.100.0/24"], ["198.51.100.0/24"], False),
        (["172.18.0.0/16", "198.51.100.9/32"], ["172.18.0.0/16", "198.51.100.9"], True),
        (["172.18.0.0/16", "0.0.0.0/0"], [], None),
        (["2001:db8::/64"], [], None),
    ],
)
def test_source_ranges_are_a_firewall_and_the_node_itself_passes_only_if_they_contain_it(
    ranges: list[str], cidrs: list[str], from_node: bool | None
) -> None:
    state = write(NODE, service(**EXPOSED, loadBalancerSourceRanges=ranges))
    assert entries(state, "KUBE-LOAD-BALANCER-FW") == (["203.0.113.7,tcp:80"] if cidrs else [])
    assert entries(state, "KUBE-LOAD-BALANCER-SOURCE-CIDR") == [f"203.0.113.7,tcp:80,{cidr}" for cidr in cidrs]
    own = ["203.0.113.7,tcp:80,203.0.113.7"] if from_node else []
    assert entries(state, "KUBE-LOAD-BALANCER-SOURCE-IP") == own
    assert (OUT_FILTER in file(state, "iptables.rules").splitlines()) is (from_node is False)


def test_every_endpoint_of_the_node_is_looped_back_whatever_its_conditions_and_once() -> None:
    endpoints = [
        endpoint("10.244.1.5", node="n1"),
        endpoint("10.244.1.6", node="n1", ready=False, serving=False),
        endpoint("10.244.2.5", node="n2"),
    ]
    state = write(
        NODE, service(), slice_of("web", *endpoints), service("b", clusterIP="10.96.0.2"), slice_of("b", *endpoints)
    )
    assert entries(state, "KUBE-LOOP-BACK") == [
        "10.244.1.5,tcp:8080,10.244.1.5",
        "10.244.1.6,tcp:8080,10.244.1.6",
    ]


HEALTH_CHECKED = service(
    type="LoadBalancer",
    externalTrafficPolicy="Local",
    healthCheckNodePort=31000,
    ports=[port(80, nodePort=30080), port(81, "b", "UDP", nodePort=30081)],
)


def test_a_health_check_port_is_open_unless_the_node_ports_have_no_address() -> None:
    assert entries(write(NODE, HEALTH_CHECKED), "KUBE-HEALTH-CHECK-NODE-PORT") == ["31000"]
    nowhere = write(NODE, HEALTH_CHECKED, nodePortAddresses=["198.51.100.0/24"])
    assert entries(nowhere, "KUBE-HEALTH-CHECK-NODE-PORT") == []


def test_a_set_that_needs_more_room_than_kube_proxy_gives_it_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipvs, "MAXELEM", 4)
    slices = [slice_of("web", *(f"10.244.1.{i}" for i in range(1, 6)))]
    services = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(9)]
    created = {
        line.split()[1]: line.split()[-1]
        for line in file(write(NODE, service(), *services, *slices), "ipset.rules").splitlines()
        if line.startswith("create") and "maxelem" in line
    }
    larger = {name: size for name, size in created.items() if size != "4"}
    assert larger == {"KUBE-LOOP-BACK": "8", "KUBE-CLUSTER-IP": "16", "KUBE-IPVS-IPS": "16"}


# ------------------------------------------------------------------ schedulers of single Services

ANNOTATION = {"kube-proxy.agentless.io/scheduler": "sh"}


def scheduled(schedulers: dict[str, str], *, annotations: bool, base: ProxyConfig | None = None) -> dict[str, str]:
    read = snapshot(
        NODE, service("a", clusterIP="10.96.0.1"), service("b", clusterIP="10.96.0.2", annotations=ANNOTATION)
    )
    chosen = with_schedulers(base or config(mode="ipvs"), schedulers, annotations=annotations)
    view = ClusterView(read, chosen).node_view(node_facts(read.nodes[0]))
    return {
        key[6:-3]: rest[3:]
        for key, rest in scheduling(ipvs.Renderer(COMPATS["1.37"]).state(view)).items()
        if "96" in key
    }


def test_annotations_count_only_if_they_are_let() -> None:
    assert scheduled({}, annotations=False) == {"96.0.1": "rr", "96.0.2": "rr"}
    assert scheduled({}, annotations=True) == {"96.0.1": "rr", "96.0.2": "sh"}


def test_a_scheduler_by_name_goes_before_the_annotation() -> None:
    named = {"shop/a": "lc", "shop/b": "mh"}
    assert scheduled(named, annotations=True) == {"96.0.1": "lc", "96.0.2": "mh -b mh-port"}


def test_an_unknown_scheduler_is_refused_by_name_and_left_out_of_an_annotation() -> None:
    with pytest.raises(InvalidConfig, match="scheduler of shop/a: 'fast' is not one of rr, wrr"):
        scheduled({"shop/a": "fast"}, annotations=False)
    with pytest.raises(InvalidConfig, match="a Service is named namespace/name"):
        scheduled({"a": "rr"}, annotations=False)
    read = snapshot(service(annotations={"kube-proxy.agentless.io/scheduler": "fast"}))
    assert read.services[0].annotations == ()
    assert [problem.field for problem in read.problems] == ["metadata.annotations[kube-proxy.agentless.io/scheduler]"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_can_be_the_one_of_all_services(scheduler: str) -> None:
    written = scheduling(write(NODE, service(), ipvs={"scheduler": scheduler}))["-t 10.96.7.7:80"]
    assert written.split()[:2] == ["-s", scheduler]


# ------------------------------------------------------------------ sharing and change


def test_nodes_share_what_does_not_depend_on_the_node() -> None:
    read = snapshot(
        node("n1", "172.18.0.11"),
        node("n2", "172.18.0.12"),
        service("a", clusterIP="10.96.0.1"),
        NODE_PORT,
        TWO_ENDPOINTS,
    )
    cluster, renderer = ClusterView(read, config(mode="ipvs")), ipvs.Renderer(COMPATS["1.37"])
    one, two = (renderer.state(cluster.node_view(node_facts(each))) for each in read.nodes)
    shared = [first.name for first, second in zip(one.fragments, two.fragments, strict=True) if first is second]
    assert shared == ["shop/a:http tcp"]
    assert one.generation != two.generation


def test_one_endpoint_more_changes_its_virtual_servers_and_nothing_else() -> None:
    before = write(
        NODE, service(), service("b", clusterIP="10.96.0.2"), slice_of("web", endpoint("10.244.2.5", node="n2"))
    )
    after = write(
        NODE,
        service(),
        service("b", clusterIP="10.96.0.2"),
        slice_of("web", endpoint("10.244.2.5", node="n2"), endpoint("10.244.2.6", node="n2")),
    )
    change = delta(before, after)
    written = dict(ipvs.delta_files(change, after))
    assert set(written) == {"iptables.rules", "ip6tables.rules", "ipvs-2-endpoints.rules", "services.jsonl"}
    assert written["ipvs-2-endpoints.rules"] == "-a -t 10.96.7.7:80 -r 10.244.2.6:8080 -m -w 1\n"
    assert [line for line in written["iptables.rules"].splitlines() if line.startswith(("-A", "-I"))] == [
        f"-A KUBE-PROXY-GEN-{after.generation[:13].upper()} -m comment --comment {after.generation}"
    ] * 2


def change(before: State, after: State) -> dict[str, str]:
    return dict(ipvs.delta_files(delta(before, after), after))


def test_a_service_that_goes_is_deleted_by_its_virtual_servers_and_taken_from_the_sets() -> None:
    both = write(NODE, service(), service("b", clusterIP="10.96.0.2"))
    one = write(NODE, service())
    gone, come = change(both, one), change(one, both)
    assert gone["ipvs-1-frontends.rules"] == "-D -t 10.96.0.2:80\n"
    assert come["ipvs-1-frontends.rules"] == "-A -t 10.96.0.2:80 -s rr\n"
    assert gone["ip.batch"] == "addr del 10.96.0.2/32 dev kube-ipvs0\n"
    assert come["ip.batch"] == "addr add 10.96.0.2/32 dev kube-ipvs0\n"
    assert gone["ipset-1-frontends.rules"] == "del KUBE-CLUSTER-IP 10.96.0.2,tcp:80\ndel KUBE-IPVS-IPS 10.96.0.2\n"
    assert come["ipset-1-frontends.rules"] == "add KUBE-CLUSTER-IP 10.96.0.2,tcp:80\nadd KUBE-IPVS-IPS 10.96.0.2\n"


def test_an_address_that_another_port_still_needs_stays() -> None:
    before, after = write(NODE, service(ports=[port(80), port(81, "b")])), write(NODE, service())
    assert "ip.batch" not in change(before, after)
    assert change(before, after)["ipset-1-frontends.rules"] == "del KUBE-CLUSTER-IP 10.96.7.7,tcp:81\n"


def test_endpoints_come_before_others_go_and_affinity_is_an_edit() -> None:
    before = write(NODE, service(), slice_of("web", endpoint("10.244.2.5", node="n2")))
    after = write(NODE, service(sessionAffinity="ClientIP"), slice_of("web", endpoint("10.244.2.6", node="n2")))
    files = change(before, after)
    assert files["ipvs-1-frontends.rules"] == "-E -t 10.96.7.7:80 -s rr -p 10800\n"
    assert files["ipvs-2-endpoints.rules"].splitlines() == [
        "-a -t 10.96.7.7:80 -r 10.244.2.6:8080 -m -w 1",
        "-d -t 10.96.7.7:80 -r 10.244.2.5:8080",
    ]


def test_a_set_that_must_be_made_anew_takes_a_whole_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipvs, "MAXELEM", 1)
    one, two = write(NODE, service()), write(NODE, service(), service("b", clusterIP="10.96.0.2"))
    assert delta(one, two).needs_full
    single = write(NODE, service(), facts={"capabilities": {"ipv6": False}})
    assert delta(one, single).needs_full


def test_files_of_endpoints_hold_real_servers_and_loops_and_no_more() -> None:
    state = write(NODE, service(), slice_of("web", endpoint("10.244.1.5", node="n1")))
    files = dict(ipvs.files(state))
    assert files["ipset-2-endpoints.rules"] == "add KUBE-LOOP-BACK 10.244.1.5,tcp:8080,10.244.1.5\n"
    assert files["ipvs-2-endpoints.rules"] == "-a -t 10.96.7.7:80 -r 10.244.1.5:8080 -m -w 1\n"
    assert "10.244.1.5" not in files["ipset-1-frontends.rules"] + files["ipvs-1-frontends.rules"]
    assert "frontends.allow" not in files
