"""What packets notice of a change, and what they must not; session affinity, and the settings of the configuration.

Most of it is looked at from n1 and its pod client-1, in both families.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.lab.place import REFUSED, TIMEOUT, Place, Reply

from .cluster import FAMILIES, UDP_PORT, Cluster, dual, slices

BOTH = tuple(FAMILIES.values())
PORTS = {"tcp": 80, "udp": 53}
NODE_PORT = 30040
N1 = ("n1",)


def web(**spec: Any) -> dict[str, Any]:
    return dual("web", 40, type="NodePort", node_ports=True, **spec)


WEB = ("10.96.0.40", "fd00:10:96::40")
OTHER = ("10.96.0.41", "fd00:10:96::41")


def met(place: Place, ip: str, number: int = 80, proto: str = "tcp", count: int = 24) -> set[str]:
    """Everybody who answers, or what happens instead."""
    return {reply.who or reply.outcome for reply in place.calls(proto, ip, number, count, timeout=2)}


# ------------------------------------------------------------------ endpoints come and go


def test_traffic_moves_with_the_endpoints(cluster: Cluster) -> None:
    for pods in (["web-1"], ["web-1", "web-2"], ["web-2"]):
        cluster.apply(web(), *slices(cluster.lab, "web", *pods), on=("n1", "n3"))
        for caller in ("client-1", "n3"):
            assert [met(cluster.place(caller), WEB[index]) for index in BOTH] == [set(pods)] * 2
    cluster.apply(web(), *slices(cluster.lab, "web"), on=("n1", "n3"))
    for caller in ("client-1", "n3"):
        assert [met(cluster.place(caller), WEB[index], count=1) for index in BOTH] == [{"refused"}] * 2


def test_a_service_that_is_gone_is_nobodys_address(cluster: Cluster) -> None:
    other = [dual("other", 41), *slices(cluster.lab, "other", "web-2")]
    n1 = cluster.lab.node("n1")
    cluster.apply(web(), *slices(cluster.lab, "web", "web-1"), *other, on=N1)
    assert [met(cluster.lab.outside, n1.addresses[index], NODE_PORT) for index in BOTH] == [{"web-1"}] * 2
    cluster.apply(*other, on=N1)
    assert [met(cluster.lab.outside, n1.addresses[index], NODE_PORT, count=1) for index in BOTH] == [{"refused"}] * 2
    assert [met(cluster.lab.pod("client-1"), OTHER[index]) for index in BOTH] == [{"web-2"}] * 2


def test_connections_that_are_open_stay_with_their_pod_even_if_it_is_no_endpoint_any_more(cluster: Cluster) -> None:
    client = cluster.lab.pod("client-1")
    cluster.apply(web(), *slices(cluster.lab, "web", "web-2"), on=N1)
    with client.open("tcp", WEB[0], 80) as v4, client.open("tcp", WEB[1], 80) as v6:
        assert [v4.ask().who, v6.ask().who] == ["web-2", "web-2"]
        cluster.apply(web(), *slices(cluster.lab, "web", "web-1"), on=N1)
        assert [v4.ask().who, v6.ask().who] == ["web-2", "web-2"]
        assert [met(client, WEB[index]) for index in BOTH] == [{"web-1"}] * 2


def test_connections_to_other_services_do_not_notice_a_change(cluster: Cluster) -> None:
    stays, client = [web(), *slices(cluster.lab, "web", "web-1", "web-2")], cluster.lab.pod("client-1")
    cluster.apply(*stays, on=N1)
    for pods in (["web-1"], ["web-2"], []):
        cluster.apply(*stays, dual("other", 41), *slices(cluster.lab, "other", *pods), on=N1)
        assert [met(client, WEB[index], count=50) for index in BOTH] == [{"web-1", "web-2"}] * 2


def test_what_is_applied_already_is_not_applied_again(cluster: Cluster) -> None:
    objects = [web(), *slices(cluster.lab, "web", "web-1", "web-2")]
    cluster.apply(*objects)
    again = cluster.apply(*objects)
    assert {name: answer["changed"] for name, answer in again.items()} == {"n1": False, "n2": False, "n3": False}


# ------------------------------------------------------------------ UDP flows


@pytest.mark.parametrize("by", ["cluster IP", "node port"])
def test_a_udp_flow_to_an_endpoint_that_is_gone_moves_to_one_that_is_there(cluster: Cluster, by: str) -> None:
    n1 = cluster.lab.node("n1")
    caller: Place = cluster.lab.pod("client-1")
    addresses: tuple[str, ...] = WEB
    number = 53
    if by == "node port":
        caller, addresses, number = cluster.lab.outside, n1.addresses, NODE_PORT
    cluster.apply(web(), *slices(cluster.lab, "web", "web-2"), on=N1)
    # One socket each, so that all its questions are one flow to the kernel.
    with caller.open("udp", addresses[0], number) as v4, caller.open("udp", addresses[1], number) as v6:
        assert [v4.ask().who, v6.ask().who] == ["web-2", "web-2"]
        cluster.apply(web(), *slices(cluster.lab, "web", "web-1", "web-2"), on=N1)
        assert [v4.ask().who, v6.ask().who] == ["web-2", "web-2"]
        cluster.apply(web(), *slices(cluster.lab, "web", "web-1"), on=N1)
        assert [v4.ask().who, v6.ask().who] == ["web-1", "web-1"]


def test_a_udp_flow_that_began_before_there_was_an_endpoint_finds_it(cluster: Cluster) -> None:
    cluster.apply(web(), *slices(cluster.lab, "web"), on=N1)
    with cluster.lab.pod("client-1").open("udp", WEB[0], 53) as flow:
        assert flow.ask(timeout=0.5) == REFUSED
        cluster.apply(web(), *slices(cluster.lab, "web", "web-1"), on=N1)
        assert flow.ask().who == "web-1"


def test_udp_flows_that_no_change_concerns_are_left_alone(cluster: Cluster) -> None:
    stays = [web(), *slices(cluster.lab, "web", "web-1", "web-2"), dual("other", 41)]
    cluster.apply(*stays, *slices(cluster.lab, "other", "web-1", "web-2"), on=N1)
    client, server = cluster.lab.pod("client-1"), cluster.lab.pod("web-2")
    for index in BOTH:
        with (
            client.open("udp", WEB[index], 53) as flow,
            client.open("udp", server.addresses[index], UDP_PORT) as direct,
        ):
            who = flow.ask().who
            assert direct.ask().who == "web-2"
            changed = ["web-1"] if index else ["web-2"]
            cluster.apply(*stays, *slices(cluster.lab, "other", *changed), on=N1)
            assert [flow.ask().who for _ in range(3)] == [who] * 3
            assert direct.ask().who == "web-2"


# ------------------------------------------------------------------ session affinity


def test_with_affinity_a_client_stays_with_its_endpoint_while_that_is_there(cluster: Cluster) -> None:
    sticky, both = web(sessionAffinity="ClientIP"), slices(cluster.lab, "web", "web-1", "web-2")
    cluster.apply(sticky, *both, on=("n1", "n3"))
    firsts: dict[tuple[str, int, str], set[str]] = {}
    for caller in ("client-1", "client-3", "n1"):
        for index in BOTH:
            for proto, number in PORTS.items():
                answered = met(cluster.place(caller), WEB[index], number, proto)
                assert len(answered) == 1
                firsts[caller, index, proto] = answered
    # by whatever way it comes
    node = cluster.lab.node("n1").addresses
    for index in BOTH:
        assert met(cluster.lab.pod("client-1"), node[index], NODE_PORT) == firsts["client-1", index, "tcp"]
    # A change elsewhere does not disturb it.
    cluster.apply(sticky, *both, dual("other", 41), on=("n1", "n3"))
    for (caller, index, proto), who in firsts.items():
        assert met(cluster.place(caller), WEB[index], PORTS[proto], proto) == who
    # The loss of its endpoint does.
    for pod in ("web-1", "web-2"):
        cluster.apply(sticky, *slices(cluster.lab, "web", pod), on=N1)
        for index in BOTH:
            assert met(cluster.lab.pod("client-1"), WEB[index]) == {pod}


def test_affinity_ends_after_its_time(cluster: Cluster) -> None:
    timeout = {"clientIP": {"timeoutSeconds": 1}}
    sticky = web(sessionAffinity="ClientIP", sessionAffinityConfig=timeout)
    cluster.apply(sticky, *slices(cluster.lab, "web", "web-1", "web-2"), on=N1)
    client, answered = cluster.lab.pod("client-1"), set[str]()
    for _ in range(20):
        answered.add(client.call("tcp", WEB[0], 80).who)
        if len(answered) == 2:
            break
        client.run(["sleep", "1.2"])
    assert answered == {"web-1", "web-2"}


def test_without_affinity_every_endpoint_gets_its_share(cluster: Cluster) -> None:
    names, ports = ("web-1", "web-2"), range(9001, 9007)
    servers = [cluster.lab.pod(name).serve("tcp", number, f"{name}:{number}") for name in names for number in ports]
    made = []
    for number in ports:
        for each in slices(cluster.lab, "web", *names):
            each["metadata"]["name"] += f"-{number}"
            each["ports"] = [{"name": "http", "port": number, "protocol": "TCP"}]
            made.append(each)
    cluster.apply(web(), *made, on=N1)
    for index in BOTH:
        shares = Counter(reply.who for reply in cluster.lab.pod("client-1").calls("tcp", WEB[index], 80, 600))
        assert set(shares) == {f"{name}:{number}" for name in names for number in ports}
        assert max(shares.values()) < 100  # 50 each, give or take seven standard deviations
    for server in servers:
        server.close()


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "mode",
    [
        {"detectLocalMode": "ClusterCIDR"},
        {"detectLocalMode": "NodeCIDR"},
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "pod"}},
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "pod2"}},  # where client-1 is
    ],
    ids=lambda mode: mode["detectLocalMode"],
)
def test_however_local_pods_are_told_they_keep_their_address_and_others_do_not(
    cluster: Cluster, mode: dict[str, Any]
) -> None:
    cluster.apply(web(externalTrafficPolicy="Local"), *slices(cluster.lab, "web", "web-2"), on=N1, **mode)
    pod, node = cluster.lab.pod("client-1"), cluster.lab.node("n1")
    assert pod.interface == "pod2"
    for index in BOTH:
        for ip, number in ((WEB[index], 80), (node.addresses[index], NODE_PORT)):
            assert pod.call("tcp", ip, number) == Reply("web-2", pod.addresses[index])
            assert node.call("tcp", ip, number) == Reply("web-2", node.addresses[index])
        assert cluster.lab.outside.call("tcp", WEB[index], 80) == Reply("web-2", node.addresses[index])


def test_masquerade_all_hides_pods_too(cluster: Cluster) -> None:
    cluster.apply(web(), *slices(cluster.lab, "web", "web-2"), on=N1, iptables={"masqueradeAll": True})
    node = cluster.lab.node("n1")
    for index in BOTH:
        seen = Reply("web-2", node.addresses[index])
        assert cluster.lab.pod("client-1").call("tcp", WEB[index], 80) == seen


def test_node_ports_can_be_kept_off_localhost(cluster: Cluster) -> None:
    objects, node = [web(), *slices(cluster.lab, "web", "web-1")], cluster.lab.node("n3")
    cluster.apply(*objects, on=("n3",))
    assert node.call("tcp", "127.0.0.1", NODE_PORT).who == "web-1"
    cluster.apply(*objects, on=("n3",), iptables={"localhostNodePorts": False})
    assert node.call("tcp", "127.0.0.1", NODE_PORT) == REFUSED
    assert node.call("tcp", node.addresses[0], NODE_PORT).who == "web-1"


def test_node_port_addresses_decide_where_node_ports_answer(cluster: Cluster) -> None:
    objects = [web(), *slices(cluster.lab, "web", "web-2")]
    pod, node = cluster.lab.pod("client-1"), cluster.lab.node("n1")
    # The node's address towards its pods is not its primary one.
    cluster.apply(*objects, on=N1)
    for index in BOTH:
        assert pod.call("tcp", node.addresses[index], NODE_PORT).who == "web-2"
        assert pod.call("tcp", node.pod_gateways[index], NODE_PORT).who == "web-2"
    cluster.apply(*objects, on=N1, nodePortAddresses=["primary"])
    for index in BOTH:
        assert pod.call("tcp", node.addresses[index], NODE_PORT).who == "web-2"
        assert pod.call("tcp", node.pod_gateways[index], NODE_PORT) == REFUSED


def test_what_listens_on_localhost_alone_stays_out_of_reach_of_pods(cluster: Cluster) -> None:
    """Node ports on localhost need route_localnet, which would let others in as well; KUBE-FIREWALL keeps them out."""
    cluster.apply(web(), *slices(cluster.lab, "web", "web-1"), on=N1)
    node, pod = cluster.lab.node("n1"), cluster.lab.pod("client-1")
    secret = Place("secret", node.netns, ("127.0.0.9",), node.agent).serve("tcp", 7777)
    pod.run(["sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1"])
    pod.run(["ip", "route", "del", "local", "127.0.0.0/8", "dev", "lo", "table", "local"])
    try:
        assert node.call("tcp", "127.0.0.9", 7777).who == "secret"
        assert pod.call("tcp", "127.0.0.9", 7777, timeout=0.5) == TIMEOUT
        # Without it there would be no secret.
        node.run(["iptables", "-F", "KUBE-FIREWALL"])
        assert pod.call("tcp", "127.0.0.9", 7777).who == "secret"
    finally:
        pod.run(["ip", "route", "add", "local", "127.0.0.0/8", "dev", "lo", "table", "local"])
        secret.close()
