"""ipvs mode in a kernel that has ip_vs: what it holds after apply, and what packets notice of it."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.carry.rival import signs
from agentless_kube_proxy.cluster.objects import SCHEDULERS
from agentless_kube_proxy.proxy.config import with_schedulers

from tests.lab import Lab
from tests.lab.place import REFUSED, Connection, Reply
from tests.lab.program import PROGRAMS
from tests.node.bundles import replace_file
from tests.node.ipvs import SYSCTLS, World, generation, rules, wanted
from tests.unit.build import Object, endpoint, node, port, service, slice_of, view

pytestmark = pytest.mark.timeout(1200)  # this kernel is slow, and slower still beside other work
ALL = ("near", "far-1", "far-2")
FOREIGN = """
    ipset create THEIRS hash:ip; ipset add THEIRS 192.0.2.9
    ipvsadm -A -t 172.18.0.13:9999 -s wlc; ipvsadm -a -t 172.18.0.13:9999 -r 10.244.1.99:99 -m
    ipvsadm -A -f 7 -s rr
    ip link add theirs type dummy; ip addr add 192.0.2.77/32 dev theirs
    iptables -A INPUT -m set --match-set THEIRS src -j ACCEPT
"""


@pytest.fixture(scope="module")
def world(uml_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(uml_lab, tmp_path_factory.mktemp("ipvs"))


@pytest.fixture
def clean(world: World) -> World:
    """A kernel without anything of ours. Most tests do as well with what the one before left.

    Connections stay for a while after their end, so those that count them have Services of their own.
    """
    result = world.akp("cleanup")
    assert result.code == 0, result.stderr
    return world


def everything(world: World) -> list[Object]:
    """Services that between them have entries in every set, in both families."""
    guarded: Object = {
        "ingress": ("203.0.113.7", "2001:db8:113::7"),
        "loadBalancerSourceRanges": ["172.18.0.0/16", "fd00::/8"],
    }
    closed: Object = {
        "ingress": ("203.0.113.8", "2001:db8:113::8"),
        "loadBalancerSourceRanges": ["198.51.100.0/25", "2001:db8::/32"],
    }
    sctp = [port(132, "assoc", "SCTP", nodePort=30132)]
    ips = ["10.96.0.9", "fd00:10:96::9"]
    local: Object = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 32000}
    return [
        *world.web(5, *ALL, externalIPs=["192.0.2.5", "2001:db8:2::5"], sessionAffinity="ClientIP"),
        *world.web(6, "near", "far-1", externalIPs=["192.0.2.6", "2001:db8:2::6"], **local),
        *world.web(7, *ALL, type="LoadBalancer", **guarded),
        *world.web(8, "far-1", type="LoadBalancer", **closed),
        service("sctp", clusterIP=ips[0], clusterIPs=ips, ipFamilies=["IPv4", "IPv6"], ports=sctp, **local),
        *world.web(10, internalTrafficPolicy="Local"),
    ]  # fmt: skip


def test_the_kernel_becomes_the_bundle_and_stays_it(clean: World) -> None:
    world = clean
    settings = {"strictARP": True, "scheduler": "lc", "tcpTimeout": "20m", "udpTimeout": "1m"}
    bundle = world.bundle(world.state(*everything(world), ipvs=settings))
    world.sh("modprobe ip_vs; ipvsadm --set 900 120 300")
    first = world.apply(bundle)
    assert first["changed"] is True
    kernel = world.kernel()
    assert {name: kernel[name] for name in wanted(bundle)} == wanted(bundle)
    for tool in ("iptables", "ip6tables"):
        assert sorted(line for line in kernel[tool] if line.startswith("-A")) == rules(bundle, f"{tool}.rules")
    assert "DOWN" in kernel["link"][0]
    assert world.sh("ipvsadm -L --timeout").strip().endswith("1200 120 60")
    names = [
        *(f"net.ipv4.{name}" for name in SYSCTLS),
        "net.ipv4.conf.all.arp_ignore",
        "net.ipv4.conf.all.arp_announce",
    ]
    assert world.sh(f"sysctl -n {' '.join(names)}").split() == ["1", "1", "1", "1", "1", "2"]

    assert world.apply(bundle)["changed"] is False
    status = world.status()
    assert (status["state"], status["generation"], status["drift"]) == ("applied", generation(bundle), 0)
    assert world.kernel() == kernel

    assert world.akp("cleanup").json["changed"] is True
    assert world.empty()
    assert world.sh("ipvsadm -L --timeout").strip().endswith("900 120 300")
    assert world.sh(f"sysctl -n {names[0]} {names[-1]}").split() == ["0", "0"]


def test_the_files_can_be_loaded_by_hand_and_are_then_taken_over(clean: World) -> None:
    world = clean
    bundle = world.bundle(world.state(*everything(world)))
    world.sh(f"""
        cd {bundle}; modprobe ip_vs
        cat ipset-*.rules | ipset restore; cat ipvs-*.rules | ipvsadm -R; ip -batch ip.batch
        iptables-restore --noflush <iptables.rules; ip6tables-restore --noflush <ip6tables.rules
    """)
    kernel = world.kernel()
    assert {name: kernel[name] for name in wanted(bundle)} == wanted(bundle)
    answer = world.apply(bundle)
    done = [*answer["sets"].values(), *answer["servers"].values(), *answer["addresses"].values()]
    assert [count for count in done if count] == []
    assert world.kernel() == kernel


DRIFT = {
    "ipvsadm -D -t 10.96.0.5:80": "missing-server",
    "ipvsadm -E -t 10.96.0.6:80 -s wrr": "changed-server",
    "ipvsadm -d -t 10.96.0.7:80 -r {near}:8080": "missing-endpoint",
    "ipvsadm -e -t 10.96.0.7:80 -r {far}:8080 -m -w 3": "changed-endpoint",
    "ipvsadm -a -t 10.96.0.7:80 -r 10.244.9.9:80 -m -w 1": "extra-endpoint",
    "ipvsadm -A -t 10.96.0.5:81 -s rr": "extra-server",
    # What a kube-proxy writes for a Service.
    "ip addr add 10.96.99.98/32 dev kube-ipvs0; ipvsadm -A -t 10.96.99.98:80 -s rr": "extra-server",
    "ipset add KUBE-CLUSTER-IP 10.96.99.98,tcp:80": "extra-entry",
    "ipset del KUBE-CLUSTER-IP 10.96.0.5,tcp:80": "missing-entry",
    "ipset add KUBE-6-CLUSTER-IP fd00::1,tcp:1": "extra-entry",
    "ip addr del 10.96.0.6/32 dev kube-ipvs0": "missing-address",
    "ip addr add 10.96.99.99/32 dev kube-ipvs0": "extra-address",
    "iptables -t nat -D KUBE-SERVICES 1": "missing-rule",
}


def test_drift_is_named_and_mended_and_what_belongs_to_others_is_not_touched(world: World) -> None:
    world.sh(FOREIGN)
    try:
        bundle = world.bundle(world.state(*everything(world)))
        world.apply(bundle)
        good = world.kernel()
        addresses = {"near": world.address("near"), "far": world.address("far-1")}
        world.sh("\n".join(command.format(**addresses) for command in DRIFT))
        status = world.status()
        assert {each["kind"] for each in status["differences"]} >= set(DRIFT.values())
        assert signs({"status": status}) == ["since the last apply, something wrote ipvs -t 10.96.99.98:80"]
        assert world.apply(bundle, "--verify")["changed"] is True
        assert world.kernel() == good
        assert "-A -t 172.18.0.13:9999 -s wlc" in good["servers"]
        assert "-A -f 7 -s rr" in good["servers"]

        world.sh("ipvsadm -C; ip link del kube-ipvs0")
        assert world.akp("status").json["state"] == "partial"
        world.apply(bundle)
        assert {*wanted(bundle)["servers"]} == {*world.kernel()["servers"]}
        world.sh("ipvsadm -A -t 172.18.0.13:9999 -s wlc; ipvsadm -A -f 7 -s rr")
        world.akp("cleanup")
        left = world.kernel()
        assert left["servers"] == ["-A -f 7 -s rr", "-A -t 172.18.0.13:9999 -s wlc"]
        assert left["sets"] == ["add THEIRS 192.0.2.9", "create THEIRS hash:ip family inet hashsize 1024 maxelem 65536"]
        assert "192.0.2.77" in world.sh("ip -br addr show theirs")
        assert left["iptables"] == [
            "*filter",
            "-A INPUT -m set --match-set THEIRS src -j ACCEPT",
            "COMMIT",
            "*nat",
            "COMMIT",
        ]
    finally:
        world.sh("iptables -D INPUT -m set --match-set THEIRS src -j ACCEPT; ipset destroy THEIRS")
        world.sh("ip link del theirs; ipvsadm -C")


def test_virtual_servers_inside_excluded_cidrs_stay(world: World) -> None:
    """Even one on an address of ours, which would else be deleted."""
    world.apply(world.state(*world.web(5, "near"), *world.web(6, "near"), ipvs={"excludeCIDRs": ["10.96.0.6/32"]}))
    world.sh("ipvsadm -A -t 10.96.0.5:81 -s rr; ipvsadm -A -t 10.96.0.6:81 -s rr")
    world.apply(
        world.state(*world.web(5, "near"), *world.web(7, "near"), ipvs={"excludeCIDRs": ["10.96.0.6/32"]}), "--verify"
    )
    servers = [line.split()[2] for line in world.kernel()["servers"] if line.startswith("-A -t 10.")]
    assert servers == ["10.96.0.5:80", "10.96.0.6:80", "10.96.0.6:81", "10.96.0.7:80"]
    world.sh("ipvsadm -C")


def test_check_tells_and_changes_nothing_and_rollback_goes_back(world: World) -> None:
    old = world.bundle(world.state(*world.web(5, *ALL)))
    new = world.bundle(world.state(*world.web(5, "near"), *world.web(6, *ALL)))
    world.apply(old)
    before = world.kernel()
    told = world.akp("check", "--verify", new).json
    assert told["changed"] is True
    assert (told["servers"]["added"], told["servers"]["endpointsRemoved"], told["addresses"]["added"]) == (4, 8, 2)
    assert {"missing-server", "extra-endpoint", "missing-entry", "missing-address"} <= {
        each["kind"] for each in told["differences"]
    }
    assert world.kernel() == before
    done = world.apply(new)
    assert {name: done[name] for name in ("sets", "servers", "addresses")} == {
        name: told[name] for name in ("sets", "servers", "addresses")
    }
    assert world.akp("rollback").json["generation"] == generation(old)
    assert world.kernel() == before


# ------------------------------------------------------------------ packets


@pytest.fixture
def routed(world: World) -> World:
    """Everything in the Services' networks is reached by way of n3."""
    v4, v6 = world.node.addresses
    world.lab.sh(f"ip route replace 10.96.0.0/16 via {v4}\nip -6 route replace fd00:10:96::/64 via {v6}\n")
    world.lab.sh(f"ip route replace 203.0.113.0/24 via {v4}\nip -6 route replace 2001:db8:113::/64 via {v6}\n")
    return world


