"""A cluster in the lab: three nodes, a few pods, and whatever Services a test applies.

| place | where | serves |
|---|---|---|
| web-1 | n1 | TCP and UDP |
| web-2 | n2 | TCP and UDP |
| client-1, client-3 | n1, n3 | nothing |
| n1, n2, n3 | the nodes; n3 has iptables-legacy, the others iptables-nft | nothing |
| outside | beyond all nodes | nothing |

So n1 has an endpoint of most Services, and n3 has none.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentless_kube_proxy import backends
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.lab.program import PROGRAM
from tests.unit.build import CLUSTER_CIDR, Object, config, endpoint, node, port, service, slice_of, snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab import Lab, Node, Place

NODES = ("n1", "n2", "n3")
TCP_PORT, UDP_PORT = 8080, 5353
SERVE = [("tcp", TCP_PORT), ("udp", UDP_PORT)]
FAMILIES = {"IPv4": 0, "IPv6": 1}
# Settings of the machine as a whole, which a lab must leave alone.
CONNTRACK: Object = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}


class Cluster:
    """The lab and what was applied to it last."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self._directory = directory
        for name, where in (("web-1", "n1"), ("web-2", "n2")):
            lab.add_pod(name, where, serve=SERVE)
        for name, where in (("client-1", "n1"), ("client-3", "n3")):
            lab.add_pod(name, where)
        lab.node("n3").use_iptables("legacy")
        self.facts = {each.name: each.akp(PROGRAM.parent, "facts") for each in lab.nodes}

    def place(self, name: str) -> Place:
        """A pod, a node or outside."""
        if name == "outside":
            return self.lab.outside
        return self.lab.pods.get(name) or self.lab.node(name)

    def nodes(self) -> list[Object]:
        """The Node objects of the lab."""
        return [node(each.name, *each.addresses, pod_cidrs=each.pod_cidrs) for each in self.lab.nodes]

    def apply(self, *objects: Object, on: Sequence[str] = NODES, **fields: Any) -> dict[str, dict[str, Any]]:
        """Brings nodes to the state that these Services and slices ask of them; answers what each of them said."""
        settings = config(**{"clusterCIDR": CLUSTER_CIDR, "conntrack": CONNTRACK, **fields})
        read = snapshot(*objects, *self.nodes())
        assert not read.problems, read.problems
        cluster, renderer = ClusterView(read, settings), backends.renderer(settings)

        def one(at: Node) -> dict[str, Any]:
            known = read.node(at.name)
            assert known is not None
            state = renderer.state(cluster.node_view(node_facts(known, self.facts[at.name])))
            bundle = Path(tempfile.mkdtemp(prefix=f"{at.name}-", dir=self._directory)) / at.name
            write_bundle(state, bundle)
            return at.apply(bundle)

        with ThreadPoolExecutor(len(NODES)) as pool:
            answers = dict(zip(on, pool.map(one, map(self.lab.node, on)), strict=True))
        for each in objects:
            self._announce(each)
        return answers

    def _announce(self, given: Object) -> None:
        """Cluster IPs are reached by way of n1; of external addresses the first by n1, the next by n3."""
        if given["kind"] != "Service":
            return
        spec = given["spec"]
        for address in spec.get("clusterIPs", []):
            self.lab.announce(address, "n1")
        ingress = given["status"]["loadBalancer"].get("ingress", [])
        for address in (*spec.get("externalIPs", []), *(entry["ip"] for entry in ingress)):
            self.lab.announce(address, "n3" if address.endswith("3") else "n1")


def dual(name: str, number: int, *, node_ports: bool = False, outside: str = "", **spec: Any) -> Object:
    """A Service of both families with a TCP port 80 and a UDP port 53.

    outside gives it load balancer addresses ("ingress") or external ones ("externalIPs"), two of each family: those
    that end in 1 are routed to n1, those that end in 3 to n3.
    """
    tcp, udp = port(80, "http"), port(53, "dns", "UDP")
    if node_ports:
        tcp["nodePort"], udp["nodePort"] = 30000 + number, 30000 + number
    addresses = [f"203.0.113.{number % 25}{last}" for last in (1, 3)] + [
        f"2001:db8:113::{number}{last}" for last in (1, 3)
    ]
    if outside == "ingress":
        spec["ingress"] = tuple(addresses)
    elif outside:
        spec[outside] = addresses
    return service(
        name,
        ports=[tcp, udp],
        ipFamilies=["IPv4", "IPv6"],
        clusterIP=f"10.96.0.{number}",
        clusterIPs=[f"10.96.0.{number}", f"fd00:10:96::{number}"],
        **spec,
    )


def slices(lab: Lab, name: str, *pods: str, **conditions: Any) -> list[Object]:
    """The EndpointSlices of a Service; a pod written `web-1:going` is one that terminates but serves."""
    states = {
        "": conditions,
        "going": {"ready": False, "serving": True, "terminating": True},
        "slow": {"ready": False},
    }
    ports = [port(TCP_PORT, "http"), port(UDP_PORT, "dns", "UDP")]
    made = []
    for index in FAMILIES.values():
        entries = []
        for text in pods:
            pod, _, condition = text.partition(":")
            known = lab.pod(pod)
            entries.append(endpoint(known.addresses[index], node=known.node.name, **states[condition]))
        made.append(slice_of(name, *entries, ports=ports, name=f"{name}-{index}"))
    return made
