# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a node is: from its Node object and, where given, from `akp-node facts`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ..addresses import FAMILIES, Family, any_contains, contains, family_of, is_loopback, parse_cidr, parse_ip
from ..cluster.snapshot import Node
from ..errors import UserError
from ..texts import shortened, visible
from .config import ProxyConfig
from .hns import HostNetwork, InvalidHns, host_network, parse_mac

_MOST_CPUS = 65_536
# Digits of ASCII: others, such as a superscript, look like numbers and are none.
_KERNEL = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")
IPVS_DEVICE = "kube-ipvs0"  # has the addresses of Services
CONTROL_PORT = "controlPort"  # among the facts of a node: what the control host adds, see `control_port`


class InvalidFacts(UserError):
    """Facts of a node that cannot be used; the message names node, field and reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """The node-side input of rules. Without facts from the node, a current kernel with all features is assumed."""

    name: str
    zone: str = ""
    node_ips: tuple[str, ...] = ()  # InternalIPs, then ExternalIPs; the first is the primary one
    pod_cidrs: tuple[str, ...] = ()
    interface_addresses: tuple[str, ...] = ()  # every address of every interface, loopback included
    families: tuple[Family, ...] = FAMILIES  # those whose iptables or nft tables work
    cpus: int | None = None
    nfacct: bool = True  # nfnetlink_acct counters and the xt_nfacct match work
    tcp_be_liberal: bool = False  # net.netfilter.nf_conntrack_tcp_be_liberal is set
    kernel: tuple[int, int] | None = None
    ipvs_addresses: tuple[str, ...] = ()  # addresses of kube-ipvs0, which are ours
    eligible: bool = True  # for load balancers: the Node is there to stay
    hns: HostNetwork | None = None  # of a Windows node; None: the node runs Linux


def node_facts(node: Node, gathered: Mapping[str, Any] | None = None) -> NodeFacts:
    """Facts of a Node, completed by what `akp-node facts` printed there."""
    internal = [ip for sort, ip in node.addresses if sort == "InternalIP"]
    external = [ip for sort, ip in node.addresses if sort == "ExternalIP"]
    facts = NodeFacts(
        name=node.name.lower(),
        zone=node.zone,
        node_ips=tuple(internal + external),
        pod_cidrs=node.pod_cidrs,
        interface_addresses=("127.0.0.1", "::1", *internal, *external),
        cpus=node.cpus,
        eligible=not node.leaving,
    )
    facts = facts if gathered is None else _gathered(facts, gathered)
    return _windows(facts, gathered or {}) if node.windows else facts


def _windows(facts: NodeFacts, gathered: Mapping[str, Any]) -> NodeFacts:
    """The facts of a Windows node, which serves one family where its network cannot do both."""
    try:
        network = host_network(gathered.get("hns", {}))
    except InvalidHns as error:
        raise InvalidFacts(f"facts of node {facts.name}: {error}") from None
    primary = family_of(facts.node_ips[0]) if facts.node_ips else Family.IPV4
    if not network.host_mac:
        network = dataclasses.replace(network, host_mac=_mac_of(facts.node_ips[:1], gathered))
    return dataclasses.replace(facts, hns=network, families=FAMILIES if network.does_dual_stack else (primary,))


def _mac_of(ips: tuple[str, ...], gathered: Mapping[str, Any]) -> str:
    """The MAC address of the interface with one of these addresses, as the node told; empty if it did not."""
    entries = gathered.get("addresses")
    found = ""
    for entry in entries if isinstance(entries, list) else ():
        mac = parse_mac(entry.get("mac")) if isinstance(entry, Mapping) else ""
        if mac and _parsed(entry)[0] in ips:
            found = mac
    return found


def _gathered(facts: NodeFacts, gathered: Mapping[str, Any]) -> NodeFacts:
    capabilities = _mapping(facts, gathered, "capabilities")
    changes: dict[str, Any] = {}
    if "addresses" in gathered:
        entries = [_address(facts, entry) for entry in _list(facts, gathered, "addresses")]
        changes["interface_addresses"] = tuple(sorted({ip for ip, device in entries if device != IPVS_DEVICE}))
        changes["ipvs_addresses"] = tuple(sorted({ip for ip, device in entries if device == IPVS_DEVICE}))
    families = tuple(family for family in FAMILIES if capabilities.get(family.value.lower(), True))
    changes["families"] = families
    cpus = gathered.get("cpus")
    if isinstance(cpus, int) and not isinstance(cpus, bool) and 0 < cpus <= _MOST_CPUS:
        changes["cpus"] = cpus
    if "nfacct" in capabilities:
        changes["nfacct"] = bool(capabilities["nfacct"])
    if "tcpBeLiberal" in gathered:
        changes["tcp_be_liberal"] = bool(gathered["tcpBeLiberal"])
    kernel = _KERNEL.match(gathered["kernel"]) if isinstance(gathered.get("kernel"), str) else None
    if kernel is not None:
        changes["kernel"] = (int(kernel[1]), int(kernel[2]))
    if isinstance(gathered.get("zone"), str):
        changes["zone"] = gathered["zone"]
    if "podCIDRs" in gathered:
        changes["pod_cidrs"] = tuple(_cidr(facts, text) for text in _list(facts, gathered, "podCIDRs"))
    return dataclasses.replace(facts, **changes)


def _mapping(facts: NodeFacts, gathered: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = gathered.get(key, {})
    if not isinstance(value, Mapping):
        raise InvalidFacts(f"facts of node {facts.name}: {key}: must be a mapping, not {_shown(value)}")
    return value


def _list(facts: NodeFacts, gathered: Mapping[str, Any], key: str) -> list[Any]:
    value = gathered[key]
    if not isinstance(value, list):
        raise InvalidFacts(f"facts of node {facts.name}: {key}: must be a list, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return visible(shortened(repr(value), 80))


def _address(facts: NodeFacts, entry: object) -> tuple[str, str]:
    ip, device, text = _parsed(entry)
    if ip is None:
        raise InvalidFacts(f"facts of node {facts.name}: addresses: {_shown(text)} is not an IP address")
    return ip, device


def _parsed(entry: object) -> tuple[str | None, str, object]:
    """An address, given as text or as {address, interface}, its interface, and what stands there for it."""
    text, device = (entry.get("address"), entry.get("interface", "")) if isinstance(entry, Mapping) else (entry, "")
    return parse_ip(text.partition("/")[0]) if isinstance(text, str) else None, str(device), text


def own_addresses(gathered: Mapping[str, Any]) -> tuple[str, ...]:
    """The addresses that a node has for itself, as far as `akp-node facts` told: not those of loopback or Services."""
    entries = gathered.get("addresses")
    parsed = map(_parsed, entries if isinstance(entries, list) else ())
    return tuple(sorted({ip for ip, device, _text in parsed if ip and device not in ("lo", IPVS_DEVICE)}))


def control_port(gathered: Mapping[str, Any]) -> int:
    """The port by which the control host came in when it asked the node; 0 if it is not known."""
    port = gathered.get(CONTROL_PORT)
    return port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536 else 0


def _cidr(facts: NodeFacts, text: object) -> str:
    cidr = parse_cidr(text) if isinstance(text, str) else None
    if cidr is None:
        raise InvalidFacts(f"facts of node {facts.name}: podCIDRs: {_shown(text)} is not a CIDR")
    return cidr


def node_ips(facts: NodeFacts, config: ProxyConfig) -> tuple[Family, dict[Family, str]]:
    """The primary family and the node's address in each family."""
    primary = family_of(facts.node_ips[0]) if facts.node_ips else Family.IPV4
    ips = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}
    for family in FAMILIES:
        own = [ip for ip in facts.node_ips if family_of(ip) is family]
        if own:
            ips[family] = own[0]
    if config.bind_address not in ("0.0.0.0", "::"):
        primary = family_of(config.bind_address)
        ips[primary] = config.bind_address
    return primary, ips


