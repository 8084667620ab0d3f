"""userspace mode: kube-proxy 1.25's rules to the letter, and the files of the proxies that they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import delta_parts, write_bundle
from agentless_kube_proxy.explain.bundles import compare_bundles
from agentless_kube_proxy.proxy.config import InvalidConfig
from agentless_kube_proxy.proxy.proxy_ports import proxy_ports

from ..build import (
    chain,
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
    view,
)

PORT = 24919  # of shop/web:http


def userspace(*objects: Any, **fields: Any) -> State:
    return render(*objects, node("n1", "192.168.77.11", "fd77::11"), mode="userspace", **fields)


def test_a_cluster_ip_is_redirected_from_elsewhere_and_translated_on_the_node() -> None:
    state = userspace(service(), slice_of("web", "10.244.1.1"))
    assert chain(state, "nat", "KUBE-PORTALS-CONTAINER") == text(f"""
        -A KUBE-PORTALS-CONTAINER -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -j REDIRECT --to-ports {PORT}
    """)
    assert chain(state, "nat", "KUBE-PORTALS-HOST") == text(f"""
        -A KUBE-PORTALS-HOST -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -j DNAT --to-destination 192.168.77.11:{PORT}
    """)


def test_external_ips_load_balancers_and_node_ports() -> None:
    state = userspace(
        service(
            type="LoadBalancer", ports=[port(nodePort=30080)], externalIPs=["198.51.100.7"], ingress=("203.0.113.7",)
        )
    )
    assert chain(state, "nat", "KUBE-PORTALS-CONTAINER") == text(f"""
        -A KUBE-PORTALS-CONTAINER -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -j REDIRECT --to-ports {PORT}
        -A KUBE-PORTALS-CONTAINER -d 203.0.113.7/32 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -j REDIRECT --to-ports {PORT}
        -A KUBE-PORTALS-CONTAINER -d 198.51.100.7/32 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -m physdev ! --physdev-is-in -j REDIRECT --to-ports {PORT}
        -A KUBE-PORTALS-CONTAINER -d 198.51.100.7/32 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -m addrtype --dst-type LOCAL -j REDIRECT --to-ports {PORT}
    """)
    assert chain(state, "nat", "KUBE-NODEPORT-CONTAINER") == text(f"""
        -A KUBE-NODEPORT-CONTAINER -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j REDIRECT --to-ports {PORT}
    """)
    assert chain(state, "nat", "KUBE-NODEPORT-HOST") == text(f"""
        -A KUBE-NODEPORT-HOST -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j DNAT --to-destination 192.168.77.11:{PORT}
    """)
    assert chain(state, "filter", "KUBE-NODEPORT-NON-LOCAL") == text(f"""
        -A KUBE-NODEPORT-NON-LOCAL -p tcp -m comment --comment "shop/web:http" -m tcp --dport {PORT} -m state --state NEW -j ACCEPT
    """)


def test_a_bind_address_takes_the_place_of_redirects_and_is_where_the_proxy_listens() -> None:
    state = userspace(service(), slice_of("web", "10.244.1.1"), bindAddress="192.168.77.99")
    assert f"-j DNAT --to-destination 192.168.77.99:{PORT}\n" in chain(state, "nat", "KUBE-PORTALS-CONTAINER")
    assert f"    bind 192.168.77.99:{PORT}\n" in file(state, "haproxy.cfg")


def test_a_service_of_ipv6_has_the_same_rules_there() -> None:
    state = userspace(
        service(clusterIP="fd00:10:96::7", ipFamilies=["IPv6"], clusterIPs=["fd00:10:96::7"]),
        slice_of("web", "fd00:10:244::1", addressType="IPv6"),
    )
    assert chain(state, "nat", "KUBE-PORTALS-HOST", "IPv6") == text(f"""
        -A KUBE-PORTALS-HOST -d fd00:10:96::7/128 -p tcp -m comment --comment "shop/web:http" -m tcp --dport 80 -j DNAT --to-destination [fd77::11]:{PORT}
    """)
    assert chain(state, "nat", "KUBE-PORTALS-HOST") == ""
    assert file(state, "haproxy.cfg") == text(f"""
        # shop/web:http tcp IPv6
        listen shop.web:http
            bind :::{PORT} v6only
            server fd00:10:244::1:8080 [fd00:10:244::1]:8080
    """)


def test_the_second_cluster_ip_of_a_service_is_not_served() -> None:
    state = userspace(dual_stack())
    assert "10.96.7.7/32" in chain(state, "nat", "KUBE-PORTALS-HOST")
    assert chain(state, "nat", "KUBE-PORTALS-HOST", "IPv6") == ""


def test_an_address_of_the_other_family_ends_the_portals_as_in_kube_proxy_and_is_named() -> None:
    vips = ("203.0.113.7", "2001:db8::7", "203.0.113.8")
    odd = service(type="LoadBalancer", ports=[port(nodePort=30080)], ingress=vips)
    state = userspace(odd)
    portals = chain(state, "nat", "KUBE-PORTALS-CONTAINER")
    assert "203.0.113.7/32" in portals
    assert "203.0.113.8/32" not in portals
    assert chain(state, "nat", "KUBE-NODEPORT-CONTAINER") == ""
    (warned,) = proxy_ports(snapshot(odd).services, config(mode="userspace")).warnings
    assert "2001:db8::7 is of another family than the cluster IP" in str(warned)


def test_a_load_balancer_that_is_a_proxy_itself_is_a_portal_as_well() -> None:
    odd = service(type="LoadBalancer", ingress=({"ip": "203.0.113.7", "ipMode": "Proxy"}, "203.0.113.7"))
    assert chain(userspace(odd), "nat", "KUBE-PORTALS-CONTAINER").count("203.0.113.7/32") == 1


def test_jumps_to_portals_go_first_and_those_to_node_ports_last() -> None:
    rules = file(userspace(service()), "iptables.rules")
    jumps = [line for line in rules.splitlines() if line.startswith("-I") or " -j KUBE-NODEPORT-" in line]
    assert (
        jumps
        == text("""
        -I PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
        -I OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
        -A PREROUTING -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-CONTAINER
        -A OUTPUT -m addrtype --dst-type LOCAL -m comment --comment "handle service NodePorts; NOTE: this must be the last rule in the chain" -j KUBE-NODEPORT-HOST
        -I INPUT -m comment --comment "Ensure that non-local NodePort traffic can flow" -j KUBE-NODEPORT-NON-LOCAL
    """).splitlines()
    )


def test_affinity_is_a_table_of_clients_that_expires() -> None:
    sticky = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}
    state = userspace(service(**sticky), slice_of("web", "10.244.1.2", "10.244.1.1"))
    assert file(state, "haproxy.cfg") == text(f"""
        # shop/web:http tcp IPv4
        listen shop.web:http
            bind *:{PORT}
            stick-table type ip size 100k expire 60s store gpc0 peers akp
            stick on src
            tcp-request inspect-delay 50ms
            tcp-request content accept if {{ src,table_server_id gt 0 }} || {{ src_inc_gpc0 eq 1 }} || WAIT_END
            server 10.244.1.1:8080 10.244.1.1:8080
            server 10.244.1.2:8080 10.244.1.2:8080
    """)


def test_a_udp_service_is_nginxs_and_without_endpoints_nobodys() -> None:
    dns = service("dns", "kube-system", ports=[port(53, "dns", "UDP")])
    pods = slice_of("dns", "10.244.1.1", namespace="kube-system", ports=[port(5353, "dns", "UDP")])
    state = userspace(dns, pods, udpIdleTimeout="2s")
    (number,) = (line.split()[1] for line in file(state, "ports.map").splitlines())
    assert file(state, "haproxy.cfg") == ""
    assert file(state, "nginx.conf") == text(f"""
        # kube-system/dns:dns udp IPv4
        upstream kube-system.dns.dns {{
            server 10.244.1.1:5353;
        }}
        server {{
            listen {number} udp;
            proxy_pass kube-system.dns.dns;
            proxy_timeout 2000ms;
        }}
    """)
    assert file(userspace(dns), "nginx.conf") == ""
    assert "-p udp" in chain(userspace(dns), "nat", "KUBE-PORTALS-HOST")


@pytest.mark.parametrize(
    ("fields", "servers"),
    [
        ({}, ["10.244.1.1", "10.244.2.1"]),
        ({"internalTrafficPolicy": "Local"}, ["10.244.1.1"]),
        ({"internalTrafficPolicy": "Local", "type": "NodePort", "ports": [port(nodePort=30080)]}, ["10.244.1.1", "10.244.2.1"]),
        ({"externalTrafficPolicy": "Local", "type": "NodePort", "ports": [port(nodePort=30080)]}, ["10.244.1.1", "10.244.2.1"]),
    ],
)  # fmt: skip
def test_a_proxy_keeps_to_the_node_where_all_traffic_has_to(fields: Any, servers: list[str]) -> None:
    state = userspace(service(**fields), slice_of("web", endpoint("10.244.1.1"), endpoint("10.244.2.1", node="n2")))
    found = [line.split()[2] for line in file(state, "haproxy.cfg").splitlines() if line.startswith("    server")]
    assert found == [f"{ip}:8080" for ip in servers]


def aged(name: str, created: str, **fields: Any) -> Any:
    made = service(name, **fields)
    made["metadata"]["creationTimestamp"] = created
    return made


def ports_of(*objects: Any, **fields: Any) -> dict[str, int]:
    found = proxy_ports(snapshot(*objects).services, config(mode="userspace", **fields)).ports
    return {f"{key[1]}/{key[3]}": number for key, number in found.items()}


def test_a_new_service_moves_no_port_of_an_older_one() -> None:
    old = [aged(f"s{n}", f"2026-01-01T00:00:{n:02}Z") for n in range(50)]
    before = ports_of(*old, portRange="20000-20063")
    after = ports_of(aged("a", "2026-01-02T00:00:00Z"), *reversed(old), portRange="20000-20063")
    assert len(set(before.values())) == 50
    assert before.items() <= after.items()


def test_tcp_and_udp_share_no_numbers_and_a_full_range_leaves_the_youngest_out() -> None:
    both = [port(53, "dns", "UDP"), port(53, "dns-tcp")]
    services = [aged("old", "2026-01-01T00:00:00Z", ports=both), aged("new", "2026-01-02T00:00:00Z", ports=both)]
    assert ports_of(*services, portRange="21000") == {"old/udp": 21000, "old/tcp": 21000}
    seen = view(*services, node(), mode="userspace", portRange="21000")
    state = backends.renderer(seen.config).state(seen)
    assert "shop/new" not in file(state, "iptables.rules") + file(state, "ports.map")
    warned = proxy_ports(snapshot(*services).services, seen.config).warnings
    assert [str(each).count("portRange 21000-21000 has no port left for it") for each in warned] == [1, 1]


@pytest.mark.parametrize(
    ("given", "ports"), [("21000-21010", (21000, 21010)), ("21000+5", (21000, 21005)), ("0-0", (20000, 27999))]
)
def test_a_range_is_written_as_kube_proxy_reads_it(given: str, ports: tuple[int, int]) -> None:
    assert config(mode="userspace", portRange=given).userspace.port_range == ports


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"portRange": "21010-21000"}, "portRange: '21010-21000' is not FIRST-LAST"),
        ({"portRange": "1-70000"}, "portRange: '1-70000' is not FIRST-LAST"),
        ({"udpIdleTimeout": "-1s"}, "udpIdleTimeout: must be at least 1ms"),
        ({"bindAddress": "127.0.0.1"}, "bindAddress: must not be a loopback address"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        config(mode="userspace", **fields)


def test_the_field_of_the_mode_has_no_effect_in_others_and_that_is_said() -> None:
    assert config(mode="iptables", udpIdleTimeout="1s").unknown == ("udpIdleTimeout",)


def test_sctp_is_left_out_and_named() -> None:
    odd = service(ports=[port(protocol="SCTP")])
    assert "shop/web" not in file(userspace(odd), "iptables.rules")
    (warned,) = proxy_ports(snapshot(odd).services, config(mode="userspace")).warnings
    assert "SCTP is not for userspace mode" in str(warned)


def test_a_bundle_has_the_files_of_the_contract_and_every_change_is_told(tmp_path: Path) -> None:
    first = userspace(service(), slice_of("web", "10.244.1.1"))
    second = userspace(service(), slice_of("web", "10.244.1.2"))
    third = userspace(service(), slice_of("web", "10.244.1.2"), portRange="21000-21000")
    for number, state in enumerate((first, second, third)):
        write_bundle(state, tmp_path / str(number))
        names = {each.name for each in (tmp_path / str(number)).iterdir()}
        assert names >= {"iptables.rules", "ip6tables.rules", "haproxy.cfg", "nginx.conf", "ports.map"}
    assert first.compat == "1.25"
    assert not delta(first, second).needs_full
    assert delta(second, third).needs_full
    (one,) = compare_bundles(tmp_path / "0", tmp_path / "1")
    assert one.details == ("- endpoint 10.244.1.1:8080", "+ endpoint 10.244.1.2:8080")
    (one,) = compare_bundles(tmp_path / "1", tmp_path / "2")
    assert one.details == (f"~ proxyPort {PORT} -> 21000",)


def test_flows_of_udp_services_lead_to_the_proxy_port_at_whichever_address() -> None:
    dns = service(
        "dns",
        "kube-system",
        type="NodePort",
        ports=[port(53, "dns", "UDP", nodePort=30053)],
        externalIPs=["198.51.100.7"],
    )
    state = userspace(dns, service())
    number = next(line.split()[1] for line in file(state, "ports.map").splitlines() if line.startswith("udp"))
    assert file(state, "conntrack.udp") == text(f"""
        ipv4 10.96.7.7 53 *:{number}
        ipv4 198.51.100.7 53 *:{number}
        ipv4 * 30053 *:{number}
    """)


def servers(state: State) -> list[str]:
    return [line.split()[1] for line in file(state, "haproxy.cfg").splitlines() if line.startswith("    server ")]


def test_gates_of_kube_proxy_1_25_have_it_ignore_policies_hints_and_terminating_endpoints() -> None:
    here, there = "10.244.1.1:8080", "10.244.2.2:8080"
    near = [endpoint("10.244.1.1", nodes=("n1",)), endpoint("10.244.2.2", node="n2", nodes=("n2",))]
    ending = slice_of("web", endpoint("10.244.1.1", ready=False, serving=True, terminating=True))
    for gate, objects, usual, strict in (
        (
            "ServiceInternalTrafficPolicy",
            [service(internalTrafficPolicy="Local"), slice_of("web", *near)],
            [here],
            None,
        ),
        ("TopologyAwareHints", [service(), slice_of("web", *near)], [here], [here, there]),
        ("ProxyTerminatingEndpoints", [service(), ending], [here], []),
    ):
        assert servers(userspace(*objects)) == usual
        # Without the policy hints count.
        assert servers(userspace(*objects, featureGates={gate: False})) == (usual if strict is None else strict)
    gates = {"ServiceInternalTrafficPolicy": False, "TopologyAwareHints": False, "ProxyTerminatingEndpoints": False}
    local = [service(internalTrafficPolicy="Local"), slice_of("web", *near)]
    assert servers(userspace(*local, featureGates=gates)) == [here, there]


def test_a_delta_tells_haproxy_of_endpoints_and_leads_nowhere_else() -> None:
    one = [service(), slice_of("web", "10.244.1.1", "10.244.1.2")]
    first = userspace(*one)
    second = userspace(service(), slice_of("web", "10.244.1.2", "10.244.1.3"))
    contents = dict(delta_parts(delta(first, second), second)[1])
    assert sorted(contents) == ["haproxy.diff", "ip6tables.rules", "iptables.rules", "services.jsonl.diff"]
    assert contents["haproxy.diff"] == "-shop.web:http 10.244.1.1:8080\n+shop.web:http 10.244.1.3:8080\n"
    dns = service("dns", "kube-system", clusterIP="10.96.0.10", ports=[port(53, "dns", "UDP")])
    pods = [slice_of("dns", f"10.244.1.{i}", namespace="kube-system", ports=[port(5353, "dns", "UDP")]) for i in (1, 2)]
    for had, has in (
        (first, userspace(*one, service("more", clusterIP="10.96.7.8"))),
        (userspace(*one, dns, pods[0]), userspace(*one, dns, pods[1])),
        (first, userspace(service(sessionAffinity="ClientIP"), one[1])),
    ):
        assert delta(had, has).needs_full
