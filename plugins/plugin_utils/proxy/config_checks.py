# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What kube-proxy refuses in a KubeProxyConfiguration, a message for each field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..addresses import family_of, is_loopback, parse_cidr
from .config import DETECT_LOCAL_MODES, MODES, NODE_PORT_KEYWORDS, ProxyConfig
from .config_texts import is_ip_port, parse_port_range

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}")


def invalid(fields: dict[str, Any], config: ProxyConfig) -> Iterator[str]:
    """What kube-proxy would refuse, a message for each."""
    if config.mode not in MODES:
        yield f"mode: {config.mode!r} is not one of {', '.join(MODES)}"
    if config.mode == "ipvs" and not config.feature("KubeProxyIPVS"):
        yield "mode: ipvs needs the feature gate KubeProxyIPVS"
    sections = ("iptables", "nftables") if config.mode == "nftables" else ("iptables",)
    for section in sections:
        if not 0 <= fields.get(f"{section}.masqueradeBit", 14) <= 31:
            yield f"{section}.masqueradeBit: must be between 0 and 31"
    for field, value in fields.items():
        if field.startswith("conntrack.") and not isinstance(value, bool) and value < 0:
            yield f"{field}: must not be negative"
    yield from _invalid_periods(fields, config.mode)
    if not -1000 <= fields.get("oomScoreAdj", -999) <= 1000:
        yield "oomScoreAdj: must be between -1000 and 1000"
    if not config.bind_address:
        yield f"bindAddress: {fields['bindAddress']!r} is not an IP address"
    for field in ("healthzBindAddress", "metricsBindAddress"):
        if fields.get(field) and not is_ip_port(fields[field]):
            yield f"{field}: {fields[field]!r} is not IP:port with a port between 1 and 65535"
    yield from _invalid_node_port_addresses(config.node_port_addresses)
    yield from _invalid_detect_local(config)
    if config.mode == "userspace":
        yield from _invalid_userspace(fields, config)
    if config.mode == "ipvs":
        for name in ("tcpTimeout", "tcpFinTimeout", "udpTimeout"):
            if fields.get(f"ipvs.{name}", 0) < 0:
                yield f"ipvs.{name}: must not be negative"
        for cidr in config.ipvs.exclude_cidrs:
            if parse_cidr(cidr) is None:
                yield f"ipvs.excludeCIDRs: {cidr!r} is not a CIDR"
        if not re.fullmatch(r"[a-z]{1,16}", config.ipvs.scheduler):
            yield f"ipvs.scheduler: {config.ipvs.scheduler!r} is not the name of a scheduler"


def _invalid_userspace(fields: dict[str, Any], config: ProxyConfig) -> Iterator[str]:
    text = fields.get("portRange", "").strip()
    if text not in ("", "0", "0-0") and parse_port_range(text) is None:
        yield f"portRange: {text!r} is not FIRST-LAST, FIRST+MORE or one port, between 1 and 65535"
    if config.userspace.udp_idle_timeout < 0.001:
        yield "udpIdleTimeout: must be at least 1ms"
    if config.bind_address and is_loopback(config.bind_address):
        yield "bindAddress: must not be a loopback address in userspace mode"


def _invalid_periods(fields: dict[str, Any], mode: str) -> Iterator[str]:
    # 0 asks for the default, so only a negative period is left to refuse.
    if fields.get("configSyncPeriod", 0) < 0:
        yield "configSyncPeriod: must be greater than 0"
    for section in {"iptables", mode} & set(MODES):
        period = fields.get(f"{section}.syncPeriod") or 30
        minimum = fields.get(f"{section}.minSyncPeriod") or (0 if section == "ipvs" else 1)
        if period < 0:
            yield f"{section}.syncPeriod: must be greater than 0"
        if minimum < 0:
            yield f"{section}.minSyncPeriod: must not be negative"
        elif minimum > period > 0:
            yield f"{section}.minSyncPeriod: must not be greater than syncPeriod"


def _invalid_node_port_addresses(entries: tuple[str, ...]) -> Iterator[str]:
    for index, entry in enumerate(entries):
        if entry in NODE_PORT_KEYWORDS:
            if entry in entries[:index]:
                yield f"nodePortAddresses[{index}]: {entry} is given twice"
        elif parse_cidr(entry) is None:
            yield f"nodePortAddresses[{index}]: {entry!r} is neither a CIDR nor one of {', '.join(NODE_PORT_KEYWORDS)}"


def _invalid_detect_local(config: ProxyConfig) -> Iterator[str]:
    if config.detect_local.mode not in DETECT_LOCAL_MODES:
        yield f"detectLocalMode: {config.detect_local.mode!r} is not one of {', '.join(DETECT_LOCAL_MODES)}"
    if config.detect_local.mode == "ClusterCIDR":
        cidrs = [parse_cidr(cidr) for cidr in config.cluster_cidrs]
        known = [cidr for cidr in cidrs if cidr is not None]
        if len(known) < len(cidrs) or len(cidrs) > 2:
            yield "clusterCIDR: must be one CIDR, or two of different families, separated by a comma"
        elif len(known) == 2 and family_of(known[0]) is family_of(known[1]):
            yield "clusterCIDR: two CIDRs must be of different families"
    bridge, prefix = config.detect_local.bridge_interface, config.detect_local.interface_name_prefix
    if config.detect_local.mode == "BridgeInterface":
        if not bridge:
            yield "detectLocal.bridgeInterface: must be set with detectLocalMode BridgeInterface"
        elif not _INTERFACE.fullmatch(bridge):
            yield f"detectLocal.bridgeInterface: {bridge!r} is no interface name"
    if config.detect_local.mode == "InterfaceNamePrefix":
        if not prefix:
            yield "detectLocal.interfaceNamePrefix: must be set with detectLocalMode InterfaceNamePrefix"
        elif not _INTERFACE.fullmatch(prefix + "x"):  # rules write one more character, a +
            yield f"detectLocal.interfaceNamePrefix: {prefix!r} is no prefix of an interface name"
