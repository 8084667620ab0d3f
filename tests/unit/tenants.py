"""A tenant's Service as hypothesis draws it: whatever an API server accepts, aimed at the Services of others."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from .build import Object, endpoint, port, service, slice_of
from .clusters import EXTERNAL, PORTS, cluster

NODE_ADDRESSES = ("172.18.0.11", "172.18.0.12", "fd00:172:18::11")
API_SERVER = ("172.18.0.13", 6443)
OLD, MIDDLE, NEW = "2020-01-01T00:00:00Z", "2023-01-01T00:00:00Z", "2026-01-01T00:00:00Z"
LONG = "a-name-of-the-greatest-length-that-kubernetes-will-accept-abcde"


def residents(size: int, seed: int) -> list[Object]:
    """The cluster that was there before: all of it of one age, and the API server."""
    objects = cluster(size, seed)
    for each in objects:
        each["metadata"]["creationTimestamp"] = MIDDLE
    return [
        *objects,
        service("kubernetes", "default", clusterIP="10.96.0.254", ports=[port(443, "https")]),
        slice_of("kubernetes", API_SERVER[0], namespace="default", ports=[port(API_SERVER[1], "https")]),
    ]


def tenant(objects: list[Object], seed: int) -> list[Object]:
    """One more Service, with slices, that claims what others have: addresses, ports, node addresses, all of it."""
    chance = random.Random(seed)
    others = [each for each in objects if each["kind"] == "Service"]
    addresses = [ip for each in others for ip in each["spec"].get("clusterIPs", [])]
    addresses += [
        *EXTERNAL,
        *NODE_ADDRESSES,
        API_SERVER[0],
        "198.51.100.1",
        "2001:db8:1::1",
        "239.1.2.3",
        "203.0.113.99",
    ]
    numbers = [each["port"] for other in others for each in other["spec"]["ports"]]
    node_ports = [each.get("nodePort", 0) for other in others for each in other["spec"]["ports"]]
    numbers += [22, 80, 6443, *filter(None, node_ports)]
    chance.shuffle(numbers)
    ports = [
        port(number, name, protocol, nodePort=chance.choice((0, 31000 + i)))
        for i, ((name, protocol), number) in enumerate(zip(_some(chance, PORTS, 4), numbers, strict=False))
    ]
    families = chance.choice((["IPv4"], ["IPv6"], ["IPv4", "IPv6"]))
    own = {"IPv4": "10.96.99.99", "IPv6": "fd00:10:96::99:99"}
    name, namespace = chance.choice((("aaa", "aaa"), ("zzz", "zzz"), (LONG, LONG)))
    made = service(
        name,
        namespace,
        type=chance.choice(("ClusterIP", "NodePort", "LoadBalancer")),
        ports=ports,
        ipFamilies=families,
        clusterIP=own[families[0]],
        clusterIPs=[own[each] for each in families],
        externalIPs=_some(chance, addresses, 12),
        ingress=tuple(_some(chance, addresses, 12)),
        externalTrafficPolicy=chance.choice(("Cluster", "Local")),
        internalTrafficPolicy=chance.choice(("Cluster", "Local")),
        sessionAffinity=chance.choice(("None", "ClientIP")),
        loadBalancerSourceRanges=_some(chance, ("10.0.0.0/8", "10.1.0.0/16", "203.0.113.9/32", "fd00::/8", "::/0"), 3),
        healthCheckNodePort=chance.choice((0, 22, 2379, 10250, 32000, 65535)),
    )
    made["metadata"]["creationTimestamp"] = chance.choice((OLD, NEW, NEW, NEW))
    endpoints = [endpoint(f"10.244.9.{i}", node=chance.choice(("n1", "n2", "n3"))) for i in range(chance.randint(0, 3))]
    return [made, slice_of(name, *endpoints, namespace=namespace, ports=[{**each, "port": 9000 + i} for i, each in enumerate(ports)], addressType="IPv4")]  # fmt: skip


def _some(chance: random.Random, pool: Any, most: int) -> list[Any]:
    return chance.sample(list(pool), chance.randint(0, min(most, len(pool))))


def drawn(size: int, seed: int) -> tuple[list[Object], list[Object]]:
    """A cluster, and what a tenant adds to it."""
    before = residents(size, seed)
    return before, tenant(before, seed + 1)


def clusters_with_tenants() -> st.SearchStrategy[tuple[list[Object], list[Object]]]:
    """Drawn from a seed, as clusters are."""
    return st.builds(drawn, st.integers(1, 5), st.integers(0, 2**32))