def test_packets_through_every_scheduler_in_both_families(routed: World) -> None:
    world = routed
    objects: list[Object] = []
    numbers = {name: 20 + i for i, name in enumerate(SCHEDULERS)}
    for name, number in numbers.items():
        annotations = {"kube-proxy.agentless.io/scheduler": name}
        made = world.web(number, *ALL)
        made[0]["metadata"]["annotations"] = annotations
        objects += made
    bundle = world.bundle(scheduled(world, *objects))
    world.apply(bundle)
    assert sorted({line.split()[4] for line in world.kernel()["servers"] if line.startswith("-A")}) == sorted(
        SCHEDULERS
    )
    for name, number in numbers.items():
        for ip in (f"10.96.0.{number}", f"fd00:10:96::{number}"):
            spread = Counter(reply.who for reply in world.lab.outside.calls("tcp", ip, 80, 6, timeout=60))
            assert set(spread) <= set(ALL), f"{name} {ip}: {spread}"
            if name in ("rr", "wrr"):
                assert set(spread.values()) == {2}, f"{name} {ip}: {spread}"
    assert world.lab.outside.call("udp", "10.96.0.20", 53, timeout=60).who in ALL


def scheduled(world: World, *objects: Object) -> State:
    """As world.state, with annotations that count."""
    known = [node(each.name, *each.addresses, pod_cidrs=each.pod_cidrs) for each in world.lab.nodes]
    seen = view(*known, *objects, on="n3", mode="ipvs", conntrack={"maxPerCore": 0})
    config = with_schedulers(seen.config, {}, annotations=True)
    return backends.renderer(config).state(dataclasses.replace(seen, config=config))


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_who_answers_and_whose_address_it_sees(routed: World, family: int) -> None:
    world, lab = routed, routed.lab
    vips = ("203.0.113.7", "2001:db8:113::7")
    closed = ("203.0.113.8", "2001:db8:113::8")
    local: Object = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ingress": vips}
    ranges = ["198.51.100.200/32", "2001:db8:51::200/128"]
    world.apply(
        world.state(
            *world.web(5, "far-1"),
            *world.web(6, "near"),
            *world.web(7, "near", "far-1", **local),
            *world.web(8, "far-1", type="LoadBalancer", ingress=closed, loadBalancerSourceRanges=ranges),
            *world.web(10),
        )
    )
    ip = {number: (f"10.96.0.{number}", f"fd00:10:96::{number}")[family] for number in (5, 6, 7, 8, 10)}
    own, gateway = world.node.addresses[family], world.node.pod_gateways[family]
    near, client, outside = lab.pod("near"), lab.pod("client-3"), lab.outside
    calls = {
        # a pod of this node keeps its address; a pod that reaches itself must not see its own
        "pod to cluster IP": (client.call("tcp", ip[5], 80, timeout=60), Reply("far-1", client.addresses[family])),
        "pod to cluster IP, UDP": (client.call("udp", ip[5], 53, timeout=60), Reply("far-1", client.addresses[family])),
        "pod to itself": (near.call("tcp", ip[6], 80, timeout=60), Reply("near", gateway)),
        "node to cluster IP": (world.node.call("tcp", ip[5], 80, timeout=60).who, "far-1"),
        # whoever comes from outside is masqueraded, unless the policy is Local
        "outside to cluster IP": (outside.call("tcp", ip[5], 80, timeout=60), Reply("far-1", own)),
        "outside to balancer, Local": (
            outside.call("tcp", vips[family], 80, timeout=60),
            Reply("near", outside.addresses[family]),
        ),
        "outside to node port, Local": (
            outside.call("tcp", own, 30007, timeout=60),
            Reply("near", outside.addresses[family]),
        ),
        "outside to node port": (outside.call("udp", own, 30008, timeout=60), Reply("far-1", own)),
        # a firewall drops, no endpoint and no such port refuse
        "outside to closed balancer": (outside.call("tcp", closed[family], 80, timeout=0.3).outcome, "timeout"),
        "outside to no endpoints": (outside.call("tcp", ip[10], 80, timeout=60), REFUSED),
        "outside to another port": (outside.call("tcp", ip[5], 81, timeout=60), REFUSED),
    }
    assert {name: got for name, (got, _) in calls.items()} == {name: due for name, (_, due) in calls.items()}


