# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) read from a document: every field, typed and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..addresses import parse_ip
from .config import (
    FEATURE_DEFAULTS,
    KIND,
    MODES,
    Conntrack,
    DetectLocalConfiguration,
    InvalidConfig,
    Ipvs,
    ProxyConfig,
    Userspace,
    Winkernel,
)
from .config_checks import invalid
from .config_texts import healthz_port, parse_duration, parse_port_range

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"


class Duration:
    """Marks a field that holds a Go duration such as 1m30s, read as seconds."""


# Every field kube-proxy knows. A nested mapping is a section; `object` is a part without effect on rules.
_FIELDS: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "featureGates": object,
    "clientConnection": object,
    "logging": object,
    "hostnameOverride": str,
    "bindAddress": str,
    "healthzBindAddress": str,
    "metricsBindAddress": str,
    "bindAddressHardFail": bool,
    "enableProfiling": bool,
    "showHiddenMetricsForVersion": str,
    "mode": str,
    "iptables": {
        "masqueradeBit": int,
        "masqueradeAll": bool,
        "localhostNodePorts": bool,
        "syncPeriod": Duration,
        "minSyncPeriod": Duration,
    },
    "ipvs": {
        "syncPeriod": Duration,
        "minSyncPeriod": Duration,
        "scheduler": str,
        "excludeCIDRs": list,
        "strictARP": bool,
        "tcpTimeout": Duration,
        "tcpFinTimeout": Duration,
        "udpTimeout": Duration,
    },
    "nftables": {"masqueradeBit": int, "masqueradeAll": bool, "syncPeriod": Duration, "minSyncPeriod": Duration},
    "winkernel": {
        "networkName": str,
        "sourceVip": str,
        "enableDSR": bool,
        "rootHnsEndpointName": str,
        "forwardHealthCheckVip": bool,
    },
    "detectLocalMode": str,
    "detectLocal": {"bridgeInterface": str, "interfaceNamePrefix": str},
    "clusterCIDR": str,
    "nodePortAddresses": list,
    "oomScoreAdj": int,
    "conntrack": {
        "maxPerCore": int,
        "min": int,
        "tcpEstablishedTimeout": Duration,
        "tcpCloseWaitTimeout": Duration,
        "tcpBeLiberal": bool,
        "udpTimeout": Duration,
        "udpStreamTimeout": Duration,
    },
    "configSyncPeriod": Duration,
    "portRange": str,
    "windowsRunAsService": bool,
}
_TYPE_NAMES = {str: "a string", bool: "true or false", int: "an integer", list: "a list", dict: "a mapping"}


def parse_config(document: object) -> ProxyConfig:
    """The configuration of a parsed YAML or JSON document, or InvalidConfig with every wrong field named.

    A field that kube-proxy does not know is no error: it logs a warning and goes on, and so do we.
    """
    if not isinstance(document, Mapping):
        raise InvalidConfig([f"a {KIND} must be a mapping"])
    errors: list[str] = []
    unknown: list[str] = []
    # Later releases dropped the field with the mode.
    known = {**_FIELDS, "udpIdleTimeout": Duration} if document.get("mode") == "userspace" else _FIELDS
    fields = dict(_checked(document, known, "", errors, unknown))
    if document.get("apiVersion") != API_VERSION:
        errors.append(f"apiVersion: must be {API_VERSION}, not {document.get('apiVersion')!r}")
    if document.get("kind") != KIND:
        errors.append(f"kind: must be {KIND}, not {document.get('kind')!r}")
    # What has a wrong type is judged as if it were not there, so that all errors are told at once.
    config = _config(fields, errors)
    named = {each.partition(":")[0] for each in errors}
    errors.extend(each for each in invalid(fields, config) if each.partition(":")[0] not in named)
    if errors:
        raise InvalidConfig(errors)
    return dataclasses.replace(config, unknown=tuple(unknown))


