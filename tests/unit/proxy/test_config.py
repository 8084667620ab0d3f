"""KubeProxyConfiguration: kube-proxy's defaults, and its refusals with the wrong field named."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from agentless_kube_proxy.proxy.config import Conntrack, DetectLocalConfiguration, InvalidConfig, Ipvs, ProxyConfig
from agentless_kube_proxy.proxy.config_document import parse_config
from agentless_kube_proxy.proxy.config_texts import parse_duration

from tests.unit.build import config, document

# What kubeadm writes into the ConfigMap kube-proxy, whole.
KUBEADM = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"""


def errors(**fields: Any) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        config(**fields)
    assert str(caught.value) == "\n".join(caught.value.errors)
    return caught.value.errors


def test_an_empty_configuration_has_kube_proxys_defaults() -> None:
    assert config() == ProxyConfig(
        mode="iptables",
        hostname_override="",
        bind_address="0.0.0.0",
        cluster_cidrs=(),
        detect_local=DetectLocalConfiguration("ClusterCIDR", "", ""),
        node_port_addresses=(),
        masquerade_bit=14,
        masquerade_all=False,
        localhost_node_ports=True,
        sync_period=30,
        min_sync_period=1,
        conntrack=Conntrack(
            max_per_core=32768,
            min=131072,
            tcp_established_timeout=86400,
            tcp_close_wait_timeout=3600,
            tcp_be_liberal=False,
            udp_timeout=0,
            udp_stream_timeout=0,
        ),
        ipvs=Ipvs(scheduler="rr", exclude_cidrs=(), strict_arp=False, tcp_timeout=0, tcp_fin_timeout=0, udp_timeout=0),
        feature_gates=(),
    )


def test_nulls_and_empty_strings_of_kubeadm_ask_for_the_defaults() -> None:
    assert parse_config(yaml.safe_load(KUBEADM)) == config(clusterCIDR="10.244.0.0/16")


def test_every_field_that_decides_on_something_is_read() -> None:
    read = config(
        mode="ipvs",
        hostnameOverride=" Node-A ",
        bindAddress="fd00::0001",
        clusterCIDR="10.244.0.0/16,fd00:10:244::/56",
        nodePortAddresses=["primary", "10.0.0.0/8"],
        iptables={"masqueradeBit": 0, "masqueradeAll": True, "localhostNodePorts": False, "syncPeriod": "10s"},
        ipvs={
            "syncPeriod": "1m",
            "minSyncPeriod": "5s",
            "scheduler": "mh",
            "excludeCIDRs": ["10.1.0.0/16"],
            "strictARP": True,
            "tcpTimeout": "15m",
            "tcpFinTimeout": "2m",
            "udpTimeout": "5m",
        },
        conntrack={
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "2h",
            "tcpCloseWaitTimeout": "0s",
            "tcpBeLiberal": True,
            "udpTimeout": "30s",
            "udpStreamTimeout": "1m30s",
        },
        featureGates={"AllowServiceExternalIPs": False, "SomethingElse": True},
    )
    assert read == ProxyConfig(
        mode="ipvs",
        hostname_override="node-a",
        bind_address="fd00::1",
        cluster_cidrs=("10.244.0.0/16", "fd00:10:244::/56"),
        node_port_addresses=("primary", "10.0.0.0/8"),
        masquerade_bit=0,
        masquerade_all=True,
        localhost_node_ports=False,
        sync_period=60,
        min_sync_period=5,
        conntrack=Conntrack(0, 0, 7200, 0, True, 30, 90),
        ipvs=Ipvs("mh", ("10.1.0.0/16",), True, 900, 120, 300),
        feature_gates=(("AllowServiceExternalIPs", False),),
    )
    assert not read.feature("AllowServiceExternalIPs")
    assert read.feature("KubeProxyIPVS")


@pytest.mark.parametrize(
    ("mode", "bit", "all_", "addresses"),
    [("iptables", 3, True, ()), ("ipvs", 3, True, ()), ("nftables", 5, False, ("primary",))],
)
def test_masquerading_is_taken_from_the_section_of_the_mode(
    mode: str, bit: int, all_: bool, addresses: tuple[str, ...]
) -> None:
    read = config(
        mode=mode,
        iptables={"masqueradeBit": 3, "masqueradeAll": True},
        nftables={"masqueradeBit": 5, "masqueradeAll": False},
    )
    assert (read.masquerade_bit, read.masquerade_all, read.node_port_addresses) == (bit, all_, addresses)


