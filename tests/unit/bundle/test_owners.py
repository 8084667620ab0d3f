"""The Service that a difference on a node belongs to."""

from __future__ import annotations

import re

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.bundle.owners import Owners

from tests.unit.build import Object, dual_stack, file, port, render, service, slice_of

WEB = [
    dual_stack(
        type="LoadBalancer",
        ports=[port(80, nodePort=30080), port(443, "https", nodePort=30443)],
        ingress=("203.0.113.9",),
        externalIPs=["198.51.100.7"],
        loadBalancerSourceRanges=["192.0.2.0/24"],
        sessionAffinity="ClientIP",
        externalTrafficPolicy="Local",
        healthCheckNodePort=31999,
    ),
    slice_of("web", "10.244.1.1", "10.244.2.1", ports=[port(8080), port(8443, "https")]),
    slice_of("web", "fd00:10:244::1", ports=[port(8080), port(8443, "https")]),
]
DNS = [
    service("dns", "kube-system", clusterIP="10.96.0.10", ports=[port(53, "", "UDP")]),
    slice_of("dns", "10.244.1.53", namespace="kube-system", ports=[port(53, "", "UDP")]),
]
IDLE = service("idle", clusterIP="10.96.3.3", externalIPs=["198.51.100.3"])


def rendered(mode: str) -> tuple[State, Owners]:
    state = render(*WEB, *DNS, IDLE, mode=mode)
    return state, Owners(file(state, "services.jsonl").splitlines())


def owner(owners: Owners, **difference: str) -> str:
    (named,) = owners.named([{"kind": "missing-rule", **difference}])
    return str(named.get("service", ""))


@pytest.mark.parametrize("family", ["iptables", "ip6tables"])
def test_iptables_rules_belong_to_the_service_port_of_their_heading(family: str) -> None:
    state, owners = rendered("iptables")
    title, found = "", set()
    for line in file(state, f"{family}-1-endpoints.rules").splitlines():
        if heading := re.fullmatch(r"# (\S+/\S+) (tcp|udp)", line):
            title = heading[1]
        elif line.startswith(":KUBE-S"):
            assert owner(owners, chain=line[1:].split()[0]) == title, line
        elif line.startswith("-A KUBE-S"):
            chain = line.split()[1]
            assert owner(owners, chain=chain, rule=line) == title, line
            assert owner(owners, kind="extra-rule", chain=chain, rule=f"-A {chain} -j ACCEPT") == title
            found.add(title)
    assert {"shop/web:http", "shop/web:https"} <= found


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_rules_and_elements_that_lead_to_a_service_are_its(mode: str) -> None:
    state, owners = rendered(mode)
    ending = "rules" if mode == "iptables" else "nft"
    names = [f"{mode}-2-dispatch.{ending}", f"{mode}-3-frontends.{ending}"]
    lines = [line for name in names for line in file(state, name).splitlines()]
    seen = {}
    for line in lines:
        comment = re.search(r'comment "?(\w[\w-]*/[\w:-]+)', line)
        if comment:
            seen[line] = comment[1]
        elif leads := re.search(r"goto \w+-\w+-(\S+?)/(\S+?)/\w+/(\S*)", line):
            seen[line] = f"{leads[1]}/{leads[2]}" + (f":{leads[3]}" if leads[3] else "")
    assert {"shop/web:http", "shop/web:https", "shop/idle:http", "kube-system/dns"} <= set(seen.values())
    for line, title in seen.items():
        assert owner(owners, table="nat", chain="KUBE-SERVICES", rule=line) == title, line


def test_nftables_chains_and_sets_have_the_name_in_theirs() -> None:
    state, owners = rendered("nftables")
    chains = re.findall(r"add (?:chain|set) ip6? kube-proxy (\S+-\w{8}-(\S+?)/(\S+?)/\w+/([a-z]*)\S*)", all_text(state))
    assert {"service", "local", "external", "firewall", "endpoint", "affinity"} <= {
        name.partition("-")[0] for name, *_rest in chains
    }
    for name, namespace, service_name, port_name in chains:
        title = f"{namespace}/{service_name}" + (f":{port_name}" if port_name else "")
        assert owner(owners, table="kube-proxy", chain=name) == title


def all_text(state: State) -> str:
    return "".join(file(state, f"nftables-{part}.nft") for part in ("1-endpoints", "2-dispatch", "3-frontends"))


@pytest.mark.parametrize(
    ("difference", "title"),
    [
        ({"table": "ipvs", "name": "-t 10.96.7.7:80"}, "shop/web:http"),
        ({"table": "ipvs", "name": "-t [fd00:10:96::77]:443"}, "shop/web:https"),
        ({"table": "ipvs", "name": "-u 10.96.0.10:53", "value": "10.244.1.53:53"}, "kube-system/dns"),
        ({"table": "ipset", "name": "KUBE-CLUSTER-IP", "value": "10.96.7.7,tcp:443"}, "shop/web:https"),
        ({"table": "ipset", "name": "KUBE-6-CLUSTER-IP", "value": "fd00:10:96::77,tcp:80"}, "shop/web:http"),
        ({"table": "ipset", "name": "KUBE-LOOP-BACK", "value": "10.244.1.53,udp:53,10.244.1.53"}, "kube-system/dns"),
        ({"table": "ipset", "name": "KUBE-NODE-PORT-TCP", "value": "30443"}, "shop/web:https"),
        ({"table": "ipset", "name": "KUBE-NODE-PORT-LOCAL-SCTP-HASH", "value": "172.18.0.11,sctp:30443"}, ""),
        ({"table": "address", "name": "kube-ipvs0", "value": "10.96.7.7/32"}, "shop/web"),
        ({"table": "address", "name": "kube-ipvs0", "value": "10.96.7.8/32"}, ""),
        ({"table": "kube-proxy", "chain": "cluster-ips", "rule": "10.96.0.10"}, "kube-system/dns"),
        ({"table": "kube-proxy", "chain": "localhost-nodeport-reject-ports", "rule": "tcp . 30080"}, "shop/web:http"),
        (
            {"table": "nat", "chain": "KUBE-SERVICES", "rule": "-A KUBE-SERVICES -d 10.96.0.10/32 -j DROP"},
            "kube-system/dns",
        ),
        ({"table": "filter", "chain": "KUBE-FORWARD", "rule": "-A KUBE-FORWARD -j ACCEPT"}, ""),
        ({"kind": "sysctl", "name": "net.ipv4.vs.conntrack"}, ""),
    ],
)
def test_entries_servers_and_addresses_are_known_by_what_they_are(difference: Object, title: str) -> None:
    assert owner(rendered("ipvs")[1], **difference) == title


def test_what_several_services_have_is_nobodys() -> None:
    twice = [service("one", clusterIP="10.96.1.1"), service("two", clusterIP="10.96.1.2")]
    slices = [slice_of("one", "10.244.1.1"), slice_of("two", "10.244.1.1")]
    state = render(*twice, *slices, mode="ipvs")
    owners = Owners(file(state, "services.jsonl").splitlines())
    assert owner(owners, table="ipset", name="KUBE-LOOP-BACK", value="10.244.1.1,tcp:8080,10.244.1.1") == ""
    assert owner(owners, table="ipvs", name="-t 10.96.1.2:80", value="10.244.1.1:8080") == ""


def test_lines_that_are_none_are_refused() -> None:
    with pytest.raises((ValueError, KeyError)):
        Owners(['{"service": 1}'])