@contextmanager
def calling(world: World, number: int) -> Iterator[None]:
    """New connections to a Service, one handful after the other, all the while.

    The node counts first packets that come for the Service and those that leave for a pod: it loses none. What a client
    sends again because a busy machine was late is counted on both sides. Handfuls pause, because each connection stays
    in the kernel for ten seconds after its end and this one has room for some 4,000.
    """
    addresses = {"iptables": f"10.96.0.{number}", "ip6tables": f"fd00:10:96::{number}"}
    seen: list[Reply] = []
    stop = threading.Event()

    def keep() -> None:
        while not stop.wait(0.2):
            for address in addresses.values():
                seen.extend(world.lab.outside.calls("tcp", address, 80, 4, timeout=60))

    def count(tool: str) -> list[int]:
        lines = world.sh(f"{tool}-save -c -t mangle").splitlines()
        return [int(line[1:].partition(":")[0]) for line in lines if "--tcp-flags" in line]

    world.sh("\n".join(
        f"{tool} -t mangle -F; {tool} -t mangle -A PREROUTING -d {address} -p tcp --syn\n"
        f"{tool} -t mangle -A POSTROUTING -p tcp --dport 8080 --syn" for tool, address in addresses.items()
    ))  # fmt: skip
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert [reply for reply in seen if not reply.who] == []
    for tool in addresses:
        come, gone = count(tool)
        assert come == gone >= 20, f"{tool}: {come} connections came, {gone} were passed on"
    world.sh("\n".join(f"{tool} -t mangle -F" for tool in addresses))


