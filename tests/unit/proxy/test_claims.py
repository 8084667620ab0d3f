"""Who gets a destination that more than one claims, in every mode, and which destinations no Service gets."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.addresses import special
from agentless_kube_proxy.backends import files, renderer
from agentless_kube_proxy.bundle.program import node_program
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.cluster.objects import MOST_PROBLEMS
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.policy import InvalidPolicy, Known, VipPolicy, under_policy, vip_policy
from agentless_kube_proxy.proxy.view import ClusterView

from tests.unit.build import Object, config, endpoint, node, port, service, slice_of, snapshot

ROOT = Path(__file__).parents[3]
MODES = ("iptables", "nftables", "ipvs")
DNS_PORTS = [port(53, "dns", "UDP"), port(53, "dns-tcp", "TCP")]
DNS = service("kube-dns", "kube-system", clusterIP="10.96.0.10", ports=DNS_PORTS)
DNS_SLICE = slice_of("kube-dns", "10.244.1.53", namespace="kube-system", ports=DNS_PORTS)
API = service("kubernetes", "default", clusterIP="10.96.0.1", ports=[port(443, "https")])
API_SLICE = slice_of("kubernetes", "172.18.0.11", namespace="default", ports=[port(6443, "https")])
OLD, NEW = "2020-01-01T00:00:00Z", "2026-01-01T00:00:00Z"


def tenant(name: str = "thief", namespace: str = "aaa", *, created: str = NEW, **fields: Any) -> list[Object]:
    """A Service with one endpoint of its own."""
    made = service(name, namespace, **{"clusterIP": "10.96.66.6", **fields})
    made["metadata"]["creationTimestamp"] = created
    ports = [port(each["port"] + 8000, each["name"], each["protocol"]) for each in made["spec"]["ports"]]
    return [made, slice_of(name, "10.244.1.66", namespace=namespace, ports=ports)]


def written(
    *objects: Object, mode: str, policy: VipPolicy | None = None, known: Known | None = None
) -> tuple[str, list[str]]:
    """All rules of node n1, and what was said."""
    read, settings = snapshot(*objects, node("n1"), node("n2", "172.18.0.12")), config(mode=mode)
    allowed, said = under_policy(read, settings, policy or VipPolicy(), known or Known())
    view = ClusterView(allowed, settings)
    state = renderer(settings).state(view.node_view(node_facts(read.nodes[0])))
    rules = "".join(text for name, text in files(state) if name != "services.jsonl")
    named = [each.text for each in said if each.heading == "claimed, and not granted"]
    return rules, [*(str(each) for each in read.problems), *named, *(str(each) for each in view.left_out)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", ["externalIPs", "loadBalancer"])
def test_the_owner_of_a_cluster_ip_has_it_whatever_others_are_called(mode: str, field: str) -> None:
    claim: Object = {"externalIPs": ["10.96.0.10"]}
    if field == "loadBalancer":
        claim = {"type": "LoadBalancer", "ingress": ("10.96.0.10",)}
    without, _said = written(DNS, DNS_SLICE, *tenant(ports=DNS_PORTS), mode=mode)
    rules, said = written(DNS, DNS_SLICE, *tenant(ports=DNS_PORTS, created=OLD, **claim), mode=mode)
    assert sorted(_without_generation(rules)) == sorted(_without_generation(without)), "as if it had claimed nothing"
    assert said == [
        f"Service/aaa/thief: {field} 10.96.0.10:53/{protocol} is the cluster IP of kube-system/kube-dns; it is left out"
        for protocol in ("udp", "tcp")
    ]


def _without_generation(rules: str) -> list[str]:
    return [line for line in rules.splitlines() if "GENERATION" not in line and "generation" not in line]


def test_at_other_ports_of_a_cluster_ip_it_is_as_with_kube_proxy() -> None:
    rules, said = written(DNS, DNS_SLICE, *tenant(externalIPs=["10.96.0.10"], ports=[port(5353, "p")]), mode="iptables")
    assert '-d 10.96.0.10/32 -p tcp -m comment --comment "aaa/thief:p external IP" -m tcp --dport 5353' in rules
    assert said == []


@pytest.mark.parametrize("mode", MODES)
def test_a_load_balancer_ip_goes_before_an_external_ip_and_the_older_before_the_younger(mode: str) -> None:
    shared = "203.0.113.7"
    external: Object = {"externalIPs": [shared]}
    balanced: Object = {"type": "LoadBalancer", "ingress": (shared,)}
    for first, second, reason in (
        ({**external, "created": OLD}, {**balanced, "created": NEW}, "is the load balancer IP of zzz/b"),
        ({**external, "created": NEW}, {**external, "created": OLD}, "is claimed by zzz/b, too, which is older"),
        ({**balanced, "created": NEW}, {**balanced, "created": OLD}, "is claimed by zzz/b, too, which is older"),
    ):
        one, two = tenant("a", "aaa", **first), tenant("b", "zzz", clusterIP="10.96.66.7", **second)
        rules, said = written(*one, *two, mode=mode)
        field = "loadBalancer" if "ingress" in first else "externalIPs"
        assert said == [f"Service/aaa/a: {field} {shared}:80/tcp {reason}; it is left out"]
        assert {"iptables": 1, "nftables": 1, "ipvs": 1}[mode] == _dispatches(rules, mode, shared)


def _dispatches(rules: str, mode: str, address: str) -> int:
    """How many lines lead somewhere from an address."""
    begin = {
        "iptables": f"-A KUBE-SERVICES -d {address}/32 ",
        "nftables": f"add element ip kube-proxy service-ips {{ {address} . ",
        "ipvs": f"-A -t {address}:",
    }[mode]
    return sum(line.startswith(begin) for line in rules.splitlines())


def test_without_ages_the_order_of_names_decides_and_who_has_one_goes_before_who_has_none() -> None:
    made = [tenant(name, created="", clusterIP=ip, externalIPs=["203.0.113.7"]) for name, ip in (("a", "10.96.6.1"), ("b", "10.96.6.2"))]  # fmt: skip
    _rules, said = written(*made[0], *made[1], mode="nftables")
    reason = "is claimed by aaa/a, too, which comes first by its name"
    assert said == [f"Service/aaa/b: externalIPs 203.0.113.7:80/tcp {reason}; it is left out"]
    made[1][0]["metadata"]["creationTimestamp"] = NEW
    _rules, said = written(*made[0], *made[1], mode="nftables")
    assert said == ["Service/aaa/a: externalIPs 203.0.113.7:80/tcp is claimed by aaa/b, too, which is older; it is left out"]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_of_two_node_ports_and_two_health_check_ports_the_older_service_has_them(mode: str) -> None:
    fields: Object = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 31999,
        "ports": [port(80, nodePort=30080)],
    }
    one = tenant("a", "aaa", created=NEW, **fields)
    two = tenant("b", "zzz", created=OLD, clusterIP="10.96.66.7", **fields)
    rules, said = written(*one, *two, mode=mode)
    assert said == [
        "Service/aaa/a: nodePort 30080/tcp is claimed by zzz/b, too, which is older; it is left out",
        "Service/aaa/a: healthCheckNodePort 31999/tcp is that of zzz/b, too, which goes first; it is left out",
    ]
    assert [line for line in rules.splitlines() if line.startswith("check ")] == ["check ipv4 31999 zzz b"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("address", ["172.18.0.11", "172.18.0.12"])
def test_the_way_in_for_the_control_host_is_no_services(mode: str, address: str) -> None:
    ports = [port(22, "ssh"), port(80, "web"), port(22, "dns", "UDP")]
    rules, said = written(*tenant(externalIPs=[address], ports=ports), mode=mode)
    name = {"172.18.0.11": "n1", "172.18.0.12": "n2"}[address]
    reason = f"is the way in to the node {name} for the control host"
    assert said == [f"Service/aaa/thief: externalIPs {address}:22/tcp {reason}; it is left out"]
    assert _dispatches(rules, mode, address) == {"iptables": 2, "nftables": 2, "ipvs": 1}[mode], "the other ports"


def test_the_inventory_says_which_port_that_is() -> None:
    policy = vip_policy("warn", None, None, ["2222", 22])
    ports = [port(2222, "ssh", nodePort=2222), port(22, "old")]
    _rules, said = written(
        *tenant(externalIPs=["172.18.0.11"], type="NodePort", ports=ports), mode="iptables", policy=policy
    )
    assert [each.split(": ")[1].split(" is ")[0] for each in said] == [
        "externalIPs 172.18.0.11:2222/tcp",
        "externalIPs 172.18.0.11:22/tcp",
        "nodePort 2222/tcp",
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_api_server_at_its_port_is_no_services(mode: str) -> None:
    ports = [port(6443, "api", nodePort=6443)]
    claim = tenant(externalIPs=["172.18.0.11", "192.0.2.5"], type="NodePort", ports=ports)
    _rules, said = written(API, API_SLICE, *claim, mode=mode, known=Known({}, "https://192.0.2.5:6443/path"))
    assert said == [
        "Service/aaa/thief: externalIPs 172.18.0.11:6443/tcp is the API server; it is left out",
        "Service/aaa/thief: externalIPs 192.0.2.5:6443/tcp is the API server; it is left out",
        "Service/aaa/thief: nodePort 6443/tcp is the API server on the node n1; it is left out",
    ]


def test_in_ipvs_mode_an_address_of_the_api_server_is_left_out_at_every_port() -> None:
    """On kube-ipvs0 it would be the node's own, and no node could reach the API server any more."""
    rules, said = written(API, API_SLICE, *tenant(externalIPs=["172.18.0.11"]), mode="ipvs")
    reason = "is an address of the API server, which ipvs mode would take at every port"
    assert said == [f"Service/aaa/thief: externalIPs 172.18.0.11:80/tcp {reason}; it is left out"]
    assert _dispatches(rules, "ipvs", "172.18.0.11") == 0


