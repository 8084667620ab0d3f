"""userspace mode: rules lead to the port of a proxy, and the proxy's file says which endpoints are behind it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.addresses import family_of
from agentless_kube_proxy.explain.packet import End, Origin, Packet
from agentless_kube_proxy.explain.ruleset import Ruleset

from ..build import Object, node, port, render, service, slice_of

NODE = "192.168.77.11"


def walked(objects: list[Object], to: str, number: int, protocol: str = "tcp", origin: Origin = Origin.POD) -> Any:
    """What becomes of a packet; the mode is told by the files alone."""
    state = render(*objects, node("n1", NODE, "fd77::11"), mode="userspace")
    walker = Ruleset(dict(backends.files(state))).walker(family_of(to), frozenset({NODE, "fd77::11"}))
    source = "fd00::9" if ":" in to else "10.244.1.9"
    return walker.walk(Packet(source, to, number, protocol, origin, "" if origin is Origin.NODE else "veth0"))


WEB = [service(type="NodePort", ports=[port(nodePort=30080)]), slice_of("web", "10.244.1.1", "10.244.1.2")]


@pytest.mark.parametrize("origin", [Origin.POD, Origin.NODE])
@pytest.mark.parametrize(("to", "number"), [("10.96.7.7", 80), (NODE, 30080)])
def test_endpoints_share_alike_and_see_the_node(to: str, number: int, origin: Origin) -> None:
    verdict = walked(WEB, to, number, origin=origin)
    assert verdict.shares == {"10.244.1.1:8080": Fraction(1, 2), "10.244.1.2:8080": Fraction(1, 2)}
    assert set(verdict.masquerades.values()) == {True}
    assert verdict.paths[0].steps[-1].text == "server 10.244.1.1:8080 10.244.1.1:8080"


def test_udp_is_nginxs() -> None:
    entry = [port(53, "dns", "UDP")]
    objects = [service(ports=entry), slice_of("web", "10.244.1.1", ports=[port(5353, "dns", "UDP")])]
    assert walked(objects, "10.96.7.7", 53, "udp").shares == {"10.244.1.1:5353": Fraction(1)}


def test_a_service_without_endpoints_refuses_and_other_traffic_passes() -> None:
    assert walked([service()], "10.96.7.7", 80).end is End.REFUSED
    assert walked([service()], "10.96.7.7", 81).end is End.PASSED
