"""API objects in, facts out: what counts, what is passed over, and what is refused in words a user can act on."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from agentless_kube_proxy.cluster.snapshot import SliceEndpoint, SlicePort

from tests.unit.build import dual_stack, endpoint, node, port, service, slice_of, snapshot

WEB = "Service/shop/web"
SLICE = "EndpointSlice/shop/web-ipv4"


def only_service(**fields: Any) -> Any:
    return snapshot(service(**fields)).services[0]


def only_slice(*endpoints: Any, **fields: Any) -> Any:
    return snapshot(slice_of("web", *endpoints, **fields)).slices[0]


# ------------------------------------------------------------------ refused, with the message a user needs

WRONG_SERVICES: list[tuple[Any, str]] = [
    (service(""), "Service/shop/(no name): metadata.name: is missing"),
    (service("Web"), "Service/shop/Web: metadata.name: 'Web' is no DNS label"),
    (service("a.b"), "Service/shop/a.b: metadata.name: 'a.b' is no DNS label"),
    (service("-web"), "Service/shop/-web: metadata.name: '-web' is no DNS label"),
    (service("x" * 64), f"Service/shop/{'x' * 64}: metadata.name: '{'x' * 56}... is no DNS label"),
    (service(7), "Service/shop/7: metadata.name: must be a string, not 7"),  # type: ignore[arg-type]
    (service("web\n-A INPUT"), r"Service/shop/'web\n-A INPUT': metadata.name: 'web\n-A INPUT' is no DNS label"),
    (service("web", "my_shop"), "Service/my_shop/web: metadata.namespace: 'my_shop' is no DNS label"),
    ({"kind": "Service", "metadata": []}, "Service/(no name): metadata: must be a mapping, not []"),
    (service() | {"spec": "x"}, f"{WEB}: spec: must be a mapping, not 'x'"),
    (service() | {"status": []}, f"{WEB}: status: must be a mapping, not []"),
    (service(labels=["x"]), f"{WEB}: metadata.labels: must be a mapping, not ['x']"),  # type: ignore[arg-type]
    (
        service(type="Ingress"),
        f"{WEB}: spec.type: 'Ingress' is not one of ClusterIP, NodePort, LoadBalancer, ExternalName",
    ),
    (service(clusterIP="10.96.0.300"), f"{WEB}: spec.clusterIP: '10.96.0.300' is not an IP address"),
    (service(clusterIP=167772161), f"{WEB}: spec.clusterIP: must be a string, not 167772161"),
    (service(clusterIPs=["10.96.7.7", "x"]), f"{WEB}: spec.clusterIPs[1]: 'x' is not an IP address"),
    (service(clusterIPs="10.96.7.7"), f"{WEB}: spec.clusterIPs: must be a list, not '10.96.7.7'"),
    (dual_stack(ipFamilies=["IPv4", "ipv6"]), f"{WEB}: spec.ipFamilies[1]: 'ipv6' is not one of IPv4, IPv6"),
    (
        dual_stack(clusterIPs=["fd00:10:96::77", "10.96.7.7"]),
        f"{WEB}: spec.clusterIPs[0]: 'fd00:10:96::77' is not an IPv4 address, as spec.ipFamilies[0] has it",
    ),
    (service(ports={}), f"{WEB}: spec.ports: must be a list, not {{}}"),
    (service(ports=["80"]), f"{WEB}: spec.ports[0]: must be a mapping, not '80'"),
    (service(ports=[port(0)]), f"{WEB}: spec.ports[0].port: 0 is not between 1 and 65535"),
    (service(ports=[port(70000)]), f"{WEB}: spec.ports[0].port: 70000 is not between 1 and 65535"),
    (service(ports=[port(-1)]), f"{WEB}: spec.ports[0].port: -1 is not between 1 and 65535"),
    (service(ports=[port(), {"name": "b"}]), f"{WEB}: spec.ports[1].port: 0 is not between 1 and 65535"),
    (service(ports=[port("80")]), f"{WEB}: spec.ports[0].port: must be an integer, not '80'"),  # type: ignore[arg-type]
    (service(ports=[port(True)]), f"{WEB}: spec.ports[0].port: must be an integer, not True"),
    (service(ports=[port(80.0)]), f"{WEB}: spec.ports[0].port: must be an integer, not 80.0"),  # type: ignore[arg-type]
    (service(ports=[port(nodePort=65536)]), f"{WEB}: spec.ports[0].nodePort: 65536 is not between 1 and 65535"),
    (service(ports=[port(name="HTTP")]), f"{WEB}: spec.ports[0].name: 'HTTP' is no DNS label"),
    (service(ports=[port(name=False)]), f"{WEB}: spec.ports[0].name: must be a string, not False"),  # type: ignore[arg-type]
    (service(ports=[port(protocol="ICMP")]), f"{WEB}: spec.ports[0].protocol: 'ICMP' is not TCP, UDP or SCTP"),
    (service(ports=[port(protocol="tcp")]), f"{WEB}: spec.ports[0].protocol: 'tcp' is not TCP, UDP or SCTP"),
    (service(sessionAffinity="Cookie"), f"{WEB}: spec.sessionAffinity: 'Cookie' is not one of None, ClientIP"),
    (
        service(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 0}}),
        f"{WEB}: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400",
    ),
    (
        service(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 86401}}),
        f"{WEB}: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not between 1 and 86400",
    ),
    (
        service(externalTrafficPolicy="Near"),
        f"{WEB}: spec.externalTrafficPolicy: 'Near' is not one of Cluster, Local",
    ),
    (
        service(internalTrafficPolicy="Near"),
        f"{WEB}: spec.internalTrafficPolicy: 'Near' is not one of Cluster, Local",
    ),
    (
        service(healthCheckNodePort=99999),
        f"{WEB}: spec.healthCheckNodePort: 99999 is not between 1 and 65535",
    ),
    (service(externalIPs="192.0.2.1"), f"{WEB}: spec.externalIPs: must be a list, not '192.0.2.1'"),
    (
        service(ingress=(["192.0.2.1"],)),
        f"{WEB}: status.loadBalancer.ingress[0]: must be a mapping, not ['192.0.2.1']",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_SERVICES, ids=[m.partition(": ")[2] for _, m in WRONG_SERVICES])
def test_a_malformed_service_is_left_out_and_named(wrong: Any, message: str) -> None:
    read = snapshot(wrong, service("other"))
    assert [str(problem) for problem in read.problems] == [message]
    assert [each.name for each in read.services] == ["other"]


WRONG_SLICES: list[tuple[Any, str]] = [
    (slice_of(name="Web_1"), "EndpointSlice/shop/Web_1: metadata.name: 'Web_1' is no DNS subdomain"),
    (slice_of(namespace="Shop"), "EndpointSlice/Shop/web-ipv4: metadata.namespace: 'Shop' is no DNS label"),
    (
        slice_of(labels={}),
        f"{SLICE}: metadata.labels[kubernetes.io/service-name]: is missing, so no Service owns it",
    ),
    (
        slice_of(labels={"kubernetes.io/service-name": ""}),
        f"{SLICE}: metadata.labels[kubernetes.io/service-name]: is missing, so no Service owns it",
    ),
    (
        slice_of(labels={"kubernetes.io/service-name": "web -j ACCEPT"}),
        f"{SLICE}: metadata.labels[kubernetes.io/service-name]: 'web -j ACCEPT' is no DNS label",
    ),
    (slice_of(addressType="IPv5"), f"{SLICE}: addressType: 'IPv5' is not IPv4, IPv6 or FQDN"),
    (slice_of(addressType=None), f"{SLICE}: addressType: None is not IPv4, IPv6 or FQDN"),
    (slice_of(ports="8080"), f"{SLICE}: ports: must be a list, not '8080'"),
    (slice_of(ports=[8080]), f"{SLICE}: ports[0]: must be a mapping, not 8080"),
    (slice_of(ports=[port(99999)]), f"{SLICE}: ports[0].port: 99999 is not between 1 and 65535"),
    (slice_of(ports=[port(protocol="QUIC")]), f"{SLICE}: ports[0].protocol: 'QUIC' is not TCP, UDP or SCTP"),
    (slice_of(ports=[port(name="a b")]), f"{SLICE}: ports[0].name: 'a b' is no DNS label"),
    (slice_of() | {"endpoints": {}}, f"{SLICE}: endpoints: must be a list, not {{}}"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_SLICES, ids=[m.partition(": ")[2] for _, m in WRONG_SLICES])
def test_a_malformed_slice_is_left_out_and_named(wrong: Any, message: str) -> None:
    read = snapshot(wrong, slice_of("other", "10.244.1.9"))
    assert [str(problem) for problem in read.problems] == [message]
    assert [each.service for each in read.slices] == ["other"]


GOOD = "10.244.1.1"
WRONG_ENDPOINTS: list[tuple[Any, str]] = [
    ("10.244.1.2", "endpoints[0]: must be a mapping, not '10.244.1.2'"),
    (None, "endpoints[0]: must be a mapping, not None"),
    (endpoint("10.244.1.999"), "endpoints[0].addresses[0]: '10.244.1.999' is not an IPv4 address"),
    (endpoint("10.244.1.2 -j ACCEPT"), "endpoints[0].addresses[0]: '10.244.1.2 -j ACCEPT' is not an IPv4 address"),
    (endpoint("10.244.1.2\n-X"), r"endpoints[0].addresses[0]: '10.244.1.2\n-X' is not an IPv4 address"),
    (endpoint("fd00::1"), "endpoints[0].addresses[0]: 'fd00::1' is not an IPv4 address"),
    (endpoint("<nil>"), "endpoints[0].addresses[0]: '<nil>' is not an IPv4 address"),
    (endpoint(5), "endpoints[0].addresses[0]: must be a string, not 5"),  # type: ignore[arg-type]
    ({"addresses": {"a": "b"}}, "endpoints[0].addresses: must be a list, not {'a': 'b'}"),
    (endpoint(GOOD, node=["n1"]), "endpoints[0].nodeName: must be a string, not ['n1']"),  # type: ignore[arg-type]
    (endpoint(GOOD) | {"conditions": "ready"}, "endpoints[0].conditions: must be a mapping, not 'ready'"),
    (endpoint(GOOD, ready="false"), "endpoints[0].conditions.ready: must be true or false, not 'false'"),
    (endpoint(GOOD, serving=[]), "endpoints[0].conditions.serving: must be true or false, not []"),
    (endpoint(GOOD, terminating="no"), "endpoints[0].conditions.terminating: must be true or false, not 'no'"),
    (endpoint(GOOD) | {"hints": ["a"]}, "endpoints[0].hints: must be a mapping, not ['a']"),
    (endpoint(GOOD) | {"hints": {"forZones": ["a"]}}, "endpoints[0].hints.forZones[0]: must be a mapping, not 'a'"),
    (endpoint(GOOD) | {"hints": {"forNodes": [{}]}}, "endpoints[0].hints.forNodes[0].name: must be a string, not None"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_ENDPOINTS, ids=[message for _, message in WRONG_ENDPOINTS])
def test_a_malformed_endpoint_is_left_out_and_the_slice_stays(wrong: Any, message: str) -> None:
    read = snapshot(slice_of() | {"endpoints": [wrong, endpoint("10.244.1.9")]})
    assert [str(problem) for problem in read.problems] == [f"{SLICE}: {message}; the endpoint is left out"]
    assert [each.address for each in read.slices[0].endpoints] == ["10.244.1.9"]


WRONG_ENTRIES: list[tuple[Any, str]] = [
    (service(externalIPs=["192.0.2.1", "junk"]), f"{WEB}: spec.externalIPs[1]: 'junk' is not an IP address"),
    (service(externalIPs=["192.0.2.1", " "]), f"{WEB}: spec.externalIPs[1]: ' ' is not an IP address"),
    (service(externalIPs=["192.0.2.1", None]), f"{WEB}: spec.externalIPs[1]: None is not an IP address"),
    (
        service(loadBalancerSourceRanges=["192.0.2.0/24", "10.0.0.0"]),
        f"{WEB}: spec.loadBalancerSourceRanges[1]: '10.0.0.0' is not a CIDR",
    ),
    (
        service(ingress=("192.0.2.1", "192.0.2.1 -j ACCEPT")),
        f"{WEB}: status.loadBalancer.ingress[1].ip: '192.0.2.1 -j ACCEPT' is not an IP address",
    ),
    (node("n1", "172.18.0.11", "junk"), "Node/n1: status.addresses[1].address: 'junk' is not an IP address"),
    (node("n1", pod_cidrs=("10.244.1.0/24", "10.0.0.1")), "Node/n1: spec.podCIDRs[1]: '10.0.0.1' is not a CIDR"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_ENTRIES, ids=[message for _, message in WRONG_ENTRIES])
def test_a_malformed_entry_of_a_list_is_left_out_and_the_object_stays(wrong: Any, message: str) -> None:
    read = snapshot(wrong)
    assert [str(problem) for problem in read.problems] == [f"{message}; the entry is left out"]
    assert len(read.services) + len(read.nodes) == 1


OTHER_WRONG: list[tuple[Any, str]] = [
    ("kind: Service", "object/(no name): must be a mapping, not 'kind: Service'"),
    (None, "object/(no name): must be a mapping, not None"),
    ({"kind": "List", "items": {}}, "List/(no name): items: must be a list, not {}"),
    ({"kind": "ServiceList", "items": [7]}, "object/(no name): must be a mapping, not 7"),
    (node("N1"), "Node/N1: metadata.name: 'N1' is no DNS subdomain"),
    (node() | {"status": {"addresses": ["x"]}}, "Node/n1: status.addresses[0]: must be a mapping, not 'x'"),
    (node() | {"spec": 3}, "Node/n1: spec: must be a mapping, not 3"),
    (
        {"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": "10.96.0.0/12"}},
        "ServiceCIDR/kubernetes: spec.cidrs: must be a list, not '10.96.0.0/12'",
    ),
    ({"kind": "ServiceCIDR"}, "ServiceCIDR/(no name): metadata.name: is missing"),
    (
        service("\x1b[31m\ud800"),
        r"Service/shop/'\x1b[31m\ud800': metadata.name: '\x1b[31m\ud800' is no DNS label",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), OTHER_WRONG, ids=range(len(OTHER_WRONG)))
def test_other_malformed_objects_are_named(wrong: Any, message: str) -> None:
    read = snapshot(wrong)
    assert [str(problem) for problem in read.problems] == [message]
    assert (read.services, read.slices, read.nodes, read.service_cidrs) == ((), (), (), ())


# ------------------------------------------------------------------ passed over, counted


@pytest.mark.parametrize(
    ("passed_over", "sort"),
    [
        (service(labels={"service.kubernetes.io/service-proxy-name": "other"}), "Service of another proxy"),
        (service(labels={"service.kubernetes.io/service-proxy-name": ""}), "Service of another proxy"),
        (service(clusterIP="None"), "headless Service"),
        (service(clusterIP=""), "Service without a cluster IP"),
        (service(clusterIP=None), "Service without a cluster IP"),
        (service(type="ExternalName", externalName="example.org"), "Service of type ExternalName"),
        (service(type="ExternalName", clusterIP="10.96.7.7"), "Service of type ExternalName"),
        (
            slice_of(labels={"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""}),
            "EndpointSlice of a headless Service",
        ),
        (slice_of(addressType="FQDN"), "EndpointSlice of addressType FQDN"),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}, "Pod"),
        ({"apiVersion": "v2", "kind": "Endpoints"}, "Endpoints"),
        ({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {"name": "x"}}, "Service"),
        ({"apiVersion": "discovery.k8s.io/v1beta1", "kind": "EndpointSlice"}, "EndpointSlice"),
        ({"metadata": {}}, "(no kind)"),
        ({"kind": ["Service"]}, "['Service']"),
    ],
)
def test_what_kube_proxy_would_not_have_been_given_is_counted(passed_over: Any, sort: str) -> None:
    read = snapshot(passed_over, passed_over)
    assert read.ignored == {sort: 2}
    assert read.problems == ()
    assert (read.services, read.slices) == ((), ())


def test_lists_hold_objects_with_and_without_their_kind() -> None:
    bare = {key: value for key, value in service("a").items() if key not in ("kind", "apiVersion")}
    read = snapshot(
        {"kind": "List", "apiVersion": "v1", "items": [service("b"), {"kind": "List", "items": [service("c")]}]},
        {"kind": "ServiceList", "apiVersion": "v1", "items": [bare]},
        {"kind": "NodeList", "apiVersion": "v1", "items": None},
        {"kind": "PodList", "apiVersion": "v1", "items": [{"metadata": {"name": "x"}}]},
    )
    assert [each.name for each in read.services] == ["a", "b", "c"]
    assert read.ignored == {"Pod": 1}
    assert read.problems == ()


def test_an_object_given_twice_counts_once_and_only_a_contradiction_is_a_problem() -> None:
    assert snapshot(service(), service()).problems == ()
    one, two = service(clusterIP="10.96.0.1"), service(clusterIP="10.96.0.2")
    for order in ((one, two), (two, one)):
        read = snapshot(*order)
        assert [each.cluster_ip for each in read.services] == ["10.96.0.1"]
        assert [str(problem) for problem in read.problems] == [
            f"{WEB}: metadata.name: another Service of this name was given in the input; one of the two is used"
        ]


def test_which_of_two_contradicting_slices_is_used_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.unit.build import endpoint, slice_of, snapshot\n"
        "zones = tuple('abcdefgh')\n"
        "a = slice_of('web', endpoint('10.244.1.1', zones=zones[:-1]))\n"
        "b = slice_of('web', endpoint('10.244.1.1', zones=zones))\n"
        "print(len(snapshot(a, b).slices[0].endpoints[0].zone_hints))"
    )
    used = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(used) == 1


def test_the_order_of_objects_does_not_matter() -> None:
    objects = [service("a"), service("b"), slice_of("a", GOOD), slice_of("b", GOOD), node("n2")]
    read = {snapshot(*order) == snapshot(*objects) for order in itertools.permutations(objects)}
    assert read == {True}


# ------------------------------------------------------------------ Service fields


def test_a_service_without_anything_optional() -> None:
    read = only_service(ports=[{"port": 80}])
    assert (read.type, read.sticky_seconds, read.external_policy_local, read.internal_policy_local) == (
        "ClusterIP",
        0,
        False,
        False,
    )
    assert [(each.name, each.protocol, each.port, each.node_port) for each in read.ports] == [("", "tcp", 80, 0)]


def test_an_object_without_namespace_is_in_default() -> None:
    bare = service()
    del bare["metadata"]["namespace"]
    assert snapshot(bare).services[0].namespace == "default"


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"sessionAffinity": "None"}, 0),
        ({"sessionAffinity": "None", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}, 0),
        ({"sessionAffinity": "ClientIP"}, 10800),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}, 60),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": None}}, 10800),
    ],
)
def test_affinity_lasts_three_hours_unless_told_otherwise(fields: Any, seconds: int) -> None:
    assert only_service(**fields).sticky_seconds == seconds


@pytest.mark.parametrize(
    ("ingress", "vips"),
    [
        (("192.0.2.1", "fd00::1"), ("192.0.2.1", "fd00::1")),
        (({"ip": "192.0.2.1", "ipMode": "VIP"},), ("192.0.2.1",)),
        (({"ip": "192.0.2.1", "ipMode": "Proxy"}, "192.0.2.2"), ("192.0.2.2",)),
        (({"hostname": "lb.example.org"}, {"ip": ""}), ()),
        (("192.0.2.2", "192.0.2.1", "192.0.2.2"), ("192.0.2.2", "192.0.2.1", "192.0.2.2")),
        (("192.0.2.010",), ("192.0.2.10",)),
    ],
)
def test_load_balancer_addresses_are_those_that_packets_still_carry(ingress: Any, vips: tuple[str, ...]) -> None:
    assert only_service(ingress=ingress).load_balancer_vips == vips


def test_blank_external_ips_are_dropped_and_the_rest_keeps_its_order() -> None:
    assert only_service(externalIPs=["192.0.2.09", "", "192.0.2.1", "192.0.2.1"]).external_ips == (
        "192.0.2.9",
        "192.0.2.1",
        "192.0.2.1",
    )


def test_source_ranges_are_trimmed_and_masked() -> None:
    assert only_service(loadBalancerSourceRanges=[" 203.0.113.7/24", "fd00::1/64 "]).source_ranges == (
        "203.0.113.0/24",
        "fd00::/64",
    )


def test_only_our_own_annotations_are_kept() -> None:
    given = {"kube-proxy.agentless.io/x": "1", "kube-proxy.agentless.io/y": 2, "other/x": "1", 3: "x"}
    assert only_service(annotations=given).annotations == (("kube-proxy.agentless.io/x", "1"),)


def test_the_old_annotation_for_source_ranges_and_load_balancer_ip_are_never_read() -> None:
    old = {"service.beta.kubernetes.io/load-balancer-source-ranges": "192.0.2.0/24"}
    read = only_service(annotations=old, type="LoadBalancer", loadBalancerIP="192.0.2.1")
    assert read.source_ranges == ()
    assert read.load_balancer_vips == ()


# ------------------------------------------------------------------ EndpointSlice fields


@pytest.mark.parametrize(
    ("conditions", "ready", "serving", "terminating"),
    [
        ({}, True, True, False),
        ({"ready": None, "serving": None, "terminating": None}, True, True, False),
        ({"ready": False}, False, True, False),
        ({"ready": True, "serving": False}, True, False, False),
        ({"ready": False, "serving": True, "terminating": True}, False, True, True),
        ({"ready": False, "serving": False, "terminating": True}, False, False, True),
        ({"serving": False}, True, False, False),
    ],
)
def test_ready_and_serving_default_to_true_independently(
    conditions: Any, ready: bool, serving: bool, terminating: bool
) -> None:
    read = only_slice(endpoint(GOOD, **conditions)).endpoints[0]
    assert (read.ready, read.serving, read.terminating) == (ready, serving, terminating)


@pytest.mark.parametrize(
    ("ports", "read"),
    [
        ([{"name": "http", "port": 8080}], [SlicePort("http", "tcp", 8080)]),
        ([{"name": "", "port": 8080, "protocol": "UDP"}], [SlicePort("", "udp", 8080)]),
        ([{"name": None, "port": 8080}], [SlicePort("", "tcp", 8080)]),
        ([{"port": 8080}], [SlicePort("", "tcp", 8080)]),
        ([{"name": "all", "port": None}], []),
        ([{"name": "all"}], []),
        ([{"name": "zero", "port": 0}], []),
        ([], []),
    ],
)
def test_a_slice_port_needs_a_number_and_has_the_empty_name_where_it_has_none(
    ports: Any, read: list[SlicePort]
) -> None:
    assert list(only_slice(GOOD, ports=ports).ports) == read


def test_only_the_first_address_of_an_endpoint_counts() -> None:
    read = only_slice(endpoint("10.244.1.1", "10.244.1.2", "junk"), endpoint(), endpoint("10.244.1.3"))
    assert [each.address for each in read.endpoints] == ["10.244.1.1", "10.244.1.3"]


def test_everything_of_an_endpoint() -> None:
    given = endpoint("10.244.01.1", node="n7", zones=("a", "b"), nodes=("n1",), ready=False, terminating=True)
    assert only_slice(given | {"zone": "z", "hostname": "h"}).endpoints == (
        SliceEndpoint("10.244.1.1", "n7", False, True, True, frozenset({"a", "b"}), frozenset({"n1"})),
    )


def test_slices_of_another_proxys_service_are_read_all_the_same() -> None:
    labels = {"kubernetes.io/service-name": "web", "service.kubernetes.io/service-proxy-name": "other"}
    assert only_slice(GOOD, labels=labels).service == "web"


# ------------------------------------------------------------------ Nodes and ServiceCIDRs


def test_a_node_keeps_what_rules_and_inventories_need() -> None:
    given = node("n1.example.org", "172.18.0.011", "ExternalIP=FD00::1", "Hostname=n1", zone="a", cpu="8")
    given["status"]["conditions"] = [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": "True"}]
    read = snapshot(given).nodes[0]
    assert read.addresses == (("InternalIP", "172.18.0.11"), ("ExternalIP", "fd00::1"), ("Hostname", "n1"))
    assert (read.zone, read.cpus, read.ready) == ("a", 8, True)
    assert read.pod_cidrs == ("10.244.1.0/24", "fd00:10:244:1::/64")
    assert read.labels == (("topology.kubernetes.io/zone", "a"),)


@pytest.mark.parametrize(("cpu", "cpus"), [("8", 8), ("7910m", None), ("", None), (4, 4), ("9" * 5000, None)])
def test_the_number_of_cpus_is_a_whole_one_or_unknown(cpu: Any, cpus: int | None) -> None:
    assert snapshot(node(cpu=cpu)).nodes[0].cpus == cpus


def test_the_singular_pod_cidr_is_not_read() -> None:
    given = node(pod_cidrs=())
    given["spec"]["podCIDR"] = "10.244.1.0/24"
    assert snapshot(given).nodes[0].pod_cidrs == ()


@pytest.mark.parametrize("version", ["networking.k8s.io/v1", "networking.k8s.io/v1beta1"])
def test_service_cidrs_of_both_versions(version: str) -> None:
    given = {
        "apiVersion": version,
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": ["10.96.0.0/12", "fd00:10:96::/112"]},
    }
    assert snapshot(given).service_cidrs[0].cidrs == ("10.96.0.0/12", "fd00:10:96::/112")