@pytest.mark.parametrize(("bit", "mark"), [(0, 0x1), (14, 0x4000), (31, 0x80000000)])
def test_the_mark_is_one_bit(bit: int, mark: int) -> None:
    assert config(iptables={"masqueradeBit": bit}).masquerade_mark == mark


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("1m30s", 90),
        ("1h", 3600),
        ("1.5h", 5400),
        ("100ms", 0.1),
        ("1us", 1e-6),
        ("1µs", 1e-6),
        ("5ns", 5e-9),
        ("0", 0),
        ("0s", 0),
        ("-5s", -5),
        ("+5s", 5),
        ("", None),
        ("5", None),
        ("5 s", None),
        ("s", None),
        ("1d", None),
        (30, None),
        (None, None),
    ],
)
def test_durations_are_those_of_go(text: Any, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        # shape
        ({"iptables": []}, ["iptables: must be a mapping, not []"]),
        ({"iptables": {"masqueradeBit": "14"}}, ["iptables.masqueradeBit: must be an integer, not '14'"]),
        ({"iptables": {"masqueradeBit": True}}, ["iptables.masqueradeBit: must be an integer, not True"]),
        ({"iptables": {"masqueradeAll": "yes"}}, ["iptables.masqueradeAll: must be true or false, not 'yes'"]),
        ({"iptables": {"syncPeriod": 30}}, ["iptables.syncPeriod: must be a duration such as 30s or 1m, not 30"]),
        ({"clusterCIDR": ["10.0.0.0/8"]}, ["clusterCIDR: must be a string, not ['10.0.0.0/8']"]),
        ({"nodePortAddresses": "primary"}, ["nodePortAddresses: must be a list, not 'primary'"]),
        ({"nodePortAddresses": [1]}, ["nodePortAddresses: must be a list of strings, not [1]"]),
        ({"featureGates": ["A"]}, ["featureGates: must map names to true or false"]),
        ({"featureGates": {"A": "on"}}, ["featureGates: must map names to true or false"]),
        (
            {"apiVersion": "v1"},
            ["apiVersion: must be kubeproxy.config.k8s.io/v1alpha1, not 'v1'"],
        ),
        ({"kind": "ConfigMap"}, ["kind: must be KubeProxyConfiguration, not 'ConfigMap'"]),
        # all that is wrong is told at once
        (
            {"conntrack": {"min": "x"}, "mode": "ebpf", "clusterCIDR": "10.244.0.0", "kind": "ConfigMap"},
            [
                "conntrack.min: must be an integer, not 'x'",
                "kind: must be KubeProxyConfiguration, not 'ConfigMap'",
                "mode: 'ebpf' is not one of iptables, ipvs, nftables, userspace, kernelspace",
                "clusterCIDR: must be one CIDR, or two of different families, separated by a comma",
            ],
        ),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": 0}},
            ["detectLocal.bridgeInterface: must be a string, not 0"],
        ),
        (
            {"mode": "ebpf", "oomScoreAdj": 2000},
            [
                "mode: 'ebpf' is not one of iptables, ipvs, nftables, userspace, kernelspace",
                "oomScoreAdj: must be between -1000 and 1000",
            ],
        ),
        # values
        (
            {"mode": "ipvs", "featureGates": {"KubeProxyIPVS": False}},
            ["mode: ipvs needs the feature gate KubeProxyIPVS"],
        ),
        ({"iptables": {"masqueradeBit": 32}}, ["iptables.masqueradeBit: must be between 0 and 31"]),
        ({"iptables": {"masqueradeBit": -1}}, ["iptables.masqueradeBit: must be between 0 and 31"]),
        (
            {"mode": "nftables", "nftables": {"masqueradeBit": 32}},
            ["nftables.masqueradeBit: must be between 0 and 31"],
        ),
        (
            {"mode": "nftables", "iptables": {"masqueradeBit": 99}},
            ["iptables.masqueradeBit: must be between 0 and 31"],
        ),
        ({"conntrack": {"maxPerCore": -1}}, ["conntrack.maxPerCore: must not be negative"]),
        ({"conntrack": {"min": -1}}, ["conntrack.min: must not be negative"]),
        (
            {"conntrack": {"tcpEstablishedTimeout": "-1s"}},
            ["conntrack.tcpEstablishedTimeout: must not be negative"],
        ),
        ({"conntrack": {"udpTimeout": "-1s"}}, ["conntrack.udpTimeout: must not be negative"]),
        ({"configSyncPeriod": "-1s"}, ["configSyncPeriod: must be greater than 0"]),
        ({"iptables": {"syncPeriod": "-1s"}}, ["iptables.syncPeriod: must be greater than 0"]),
        ({"iptables": {"minSyncPeriod": "-1s"}}, ["iptables.minSyncPeriod: must not be negative"]),
        (
            {"iptables": {"syncPeriod": "10s", "minSyncPeriod": "11s"}},
            ["iptables.minSyncPeriod: must not be greater than syncPeriod"],
        ),
        (
            {"mode": "ipvs", "ipvs": {"minSyncPeriod": "31s"}},
            ["ipvs.minSyncPeriod: must not be greater than syncPeriod"],
        ),
        ({"oomScoreAdj": -1001}, ["oomScoreAdj: must be between -1000 and 1000"]),
        ({"bindAddress": "eth0"}, ["bindAddress: 'eth0' is not an IP address"]),
        (
            {"healthzBindAddress": "0.0.0.0:0"},
            ["healthzBindAddress: '0.0.0.0:0' is not IP:port with a port between 1 and 65535"],
        ),
        (
            {"metricsBindAddress": "localhost:10249"},
            ["metricsBindAddress: 'localhost:10249' is not IP:port with a port between 1 and 65535"],
        ),
        (
            {"nodePortAddresses": ["10.0.0.1"]},
            ["nodePortAddresses[0]: '10.0.0.1' is neither a CIDR nor one of primary, localhost, all"],
        ),
        (
            {"nodePortAddresses": ["primary", "10.0.0.0/8", "primary"]},
            ["nodePortAddresses[2]: primary is given twice"],
        ),
        (
            {"clusterCIDR": "10.244.0.0"},
            ["clusterCIDR: must be one CIDR, or two of different families, separated by a comma"],
        ),
        (
            {"clusterCIDR": "10.0.0.0/8,fd00::/8,fd01::/16"},
            ["clusterCIDR: must be one CIDR, or two of different families, separated by a comma"],
        ),
        (
            {"clusterCIDR": "10.0.0.0/8,"},
            ["clusterCIDR: must be one CIDR, or two of different families, separated by a comma"],
        ),
        (
            {"clusterCIDR": "10.0.0.0/8, fd00::/8"},
            ["clusterCIDR: must be one CIDR, or two of different families, separated by a comma"],
        ),
        ({"clusterCIDR": "10.0.0.0/8,11.0.0.0/8"}, ["clusterCIDR: two CIDRs must be of different families"]),
        (
            {"detectLocalMode": "Magic"},
            ["detectLocalMode: 'Magic' is not one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix"],
        ),
        (
            {"detectLocalMode": "BridgeInterface"},
            ["detectLocal.bridgeInterface: must be set with detectLocalMode BridgeInterface"],
        ),
        (
            {"detectLocalMode": "InterfaceNamePrefix"},
            ["detectLocal.interfaceNamePrefix: must be set with detectLocalMode InterfaceNamePrefix"],
        ),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0 -j ACCEPT"}},
            ["detectLocal.bridgeInterface: 'cbr0 -j ACCEPT' is no interface name"],
        ),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "abcdefghijklmnop"}},
            ["detectLocal.bridgeInterface: 'abcdefghijklmnop' is no interface name"],
        ),
        # with the + that iptables needs, it must still fit into an interface name
        (
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "abcdefghijklmno"}},
            ["detectLocal.interfaceNamePrefix: 'abcdefghijklmno' is no prefix of an interface name"],
        ),
        (
            {"mode": "ipvs", "ipvs": {"tcpTimeout": "-1s", "excludeCIDRs": ["x"], "scheduler": "rr -x"}},
            [
                "ipvs.tcpTimeout: must not be negative",
                "ipvs.excludeCIDRs: 'x' is not a CIDR",
                "ipvs.scheduler: 'rr -x' is not the name of a scheduler",
            ],
        ),
    ],
)
def test_what_kube_proxy_refuses_is_refused_with_the_field_named(fields: Any, messages: list[str]) -> None:
    assert errors(**fields) == messages


