"""Seeded KubeProxyConfigurations: every field that reaches the kernel, in the values that make a difference."""

from __future__ import annotations

import random
from typing import Any

from .plan import CLUSTER_CIDR4, CLUSTER_CIDR6, NODE_NET4, NODE_NET6, SECOND_NET4, internal_addresses

Object = dict[str, Any]

NODE_PORT_ADDRESSES: tuple[list[str] | None, ...] = (
    None,
    None,
    None,
    [],
    ["primary"],
    ["localhost"],
    ["all"],
    ["primary", "localhost"],
    ["localhost", "all"],
    [f"{NODE_NET4}0/24", f"{NODE_NET6}/64"],
    [f"{NODE_NET4}0/24"],
    [f"{NODE_NET6}/64"],
    [f"{SECOND_NET4}0/24"],
    ["127.0.0.0/8"],
    ["127.0.0.1/32", "::1/128", f"{NODE_NET4}0/24"],
    ["0.0.0.0/0"],
    ["::/0"],
    ["0.0.0.0/1", "128.0.0.0/1"],
    ["fe80::/10", f"{NODE_NET4}0/24"],
    ["10.0.0.0/8"],
)
CLUSTER_CIDRS = (
    f"{CLUSTER_CIDR4},{CLUSTER_CIDR6}",
    f"{CLUSTER_CIDR6},{CLUSTER_CIDR4}",
    CLUSTER_CIDR4,
    CLUSTER_CIDR6,
    "",
    "10.244.3.4/16",
)

# They must be understood, and change no rule.
HARMLESS: Object = {
    "bindAddressHardFail": False,
    "configSyncPeriod": "5m",
    "enableProfiling": True,
    "healthzBindAddress": "127.0.0.1:10256",
    "logging": {"format": "text", "verbosity": 2},
    "metricsBindAddress": "127.0.0.1:10249",
    "oomScoreAdj": 0,
    "portRange": "",
    "showHiddenMetricsForVersion": "",
    "winkernel": {"enableDSR": True, "networkName": "cbr0"},
}


def draw(rng: random.Random, mode: str, node: Object, minor: str) -> Object:
    name = node["metadata"]["name"]
    config: Object = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": rng.choice((name, name, name, f" {name.upper()} ")),
        "conntrack": _conntrack(rng),
    }
    if mode == "iptables" and rng.random() < 0.1:
        config["mode"] = ""
    _detect_local(rng, config)
    addresses = rng.choice(NODE_PORT_ADDRESSES)
    if minor == "1.36" and addresses and addresses != ["primary"] and not all("/" in entry for entry in addresses):
        addresses = ["primary"]  # it knew no other keyword, and this one only alone
    if addresses is not None:
        config["nodePortAddresses"] = addresses
    if rng.random() < 0.2:
        config["bindAddress"] = rng.choice(("0.0.0.0", "::", *internal_addresses(node)))
    for section in dict.fromkeys(("iptables", mode)):
        config[section] = _section(rng, section)
    config.update({field: value for field, value in HARMLESS.items() if rng.random() < 0.1})
    gates = {gate: value for gate, value in _gates(mode, minor).items() if rng.random() < 0.1}
    if gates:
        config["featureGates"] = gates
    return config


def _conntrack(rng: random.Random) -> Object:
    # The table's size belongs to the whole machine, so neither side may touch it.
    conntrack: Object = {"maxPerCore": 0, "min": rng.choice((0, 131072))}
    if rng.random() < 0.3:
        conntrack["tcpBeLiberal"] = rng.choice((True, False))
    for field in ("tcpEstablishedTimeout", "tcpCloseWaitTimeout", "udpTimeout", "udpStreamTimeout"):
        if rng.random() < 0.4:
            conntrack[field] = rng.choice(("0s", "1m30s", "2h", "7200s"))
    return conntrack


def _detect_local(rng: random.Random, config: Object) -> None:
    mode = rng.choice((None, "ClusterCIDR", "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"))
    config["clusterCIDR"] = rng.choice(CLUSTER_CIDRS)
    if mode is not None:
        config["detectLocalMode"] = mode
    if mode == "BridgeInterface":
        config["detectLocal"] = {"bridgeInterface": "cni0"}
    elif mode == "InterfaceNamePrefix":
        config["detectLocal"] = {"interfaceNamePrefix": "veth"}


def _section(rng: random.Random, section: str) -> Object:
    # Short periods change no rule; they only spare the comparison the wait for the next sync.
    drawn: Object = {"minSyncPeriod": "100ms", "syncPeriod": "1s"}
    if section == "ipvs":
        drawn["syncPeriod"] = "10m"  # it syncs everything each time, whether there is anything new or not
        drawn["scheduler"] = rng.choice(("", "rr", "lc", "sh", "mh", "wrr"))
        if rng.random() < 0.3:
            drawn["strictARP"] = True
        if rng.random() < 0.3:
            drawn["excludeCIDRs"] = ["10.250.0.0/16"]
        if rng.random() < 0.3:
            drawn.update(tcpTimeout="1h", tcpFinTimeout="2m", udpTimeout="5m")
        return drawn
    if rng.random() < 0.4:
        drawn["masqueradeBit"] = rng.choice((0, 13, 14, 31))
    if rng.random() < 0.25:
        drawn["masqueradeAll"] = rng.choice((True, False))
    if section == "iptables" and rng.random() < 0.4:
        drawn["localhostNodePorts"] = rng.choice((True, False))
    return drawn


def _gates(mode: str, minor: str) -> dict[str, bool]:
    gates = {"AllowServiceExternalIPs": False}
    if mode == "nftables" and minor != "1.36":
        gates["KubeProxyNFTablesLocalhostNodePorts"] = True
    return gates
