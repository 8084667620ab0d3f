"""`akp render` on a cluster that a tenant fills with harm: what stands in the files, and what does not.

Nothing but the command line and the files that it writes is used here, whatever the parts behind them are called.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.cli import main

from tests.unit.build import Object, endpoint, node, port, service, slice_of

DNS_PORTS = [port(53, "dns", "UDP"), port(53, "dns-tcp", "TCP")]
VICTIMS = [
    service("kube-dns", "kube-system", clusterIP="10.96.0.10", ports=DNS_PORTS),
    slice_of("kube-dns", "10.244.1.53", namespace="kube-system", ports=DNS_PORTS),
    service("web", "shop", clusterIP="10.96.0.20", externalIPs=["203.0.113.20"]),
    slice_of("web", "10.244.1.20"),
    service("kubernetes", "default", clusterIP="10.96.0.1", ports=[port(443, "https")]),
    slice_of("kubernetes", "172.18.0.9", namespace="default", ports=[port(6443, "https")]),
]
THIEF = "10.244.6.66"


def thief(name: str = "thief", address: str = THIEF, count: int = 1, **fields: Any) -> list[Object]:
    made = service(name, "aaa", **{"clusterIP": "10.96.66.6", **fields})
    ports = [port(each["port"], each["name"], each["protocol"]) for each in made["spec"]["ports"]]
    slices = []
    for first in range(0, count, 1000):
        more = (
            [endpoint(f"10.245.{i >> 8}.{i & 255}") for i in range(first, min(first + 1000, count))]
            if count > 1
            else []
        )
        slices.append(
            slice_of(name, *(more or [endpoint(address)]), name=f"{name}-{first}", namespace="aaa", ports=ports)
        )
    return [made, *slices]


LOCAL = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ingress": ("203.0.113.66",)}
HARM: dict[str, list[Object]] = {
    "cluster IP of kube-dns": thief(externalIPs=["10.96.0.10"], ports=DNS_PORTS),
    "cluster IP of kube-dns by a load balancer": thief(type="LoadBalancer", ingress=("10.96.0.10",), ports=DNS_PORTS),
    "ssh of a node": thief(externalIPs=["172.18.0.11"], ports=[port(22, "ssh")]),
    "the API server": thief(externalIPs=["172.18.0.9"], ports=[port(6443, "https")]),
    "endpoints on loopback": thief(address="127.0.0.1", type="NodePort", ports=[port(80, "http", nodePort=30666)]),
    "endpoints that are unspecified": thief(address="0.0.0.0"),
    "endpoints of cloud metadata": thief(address="169.254.169.254"),
    "a multicast VIP": thief(externalIPs=["239.1.2.3"]),
    "a health check port of etcd": thief(healthCheckNodePort=2379, **LOCAL),
    "a health check port of kubelet": thief(healthCheckNodePort=10250, **LOCAL),
    "more endpoints than a line has room for": thief(count=20_000),
}
# What must not stand in any file that rules are loaded from.
NEVER = (
    "127.0.0.1:80",
    "127.0.0.1 . 80",
    "0.0.0.0:80",
    "0.0.0.0 . 80",
    "169.254.169.254",
    "239.1.2.3",
    "2379",
    "10250",
)


def rendered(folder: Path, mode: str, objects: list[Object]) -> tuple[dict[str, str], str]:
    """What belongs to whom, as the table of services tells, and the rules."""
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "all.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": mode, "clusterCIDR": "10.244.0.0/16",
    }))  # fmt: skip
    argv = ["render", "--cluster", str(folder / "cluster"), "--config", str(folder / "config.yaml"), "--all-nodes"]
    assert main([*argv, "--output", str(folder / "out")]) == 0
    found, rules = {}, []
    for file in sorted((folder / "out" / "n1").iterdir()):
        if file.name == "services.jsonl":
            for line in file.read_text().splitlines():
                record = json.loads(line)
                found[f"{record['service']} {record['port']} {record['protocol']} {record['family']}"] = line
        elif file.name not in ("manifest.json", "akp-node"):
            rules.append(file.read_text())
    return found, "".join(rules)


def claimed(line: str) -> set[tuple[str, str]]:
    record = json.loads(line)
    number = record["clusterIP"].rpartition(":")[2]
    return {(ip, number) for key in ("externalIPs", "loadBalancerIPs") for ip in record.get(key, ())}


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
@pytest.mark.parametrize("what", HARM)
def test_a_tenant_takes_nothing_that_is_not_his_and_others_keep_theirs(tmp_path: Path, mode: str, what: str) -> None:
    before, _rules = rendered(tmp_path / "before", mode, [*VICTIMS, node("n1")])
    after, rules = rendered(tmp_path / "after", mode, [*VICTIMS, *HARM[what], node("n1")])
    assert {key: after[key] for key in before} == before
    for key, line in after.items():
        if key.startswith("aaa/"):
            assert not claimed(line) & {
                ("10.96.0.10", "53"), ("172.18.0.11", "22"), ("172.18.0.9", "6443"), ("239.1.2.3", "80"),
            }  # fmt: skip
            assert len(json.loads(line).get("endpoints", ())) <= 10_000
    assert not [text for text in NEVER if text in rules]
    assert max(map(len, rules.splitlines())) < 4_000_000