@pytest.mark.slow
@pytest.mark.parametrize("updates", [6, pytest.param(20, marks=pytest.mark.soak)])
def test_200_connections_live_through_updates_and_no_new_one_is_refused(routed: World, updates: int) -> None:
    """Whole bundles and deltas in turn: other Services come and go, and endpoints of a Service that is being called."""
    world = routed

    def at(step: int) -> State:
        churned = [pod for i, pod in enumerate(ALL) if (step + i) % 3]
        return world.state(
            *world.web(4, "far-1"),
            *world.web(6, *churned),
            *(each for n in range(30, 32 + step % 3) for each in world.web(n, *churned[: step % 2])),
        )

    state = at(0)
    world.apply(state)
    connections: list[Connection] = [
        world.lab.outside.open("tcp", ("10.96.0.4", "fd00:10:96::4")[i % 2], 80, timeout=60) for i in range(200)
    ]
    with calling(world, 6):
        for step in range(1, updates + 1):
            new = at(step)
            answer = world.apply(new if step % 6 == 0 else world.delta(state, new))
            assert answer["changed"], json.dumps(answer)
            state = new
    replies = [connection.ask(60) for connection in connections]
    broken = [(i, reply) for i, reply in enumerate(replies) if reply.who != "far-1"]
    assert broken == [], world.sh("conntrack -S; ipvsadm -Lnc; conntrack -L -p tcp; conntrack -L -f ipv6 -p tcp")
    assert world.status()["drift"] == 0
    for connection in connections:
        connection.close()


def test_a_removed_endpoint_keeps_its_connections_until_they_end(routed: World) -> None:
    world, outside = routed, routed.lab.outside
    both, one = world.state(*world.web(5, "near", "far-1")), world.state(*world.web(5, "near"))
    world.apply(both)
    held = [outside.open("tcp", "10.96.0.5", 80, timeout=60) for _ in range(2)]
    assert {connection.ask(60).who for connection in held} == {"near", "far-1"}
    answer = world.apply(one)
    assert answer["draining"] == 1
    far = world.address("far-1")
    lines = [line for line in world.kernel()["servers"] if f"-r {far}:" in line]
    # UDP has no connections to wait for, and IPv6 had none
    assert lines == [f"-a -t 10.96.0.5:80 -r {far}:8080 -m -w 0"]
    assert {reply.who for reply in outside.calls("tcp", "10.96.0.5", 80, 6, timeout=60)} == {"near"}
    assert {connection.ask(60).who for connection in held} == {"near", "far-1"}
    # it is neither drift nor a change, and a run that finds it busy lets it be
    assert world.status()["drift"] == 0
    assert world.apply(one)["changed"] is False
    assert world.akp("drain").json["draining"] == 1
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 60
    while world.akp("drain").json["draining"]:
        assert time.monotonic() < deadline
    assert not [line for line in world.kernel()["servers"] if f"-r {far}:" in line]