def _checked(
    document: Mapping[str, Any], known: dict[str, Any], path: str, errors: list[str], unknown: list[str]
) -> Iterator[tuple[str, Any]]:
    """The fields that are set, by their full path, typed; those of a wrong type go to errors, others to unknown."""
    for key, value in document.items():
        field = f"{path}{key}"
        expected = known.get(key)
        if expected is None:
            unknown.append(field)
        elif value is None:
            continue
        elif isinstance(expected, dict):
            if isinstance(value, Mapping):
                yield from _checked(value, expected, f"{field}.", errors, unknown)
            else:
                errors.append(f"{field}: must be a mapping, not {value!r}")
        elif expected is Duration:
            seconds = parse_duration(value)
            if seconds is None:
                errors.append(f"{field}: must be a duration such as 30s or 1m, not {value!r}")
            else:
                yield field, seconds
        elif not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            errors.append(f"{field}: must be {_TYPE_NAMES[expected]}, not {value!r}")
        elif expected is list and not all(isinstance(entry, str) for entry in value):
            errors.append(f"{field}: must be a list of strings, not {value!r}")
        else:
            yield field, value


def _config(fields: dict[str, Any], errors: list[str]) -> ProxyConfig:
    mode = fields.get("mode") or "iptables"
    section = "nftables" if mode == "nftables" else "iptables"
    periods = mode if mode in MODES else "iptables"
    gates = fields.get("featureGates", {})
    if not isinstance(gates, Mapping) or not all(isinstance(on, bool) for on in gates.values()):
        errors.append("featureGates: must map names to true or false")
        gates = {}
    defaults = Conntrack()
    return ProxyConfig(
        mode=mode,
        hostname_override=fields.get("hostnameOverride", "").strip().lower(),
        bind_address=parse_ip(fields.get("bindAddress") or "0.0.0.0") or "",
        cluster_cidrs=tuple(fields["clusterCIDR"].split(",")) if fields.get("clusterCIDR") else (),
        detect_local=DetectLocalConfiguration(
            mode=fields.get("detectLocalMode") or "ClusterCIDR",
            bridge_interface=fields.get("detectLocal.bridgeInterface", ""),
            interface_name_prefix=fields.get("detectLocal.interfaceNamePrefix", ""),
        ),
        # In nftables mode node ports are served on the primary addresses unless something else is asked for.
        node_port_addresses=tuple(fields.get("nodePortAddresses") or (("primary",) if mode == "nftables" else ())),
        masquerade_bit=fields.get(f"{section}.masqueradeBit", 14),
        masquerade_all=fields.get(f"{section}.masqueradeAll", False),
        localhost_node_ports=fields.get("iptables.localhostNodePorts", True),
        sync_period=fields.get(f"{periods}.syncPeriod") or 30,
        min_sync_period=fields.get(f"{periods}.minSyncPeriod") or (0 if periods == "ipvs" else 1),
        conntrack=Conntrack(
            max_per_core=fields.get("conntrack.maxPerCore", defaults.max_per_core),
            min=fields.get("conntrack.min", defaults.min),
            tcp_established_timeout=fields.get("conntrack.tcpEstablishedTimeout", defaults.tcp_established_timeout),
            tcp_close_wait_timeout=fields.get("conntrack.tcpCloseWaitTimeout", defaults.tcp_close_wait_timeout),
            tcp_be_liberal=fields.get("conntrack.tcpBeLiberal", False),
            udp_timeout=fields.get("conntrack.udpTimeout", 0),
            udp_stream_timeout=fields.get("conntrack.udpStreamTimeout", 0),
        ),
        ipvs=Ipvs(
            scheduler=fields.get("ipvs.scheduler") or "rr",
            exclude_cidrs=tuple(fields.get("ipvs.excludeCIDRs", ())),
            strict_arp=fields.get("ipvs.strictARP", False),
            tcp_timeout=fields.get("ipvs.tcpTimeout", 0),
            tcp_fin_timeout=fields.get("ipvs.tcpFinTimeout", 0),
            udp_timeout=fields.get("ipvs.udpTimeout", 0),
        ),
        userspace=Userspace(
            port_range=parse_port_range(fields.get("portRange", "")) or Userspace().port_range,
            udp_idle_timeout=fields.get("udpIdleTimeout") or Userspace().udp_idle_timeout,
        ),
        winkernel=Winkernel(
            network_name=fields.get("winkernel.networkName", ""),
            source_vip=parse_ip(fields.get("winkernel.sourceVip") or "") or "",
            enable_dsr=fields.get("winkernel.enableDSR", False),
            root_endpoint_name=fields.get("winkernel.rootHnsEndpointName") or "cbr0",
            forward_health_check_vip=fields.get("winkernel.forwardHealthCheckVip", False),
        ),
        healthz_port=healthz_port(fields.get("healthzBindAddress", "")),
        feature_gates=tuple(sorted((str(name), on) for name, on in gates.items() if name in FEATURE_DEFAULTS)),
    )
