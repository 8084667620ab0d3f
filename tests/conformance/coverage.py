"""Which fields and options a cluster exercises, counted from its objects; the report's table is made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .draw import Cluster
from .undefined import parse

Object = dict[str, Any]


def features(cluster: Cluster) -> Counter[str]:
    found: Counter[str] = Counter()
    for obj in cluster.objects:
        kind = obj["kind"]
        reader = {"Service": _service, "EndpointSlice": _slice, "Node": _node, "ServiceCIDR": _service_cidr}[kind]
        found.update(f"{kind}: {feature}" for feature in reader(obj))
    found.update(f"KubeProxyConfiguration: {feature}" for feature in _config(cluster.config))
    found.update(f"Cluster: {feature}" for feature in _cluster(cluster))
    return found


def _service(obj: Object) -> Iterator[str]:
    spec = obj["spec"]
    headless = spec.get("clusterIP") == "None"
    yield f"type {'headless' if headless else spec['type']}"
    yield f"ipFamilies {', '.join(spec.get('ipFamilies', [])) or 'none'}"
    if "service.kubernetes.io/service-proxy-name" in obj["metadata"].get("labels", {}):
        yield "label service-proxy-name"
    for policy in ("internalTrafficPolicy", "externalTrafficPolicy", "sessionAffinity", "trafficDistribution"):
        if policy in spec:
            yield f"{policy} {spec[policy]}"
    for field in ("healthCheckNodePort", "publishNotReadyAddresses", "loadBalancerClass", "loadBalancerIP"):
        if field in spec:
            yield field
    if spec.get("allocateLoadBalancerNodePorts") is False:
        yield "allocateLoadBalancerNodePorts false"
    for port in spec.get("ports", []):
        yield f"port {port['protocol']}{'' if 'name' in port else ', unnamed'}"
        if "nodePort" in port:
            yield "nodePort"
    yield from (f"externalIPs {_spelling(address)}" for address in spec.get("externalIPs", []))
    yield from (f"loadBalancerSourceRanges {_range(cidr)}" for cidr in spec.get("loadBalancerSourceRanges", []))
    for ingress in obj.get("status", {}).get("loadBalancer", {}).get("ingress", []):
        yield f"ingress ip, ipMode {ingress.get('ipMode')}" if "ip" in ingress else "ingress hostname only"


def _spelling(address: str) -> str:
    canonical = str(parse(address))
    family = "IPv6" if ":" in canonical else "IPv4"
    return family if address == canonical else f"{family}, not canonical"


def _range(text: str) -> str:
    address, _, bits = text.strip().partition("/")
    family = "IPv6" if ":" in address else "IPv4"
    if int(bits) == 0:
        return f"{family} /0"
    return f"{family}, padded" if text != text.strip() else family


def _slice(obj: Object) -> Iterator[str]:
    yield f"addressType {obj['addressType']}"
    labels = obj["metadata"].get("labels", {})
    if "kubernetes.io/service-name" not in labels:
        yield "no owner"
    if "service.kubernetes.io/headless" in labels:
        yield "label headless"
    if not obj["endpoints"]:
        yield "no endpoints"
    for port in obj["ports"]:
        if "port" not in port:
            yield "port null"
        if "name" not in port:
            yield "port name null"
    seen: set[str] = set()
    for endpoint in obj["endpoints"]:
        yield from _endpoint(endpoint)
        if endpoint["addresses"][0] in seen:
            yield "the same address twice"
        seen.add(endpoint["addresses"][0])


def _endpoint(endpoint: Object) -> Iterator[str]:
    conditions = endpoint.get("conditions", {})
    yield "endpoint " + " ".join(f"{name}={conditions.get(name)}" for name in ("ready", "serving", "terminating"))
    hints = endpoint.get("hints", {})
    if hints:
        yield f"hints {' and '.join(sorted(hints))}"
    if any(hint["name"] == "" for hint in hints.get("forZones", [])):
        yield "hint for the empty zone"
    if "nodeName" not in endpoint:
        yield "endpoint without node"
    if len(endpoint["addresses"]) > 1:
        yield "endpoint with two addresses"


def _node(obj: Object) -> Iterator[str]:
    kinds = [f"{a['type']} {'IPv6' if ':' in a['address'] else 'IPv4'}" for a in obj["status"]["addresses"]]
    yield "addresses " + ", ".join(kind for kind in kinds if not kind.startswith("Hostname"))
    zone = obj["metadata"].get("labels", {}).get("topology.kubernetes.io/zone")
    yield "zone " + ("missing" if zone is None else "empty" if zone == "" else "set")


def _service_cidr(obj: Object) -> Iterator[str]:
    yield f"{len(obj['spec']['cidrs'])} CIDRs"


def _config(config: Object, prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if name in ("apiVersion", "kind", "clientConnection", "minSyncPeriod", "syncPeriod"):
            continue
        if name == "hostnameOverride":
            yield "hostnameOverride" if value == value.strip().lower() else "hostnameOverride, upper case and padded"
        elif isinstance(value, dict):
            yield from _config(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} {value if value != '' else '(empty)'}"


def _cluster(cluster: Cluster) -> Iterator[str]:
    for address in cluster.extra:
        yield "a further address on the node" if address.startswith("192.168.") else "a Service's address on the node"
    yield "over 1,000 endpoints" if cluster.large else "up to 1,000 endpoints"
