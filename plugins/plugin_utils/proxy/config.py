# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What of a KubeProxyConfiguration decides on rules, with kube-proxy's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..cluster.objects import SCHEDULERS
from ..errors import UserError
from .warned import Warned

KIND = "KubeProxyConfiguration"
MODES = ("iptables", "ipvs", "nftables", "userspace", "kernelspace")
NODE_PORT_KEYWORDS = ("primary", "localhost", "all")
DETECT_LOCAL_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")


class InvalidConfig(UserError):
    """A KubeProxyConfiguration that kube-proxy would refuse; one message per wrong field."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors

    @property
    def sentence(self) -> str:
        """All fields in one line."""
        return f"the KubeProxyConfiguration is not valid: {'; '.join(self.errors)}"


@dataclasses.dataclass(frozen=True, slots=True)
class DetectLocalConfiguration:
    """`detectLocalMode` and `detectLocal`: how traffic of the node's own pods is told from other traffic."""

    mode: str = "ClusterCIDR"
    bridge_interface: str = ""
    interface_name_prefix: str = ""


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
    detect_local: DetectLocalConfiguration = DetectLocalConfiguration()
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
        return dict(self.feature_gates).get(name, FEATURE_DEFAULTS[name])

    def ignores(self, name: str) -> bool:
        """Whether userspace mode does without a feature that is younger than it."""
        return self.mode == "userspace" and not self.feature(name)

    @property
    def masquerade_mark(self) -> int:
        """The fwmark that asks for masquerading."""
        return 1 << self.masquerade_bit


FEATURE_DEFAULTS = {
    "AllowServiceExternalIPs": True,
    "KubeProxyNFTablesLocalhostNodePorts": False,
    "KubeProxyIPVS": True,
    # The gates by which kube-proxy 1.25 ignored what came after userspace mode; they count in that mode alone.
    "ProxyTerminatingEndpoints": True,
    "ServiceInternalTrafficPolicy": True,
    "TopologyAwareHints": True,
}


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