@pytest.mark.soak
def test_what_a_delta_told_to_leave_the_next_delta_deletes_if_it_is_idle(routed: World) -> None:
    world = routed
    states = [world.state(*world.web(11, *pods)) for pods in (("near", "far-1"), ("near",), ("near", "far-2"))]
    far = world.address("far-1")
    world.apply(states[0])
    for step, weights in ((1, ["0"]), (2, [])):
        answer = world.apply(world.delta(states[step - 1], states[step]))
        assert answer["draining"] == 2 * len(weights), "one of each family"
        lines = [line for line in world.kernel()["servers"] if f"-t 10.96.0.11:80 -r {far}:" in line]
        assert [line.split()[-1] for line in lines] == weights
        assert world.status()["drift"] == 0


def test_an_endpoint_that_comes_back_while_it_drains_takes_connections_again(routed: World) -> None:
    world, outside = routed, routed.lab.outside
    both, one = world.state(*world.web(3, "near", "far-1")), world.state(*world.web(3, "near"))
    world.apply(both)
    held = [outside.open("tcp", "10.96.0.3", 80, timeout=60) for _ in range(2)]
    far = world.address("far-1")
    for away, back in ((world.delta(both, one), world.delta(one, both)), (one, both)):
        assert world.apply(away)["changed"] is True
        leaving = [line for line in world.kernel()["servers"] if line.endswith("-w 0")]
        assert [line for line in leaving if " 10.96.0.3:80 " in line] == [f"-a -t 10.96.0.3:80 -r {far}:8080 -m -w 0"]
        assert world.apply(back)["changed"] is True
        assert world.akp("drain").json["draining"] == 0
        calls = outside.calls("tcp", "10.96.0.3", 80, 6, timeout=60)
        assert {reply.who for reply in calls} == {"near", "far-1"}
        assert {connection.ask(60).who for connection in held} == {"near", "far-1"}
    for connection in held:
        connection.close()


@contextmanager
def draining(world: World, number: int) -> Iterator[State]:
    """A Service with connections to both its endpoints; given is the state in which one of them is gone."""
    both, one = world.state(*world.web(number, "near", "far-1")), world.state(*world.web(number, "near"))
    world.apply(both)
    held = [world.lab.outside.open("tcp", f"10.96.0.{number}", 80, timeout=60) for _ in range(2)]
    yield one
    assert {connection.ask(60).who for connection in held} == {"near", "far-1"}
    for connection in held:
        connection.close()


@pytest.mark.soak
def test_who_cannot_be_told_to_leave_stays_with_all_the_rest(routed: World, tmp_path: Path) -> None:
    """Once that was a run that said ok, and neither it nor the next saw that new connections still went there."""
    world = routed
    with draining(world, 21) as one:
        before = world.kernel()
        refused = world.akp("apply", world.bundle(one), **failing(world, tmp_path / "bin", "ipvsadm", "-e", 1))
        assert (refused.code, refused.json["asBefore"]) == (4, True), refused.stdout
        assert "still gets connections" in refused.json["error"]
        assert world.kernel() == before
        assert world.apply(one)["draining"] == 1
        assert world.status()["drift"] == 0


@pytest.mark.soak
def test_who_was_leaving_still_is_after_a_failed_return(routed: World, tmp_path: Path) -> None:
    world = routed
    with draining(world, 22) as one:
        world.apply(one)
        before = world.kernel()
        back = world.bundle(world.state(*world.web(22, "near", "far-1"), *world.web(6, "near")))
        refused = world.akp("apply", back, **failing(world, tmp_path / "bin", "ip", "addr add", 1))
        assert (refused.code, refused.json["asBefore"]) == (4, True), refused.stdout
        assert world.kernel() == before
        assert world.akp("drain").json["draining"] == 1


@pytest.mark.soak
def test_who_is_idle_and_cannot_be_deleted_is_not_forgotten(routed: World, tmp_path: Path) -> None:
    world = routed
    with draining(world, 23) as one:
        world.apply(one)
        env = failing(world, tmp_path / "bin", "ipvsadm", "-d", 1000)
    deadline = time.monotonic() + 60
    while (told := world.akp("drain", **env).json)["draining"] and not told["warnings"]:
        assert time.monotonic() < deadline
    assert (told["draining"], "ipvsadm: Cannot allocate memory" in told["warnings"][0]) == (1, True)
    while world.akp("drain").json["draining"]:
        assert time.monotonic() < deadline
    assert "-w 0" not in world.sh("ipvsadm -Sn")