def test_who_names_an_address_by_itself_means_it() -> None:
    policy = vip_policy("warn", ["172.18.0.11", "0.0.0.0/0"], None)
    claim = tenant(externalIPs=["172.18.0.11", "172.18.0.12"], ports=[port(22, "ssh")])
    _rules, said = written(*claim, mode="iptables", policy=policy)
    assert ["172.18.0.12:22" in each for each in said] == [True]


@pytest.mark.parametrize("wrong", [["0"], ["ssh"], ["70000"]])
def test_a_control_port_that_is_none_is_refused(wrong: list[str]) -> None:
    with pytest.raises(InvalidPolicy, match="the control ports"):
        vip_policy("warn", None, None, wrong)


# ------------------------------------------------------------------ health check ports


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [22, 2379, 10250, 29999, 32768])
def test_a_health_check_port_that_nodes_do_not_open_is_left_out_and_the_rest_stays(mode: str, number: int) -> None:
    fields: Object = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ingress": ("203.0.113.7",)}
    rules, said = written(*tenant(**fields, healthCheckNodePort=number), mode=mode)
    reason = "is not one of 30000-32767, which nodes open for health checks"
    assert said == [f"Service/aaa/thief: healthCheckNodePort {number}/tcp {reason}; it is left out"]
    plain, _said = written(*tenant(**fields), mode=mode)
    assert _without_generation(rules) == _without_generation(plain)


