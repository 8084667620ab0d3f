# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1): kube-proxy's fields, defaults and validation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..addresses import family_of, is_loopback, parse_cidr, parse_ip
from ..cluster.objects import SCHEDULERS
from ..errors import UserError
from .warned import Warned

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"
MODES = ("iptables", "ipvs", "nftables", "userspace", "kernelspace")
NODE_PORT_KEYWORDS = ("primary", "localhost", "all")
DETECT_LOCAL_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}")
_DURATION = re.compile(r"(?P<sign>[-+]?)(?P<parts>(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0)")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|µs|ms|s|m|h)")
_PORT_RANGE = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5})|\+(?P<more>[0-9]{1,5}))?")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class InvalidConfig(UserError):
    """A KubeProxyConfiguration that kube-proxy would refuse; one message per wrong field."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors

    @property
    def sentence(self) -> str:
        """All fields in one line."""
        return f"the KubeProxyConfiguration is not valid: {'; '.join(self.errors)}"


class Duration:
    """Marks a field that holds a Go duration such as 1m30s, read as seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conntrack:
    """`conntrack`: kernel settings, all Linux modes. 0 leaves the kernel's value."""

    max_per_core: int = 32768
    min: int = 131072
    tcp_established_timeout: float = 86400
    tcp_close_wait_timeout: float = 3600
    tcp_be_liberal: bool = False
    udp_timeout: float = 0
    udp_stream_timeout: float = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ipvs:
    """`ipvs`, and the schedulers of single Services, which kube-proxy does not have."""

    scheduler: str = "rr"
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: float = 0
    tcp_fin_timeout: float = 0
    udp_timeout: float = 0
    service_schedulers: tuple[tuple[str, str], ...] = ()  # namespace/name -> scheduler
    scheduler_annotations: bool = False  # whether a Service may choose by annotation


@dataclasses.dataclass(frozen=True, slots=True)
class Userspace:
    """`portRange` and `udpIdleTimeout`, which count in userspace mode alone."""

    # kube-proxy leaves the choice to the kernel. These are neither node ports nor ports that the kernel gives out.
    port_range: tuple[int, int] = (20000, 27999)  # the first and the last port
    udp_idle_timeout: float = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Winkernel:
    """`winkernel`: Windows nodes."""

    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = False
    root_endpoint_name: str = "cbr0"
    forward_health_check_vip: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ProxyConfig:
    """What of a KubeProxyConfiguration decides on rules and sysctls, with kube-proxy's defaults."""

    mode: str = "iptables"
    hostname_override: str = ""
    bind_address: str = "0.0.0.0"
    cluster_cidrs: tuple[str, ...] = ()
    detect_local_mode: str = "ClusterCIDR"
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    node_port_addresses: tuple[str, ...] = ()
    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: float = 30
    min_sync_period: float = 1
    conntrack: Conntrack = Conntrack()
    ipvs: Ipvs = Ipvs()
    userspace: Userspace = Userspace()
    winkernel: Winkernel = Winkernel()
    healthz_port: int = 10256
    feature_gates: tuple[tuple[str, bool], ...] = ()
    unknown: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # fields that kube-proxy would pass over

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """What an operator should look at."""
        text = f"is not a field of {KIND} and has no effect, as with kube-proxy; a typing error?"
        return tuple(Warned("in the configuration", f"{KIND}: {field}: {text}") for field in self.unknown)

    def feature(self, name: str) -> bool:
        """Whether a feature gate is on."""
        return dict(self.feature_gates).get(name, _FEATURE_DEFAULTS[name])

    @property
    def masquerade_mark(self) -> int:
        """The fwmark that asks for masquerading."""
        return 1 << self.masquerade_bit


_FEATURE_DEFAULTS = {
    "AllowServiceExternalIPs": True,
    "KubeProxyNFTablesLocalhostNodePorts": False,
    "KubeProxyIPVS": True,
}

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
    errors.extend(each for each in _invalid(fields, config) if each.partition(":")[0] not in named)
    if errors:
        raise InvalidConfig(errors)
    return dataclasses.replace(config, unknown=tuple(unknown))


