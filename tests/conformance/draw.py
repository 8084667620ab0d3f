"""Seeded clusters: everything a real API server accepts and kube-proxy reads, with odd combinations on purpose.

The same (seed, mode) always gives the same objects. Objects that kube-proxy itself treats in no fixed way (see
`undefined`) are not drawn, since nothing could be compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import options
from .plan import IPV4, IPV6, NODE_NET4, NODE_NET6, SECOND_NET4, Plan, internal_addresses, node_address, pod_cidr
from .undefined import parse, undefined

Object = dict[str, Any]

ZONES = ("zone-a", "zone-b", "zone-c")
NODES = 4
NAMESPACES = ("ns0", "ns1", "ns2", "a-namespace-with-the-longest-name-that-kubernetes-will-accept")
LONG = "a-service-with-the-longest-name-that-kubernetes-will-accept-a"
PORT_NAMES = (
    "http",
    "https",
    "dns",
    "metrics",
    "p",
    "0",
    "a-port-name-of-the-length-that-is-the-limit-for-a-label-in-the",
)
PROTOCOLS = ("TCP", "TCP", "TCP", "UDP", "UDP", "SCTP")
TIMEOUTS = (1, 60, 10800, 10800, 86400, 3661)


@dataclass(frozen=True)
class Cluster:
    """One case: what is in the API server, how kube-proxy is configured, and on which node it runs."""

    seed: int
    mode: str
    node: str
    config: Object
    objects: tuple[Object, ...]
    minor: str = "1.37"
    extra: tuple[str, ...] = ()  # addresses of the node's interface that its Node does not tell

    def of(self, kind: str) -> list[Object]:
        return [obj for obj in self.objects if obj["kind"] == kind]

    @property
    def large(self) -> bool:
        """Whether kube-proxy may be beyond the 1,000 endpoints from which on it saves comments and deletions."""
        sizes = (len(obj["endpoints"] or ()) * len(obj["ports"] or ()) for obj in self.of("EndpointSlice"))
        return sum(sizes) > 990

    @property
    def pod_cidrs(self) -> list[str]:
        """Where this node's pods are, in both families, whether the Node says so or not."""
        index = int(self.node[1:]) if re.fullmatch(r"n[1-9]", self.node) else 1
        return [pod_cidr(index, IPV4), pod_cidr(index, IPV6)]

    def own_node(self) -> Object:
        return next(obj for obj in self.of("Node") if obj["metadata"]["name"] == self.node)

    @property
    def addresses(self) -> list[str]:
        """What the node's interface has."""
        return [*internal_addresses(self.own_node()), *self.extra]

    @property
    def others(self) -> list[str]:
        """What the interfaces of other nodes have, also of those that are no Nodes now."""
        told = {address for node in self.of("Node") for address in internal_addresses(node)}
        made = {node_address(index, family) for index in range(1, NODES + 1) for family in (IPV4, IPV6)}
        return sorted((told | made) - set(self.addresses))


def cluster(seed: int, mode: str, minor: str = "1.37") -> Cluster:
    """Draw a cluster that a Kubernetes minor can handle; one in eight has over 1,000 endpoints."""
    drawer = Drawer(random.Random(f"{mode}/{seed}"), mode, minor)
    return drawer.cluster(seed, large=seed % 8 == 5 and mode != "ipvs")