def test_the_range_of_health_check_ports_is_a_setting() -> None:
    fields: Object = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 20000}
    policy = vip_policy("warn", None, None, None, "20000-40000")
    rules, said = written(*tenant(**fields), mode="iptables", policy=policy)
    assert said == []
    assert "--dport 20000 -j ACCEPT" in rules
    for wrong in ("x", "1-", "0-5", "9-8", "1-70000"):
        with pytest.raises(InvalidPolicy, match="is no range such as 30000-32767"):
            vip_policy("warn", None, None, None, wrong)


# ------------------------------------------------------------------ what leads to a node itself, or to all hosts

SPECIAL = {
    "127.0.0.1": "is a loopback address",
    "127.8.9.10": "is a loopback address",
    "::1": "is a loopback address",
    "::ffff:127.0.0.1": "is a loopback address",
    "0.0.0.0": "is no address that anything could have",
    "::": "is no address that anything could have",
    "169.254.169.254": "is a link-local address",
    "fe80::1": "is a link-local address",
    "febf::1": "is a link-local address",
    "224.0.0.18": "is a multicast address",
    "239.1.2.3": "is a multicast address",
    "ff02::1": "is a multicast address",
    "ff0e::1": "is a multicast address",
    "255.255.255.255": "is the broadcast address",
    "255.255.255.254": "is no address that anything could have",
    "::2": "is in a range of IPv6 that stands for IPv4 addresses",
    "::7f00:1": "is in a range of IPv6 that stands for IPv4 addresses",
    "0:1::7": "is in a range of IPv6 that stands for IPv4 addresses",
    "2002:7f00:1::1": "is in a range of IPv6 that stands for IPv4 addresses",
}