@dataclasses.dataclass(frozen=True, slots=True)
class NodePortAddresses:
    """Which of the node's addresses accept node ports, in one family."""

    match_all: bool
    cidrs: tuple[str, ...]  # what selects them
    ips: tuple[str, ...]  # the selected addresses, unless match_all
    contains_ipv4_loopback: bool
    contains_explicit_loopback: bool


def node_port_addresses(
    family: Family, config: ProxyConfig, ips: Mapping[Family, str], interface_addresses: tuple[str, ...]
) -> NodePortAddresses:
    """nodePortAddresses with its keywords expanded, applied to the node's interfaces."""
    expanded: list[str] = []
    for entry in config.node_port_addresses:
        if entry == "primary":
            known = [ips[each] for each in FAMILIES if not is_loopback(ips[each])]
            expanded += [f"{ip}/{family_of(ip).bits}" for ip in known]
        elif entry == "localhost":
            expanded += ["127.0.0.0/8", "::1/128"]
        elif entry == "all":
            expanded += [each.zero_cidr for each in FAMILIES]
        else:
            expanded.append(parse_cidr(entry) or entry)
    own = [cidr for cidr in expanded if family_of(cidr) is family] or [family.zero_cidr]
    match_all = family.zero_cidr in own
    seen = own[: own.index(family.zero_cidr) + 1] if match_all else own
    return NodePortAddresses(
        match_all=match_all,
        cidrs=tuple(own),
        ips=()
        if match_all
        else tuple(sorted({ip for ip in interface_addresses if family_of(ip) is family and any_contains(own, ip)})),
        contains_ipv4_loopback=family is Family.IPV4
        and any(cidr.startswith("127.") or contains(cidr, "127.0.0.0") for cidr in seen),
        contains_explicit_loopback=any(is_loopback(cidr.partition("/")[0]) for cidr in own),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class DetectLocal:
    """How rules tell a pod of this node: by a source network or by the interface it comes in on."""

    cidr: str = ""
    interface: str = ""
    prefix: str = ""


class UnusableNode(UserError):
    """The configuration cannot work on this node; the message says what is missing."""


def detect_local(family: Family, facts: NodeFacts, config: ProxyConfig) -> DetectLocal | None:
    """The match of a family, or None where kube-proxy would leave out the rules that need one."""
    if facts.hns is not None:
        return None
    if config.detect_local.mode == "BridgeInterface":
        return DetectLocal(interface=config.detect_local.bridge_interface)
    if config.detect_local.mode == "InterfaceNamePrefix":
        return DetectLocal(prefix=config.detect_local.interface_name_prefix)
    if config.detect_local.mode == "NodeCIDR":
        cidrs: tuple[str, ...] = facts.pod_cidrs
        if not cidrs:
            raise UnusableNode(
                f"node {facts.name}: detectLocalMode NodeCIDR needs spec.podCIDRs of the Node, which are not set"
            )
    else:
        cidrs = tuple(parse_cidr(cidr) or "" for cidr in config.cluster_cidrs)
    own = [cidr for cidr in cidrs if family_of(cidr) is family]
    return DetectLocal(cidr=own[0]) if own else None