@pytest.mark.slow
def test_from_mode_to_mode_services_answer_all_the_while_and_nothing_stays(routed: World) -> None:
    world = routed
    objects = world.web(6, *ALL, type="NodePort")
    facts = {"capabilities": {"nfacct": False}}
    states = {mode: world.state(*objects, mode=mode, facts=facts) for mode in ("iptables", "ipvs")}
    world.apply(states["iptables"])
    with calling(world, 6):
        for mode in ("ipvs", "iptables"):
            answer = world.apply(states[mode])
            assert answer["changed"] is True
            kernel = world.kernel()
            rules_now = "\n".join(kernel["iptables"] + kernel["ip6tables"])
            assert ("KUBE-SVC-" in rules_now) is (mode == "iptables")
            assert ("KUBE-IPVS-FILTER" in rules_now) is (mode == "ipvs")
            left = bool(kernel["sets"] or kernel["servers"] or kernel["link"])
            assert left is (mode == "ipvs")
            assert world.status()["drift"] == 0
    assert world.akp("cleanup").code == 0
    assert world.empty()


# ------------------------------------------------------------------ when something fails


def test_what_the_kernel_refuses_is_undone(world: World) -> None:
    """A set that is too small for its entries is found out by the kernel, in the middle."""
    good = world.bundle(world.state(*world.web(5, *ALL)))
    world.apply(good)
    before = world.kernel()
    bad = world.bundle(world.state(*world.web(5, "near"), *world.web(6, *ALL), *world.web(7, *ALL)))
    made = "create KUBE-6-IPVS-IPS hash:ip family inet6 hashsize 1024 maxelem "
    name = "ipset-1-frontends.rules"
    replace_file(bad, name, (bad / name).read_text().replace(f"{made}65536", f"{made}1"))
    refused = world.akp("apply", bad)
    assert (refused.code, "ipset restore" in refused.json["error"]) == (4, True)
    assert ("the old state is back" in refused.json["error"], refused.json["asBefore"]) == (True, True)
    assert world.kernel() == before
    assert world.akp("status").json["generation"] == generation(good)

    world.akp("cleanup")
    assert world.akp("apply", bad).code == 4
    assert world.empty()


REMOVALS = {"ip": "addr del", "ipvsadm": "-D", "ipset": "del"}


def failing(world: World, directory: Path, tool: str, word: str, times: int) -> dict[str, str]:
    """An environment in which a tool that is given a line, or words, that begin so fails, so many times."""
    directory.mkdir()
    real = world.sh(f"command -v {tool}").strip()
    script = directory / tool
    script.write_text(rf"""#!/bin/sh
case "$*" in *restore*|*-R*|*batch*) cat ;; *) echo "$*" ;; esac >{directory}/input
if grep -q -e '^{word}\( \|$\)' {directory}/input && [ "$(wc -c <{directory}/times)" -lt {times} ]; then
    printf x >>{directory}/times
    echo "{tool}: Cannot allocate memory" >&2
    exit 1
fi
exec {real} "$@" <{directory}/input
""")
    script.chmod(0o755)
    (directory / "times").touch()
    return {"AKP_PATH": str(directory)}


@pytest.mark.soak
def test_what_cannot_be_removed_is_undone_with_the_rules(world: World, tmp_path: Path) -> None:
    """By then the rules are the new ones; they go back too."""
    old = world.bundle(world.state(*world.web(5, *ALL), *world.web(6, "near")))
    new = world.bundle(world.state(*world.web(5, "near"), *world.web(7, "far-1", type="NodePort")))
    world.apply(old)
    before = world.kernel()
    for tool, word in REMOVALS.items():
        refused = world.akp("apply", new, **failing(world, tmp_path / tool, tool, word, 1))
        assert (refused.code, "the old state is back" in refused.json["error"]) == (4, True), refused.stdout
        assert refused.json["asBefore"] is True
        assert f"{tool}: Cannot allocate memory" in refused.json["error"]
        assert world.kernel() == before, tool
    assert world.akp("status").json["state"] == "applied"
    assert world.akp("drain").code == 0
    assert world.kernel() == before, "nobody is about to leave"
    world.apply(new)
    assert world.status()["drift"] == 0


@pytest.mark.soak
def test_timeouts_go_back_with_the_rest(world: World, tmp_path: Path) -> None:
    old = world.bundle(world.state(*world.web(5, *ALL), *world.web(6, "near")))
    new = world.bundle(world.state(*world.web(5, "near"), ipvs={"tcpTimeout": "20m", "udpTimeout": "1m"}))
    world.apply(old)
    before = world.sh("ipvsadm -L --timeout")
    refused = world.akp("apply", new, **failing(world, tmp_path / "bin", "ipvsadm", "-D", 1))
    assert (refused.code, refused.json["asBefore"]) == (4, True), refused.stdout
    assert world.sh("ipvsadm -L --timeout") == before
    world.apply(new)
    assert "1200 120 60" in world.sh("ipvsadm -L --timeout")
    assert world.akp("cleanup").code == 0
    assert world.sh("ipvsadm -L --timeout") == before


