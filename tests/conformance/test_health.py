"""Health checks: what a real kube-proxy answers, byte for byte, and what we do."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from agentless_kube_proxy.bundle.write import write_bundle

from tests.controlplane import ControlPlane, binaries, netns
from tests.node import health
from tests.node.health import over_tcp, request
from tests.node.host import Host
from tests.unit.build import Object, dual_stack, endpoint, node, port, render, slice_of

from .kubeproxy import KubeProxy, Sentinel
from .side import Namespace

ADDRESS = "192.168.80.1"
PORT = 31500
CONFIG: Object = {
    "mode": "iptables",
    "clusterCIDR": "10.244.0.0/16,fd00:10:244::/56",
    "conntrack": {"maxPerCore": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
}
READY: Object = {"ready": True}
LEAVING: Object = {"ready": False, "serving": True, "terminating": True}

pytestmark = pytest.mark.controlplane


def cluster(*conditions: Object, ipv6: int = 1) -> list[Object]:
    """A load balancer of policy Local, with an endpoint on n1 for each of the conditions."""
    made: Object = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": PORT,
        "clusterIP": "10.96.7.7",
        "ipFamilyPolicy": "RequireDualStack",
        "ports": [port(nodePort=30080), port(443, "https", nodePort=30443)],
    }
    here = [endpoint(f"10.244.1.{i + 1}", **each) for i, each in enumerate(conditions)]
    ports = [port(8080), port(8443, "https")]
    return [
        dual_stack("web", "shop", **made),
        slice_of("web", *here, endpoint("10.244.2.1", node="n2", ready=True), ports=ports),
        slice_of(
            "web", *(endpoint(f"fd00:10:244:1::{i + 1}", ready=True) for i in range(ipv6)),
            ports=ports, name="web-ipv6", addressType="IPv6",
        ),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ControlPlane, Sentinel, KubeProxy]]:
    """A control plane and kube-proxy, in one namespace."""
    name = f"akph{os.getpid()}"
    netns.add(name)
    netns.ip("-n", name, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    folder = tmp_path_factory.mktemp("kube-proxy")
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "hostnameOverride": "n1",
        "healthzBindAddress": "127.0.0.1:10256",
        **CONFIG,
    }
    try:
        with ControlPlane(name, (ADDRESS,)) as plane:
            sentinel = Sentinel(plane)
            plane.load([node("n1", ADDRESS), *cluster(READY, READY), *sentinel.objects()])
            kubeconfig = plane.kubeconfig(folder / "kubeconfig", "kube-proxy", ADDRESS)
            proxy = KubeProxy(Namespace(name), binaries() / "kube-proxy", folder, config, kubeconfig)
            proxy.start()
            try:
                proxy.wait(sentinel, "iptables")
                yield plane, sentinel, proxy
            finally:
                proxy.stop()
    finally:
        netns.delete(name)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    each = Host(tmp_path_factory.mktemp("host"))
    try:
        yield each
    finally:
        each.close()


def ours(host: Host, *objects: Object) -> None:
    write_bundle(render(node("n1", ADDRESS), *objects, **CONFIG), host.directory / "bundle")
    host.apply(host.directory / "bundle")


def asked(host: Host, what: str, text: str) -> str:
    return undated(health.asked(host, what, text))


def undated(text: str) -> str:
    return re.sub(r"Date: [^\r]+", "Date: D", text)


REQUESTS = {
    "GET": request(),
    "another path": request("/shop/web?x=y"),
    "HEAD": request(method="HEAD"),
    "POST": request(method="POST", headers="Content-Length: 0\r\nConnection: close\r\n"),
    "HTTP/1.0": request(version="1.0", headers=""),
    "a health checker": request(headers="User-Agent: GoogleHC/1.0\r\nConnection: close\r\n"),
    "no Host": "GET / HTTP/1.1\r\n\r\n",
    "no HTTP": "hello\r\n\r\n",
}
CASES = {
    "two ready endpoints": cluster(READY, READY),
    "one of them": cluster(READY, {"ready": False}),
    "a terminating one": cluster(LEAVING),
    "none": cluster(ipv6=0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_health_check_port_answers_as_kube_proxy_does(
    case: str, real: tuple[ControlPlane, Sentinel, KubeProxy], host: Host
) -> None:
    plane, sentinel, proxy = real
    for obj in CASES[case]:
        plane.client.replace(obj)
    sentinel.poke()
    proxy.wait(sentinel, "iptables")
    ours(host, *CASES[case])
    for name, text in REQUESTS.items():
        for address, what in (("127.0.0.1", f"{PORT}/ipv4"), ("::1", f"{PORT}/ipv6")):
            mine = asked(host, what, text)
            deadline = time.monotonic() + 20
            # The answers change a moment after the rules.
            while undated(over_tcp(plane.namespace, address, PORT, text)) != mine and time.monotonic() < deadline:
                time.sleep(0.2)
            assert undated(over_tcp(plane.namespace, address, PORT, text)) == mine, (case, name, what)


def shape(value: Any) -> Any:
    """A JSON value with its times left out."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return "time" if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\dT", value) else value


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/", "/healthz/x"])
def test_the_nodes_own_health_has_the_form_of_kube_proxys(
    path: str, real: tuple[ControlPlane, Sentinel, KubeProxy], host: Host
) -> None:
    plane, _sentinel, _proxy = real
    ours(host, *CASES["one of them"])
    theirs = over_tcp(plane.namespace, "127.0.0.1", 10256, request(path))
    mine = asked(host, "healthz", request(path))
    theirs_head, _, theirs_body = undated(theirs).partition("\r\n\r\n")
    mine_head, _, mine_body = mine.partition("\r\n\r\n")
    without = re.compile(r"Content-Length: \d+")  # times have more or fewer digits
    assert without.sub("", mine_head) == without.sub("", theirs_head)
    if path in ("/healthz", "/livez"):
        assert list(json.loads(mine_body)) == list(json.loads(theirs_body))
        assert shape(json.loads(mine_body)) == shape(json.loads(theirs_body))
    else:
        assert mine_body == theirs_body