@pytest.mark.parametrize("wrong", [None, [], "kind: KubeProxyConfiguration", 3])
def test_a_configuration_is_a_mapping(wrong: Any) -> None:
    with pytest.raises(InvalidConfig, match="a KubeProxyConfiguration must be a mapping"):
        parse_config(wrong)


@pytest.mark.parametrize(
    "fields",
    [
        # only what the mode uses is judged
        {"detectLocalMode": "NodeCIDR", "clusterCIDR": "junk"},
        {"mode": "iptables", "ipvs": {"tcpTimeout": "-1s", "excludeCIDRs": ["x"]}},
        {"mode": "iptables", "nftables": {"masqueradeBit": 99}},
        {"nodePortAddresses": []},
        {"nodePortAddresses": ["all", "localhost", "primary", "127.0.0.0/8", "::/0"]},
        {"bindAddress": "::"},
        {"healthzBindAddress": "0.0.0.0"},
        {"healthzBindAddress": "[::]:10256", "metricsBindAddress": "127.0.0.1:65535"},
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "abcdefghijklmno"}},
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "abcdefghijklmn"}},
        {"mode": "ipvs", "featureGates": {"KubeProxyIPVS": True}},
        {"oomScoreAdj": -1000},
        {"winkernel": {"anything": "goes"}},
        {"iptables": None, "conntrack": None, "detectLocal": None},
    ],
)
def test_what_kube_proxy_accepts_is_accepted(fields: Any) -> None:
    assert config(**fields).mode in ("iptables", "ipvs")


def test_fields_that_kube_proxy_does_not_know_are_named_and_change_nothing() -> None:
    found = config(iptable={}, iptables={"masqBit": 1, "masqueradeBit": 15}, mode="nftables", future=None)
    assert found == config(iptables={"masqueradeBit": 15}, mode="nftables")
    assert [str(each) for each in found.warnings] == [
        f"KubeProxyConfiguration: {field}: is not a field of KubeProxyConfiguration and has no effect, as with kube-proxy; "
        "a typing error?"
        for field in ("iptable", "iptables.masqBit", "future")
    ]
    assert config().warnings == ()


def test_a_configuration_that_is_json_already_is_none_the_worse() -> None:
    assert parse_config(document(mode="nftables")).mode == "nftables"