@pytest.mark.soak
def test_what_cannot_be_put_back_either_is_said_and_healed(world: World, tmp_path: Path) -> None:
    """A tool that fails for good, for a while: no run calls that well, and the first one that can ends it."""
    old = world.bundle(world.state(*world.web(5, *ALL), *world.web(6, "near")))
    new = world.bundle(world.state(*world.web(5, "near"), *world.web(7, "far-1")))
    world.apply(old)
    env = failing(world, tmp_path / "bin", "ipset", "del", 1000)
    refused = world.akp("apply", new, **env)
    assert (refused.code, "not all of the old state could be put back" in refused.json["error"]) == (4, True)
    assert refused.json["asBefore"] is False
    assert "ipset: Cannot allocate memory" in refused.json["warnings"][-1]
    assert world.akp("status").json["state"] == "partial"
    # The recorded bundle once more: a glance at markers and jumps would find nothing to do.
    world.apply(old)
    healed = world.status()
    assert (healed["state"], healed["drift"]) == ("applied", 0)


def test_a_set_that_a_foreign_rule_asks_stays(clean: World) -> None:
    """Sets that no longer belong anywhere are no reason to refuse what is new."""
    world = clean
    world.apply(world.state(*world.web(5, *ALL)))
    asks = "INPUT -m set --match-set KUBE-6-CLUSTER-IP dst,dst -j ACCEPT"
    world.sh(f"ip6tables -A {asks}")
    try:
        answer = world.apply(world.state(*world.web(5, "near"), facts={"capabilities": {"ipv6": False}}))
        stays = "set KUBE-6-CLUSTER-IP stays: it is in use by a rule that is not ours"
        assert answer["warnings"] == [stays]
        assert [name for name in world.sh("ipset list -n").split() if "-6-" in name] == ["KUBE-6-CLUSTER-IP"]
        cleaned = world.akp("cleanup")
        assert (cleaned.code, cleaned.json["warnings"]) == (0, [stays])
        assert world.sh("ipset list -n").split() == ["KUBE-6-CLUSTER-IP"]
    finally:
        world.sh(f"ip6tables -D {asks}")
    assert world.akp("cleanup").code == 0
    assert world.empty()


@pytest.mark.soak
def test_a_set_that_should_go_and_does_not_is_said_and_goes_with_the_next_run(clean: World, tmp_path: Path) -> None:
    world = clean
    world.apply(world.state(*world.web(5, *ALL)))
    new = world.bundle(world.state(*world.web(5, "near"), facts={"capabilities": {"ipv6": False}}))
    refused = world.akp("apply", new, **failing(world, tmp_path / "bin", "ipset", "destroy", 2))
    assert (refused.code, "the new state is in force" in refused.json["error"]) == (4, True), refused.stdout
    assert "ipset: Cannot allocate memory" in refused.json["warnings"][-1]
    assert "KUBE-6-" in world.sh("ipset list -n")
    world.apply(new)
    assert "KUBE-6-" not in world.sh("ipset list -n")
    assert world.status()["drift"] == 0


def test_a_delta_for_another_generation_is_not_taken_and_a_run_that_was_killed_is_completed(world: World) -> None:
    first, second = world.state(*world.web(5, *ALL)), world.state(*world.web(5, "near"), *world.web(6, *ALL))
    change = world.delta(first, second)
    assert world.akp("apply", change).json["need"] == "full"
    world.apply(first)
    # somebody meddled with the marker: the first transaction finds that out, and nothing changes
    good = world.kernel()
    chain = f"KUBE-PROXY-GEN-{first.generation[:13].upper()}"
    world.sh(f"iptables -t nat -F {chain}; iptables -t nat -X {chain}")
    before = world.kernel()
    answer = world.akp("apply", change).json
    assert (answer["need"], answer["asBefore"]) == ("full", True), answer
    assert world.kernel() == before
    world.apply(first, "--verify")
    # or with a jump: the last transaction finds that out, and all is as recorded again
    world.sh("ip6tables -t filter -F FORWARD")
    assert world.akp("apply", change).json["need"] == "full"
    assert world.kernel() == good
    # killed while the servers were on their way
    world.node.run(
        ["sh", "-c", f"sh {PROGRAMS['ipvs']} apply {change} & p=$!; "
         "until iptables-save -t nat | grep -q "f"{second.generation}; do :; done; kill -9 $p; wait $p || :"],
        timeout=120,
    )  # fmt: skip
    assert world.akp("apply", world.delta(second, first)).json["need"] == "full"
    world.apply(second)
    bundle = world.bundle(second)
    kernel = world.kernel()
    assert {name: kernel[name] for name in wanted(bundle)} == wanted(bundle)


def test_endpoints_name_no_virtual_server_that_frontends_do_not_have(world: World) -> None:
    """Whoever may sign endpoints cannot reach a virtual server that belongs to others."""
    first, second = world.state(*world.web(5, *ALL)), world.state(*world.web(5, "near"))
    world.apply(first)
    name, theirs = "ipvs-2-endpoints.rules", "192.0.2.50:80"
    world.sh(f"ipvsadm -A -t {theirs} -s rr; ipvsadm -a -t {theirs} -r 10.244.1.8:80 -m -w 1")
    before = world.kernel()
    for line in (f"-a -t {theirs} -r 10.244.1.9:80 -m -w 1", f"-d -t {theirs} -r 10.244.1.8:80"):
        bundles = [world.delta(first, second)]
        if line.startswith("-a"):
            bundles.append(world.bundle(second))
        for bundle in bundles:
            replace_file(bundle, name, f"{(bundle / name).read_text()}{line}\n")
            refused = world.akp("apply", bundle)
            assert (refused.code, refused.json["asBefore"]) == (2, True), refused.stdout
            assert theirs in refused.json["error"]
            assert world.kernel() == before
    world.sh(f"ipvsadm -D -t {theirs}")
    assert world.apply(world.delta(first, second))["changed"] is True


