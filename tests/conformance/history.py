"""What happens to a cluster over time: endpoints come, go and terminate, Services change in every way, nodes move.

A step changes a copy of all objects; the difference of the two is what is sent to the API server. So every step is a
list of plain creations, replacements and deletions, and the state after it is known.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .draw import ZONES, Cluster, Drawer
from .plan import IPV4, IPV6
from .undefined import undefined

Object = dict[str, Any]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    action: str  # create, replace or delete
    object: Object

    def __str__(self) -> str:
        meta = self.object["metadata"]
        return f"{self.action} {self.object['kind']} {meta.get('namespace', '')}/{meta['name']}".replace(" /", " ")


@dataclass(frozen=True)
class Step:
    changes: tuple[Change, ...]
    after: Cluster


def key(obj: Object) -> Key:
    return obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def changes(before: Sequence[Object], after: Sequence[Object]) -> list[Change]:
    """From one cluster to the other; nodes first, and what goes before what comes, so that its ports are free."""
    old, new = {key(o): o for o in before}, {key(o): o for o in after}
    gone = [Change("delete", old[k]) for k in old if k not in new]
    kept = [Change("replace", new[k]) for k in new if k in old and new[k] != old[k]]
    made = [Change("create", new[k]) for k in new if k not in old]
    return sorted(gone + kept + made, key=lambda change: change.object["kind"] != "Node")


def _keep_classes(before: Sequence[Object], after: Sequence[Object]) -> None:
    """The class of a load balancer stays for as long as the Service is one: the API server refuses another, or none.

    Several changes of one step may have made it something else, and a load balancer again.
    """
    old = {key(each): each["spec"] for each in before if each["kind"] == "Service"}
    for each in after:
        was = old.get(key(each))
        if was is None or not was.get("type") == each["spec"].get("type") == "LoadBalancer":
            continue
        each["spec"].pop("loadBalancerClass", None)
        if "loadBalancerClass" in was:
            each["spec"]["loadBalancerClass"] = was["loadBalancerClass"]


class LeftToChance(Exception):
    """A cluster that no history can start from."""


class History:
    def __init__(self, cluster: Cluster) -> None:
        self.random = random.Random(f"history/{cluster.mode}/{cluster.seed}")
        self.cluster = cluster
        self._begun = False
        self.drawer = Drawer(self.random, cluster.mode, cluster.minor, taken=cluster.objects)
        self.mutations: tuple[Callable[[list[Object]], None], ...] = (
            self.conditions, self.conditions, self.remove_endpoints, self.add_endpoints, self.add_endpoints,
            self.hints, self.add_slice, self.remove_slice, self.policy, self.policy, self.retype, self.retype,
            self.ports, self.families, self.affinity, self.outside, self.proxy_name, self.remove_service,
            self.add_service, self.zone,
        )  # fmt: skip

    def step(self) -> Step:
        """The next step; LeftToChance if the cluster is so that none can follow which says anything."""
        before = list(self.cluster.objects)
        why = None if self._begun else undefined(before)
        self._begun = True
        if why:
            # Most steps leave what makes it so, and one that does not may never come.
            raise LeftToChance(f"kube-proxy treats this cluster in no fixed way, so it has no history: {why}")
        while True:
            after = copy.deepcopy(before)
            for mutate in self.random.choices(self.mutations, k=self.random.choice((1, 1, 2, 3, 5))):
                mutate(after)
            _keep_classes(before, after)
            made = changes(before, after)
            if made and not undefined(after):
                break
        self.cluster = replace(self.cluster, objects=tuple(after))
        return Step(tuple(made), self.cluster)

    # What to change

    def _slices(self, objects: list[Object]) -> list[Object]:
        return [o for o in objects if o["kind"] == "EndpointSlice" and o["addressType"] != "FQDN"]

    def _service(self, objects: list[Object], *kinds: str) -> Object | None:
        """One of the Services that have a cluster IP, of these types."""
        services = [o for o in objects if o["kind"] == "Service" and o["spec"].get("clusterIP", "None") != "None"]
        found = [o for o in services if not kinds or o["spec"]["type"] in kinds]
        return self.random.choice(found) if found else None

    def _endpoints(self, objects: list[Object]) -> list[Object]:
        full = [o for o in self._slices(objects) if o["endpoints"]]
        if not full:
            return []
        endpoints = self.random.choice(full)["endpoints"]
        chosen = self.random.sample(endpoints, self.random.randrange(1, min(4, len(endpoints)) + 1))
        return endpoints if self.random.random() < 0.2 else chosen

    # Endpoints

    def conditions(self, objects: list[Object]) -> None:
        """A rolling update in small: ready ones terminate, terminating ones stop serving, others become ready."""
        for endpoint in self._endpoints(objects):
            current = endpoint.get("conditions", {})
            if current.get("terminating"):
                endpoint["conditions"] = {
                    "ready": False,
                    "serving": not current.get("serving", True),
                    "terminating": True,
                }
            elif self.random.random() < 0.5:
                endpoint["conditions"] = {"ready": False, "serving": True, "terminating": True}
            else:
                endpoint["conditions"] = self.drawer.conditions()

    def remove_endpoints(self, objects: list[Object]) -> None:
        doomed = [id(endpoint) for endpoint in self._endpoints(objects)]
        for obj in self._slices(objects):
            obj["endpoints"] = [endpoint for endpoint in obj["endpoints"] if id(endpoint) not in doomed]

    def add_endpoints(self, objects: list[Object]) -> None:
        if slices := self._slices(objects):
            chosen = self.random.choice(slices)
            if len(chosen["endpoints"]) < 900:
                hints = self.random.choice(("none", "zones", "nodes"))
                count = self.random.randrange(1, 4)
                chosen["endpoints"] += [self.drawer.endpoint(chosen["addressType"], hints) for _ in range(count)]

    def hints(self, objects: list[Object]) -> None:
        for endpoint in self._endpoints(objects):
            endpoint.pop("hints", None)
            if self.random.random() < 0.6:
                endpoint["hints"] = {"forZones": [{"name": self.random.choice(ZONES)}]}

    def add_slice(self, objects: list[Object]) -> None:
        if service := self._service(objects):
            family = self.random.choice(service["spec"]["ipFamilies"])
            objects.append(self.drawer.slice(service, family, self.random.randrange(0, 4)))

    def remove_slice(self, objects: list[Object]) -> None:
        if slices := self._slices(objects):
            objects.remove(self.random.choice(slices))

    # Services

    def policy(self, objects: list[Object]) -> None:
        if service := self._service(objects):
            spec = service["spec"]
            if "externalTrafficPolicy" in spec and self.random.random() < 0.6:
                self._external_policy(spec, "Local" if spec["externalTrafficPolicy"] == "Cluster" else "Cluster")
            else:
                spec["internalTrafficPolicy"] = "Local" if spec.get("internalTrafficPolicy") != "Local" else "Cluster"

    def _external_policy(self, spec: Object, policy: str) -> None:
        spec["externalTrafficPolicy"] = policy
        if spec["type"] == "LoadBalancer" and policy == "Local":
            spec.setdefault("healthCheckNodePort", self.drawer.plan.node_port())
        else:
            spec.pop("healthCheckNodePort", None)

    def retype(self, objects: list[Object]) -> None:
        """Another type; whatever only the old one may have goes."""
        service = self._service(objects)
        if service is None:
            return
        spec = service["spec"]
        kind = self.random.choice([k for k in ("ClusterIP", "NodePort", "LoadBalancer") if k != spec["type"]])
        spec["type"] = kind
        for field in ("externalTrafficPolicy", "healthCheckNodePort", "loadBalancerSourceRanges", "loadBalancerClass",
                      "allocateLoadBalancerNodePorts", "loadBalancerIP", "externalIPs"):  # fmt: skip
            spec.pop(field, None)
        service.pop("status", None)
        service["metadata"].get("annotations", {}).pop("service.beta.kubernetes.io/load-balancer-source-ranges", None)
        for port in spec["ports"]:
            port.pop("nodePort", None)
            if kind != "ClusterIP":
                port["nodePort"] = self.drawer.plan.node_port()
        self.drawer.outside(service)

    def ports(self, objects: list[Object]) -> None:
        service = self._service(objects)
        if service is None:
            return
        spec = service["spec"]
        choice = self.random.random()
        if choice < 0.3 and len(spec["ports"]) > 1:
            spec["ports"].remove(self.random.choice(spec["ports"]))
        elif choice < 0.6 and all("name" in port for port in spec["ports"]):
            number = next(n for n in range(7000, 8000) if n not in {p["port"] for p in spec["ports"]})
            port: Object = {
                "name": f"added-{number}",
                "protocol": self.random.choice(("TCP", "UDP", "SCTP")),
                "port": number,
            }
            if spec["type"] != "ClusterIP":
                port["nodePort"] = self.drawer.plan.node_port()
            spec["ports"].append(port)
        else:
            port = self.random.choice(spec["ports"])
            port["port"] = self.random.randrange(1024, 30000)

    def families(self, objects: list[Object]) -> None:
        """From one family to two and back; the first one stays, as the API demands."""
        service = self._service(objects)
        if service is None:
            return
        spec = service["spec"]
        if len(spec["ipFamilies"]) == 2:
            spec.update(
                ipFamilies=spec["ipFamilies"][:1], clusterIPs=spec["clusterIPs"][:1], ipFamilyPolicy="SingleStack"
            )
        else:
            second = IPV6 if spec["ipFamilies"] == [IPV4] else IPV4
            spec["ipFamilies"] = [*spec["ipFamilies"], second]
            spec["clusterIPs"] = [*spec["clusterIPs"], self.drawer.plan.cluster_ip(second)]
            spec["ipFamilyPolicy"] = "RequireDualStack"

    def affinity(self, objects: list[Object]) -> None:
        if service := self._service(objects):
            spec = service["spec"]
            if spec.get("sessionAffinity") == "ClientIP" and self.random.random() < 0.6:
                spec["sessionAffinity"] = "None"
                spec.pop("sessionAffinityConfig", None)
            else:
                spec["sessionAffinity"] = "ClientIP"
                spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": self.random.choice((5, 600, 10800))}}

    def outside(self, objects: list[Object]) -> None:
        """The cloud gives or takes an address, or somebody edits the source ranges."""
        if service := self._service(objects, "LoadBalancer"):
            spec = service["spec"]
            if self.random.random() < 0.4:
                spec["loadBalancerSourceRanges"] = [
                    self.drawer.source_range() for _ in range(self.random.randrange(0, 3))
                ]
            elif service.get("status") and self.random.random() < 0.4:
                service.pop("status")
            else:
                ingress = list(service.get("status", {}).get("loadBalancer", {}).get("ingress", []))
                family = self.random.choice((IPV4, IPV6))
                ingress.append(
                    {
                        "ip": self.drawer.plan.load_balancer(family),
                        "ipMode": self.random.choice(("VIP", "VIP", "Proxy")),
                    }
                )
                service["status"] = {"loadBalancer": {"ingress": ingress}}

    def proxy_name(self, objects: list[Object]) -> None:
        """The Service is handed over to another proxy, or back."""
        if service := self._service(objects):
            labels = service["metadata"].setdefault("labels", {})
            if labels.pop("service.kubernetes.io/service-proxy-name", None) is None:
                labels["service.kubernetes.io/service-proxy-name"] = "other"

    def remove_service(self, objects: list[Object]) -> None:
        """Slices go with it, or outlive it, as they do for a moment in a real cluster."""
        if service := self._service(objects):
            objects.remove(service)
            if self.random.random() < 0.7:
                namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
                for obj in self._slices(objects):
                    owner = obj["metadata"].get("labels", {}).get("kubernetes.io/service-name")
                    if (obj["metadata"]["namespace"], owner) == (namespace, name):
                        objects.remove(obj)

    def add_service(self, objects: list[Object]) -> None:
        service = self.drawer.service()
        objects.append(service)
        objects += self.drawer.slices(service)

    # Nodes

    def zone(self, objects: list[Object]) -> None:
        nodes = [obj for obj in objects if obj["kind"] == "Node"]
        own = [node for node in nodes if node["metadata"]["name"] == self.cluster.node]
        labels = self.random.choice(nodes + own * 3)["metadata"]["labels"]
        if labels.pop("topology.kubernetes.io/zone", None) is None or self.random.random() < 0.7:
            labels["topology.kubernetes.io/zone"] = self.random.choice(ZONES)
