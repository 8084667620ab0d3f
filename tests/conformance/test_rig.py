"""The parts of the rig that need no kernel: drawing, histories, canonical forms, shrinking."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import draw, goldens, kernel, packets
from .coverage import features
from .draw import Cluster
from .history import History, LeftToChance, changes, key
from .shrink import Shrinker, shrink_step
from .undefined import undefined

MODES = ("iptables", "nftables", "ipvs")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_always_draws_the_same_cluster_and_history(mode: str) -> None:
    first, second = (History(draw.cluster(7, mode)) for _ in range(2))
    assert first.cluster == second.cluster
    assert [first.step() for _ in range(5)] == [second.step() for _ in range(5)]


def test_a_seed_draws_the_same_in_every_process() -> None:
    """Sets of strings have another order in each."""
    told = f"""if True:
        from tests.conformance import draw, history
        for mode in {MODES}:
            print(mode, drawn := draw.cluster(7, mode), history.History(drawn).step())
        """
    draws = [
        subprocess.run(
            [sys.executable, "-c", told],
            env=os.environ | {"PYTHONHASHSEED": str(number)}, cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for number in (1, 2, 3)
    ]  # fmt: skip
    assert len(draws[0]) > 10_000
    assert draws[0] == draws[1] == draws[2]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_drawn_that_kube_proxy_treats_in_no_fixed_way(mode: str) -> None:
    for seed in range(40):
        history = History(draw.cluster(seed, mode))
        for _ in range(3):
            assert undefined(history.step().after.objects) is None


def service(name: str, **spec: Any) -> dict[str, Any]:
    ports = [{"port": 80, "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": name},
        "spec": {"type": "ClusterIP", "ports": ports, **spec},
    }


def test_a_cluster_that_is_left_to_chance_has_no_history_and_says_why() -> None:
    drawn = draw.cluster(7, "iptables")
    claims = (service("a", externalIPs=["203.0.113.7"]), service("b", externalIPs=["203.0.113.7"]))
    with pytest.raises(LeftToChance, match=r"no history: \('shop', 'b'\) and \('shop', 'a'\) claim"):
        History(dataclasses.replace(drawn, objects=(*drawn.objects, *claims))).step()


def test_a_service_that_is_a_name_claims_nothing() -> None:
    named = service("a", type="ExternalName", externalName="example.com", externalIPs=["203.0.113.7"])
    assert undefined([named, service("b", externalIPs=["203.0.113.7"])]) is None


@pytest.mark.parametrize("mode", MODES)
def test_the_class_of_a_load_balancer_never_changes(mode: str) -> None:
    seen = 0
    for seed in range(12):
        history = History(draw.cluster(seed, mode))
        for _ in range(4):
            before = {key(each): each["spec"] for each in history.cluster.of("Service")}
            for each in history.step().after.of("Service"):
                was = before.get(key(each))
                if was and was["type"] == each["spec"]["type"] == "LoadBalancer":
                    seen += "loadBalancerClass" in was
                    assert each["spec"].get("loadBalancerClass") == was.get("loadBalancerClass")
    assert seen


@pytest.mark.parametrize("mode", MODES)
def test_a_few_dozen_clusters_cover_the_fields_that_rules_depend_on(mode: str) -> None:
    found = {feature for seed in range(1, 26) for feature in features(draw.cluster(seed, mode))}
    assert {
        "Service: type LoadBalancer", "Service: type NodePort", "Service: type ClusterIP", "Service: type headless",
        "Service: type ExternalName", "Service: label service-proxy-name", "Service: port SCTP",
        "Service: ipFamilies IPv6, IPv4", "Service: ingress ip, ipMode Proxy", "Service: ingress hostname only",
        "Service: externalTrafficPolicy Local", "Service: internalTrafficPolicy Local",
        "Service: sessionAffinity ClientIP",
        "EndpointSlice: port null", "EndpointSlice: hints forZones", "EndpointSlice: hints forNodes",
        "EndpointSlice: endpoint ready=False serving=True terminating=True", "EndpointSlice: addressType FQDN",
        "Node: zone missing", "KubeProxyConfiguration: detectLocalMode NodeCIDR",
    } <= found  # fmt: skip


def test_a_history_is_told_by_what_has_to_be_sent() -> None:
    history = History(draw.cluster(3, "iptables"))
    before = {key(obj): obj for obj in history.cluster.objects}
    step = history.step()
    for change in step.changes:
        if change.action == "delete":
            del before[key(change.object)]
        else:
            before[key(change.object)] = change.object
    assert sorted(before.values(), key=key) == sorted(step.after.objects, key=key)


SAVED = """\
*nat
:PREROUTING ACCEPT [1:2]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
-A KUBE-SERVICES -d 10.96.0.2/32 -m comment --comment "ns/b:p cluster IP" -j KUBE-SVC-B
-A KUBE-SERVICES -d 10.96.0.1/32 -m comment --comment "ns/a:p cluster IP" -j KUBE-SVC-A
-A KUBE-SERVICES -m comment --comment "last" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-A -j KUBE-SEP-1
-A KUBE-SVC-A -j KUBE-SEP-2
COMMIT
"""


def canonical(text: str) -> kernel.State:
    return kernel.canonical({"iptables.txt": text}, "iptables")


def moved(text: str, line: str, before: str) -> str:
    lines = text.splitlines(keepends=True)
    chosen = next(each for each in lines if line in each)
    lines.remove(chosen)
    lines.insert(next(i for i, each in enumerate(lines) if before in each), chosen)
    return "".join(lines)


def test_the_order_of_services_does_not_count() -> None:
    assert canonical(moved(SAVED, "ns/a:p", "ns/b:p")) == canonical(SAVED)


@pytest.mark.parametrize(
    ("line", "before"), [("KUBE-SEP-2", "KUBE-SEP-1"), ("-j KUBE-NODEPORTS", "ns/a:p"), ("-j KUBE-NODEPORTS", "ns/b:p")]
)
def test_every_other_order_counts(line: str, before: str) -> None:
    assert kernel.differences(canonical(SAVED), canonical(moved(SAVED, line, before)))


def test_elements_and_anonymous_sets_have_no_order() -> None:
    one = "table ip kube-proxy {\n\tset s {\n\t\ttype ipv4_addr\n\t\telements = { 1.1.1.1,\n\t\t\t     2.2.2.2 }\n\t}\n"
    one += "\tchain c {\n\t\tip saddr { 1.1.1.1, 2.2.2.2 } drop\n\t}\n}\n"
    other = one.replace("1.1.1.1", "@").replace("2.2.2.2", "1.1.1.1").replace("@", "2.2.2.2")
    assert one != other
    assert kernel.canonical({"nft.txt": one}, "nftables") == kernel.canonical({"nft.txt": other}, "nftables")


def test_what_nothing_leads_to_is_left_over_and_nothing_else() -> None:
    state: kernel.State = {
        "nft ip kube-proxy map service-ips": ("10.0.0.1 . tcp . 80 : goto service-A-ns/a/tcp/p",),
        "nft ip kube-proxy chain service-A-ns/a/tcp/p": (),
        "nft ip kube-proxy chain service-B-ns/b/tcp/p": (),
        "nft ip kube-proxy chain services": (),
        "iptables nat OUTPUT": ("-A OUTPUT -j KUBE-SVC-A",),
        "iptables nat KUBE-SVC-A": ("-A KUBE-SVC-A -j KUBE-SEP-A",),
        "iptables nat KUBE-SEP-A": ("-A KUBE-SEP-A -j DNAT",),
        "iptables nat KUBE-SVC-B": ("-A KUBE-SVC-B -j KUBE-SEP-B",),
        "iptables nat KUBE-SEP-B": ("-A KUBE-SEP-B -j DNAT",),
    }
    assert kernel.leftovers(state) == {
        "nft ip kube-proxy chain service-B-ns/b/tcp/p", "iptables nat KUBE-SVC-B", "iptables nat KUBE-SEP-B",
    }  # fmt: skip


def affine(cluster: Cluster) -> bool:
    return any(s["spec"].get("sessionAffinity") == "ClientIP" for s in cluster.of("Service"))


def test_shrinking_leaves_what_makes_the_difference() -> None:
    drawn = next(c for c in (draw.cluster(seed, "iptables") for seed in range(50)) if affine(c) and not c.large)
    smallest = Shrinker(affine, 20).shrink(drawn)
    assert [obj["kind"] for obj in smallest.objects] == ["Node", "Service"]
    assert affine(smallest)


def test_a_change_is_shrunk_to_the_services_that_it_takes() -> None:
    before = draw.cluster(3, "iptables")
    doomed = before.of("Service")[0]
    after = Cluster(3, "iptables", before.node, before.config, tuple(o for o in before.objects if o != doomed))

    def differs(first: Cluster, second: Cluster) -> bool:
        return any(c.action == "delete" and c.object == doomed for c in changes(first.objects, second.objects))

    first, _ = shrink_step(before, after, differs, 20)
    assert first.of("Service") == [doomed]


def test_goldens_are_read_as_they_were_written() -> None:
    for golden in goldens.recorded():
        text = (golden / "kernel.txt").read_text()
        assert goldens.dump(goldens.load(text)) == text


def _alike(source: str, sticky: bool, real: set[str], ours: set[str]) -> bool:
    backends = frozenset({"10.244.3.27 8080", "192.168.77.11 8080"})
    callers = frozenset({"192.168.77.11", "10.244.1.5"})
    probe = packets.Probe(source, None, "UDP", "10.96.0.1", 1, "cluster IP of a/b", sticky, backends, callers)
    return packets.alike(probe, frozenset(real), frozenset(ours))


def test_a_caller_that_keeps_its_backend_may_have_another_one_on_the_other_side() -> None:
    far, near = "10.244.3.27 8080 saw 192.168.77.11", "192.168.77.11 8080 saw 10.244.1.5"
    assert _alike("pod", True, {far}, {near})
    assert not _alike("pod", False, {far}, {near}), "without affinity every backend is met on both sides"
    assert not _alike("outside", True, {far}, {near}), "many callers meet every backend, too"


@pytest.mark.parametrize("ours", ["10.244.3.27 8080 saw 10.244.1.5", "refused", "no answer"])
def test_the_same_backend_sees_the_same_and_an_answer_is_not_a_failure(ours: str) -> None:
    assert not _alike("pod", True, {"10.244.3.27 8080 saw 192.168.77.11"}, {ours})


@pytest.mark.parametrize("sticky", [True, False])
@pytest.mark.parametrize(
    "end",
    [
        pytest.param("10.244.3.28 8080 saw 10.244.1.5", id="nobody's endpoint"),
        pytest.param("10.244.3.27 8081 saw 10.244.1.5", id="another port of it"),
        pytest.param("10.244.3.27 8080 saw 10.96.0.1", id="neither the caller nor its node"),
    ],
)
def test_an_answer_that_no_rule_leads_to_is_wrong_even_on_both_sides(sticky: bool, end: str) -> None:
    assert not _alike("pod", sticky, {end}, {end})
    assert not _alike("pod", sticky, {"10.244.3.27 8080 saw 10.244.1.5"}, {end})


def test_who_may_answer_a_probe_are_the_endpoints_of_its_service_port() -> None:
    def service(name: str, cluster_ip: str) -> dict[str, Any]:
        ports = [
            {"name": "web", "port": 80, "protocol": "TCP", "nodePort": 30080},
            {"name": "dns", "port": 53, "protocol": "UDP"},
        ]
        spec = {"clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "ports": ports, "externalIPs": ["198.51.100.7"]}
        return {"kind": "Service", "metadata": {"namespace": "a", "name": name}, "spec": spec}

    def part(name: str, address: str, port: int | None) -> dict[str, Any]:
        labels = {"kubernetes.io/service-name": name}
        ports = [{"name": "web", "port": port, "protocol": "TCP"}, {"name": "other", "port": 1, "protocol": "TCP"}]
        endpoints = [{"addresses": [address]}]
        return {
            "kind": "EndpointSlice", "metadata": {"namespace": "a", "name": name, "labels": labels},
            "addressType": "IPv4", "ports": ports, "endpoints": endpoints,
        }  # fmt: skip

    node = {
        "kind": "Node", "metadata": {"name": "n1"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.168.77.11"}]},
    }  # fmt: skip
    services = [service("one", "10.96.0.1"), service("two", "10.96.0.2")]
    services[1]["spec"]["ports"][0].pop("nodePort")
    slices = [part("one", "10.244.001.9", 8080), part("two", "10.244.2.9", 8080), part("one", "10.244.1.10", None)]
    cluster = Cluster(1, "iptables", "n1", {}, (node, *services, *slices), extra=("192.168.78.200",))
    made = packets.probes(cluster)
    found = {(probe.destination, probe.port, probe.protocol): set(probe.backends) for probe in made}
    assert found == {
        ("10.96.0.1", 80, "TCP"): {"10.244.1.9 8080"},
        ("10.96.0.1", 53, "UDP"): set(),
        ("10.96.0.2", 80, "TCP"): {"10.244.2.9 8080"},
        ("10.96.0.2", 53, "UDP"): set(),
        ("198.51.100.7", 80, "TCP"): {"10.244.1.9 8080", "10.244.2.9 8080"},
        ("198.51.100.7", 53, "UDP"): set(),
        ("192.168.77.11", 30080, "TCP"): {"10.244.1.9 8080"},
        ("127.0.0.1", 30080, "TCP"): {"10.244.1.9 8080"},
        **{(f"10.96.0.{n}", 4, protocol): {f"10.96.0.{n} 4"} for n in (1, 2) for protocol in ("TCP", "UDP")},
    }
    node_only = {"192.168.77.11", "192.168.78.200", "127.0.0.1", "::1", packets.CALLER}
    for probe in made:
        assert probe.callers == node_only | ({probe.address} if probe.address else set())


def test_a_host_answers_for_its_address_where_a_service_of_the_other_family_has_it_as_external_ip() -> None:
    ports = [{"name": "web", "port": 80, "protocol": "TCP"}]
    spec = {"clusterIP": "fd00:10:96::1", "clusterIPs": ["fd00:10:96::1"], "ports": ports}
    service = {
        "kind": "Service", "metadata": {"namespace": "a", "name": "six"},
        "spec": {**spec, "externalIPs": ["192.168.77.12", "2001:db8:51::1"]},
    }  # fmt: skip
    piece = {
        "kind": "EndpointSlice",
        "metadata": {"namespace": "a", "name": "six", "labels": {"kubernetes.io/service-name": "six"}},
        "addressType": "IPv6", "ports": [{**ports[0], "port": 8080}],
        "endpoints": [{"addresses": ["fd00:10:244:1::8"]}],
    }  # fmt: skip
    addresses = [{"type": "InternalIP", "address": address} for address in ("192.168.77.11", "fd77::11")]
    node = {"kind": "Node", "metadata": {"name": "n1"}, "status": {"addresses": addresses}}
    made = packets.probes(Cluster(1, "iptables", "n1", {}, (node, service, piece)))
    found = {(probe.destination, probe.port): set(probe.backends) for probe in made if probe.port == 80}
    assert found == {
        ("fd00:10:96::1", 80): {"fd00:10:244:1::8 8080"},
        ("2001:db8:51::1", 80): {"fd00:10:244:1::8 8080"},
        ("192.168.77.12", 80): {"192.168.77.12 80"},
    }