def test_a_delta_that_fails_in_the_middle_goes_back_to_the_record(world: World, tmp_path: Path) -> None:
    first = world.state(*world.web(5, "far-1"), *world.web(6, "near"))
    second = world.state(*world.web(5, "near", "far-2"), *world.web(7, *ALL))
    world.apply(first)
    before = world.kernel()
    for tool, word in (("ipset", "add"), ("ipvsadm", "-A"), ("ip", "addr add"), ("ipvsadm", "-D")):
        directory = tmp_path / f"{tool}{word}".replace(" ", "-")
        answer = world.akp("apply", world.delta(first, second), **failing(world, directory, tool, word, 1)).json
        assert (answer["need"], answer["asBefore"]) == ("full", True), answer
        assert "Cannot allocate memory" in answer["reason"]
        assert world.kernel() == before, tool
        assert world.akp("status").json["state"] == "applied"
    assert world.apply(world.delta(first, second))["changed"] is True
    assert world.status()["drift"] == 0


def test_a_delta_of_endpoints_starts_few_programs(world: World, tmp_path: Path) -> None:
    """Of this mode there are five; the others are those of a delta in any mode."""
    states = [world.state(service("a"), slice_of("a", endpoint(f"10.244.3.{n}", node="n3"))) for n in (101, 102, 103)]
    world.apply(states[0])
    world.apply(world.delta(states[0], states[1]))
    change = world.delta(states[1], states[2])
    log, directory = tmp_path / "log", tmp_path / "bin"
    directory.mkdir()
    tools = "awk cat cmp conntrack cp cut date flock grep gzip head id ip ipset ipvsadm ln logger ls mkdir modprobe mv"
    tools += " nft readlink rm rmdir sed sha256sum sleep sort tail tr unshare wc"
    tools += "".join(
        f" ip{six}tables{end}" for six in ("", "6") for end in ("", "-save", "-restore", "-legacy-restore")
    )
    for real in world.sh(f"for tool in {tools}; do command -v $tool || :; done").split():
        script = directory / Path(real).name
        script.write_text(f'#!/bin/sh\necho {script.name} >>{log}\nexec {real} "$@"\n')
        script.chmod(0o755)
    assert world.akp("apply", change, AKP_PATH=str(directory)).json["changed"] is True
    started = log.read_text().split()
    first = started.index("iptables-legacy-restore")
    loaded = ["awk", "iptables-legacy-restore", "ip6tables-legacy-restore", "ipset", "ipvsadm"]
    assert started[first - 1 : first + 4] == loaded, started
    assert len(started) <= 18, started


def test_a_rebooted_node_restores_what_it_had(routed: World) -> None:
    world = routed
    bundle = world.bundle(world.state(*world.web(5, *ALL)))
    world.apply(bundle)
    world.lab.reboot("n3")
    assert world.akp("status").json["state"] == "flushed"
    assert world.akp("restore").json["changed"] is True
    assert world.kernel()["servers"] == wanted(bundle)["servers"]
    assert world.lab.outside.call("tcp", "10.96.0.5", 80, timeout=60).who in ALL


def test_a_scheduler_that_the_kernel_lacks_is_named_before_anything_changes(world: World) -> None:
    before = world.kernel()
    world.sh("f=$(modinfo -n ip_vs_sed); rmmod ip_vs_sed 2>/dev/null || :; mv $f /tmp/ip_vs_sed.ko.away")
    try:
        bundle = world.bundle(world.state(*world.web(5, *ALL), ipvs={"scheduler": "sed"}))
        refused = world.akp("apply", bundle)
        assert (refused.code, "module ip_vs_sed" in refused.json["error"]) == (3, True)
        assert world.kernel() == before
    finally:
        world.sh("mv /tmp/ip_vs_sed.ko.away $(modinfo -n ip_vs_sed)")


def test_endpoints_of_two_services_may_be_the_same(world: World) -> None:
    """Two Services with one endpoint: its entry in the loop-back set goes with the last of them."""
    shared = [slice_of(name, endpoint(world.address("near"), node="n3"), ports=[port(8080)]) for name in ("a", "b")]
    services = [service(name, clusterIP=f"10.96.1.{i}") for i, name in enumerate(("a", "b"))]
    both, one = world.state(*services, *shared), world.state(services[0], shared[0])
    world.apply(both)
    world.apply(world.delta(both, one))
    assert world.status()["drift"] == 0
    assert f"add KUBE-LOOP-BACK {world.address('near')},tcp:8080,{world.address('near')}" in world.kernel()["sets"]