def with_schedulers(config: ProxyConfig, services: Mapping[str, str], *, annotations: bool) -> ProxyConfig:
    """The configuration with schedulers of single Services: those given here, and, if so asked, those annotated."""
    errors = [
        f"scheduler of {service}: {scheduler!r} is not one of {', '.join(SCHEDULERS)}"
        for service, scheduler in services.items()
        if scheduler not in SCHEDULERS
    ]
    errors += [f"scheduler of {name}: a Service is named namespace/name" for name in services if name.count("/") != 1]
    if errors:
        raise InvalidConfig(errors)
    ipvs = dataclasses.replace(
        config.ipvs, service_schedulers=tuple(sorted(services.items())), scheduler_annotations=annotations
    )
    return dataclasses.replace(config, ipvs=ipvs)


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


_LONGEST = (2**63 - 1) / 1e9  # Go counts nanoseconds in 64 bits, and refuses more


def parse_duration(text: object) -> float | None:
    """Seconds of a Go duration, or None."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(match["parts"]))
    if seconds > _LONGEST:
        return None
    return -seconds if match["sign"] == "-" else seconds


def parse_port_range(text: str) -> tuple[int, int] | None:
    """The first and the last port of `FIRST-LAST`, `FIRST+MORE` or `PORT`; None of an empty text or of port 0."""
    match = _PORT_RANGE.fullmatch(text.strip())
    if match is None:
        return None
    first = int(match["first"])
    last = int(match["last"] or first + int(match["more"] or 0))
    return (first, last) if 0 < first <= last <= 65535 else None


def _healthz_port(address: str) -> int:
    """The port of IP:PORT; without one it is kube-proxy's default."""
    port = "" if parse_ip(address) else address.rpartition(":")[2]
    return int(port) if re.fullmatch("[0-9]{1,5}", port) else 10256


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
        detect_local_mode=fields.get("detectLocalMode") or "ClusterCIDR",
        bridge_interface=fields.get("detectLocal.bridgeInterface", ""),
        interface_name_prefix=fields.get("detectLocal.interfaceNamePrefix", ""),
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
        healthz_port=_healthz_port(fields.get("healthzBindAddress", "")),
        feature_gates=tuple(sorted((str(name), on) for name, on in gates.items() if name in _FEATURE_DEFAULTS)),
    )


def _invalid(fields: dict[str, Any], config: ProxyConfig) -> Iterator[str]:
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
        if fields.get(field) and not _is_ip_port(fields[field]):
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


def _is_ip_port(text: str) -> bool:
    if parse_ip(text) is not None:
        return True  # a bare address gets the default port
    host, _colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return parse_ip(bare) is not None and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535


def _invalid_node_port_addresses(entries: tuple[str, ...]) -> Iterator[str]:
    for index, entry in enumerate(entries):
        if entry in NODE_PORT_KEYWORDS:
            if entry in entries[:index]:
                yield f"nodePortAddresses[{index}]: {entry} is given twice"
        elif parse_cidr(entry) is None:
            yield f"nodePortAddresses[{index}]: {entry!r} is neither a CIDR nor one of {', '.join(NODE_PORT_KEYWORDS)}"


def _invalid_detect_local(config: ProxyConfig) -> Iterator[str]:
    if config.detect_local_mode not in DETECT_LOCAL_MODES:
        yield f"detectLocalMode: {config.detect_local_mode!r} is not one of {', '.join(DETECT_LOCAL_MODES)}"
    if config.detect_local_mode == "ClusterCIDR":
        cidrs = [parse_cidr(cidr) for cidr in config.cluster_cidrs]
        known = [cidr for cidr in cidrs if cidr is not None]
        if len(known) < len(cidrs) or len(cidrs) > 2:
            yield "clusterCIDR: must be one CIDR, or two of different families, separated by a comma"
        elif len(known) == 2 and family_of(known[0]) is family_of(known[1]):
            yield "clusterCIDR: two CIDRs must be of different families"
    bridge, prefix = config.bridge_interface, config.interface_name_prefix
    if config.detect_local_mode == "BridgeInterface":
        if not bridge:
            yield "detectLocal.bridgeInterface: must be set with detectLocalMode BridgeInterface"
        elif not _INTERFACE.fullmatch(bridge):
            yield f"detectLocal.bridgeInterface: {bridge!r} is no interface name"
    if config.detect_local_mode == "InterfaceNamePrefix":
        if not prefix:
            yield "detectLocal.interfaceNamePrefix: must be set with detectLocalMode InterfaceNamePrefix"
        elif not _INTERFACE.fullmatch(prefix + "x"):  # rules write one more character, a +
            yield f"detectLocal.interfaceNamePrefix: {prefix!r} is no prefix of an interface name"
