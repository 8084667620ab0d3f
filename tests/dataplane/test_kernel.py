"""What a kernel holds after apply is what the engine wrote, whatever it held before; on both flavours of iptables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State, delta
from agentless_kube_proxy.bundle.write import write_bundle, write_delta
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.lab.program import PROGRAM
from tests.node.host import Host
from tests.unit.build import Object, dual_stack, file, port, render, service, slice_of
from tests.unit.clusters import CONFIGS, clusters

RESTORE = {"IPv4": "iptables.rules", "IPv6": "ip6tables.rules"}
SAVE = {"IPv4": "$ipt-save", "IPv6": "$ip6t-save"}
# Rules of somebody else, in every table that is ours as well, and before and after our jumps.
FOREIGN = """
for i in $ipt $ip6t; do
  $i -N DOCKER-USER; $i -A FORWARD -j DOCKER-USER; $i -A DOCKER-USER -m comment --comment "it's theirs" -j RETURN
  $i -A INPUT -p tcp -m tcp --dport 22 -m conntrack --ctstate NEW -j ACCEPT
  $i -t nat -N CNI-HOSTPORT; $i -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT
  $i -t nat -A CNI-HOSTPORT -p udp -m udp --dport 5000:5010 -j RETURN
  $i -t nat -N KUBELET; $i -t nat -N KUBE-ROUTER-NAT; $i -t nat -A KUBE-ROUTER-NAT -j RETURN
  $i -t mangle -A POSTROUTING -o eth7 -j MARK --set-xmark 0x7/0x7
  $i -t raw -A PREROUTING -i lo -j ACCEPT
  $i -P FORWARD DROP
done
$ipt -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
"""
Tables = dict[tuple[str, str, str], list[str]]


def wanted(state: State) -> Tables:
    """The rules of every chain of ours, and the jumps of the built-in chains, as they must come out."""
    rules: Tables = {}
    for family, name in RESTORE.items():
        table = ""
        for line in file(state, name).splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif line.startswith(":"):
                rules[family, table, line.split()[0][1:]] = []
            elif line.startswith("-A"):
                rules[family, table, line.split()[1]].append(line)
            elif line.startswith("-I"):
                rules.setdefault((family, table, line.split()[1]), []).insert(0, f"-A{line[2:]}")
    return rules


OURS = re.compile(r"KUBE-(?!ROUTER)")


def held(host: Host) -> tuple[Tables, Tables]:
    """What the kernel holds: our chains and jumps, and everything else, each in its order."""
    ours: Tables = {}
    theirs: Tables = {}
    for family, save in SAVE.items():
        for table in ("mangle", "filter", "nat", "raw"):
            for line in host.sh(f"{save} -t {table}").splitlines():
                if line.startswith(":"):
                    name, policy, _counters = line[1:].split()
                    (ours if OURS.match(name) else theirs)[family, table, name] = [] if policy == "-" else [policy]
                elif line.startswith("-A"):
                    name, target = line.split()[1], line.split()[-1]
                    side = ours if OURS.match(name) or OURS.match(target) else theirs
                    # The tool itself writes two blanks there.
                    rule = line.replace("--nfacct-name  ", "--nfacct-name ")
                    side.setdefault((family, table, name), []).append(rule)
    return ours, theirs


def in_order(rules: Tables) -> Tables:
    return {key: rules[key] for key in sorted(rules)}


@pytest.fixture(params=["nft", "legacy"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Makes hosts of one flavour."""
    made = Hosts(request.param, tmp_path)
    yield made
    for each in made.open:
        each.close()


class Hosts:
    def __init__(self, flavour: str, directory: Path) -> None:
        self.flavour = flavour
        self.open: list[Host] = []
        self._directory = directory
        self._numbers = itertools.count()

    def new(self) -> Host:
        directory = self._directory / f"host-{next(self._numbers)}"
        directory.mkdir()
        self.open.append(Host(directory, self.flavour))
        return self.open[-1]

    def close(self, host: Host) -> None:
        self.open.remove(host)
        host.close()

    def bundle(self, state: State) -> Path:
        path = self._directory / f"bundle-{next(self._numbers)}"
        write_bundle(state, path)
        return path

    def delta(self, old: State, new: State) -> Path:
        path = self._directory / f"delta-{next(self._numbers)}"
        write_delta(delta(old, new), new, path)
        return path