class Drawer:
    """Draws objects one after the other; a history goes on drawing from the one that made its cluster."""

    def __init__(self, rng: random.Random, mode: str, minor: str, taken: Sequence[Object] = ()) -> None:
        self.random, self.mode, self.minor, self.plan = rng, mode, minor, Plan(rng)
        self.numbers = iter(range(500_000 if taken else 0, 1_000_000))
        self.plan.take(taken)
        self.host_network: set[str] = set()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def cluster(self, seed: int, large: bool) -> Cluster:
        nodes = [self.node(index) for index in range(1, NODES + 1)]
        index = self.random.randrange(NODES)
        services, slices = [], []
        # In ipvs mode kube-proxy starts a process for every entry of every set, in a slow kernel.
        for _ in range(self.random.choice((2, 4, 6, 8) if self.mode == "ipvs" else (3, 6, 10, 16, 24))):
            service = self.service()
            services.append(service)
            slices += self.slices(service)
        if large:
            service = self.service(kind="ClusterIP")
            services.append(service)
            slices += self.bulk(service, self.random.choice((1010, 1300)))
        slices += self.strangers()
        objects = (*self.service_cidrs(), *nodes, *services, *slices)
        config = options.draw(self.random, self.mode, nodes[index], self.minor)
        extra = self.extra_addresses(services)
        drawn = Cluster(seed, self.mode, nodes[index]["metadata"]["name"], config, objects, self.minor, extra)
        if undefined(drawn.objects):
            raise AssertionError(f"seed {seed} drew a cluster that kube-proxy itself treats in no fixed way")
        return drawn

    # Nodes and service CIDRs

    def node(self, index: int) -> Object:
        families = self.random.choice(((IPV4,), (IPV4, IPV6), (IPV4, IPV6), (IPV6, IPV4), (IPV6,)))
        addresses = [{"type": "InternalIP", "address": node_address(index, family)} for family in families]
        if IPV4 in families and self.chance(0.3):
            addresses.append({"type": "InternalIP", "address": f"{SECOND_NET4}{10 + index}"})
        if self.chance(0.3):
            addresses.insert(0, {"type": "ExternalIP", "address": f"192.0.2.{10 + index}"})
        addresses.insert(0, {"type": "Hostname", "address": f"n{index}"})
        cidrs = [pod_cidr(index, family) for family in self.random.choice(((IPV4, IPV6), (IPV6, IPV4), families[:1]))]
        labels = {"kubernetes.io/hostname": f"n{index}"}
        if self.chance(0.85):
            labels["topology.kubernetes.io/zone"] = ZONES[index % 3] if self.chance(0.95) else ""
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"n{index}", "labels": labels},
            "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs},
            "status": {"addresses": addresses},
        }

    def service_cidrs(self) -> list[Object]:
        drawn = self.random.sample(
            (
                ["10.112.0.0/16"],
                ["10.113.0.0/16"],
                ["10.96.128.0/17"],
                ["fd00:10:97::/112"],
                ["172.30.0.0/16", "fd00:10:98::/112"],
            ),
            2,
        )
        return [
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "ServiceCIDR",
                "metadata": {"name": f"extra-{i}"},
                "spec": {"cidrs": cidrs},
            }
            for i, cidrs in enumerate(drawn)
            if self.chance(0.3)
        ]

    def extra_addresses(self, services: Sequence[Object]) -> tuple[str, ...]:
        """What an administrator or a VIP manager has put on the interface: a Service's address, or just one more."""
        found = [f"{SECOND_NET4}200"] if self.chance(0.2) else []
        outside = [
            str(parse(address))
            for service in services
            for address in (
                *service["spec"].get("externalIPs", []),
                *(i["ip"] for i in service.get("status", {}).get("loadBalancer", {}).get("ingress", []) if "ip" in i),
            )
        ]
        if outside and self.chance(0.25):
            found.append(self.random.choice(outside))
        nodes = {node_address(index, family) for index in range(1, NODES + 1) for family in (IPV4, IPV6)}
        return tuple(address for address in found if address not in nodes)

    # Services

    def service(self, kind: str | None = None) -> Object:
        number = next(self.numbers)
        name = f"svc-{number}" if self.chance(0.85) else f"{LONG[: 62 - len(str(number))]}{number}"
        kind = (
            kind
            or self.random.choices(
                ("ClusterIP", "NodePort", "LoadBalancer", "Headless", "ExternalName"), (38, 20, 34, 4, 4)
            )[0]
        )
        namespace = self.random.choice(NAMESPACES)
        if self.minor == "1.36" and self.mode == "nftables":
            # It passed comments of over 128 bytes to nft, which refuses them and everything else.
            namespace, name = "ns0", f"svc-{number}"
        meta: Object = {"namespace": namespace, "name": name}
        if self.chance(0.04):
            meta["labels"] = {"service.kubernetes.io/service-proxy-name": self.random.choice(("", "other-proxy"))}
        if self.chance(0.2):
            meta["annotations"] = {
                "service.kubernetes.io/topology-mode": "Auto",
                "quote": 'it\'s "quoted" $(x) {{ y }}',
            }
        service: Object = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {}}
        if kind == "ExternalName":
            service["spec"] = {"type": kind, "externalName": "example.com", "ports": self.ports(with_node_ports=False)}
            return service
        families = self.random.choice(([IPV4], [IPV6], [IPV4, IPV6], [IPV6, IPV4]))
        addresses = ["None"] if kind == "Headless" else [self.plan.cluster_ip(family) for family in families]
        service["spec"] = {
            "type": "ClusterIP" if kind == "Headless" else kind,
            "clusterIP": addresses[0],
            "clusterIPs": addresses,
            "ipFamilies": families,
            "ipFamilyPolicy": "SingleStack"
            if len(families) == 1
            else self.random.choice(("PreferDualStack", "RequireDualStack")),
            "ports": self.ports(with_node_ports=kind in ("NodePort", "LoadBalancer")),
        }
        self.policies(service)
        if kind != "Headless":
            self.outside(service)
        return service

    def ports(self, with_node_ports: bool) -> list[Object]:
        count = self.random.choice((1, 1, 1, 2, 2, 3))
        names: Sequence[str] = self.random.sample(PORT_NAMES, count)
        if count == 1 and self.chance(0.4):
            names = ("",)
        ports: list[Object] = []
        for name in names:
            taken = {(p["protocol"], p["port"]) for p in ports}
            while True:
                protocol = self.random.choice(PROTOCOLS)
                number = self.random.choice((53, 80, 80, 443, 1, 65535, self.random.randrange(1024, 30000)))
                if ports and self.chance(0.25):
                    number = ports[0]["port"]
                if (protocol, number) not in taken:
                    break
            port: Object = {"protocol": protocol, "port": number}
            if name:
                port["name"] = name
            if self.chance(0.5):
                port["targetPort"] = self.random.choice((8080, "web", number))
            if self.chance(0.1):
                port["appProtocol"] = "kubernetes.io/h2c"
            if with_node_ports:
                # Two protocols of one port number may share the node port.
                shared = [p["nodePort"] for p in ports if p["port"] == number]
                port["nodePort"] = shared[0] if shared and self.chance(0.6) else self.plan.node_port()
            ports.append(port)
        return ports

    def policies(self, service: Object) -> None:
        """What decides which endpoints count, for Services with a cluster IP."""
        spec = service["spec"]
        spec["internalTrafficPolicy"] = self.random.choice(("Cluster", "Cluster", "Local"))
        if self.chance(0.25):
            spec["sessionAffinity"] = "ClientIP"
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": self.random.choice(TIMEOUTS)}}
        if self.chance(0.1):
            spec["publishNotReadyAddresses"] = True
        if self.chance(0.2):
            spec["trafficDistribution"] = self.random.choice(("PreferClose", "PreferSameZone", "PreferSameNode"))
        if self.chance(0.5):
            spec["selector"] = {"app": service["metadata"]["name"]}

    def outside(self, service: Object) -> None:
        """External IPs, load balancer addresses, source ranges and the external policy."""
        spec, kind = service["spec"], service["spec"]["type"]
        taken: set[str] = set()
        if self.chance(0.3):
            drawn = (self.external_ip() for _ in range(self.random.randrange(1, 4)))
            spec["externalIPs"] = [spelled for spelled in drawn if self.claim(spec, _plain(spelled), taken)]
            if spec["externalIPs"] and self.chance(0.1):
                spec["externalIPs"].append(spec["externalIPs"][0])
        if kind == "LoadBalancer":
            self.load_balancer(service, taken)
        if kind != "ClusterIP" or spec.get("externalIPs"):
            spec["externalTrafficPolicy"] = self.random.choice(("Cluster", "Local"))
            if kind == "LoadBalancer" and spec["externalTrafficPolicy"] == "Local":
                spec["healthCheckNodePort"] = self.plan.node_port()

    def claim(self, spec: Object, address: str, taken: set[str]) -> bool:
        """Take an address for all ports of a Service, unless another one has it: who gets it, chance would decide."""
        if address in taken:
            return True
        free = [self.plan.frontend(address, port["protocol"], port["port"]) for port in spec["ports"]]
        if all(free):
            taken.add(address)
            return True
        return False

    def external_ip(self) -> str:
        choice = self.random.random()
        if choice < 0.08:
            return node_address(self.random.randrange(1, NODES + 1), self.random.choice((IPV4, IPV6)))
        if choice < 0.14:
            return f"::ffff:{self.plan.external(IPV4)}"
        family = self.random.choice((IPV4, IPV4, IPV6))
        return self.spell(self.plan.external(family))

    def spell(self, address: str) -> str:
        """The same address as a careless hand may write it."""
        if ":" not in address and self.chance(0.1):
            return ".".join(octet.zfill(3) for octet in address.split("."))
        if ":" in address and self.chance(0.2):
            return address.upper()
        return address

    def load_balancer(self, service: Object, taken: set[str]) -> None:
        spec = service["spec"]
        ingress: list[Object] = []
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            if self.chance(0.12):
                ingress.append({"hostname": f"lb-{service['metadata']['name'][:20]}.example.com"})
                continue
            own = spec.get("externalIPs")
            address = (
                self.random.choice(own)
                if own and self.chance(0.1)
                else self.spell(self.plan.load_balancer(self.random.choice((IPV4, IPV4, IPV6))))
            )
            if self.claim(spec, _plain(address), taken):
                entry: Object = {"ip": address, "ipMode": "Proxy" if self.chance(0.15) else "VIP"}
                if self.chance(0.15):
                    entry["hostname"] = "lb.example.com"
                ingress.append(entry)
        if ingress:
            service["status"] = {"loadBalancer": {"ingress": ingress}}
        if self.chance(0.4):
            spec["loadBalancerSourceRanges"] = [self.source_range() for _ in range(self.random.choice((1, 2, 4)))]
        if self.chance(0.3):
            spec["allocateLoadBalancerNodePorts"] = False
            for port in spec["ports"]:
                if self.chance(0.7):
                    port.pop("nodePort")
        if self.chance(0.1):
            annotations = service["metadata"].setdefault("annotations", {})
            annotations["service.beta.kubernetes.io/load-balancer-source-ranges"] = "10.0.0.0/8"
        if self.chance(0.2):
            spec["loadBalancerClass"] = "example.com/lb"
        if self.chance(0.2):
            spec["loadBalancerIP"] = "203.0.113.254"

    def source_range(self) -> str:
        return self.random.choice(
            (
                "203.0.113.0/24",
                "192.168.0.0/16",
                f"{NODE_NET4}0/24",
                "10.1.2.3/8",
                "172.16.0.1/32",
                "10.244.0.0/16",
                " 198.18.0.0/15 ",
                "010.001.000.000/016",
                "2001:db8::/32",
                f"{NODE_NET6}/64",
                "2001:db8:1::5/48",
                "fd00::1/128",
                "0.0.0.0/0" if self.chance(0.4) else "100.64.0.0/10",
                "::/0" if self.chance(0.4) else "64:ff9b::/96",
            )
        )

    # EndpointSlices

    def slices(self, service: Object) -> list[Object]:
        """Zero to three slices for each family that the Service has, and now and then for one that it has not."""
        families = list(service["spec"].get("ipFamilies", [IPV4]))
        if self.chance(0.1):
            families.append(IPV6 if IPV4 in families else IPV4)
        self.host_network.clear()
        hints = self.random.choice(("none", "none", "zones", "nodes", "both", "partial"))
        made: list[Object] = []
        for family in families:
            made += [
                self.slice(service, family, self.random.choice((0, 1, 1, 2, 3, 5, 12)), hints)
                for _ in range(self.random.choice((0, 1, 1, 1, 2, 3)))
            ]
            if len(made) > 1 and made[-1]["addressType"] == made[-2]["addressType"] and self.chance(0.4):
                self.repeat_endpoint(made[-2], made[-1])
        return made

    def slice(self, service: Object, family: str, count: int, hints: str = "none") -> Object:
        name = service["metadata"]["name"]
        ports: list[Object] = []
        for port in service["spec"]["ports"]:
            if self.chance(0.05):
                continue
            entry: Object = {
                "protocol": port["protocol"],
                "port": self.random.choice((80, 8080, 53, 9000 + port["port"] % 999)),
            }
            if "name" in port or self.chance(0.5):
                entry["name"] = port.get("name", "")
            if self.chance(0.04):
                entry.pop("port")
            if self.chance(0.04):
                entry["protocol"] = "UDP" if entry["protocol"] == "TCP" else "TCP"
            ports.append(entry)
        if self.chance(0.1) and all(port.get("name") for port in ports):
            ports.append({"name": "", "protocol": "TCP", "port": 7})
        endpoints = [self.endpoint(family, hints) for _ in range(count)]
        if len(endpoints) > 1 and self.chance(0.1):
            again = {**self.endpoint(family, hints), "addresses": endpoints[0]["addresses"]}
            endpoints.append(again)
        meta: Object = {
            "namespace": service["metadata"]["namespace"],
            "name": f"{name[:40]}-{next(self.numbers)}",
            "labels": {"kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "conformance"},
        }
        if service["spec"].get("clusterIP") == "None" or self.chance(0.03):
            meta["labels"]["service.kubernetes.io/headless"] = ""
        if self.chance(0.03):
            meta["labels"]["service.kubernetes.io/service-proxy-name"] = "other-proxy"
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": meta,
            "addressType": family,
            "ports": ports,
            "endpoints": endpoints,
        }

    def endpoint(self, family: str, hints: str) -> Object:
        node = self.random.randrange(1, NODES + 1)
        address = node_address(node, family)
        if address in self.host_network or not self.chance(0.05):
            address = self.plan.pod(node, family)
        self.host_network.add(address)
        endpoint: Object = {"addresses": [address if family == IPV6 else self.spell(address)]}
        if self.chance(0.03):
            endpoint["addresses"].append(self.plan.pod(node, family))
        if self.chance(0.93):
            endpoint["nodeName"] = f"n{node}" if self.chance(0.97) else "gone"
        endpoint["conditions"] = self.conditions()
        if self.chance(0.5):
            endpoint["zone"] = ZONES[node % 3]
        drawn: Object = {}
        if hints in ("zones", "both") or (hints == "partial" and self.chance(0.7)):
            drawn["forZones"] = [
                {"name": name} for name in self.random.sample((*ZONES, ""), self.random.choice((1, 1, 2)))
            ]
        if hints in ("nodes", "both") or (hints == "partial" and self.chance(0.3)):
            drawn["forNodes"] = [
                {"name": f"n{n}"} for n in self.random.sample(range(1, NODES + 1), self.random.choice((1, 1, 2)))
            ]
        if drawn:
            endpoint["hints"] = drawn
        if self.chance(0.1):
            endpoint["targetRef"] = {"kind": "Pod", "name": f"pod-{node}", "namespace": "ns0"}
            endpoint["hostname"] = f"host-{node}"
        return endpoint

    def conditions(self) -> Object:
        choice = self.random.random()
        if choice < 0.15:
            return {}
        if choice < 0.65:
            return {"ready": True, "serving": True, "terminating": False}
        if choice < 0.75:
            return {"ready": False, "serving": True, "terminating": True}
        states = (None, True, False)
        drawn = {name: self.random.choice(states) for name in ("ready", "serving", "terminating")}
        return {name: value for name, value in drawn.items() if value is not None}

    def repeat_endpoint(self, first: Object, second: Object) -> None:
        """The same address in two slices: the same pod twice, or its successor beside the terminating one."""
        if not first["endpoints"]:
            return
        endpoint = dict(self.random.choice(first["endpoints"]))
        if any(_plain(e["addresses"][0]) == _plain(endpoint["addresses"][0]) for e in second["endpoints"]):
            return
        same = [e for e in first["endpoints"] if _plain(e["addresses"][0]) == _plain(endpoint["addresses"][0])]
        if len(same) > 1:
            return
        terminating = endpoint["conditions"].get("terminating")
        if not terminating and self.chance(0.5):
            endpoint["conditions"] = {"ready": False, "serving": self.chance(0.5), "terminating": True}
        second["endpoints"].append(endpoint)

    def bulk(self, service: Object, count: int) -> list[Object]:
        family = service["spec"]["ipFamilies"][0]
        made = []
        while count > 0:
            made.append(self.slice(service, family, min(count, self.random.choice((100, 400, 999)))))
            made[-1]["ports"] = [
                {"name": p.get("name", ""), "protocol": p["protocol"], "port": 8080} for p in service["spec"]["ports"]
            ]
            count -= len(made[-1]["endpoints"])
        return made

    def strangers(self) -> list[Object]:
        """Slices that no Service of ours owns, or that carry nothing kube-proxy reads."""
        made: list[Object] = []
        nobody: Object = {
            "metadata": {"namespace": "ns0", "name": "nobody"},
            "spec": {"ports": [{"protocol": "TCP", "port": 80}]},
        }
        if self.chance(0.5):
            made.append(self.slice(nobody, IPV4, 2))
        if self.chance(0.3):
            made.append(self.slice(nobody, IPV4, 2))
            made[-1]["metadata"]["labels"].pop("kubernetes.io/service-name")
        if self.chance(0.3):
            made.append(self.slice(nobody, IPV4, 0))
            made[-1].update(addressType="FQDN", endpoints=[{"addresses": ["example.com"]}])
        return made


def _plain(address: str) -> str:
    """An address as kube-proxy prints it, for addresses spelled by `spell`."""
    if ":" in address:
        return address.removeprefix("::ffff:").lower() if "." in address else address.lower()
    return ".".join(str(int(octet)) for octet in address.split("."))