@pytest.mark.parametrize("address", ["1.0.0.1", "12.7.0.1", "126.255.255.255", "128.0.0.1", "169.253.1.1", "223.255.255.255", "240.0.0.1", "255.255.254.255", "1::2", "2001::2", "2003::1", "fec0::1", "fe00::1", "fd00::1", "2001:db8::ff02"])  # fmt: skip
def test_other_addresses_are_destinations(address: str) -> None:
    assert special(address) == ""


def test_what_a_node_refuses_is_no_destination() -> None:
    """One such address in a bundle, and the node would take nothing of it."""
    networks = re.search(r'pin\("NEVER", "([^"]+)"\)', node_program("iptables"))
    assert networks
    for network in map(ipaddress.ip_network, networks[1].split(",")):
        found = (network[0], network[1], network[network.num_addresses // 2], network[-2], network[-1])
        assert [str(each) for each in found if not special(str(each))] == []


@pytest.mark.parametrize(("address", "reason"), SPECIAL.items())
def test_an_endpoint_that_is_no_destination_is_left_out_and_named(address: str, reason: str) -> None:
    family = "IPv4" if "." in address else "IPv6"
    good = "10.244.1.1" if family == "IPv4" else "fd00::1"
    made = slice_of("web", endpoint(address), good, addressType=family)
    (read,) = snapshot(made).slices
    assert [each.address for each in read.endpoints] == [good]
    (problem,) = snapshot(made).problems
    shown = address.removeprefix("::ffff:")
    assert str(problem) == f"EndpointSlice/shop/{made['metadata']['name']}: endpoints[0].addresses[0]: {shown} {reason}; the endpoint is left out"  # fmt: skip


@pytest.mark.parametrize(("address", "reason"), SPECIAL.items())
def test_a_vip_that_is_no_destination_is_left_out_and_named_in_every_mode(address: str, reason: str) -> None:
    made = service(type="LoadBalancer", externalIPs=["192.0.2.1", address], ingress=(address, "192.0.2.2"))
    read = snapshot(made)
    assert (read.services[0].external_ips, read.services[0].load_balancer_vips) == (("192.0.2.1",), ("192.0.2.2",))
    shown = address.removeprefix("::ffff:")
    assert [str(each).split(": ", 1)[1] for each in read.problems] == [
        f"spec.externalIPs[1]: {shown} {reason}; the entry is left out",
        f"status.loadBalancer.ingress[0].ip: {shown} {reason}; the entry is left out",
    ]


def test_a_cluster_ip_that_is_no_destination_is_no_service() -> None:
    read = snapshot(service(clusterIP="127.0.0.1"))
    assert read.services == ()
    assert [str(each) for each in read.problems] == ["Service/shop/web: spec.clusterIP: '127.0.0.1' is a loopback address"]  # fmt: skip


def test_an_object_with_a_thousand_problems_does_not_bury_those_of_others() -> None:
    read = snapshot(slice_of("web", *["239.0.0.1"] * 1000), service("other", externalIPs=["junk"]))
    assert len(read.problems) == MOST_PROBLEMS + 2
    assert sum("has more problems than are listed here" in str(each) for each in read.problems) == 1


def test_akp_render_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    objects = [DNS, DNS_SLICE, *tenant(externalIPs=["10.96.0.10"], ports=DNS_PORTS), node("n1")]
    (folder / "all.yaml").write_text(yaml.safe_dump_all(objects))
    argv = ["render", "--cluster", str(folder), "--config", str(ROOT / "examples/shop/kube-proxy.yaml")]
    argv += ["--all-nodes", "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert "warning: Service/aaa/thief: externalIPs 10.96.0.10:53/udp is the cluster IP of kube-system/kube-dns" in said
    assert main([*argv, "--control-port", "x"]) == 2
    assert main([*argv, "--health-check-ports", "x"]) == 2