NO_SYSCTLS: Object = {"conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}}


def applied(host: Host, bundle: Path, *options: str) -> dict[str, Any]:
    """What the bundle's own program answers to apply; a delta has none."""
    own = bundle / "akp-node"
    result = host.akp("apply", *options, bundle, program=own if own.exists() else PROGRAM)
    assert result.code == 0, result.stdout + result.stderr
    return result.json


def assert_applied(hosts: Hosts, host: Host, state: State) -> None:
    bundle = hosts.bundle(state)
    applied(host, bundle)
    assert in_order(held(host)[0]) == in_order(wanted(state))
    assert applied(host, bundle)["changed"] is False
    assert applied(host, bundle, "--verify")["changed"] is False


# Each example costs seconds, so the first that fails is told as it is; its seed is enough to find a smaller one.
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(steps=st.lists(st.tuples(clusters(4), CONFIGS), min_size=2, max_size=2))
def test_whatever_was_applied_before_the_kernel_holds_the_bundle_and_nothing_of_others_has_changed(
    hosts: Hosts, steps: list[Any]
) -> None:
    host = hosts.new()
    host.sh(FOREIGN)
    theirs = held(host)[1]
    assert len(theirs) > 30
    for objects, fields in steps:
        settings_ = {**fields, "conntrack": {**NO_SYSCTLS["conntrack"], **fields.get("conntrack", {})}}
        state = render(*objects, on="n1", **settings_)
        # Equal to the text is equal to what a fresh kernel would hold, since that is equal to the text as well.
        assert_applied(hosts, host, state)
        assert held(host)[1] == theirs
    hosts.close(host)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(steps=st.lists(clusters(4), min_size=3, max_size=3))
def test_deltas_lead_where_the_whole_bundle_leads(hosts: Hosts, steps: list[Any]) -> None:
    host = hosts.new()
    first, *others = (render(*objects, on="n1", **NO_SYSCTLS) for objects in steps)
    applied(host, hosts.bundle(first))
    for old, new in itertools.pairwise([first, *others]):
        if old.generation == new.generation:  # Nothing to bring: the control side makes no such delta.
            continue
        answer = applied(host, hosts.delta(old, new))
        assert (answer["ok"], answer["generation"]) == (True, new.generation)
        assert in_order(held(host)[0]) == in_order(wanted(new))
    assert applied(host, hosts.bundle(others[-1]), "--verify")["changed"] is False
    hosts.close(host)


def test_every_probability_is_printed_as_it_was_written(hosts: Hosts) -> None:
    state = render(service(), slice_of("web", *(f"10.244.{i // 250}.{i % 250 + 1}" for i in range(400))), **NO_SYSCTLS)
    assert_applied(hosts, hosts.new(), state)


def test_a_large_cluster_without_comments(hosts: Hosts) -> None:
    endpoints = (f"10.244.{i // 250}.{i % 250 + 1}" for i in range(1001))
    state = render(service(sessionAffinity="ClientIP"), slice_of("web", *endpoints), **NO_SYSCTLS)
    assert_applied(hosts, hosts.new(), state)


def test_the_longest_names_there_can_be(hosts: Hosts) -> None:
    ports = [port(65535, "p" * 63, protocol, nodePort=32767) for protocol in ("TCP", "UDP", "SCTP")]
    addresses = ("2001:db8:aaaa:bbbb:cccc:dddd:eeee:ff01", "255.255.254.254")
    long = dual_stack(
        "s" * 63,
        "n" * 63,
        type="LoadBalancer",
        ports=ports,
        externalTrafficPolicy="Local",
        sessionAffinity="ClientIP",
        externalIPs=list(addresses),
        ingress=addresses,
        healthCheckNodePort=32000,
        loadBalancerSourceRanges=["2001:db8:aaaa:bbbb:cccc:dddd:eeee:ff00/127", "255.255.255.0/24"],
    )
    slices = [
        slice_of("s" * 63, address, namespace="n" * 63, ports=ports, name=f"x{index}")
        for index, address in enumerate(addresses)
    ]
    state = render(long, *slices, **NO_SYSCTLS)
    longest = max(re.findall(r'--comment "([^"]*)"', file(state, "ip6tables.rules")), key=len)
    assert len(longest) > 240
    assert_applied(hosts, hosts.new(), state)


@pytest.mark.parametrize(
    "mode",
    [
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "abcdefghijklmno"}},
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "abcdefghijklmn"}},
        {"iptables": {"masqueradeBit": 0}},
        {"iptables": {"masqueradeBit": 31}},
    ],
)
def test_settings_at_their_limits(hosts: Hosts, mode: Any) -> None:
    local = dual_stack(type="NodePort", externalTrafficPolicy="Local", ports=[port(nodePort=30080)])
    slices = [slice_of("web", "10.244.1.1"), slice_of("web", "fd00:10:244:1::1")]
    assert_applied(hosts, hosts.new(), render(local, *slices, **NO_SYSCTLS, **mode))
