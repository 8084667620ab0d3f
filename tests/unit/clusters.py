"""Clusters as hypothesis draws them: small, but with everything that Services and EndpointSlices can be."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from .build import Object, endpoint, node, port, service, slice_of

ZONES = ("a", "b", "c")
NODES = ("n1", "n2", "n3")
NAMES = ("api", "dns", "web")
PORTS = (("http", "TCP"), ("dns", "UDP"), ("dns", "TCP"), ("", "TCP"), ("call", "SCTP"))
EXTERNAL = ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2")
RANGES = ("172.18.0.0/16", "203.0.113.0/24", "fd00:172:18::/64", "2001:db8:51::/64", "0.0.0.0/0", "::/0")


def _some(chance: random.Random, pool: tuple[Any, ...], most: int) -> list[Any]:
    return chance.sample(pool, chance.randint(0, min(most, len(pool))))


def _service(chance: random.Random, number: int) -> Object:
    """A Service; its number keeps its addresses and node ports apart from those of others."""
    families = chance.choice((["IPv4"], ["IPv6"], ["IPv4", "IPv6"], ["IPv6", "IPv4"]))
    ips = {"IPv4": f"10.96.0.{number + 1}", "IPv6": f"fd00:10:96::{number + 1:x}"}
    node_ports = chance.random() < 0.5
    ports = [
        port(80 + i, name, protocol, **({"nodePort": 30000 + 10 * number + i} if node_ports else {}))
        for i, (name, protocol) in enumerate(_some(chance, PORTS, 3))
    ]
    return service(
        f"{NAMES[number % 3]}-{number}",
        chance.choice(("shop", "back-office")),
        type=chance.choice(("ClusterIP", "NodePort", "LoadBalancer")),
        ports=ports,
        ipFamilies=families,
        clusterIP=ips[families[0]],
        clusterIPs=[ips[family] for family in families],
        externalTrafficPolicy=chance.choice((None, "Cluster", "Local")),
        internalTrafficPolicy=chance.choice((None, "Cluster", "Local")),
        sessionAffinity=chance.choice((None, "None", "ClientIP")),
        externalIPs=_some(chance, EXTERNAL, 2),
        loadBalancerSourceRanges=_some(chance, RANGES, 3),
        healthCheckNodePort=chance.choice((0, 32000 + number)),
        ingress=tuple(_some(chance, ("198.51.100.1", "2001:db8:1::1"), 2)),
    )


def _slice(chance: random.Random, of: Object, part: str) -> Object:
    """An EndpointSlice of a Service, with some of its ports and perhaps others."""
    family, net = chance.choice((("IPv4", "10.244.{}.{}"), ("IPv6", "fd00:10:244:{}::{}")))
    places = {(chance.randint(1, 3), chance.randint(1, 12)): None for _ in range(chance.randint(0, 5))}
    hinted = chance.random() < 0.3
    return slice_of(
        of["metadata"]["name"],
        *(
            endpoint(
                net.format(where, last),
                node=f"n{where}",
                zones=tuple(_some(chance, ZONES, 2)) if hinted else (),
                nodes=tuple(_some(chance, NODES, 1)) if hinted else (),
                ready=chance.choice((None, True, True, False)),
                serving=chance.choice((None, True, True, False)),
                terminating=chance.choice((None, False, True)),
            )
            for where, last in places
        ),
        namespace=of["metadata"]["namespace"],
        name=f"{of['metadata']['name']}-{part}",
        addressType=family,
        ports=[port(8000 + i, name, protocol) for i, (name, protocol) in enumerate(_some(chance, PORTS, 5))],
    )


def cluster(size: int, seed: int) -> list[Object]:
    """Services with two slices each, and three Nodes."""
    chance = random.Random(seed)
    services = [_service(chance, number) for number in range(size)]
    slices = [_slice(chance, each, part) for each in services for part in ("x", "y")]
    nodes = [
        node(
            f"n{i}",
            f"172.18.0.{10 + i}",
            f"fd00:172:18::{10 + i}",
            zone=ZONES[i - 1],
            pod_cidrs=(f"10.244.{i}.0/24", f"fd00:10:244:{i}::/64"),
        )
        for i in (1, 2, 3)
    ]
    return [*services, *slices, *nodes]


def clusters(most: int = 5) -> st.SearchStrategy[list[Object]]:
    """Drawn from a seed, because drawing every field by itself would take longer than what is tested."""
    return st.builds(cluster, st.integers(0, most), st.integers(0, 2**32))


CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "clusterCIDR": st.sampled_from(("", "10.244.0.0/16", "10.244.0.0/16,fd00:10:244::/56")),
        "detectLocalMode": st.sampled_from(("", "ClusterCIDR", "NodeCIDR")),
        "nodePortAddresses": st.lists(
            st.sampled_from(("primary", "localhost", "all", "172.16.0.0/12", "::1/128")), unique=True
        ),
        "iptables": st.fixed_dictionaries(
            {},
            optional={
                "masqueradeAll": st.booleans(),
                "masqueradeBit": st.integers(0, 31),
                "localhostNodePorts": st.booleans(),
            },
        ),
        "conntrack": st.fixed_dictionaries({}, optional={"tcpBeLiberal": st.booleans()}),
    },
)


def reordered(objects: list[Object], chance: random.Random) -> list[Object]:
    """The same cluster, told in another order wherever the API gives order no meaning."""

    def mixed(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: mixed(value[name], name) for name in chance.sample(list(value), len(value))}
        if isinstance(value, list):
            told = [mixed(entry) for entry in value]
            # ports have unique names here, and endpoints of one slice unique addresses
            return chance.sample(told, len(told)) if key in ("ports", "endpoints", "forZones", "forNodes") else told
        return value

    return [mixed(each) for each in chance.sample(objects, len(objects))]


# ------------------------------------------------------------------ what no API server would send

NASTY: st.SearchStrategy[Any] = st.sampled_from(
    (
        None,
        True,
        0,
        -1,
        70000,
        10**30,
        1.5,
        "",
        " ",
        "None",
        "IPv4",
        "x" * 300,
        'web" -j ACCEPT -m comment --comment "',
        "web\n-A INPUT -j ACCEPT",
        "web\r\n-A INPUT -j ACCEPT\r\n",
        "$(reboot)",
        "`reboot`",
        "web; reboot",
        "10.0.0.1 -j ACCEPT",
        "10.0.0.1/32",
        "10.0.0.1,0.0.0.0/0",
        "! 10.0.0.1",
        "::1]:80 -j ACCEPT",
        "-j",
        "--",
        "#",
        "\0",
        "\u2028-A INPUT",
        "ｗｅｂ",
        "\ud800",
        [],
        {},
        [[]],
        [{}],
        {"name": {}},
        ["10.0.0.1 -j ACCEPT", "10.0.0.1"],
    )
)
JSON = st.recursive(
    NASTY | st.text(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in an object, as deep as real ones go: broken ones are nested without end."""
    if prefix:
        yield prefix
    if len(prefix) > 30:
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from places(member, (*prefix, key))


def _broken(objects: list[Any], breaks: list[tuple[int, int, Any]], strangers: list[Any]) -> list[Any]:
    *broken, n1, n2, n3 = objects
    for which, where, what in breaks if broken else ():
        target = broken[which % len(broken)]
        found = list(places(target))
        *parents, last = found[where % len(found)]
        for key in parents:
            target = target[key]
        target[last] = copy.deepcopy(what)  # one that is drawn twice would else be put into itself
    return [*broken, *strangers, n1, n2, n3]


def broken_clusters() -> st.SearchStrategy[list[Any]]:
    """Clusters in which some things are not what they should be; only their Nodes are whole."""
    breaks = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9999), JSON), max_size=6)
    return st.builds(_broken, clusters(3), breaks, st.lists(JSON, max_size=2))
