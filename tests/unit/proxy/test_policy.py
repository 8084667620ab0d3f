"""Addresses that Services claim: those of others are found, left out or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.proxy.policy import (
    InvalidPolicy,
    Known,
    RefusedVips,
    check_vips,
    under_policy,
    vip_policy,
)

from tests.unit.build import Object, config, node, port, service, slice_of, snapshot

ROOT = Path(__file__).parents[3]
ANYWHERE = vip_policy("warn", None, None)
KUBERNETES = service("kubernetes", "default", clusterIP="10.96.0.1", ports=[port(443, "https")])
API_SERVER = slice_of("kubernetes", "192.0.2.5", namespace="default")
RANGES: Object = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "ServiceCIDR",
    "metadata": {"name": "kubernetes"},
    "spec": {"cidrs": ["10.96.0.0/16", "fd00:10:96::/112"]},
}


def cluster(*objects: Object) -> Snapshot:
    return snapshot(*objects, node("n1"), KUBERNETES, API_SERVER, RANGES)


def found_in(*objects: Object, policy: object = ANYWHERE) -> list[str]:
    return [str(each) for each in check_vips(cluster(*objects), config(clusterCIDR="10.244.0.0/16"), policy)]  # type: ignore[arg-type]


def node_address() -> str:
    return next(ip for sort, ip in cluster().nodes[0].addresses if sort == "InternalIP")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.5", "is an address of the API server"),
        ("10.96.0.1", "is the cluster IP of default/kubernetes"),
        ("10.96.200.1", "is in the range of cluster IPs 10.96.0.0/16"),
        ("fd00:10:96::99", "is in the range of cluster IPs fd00:10:96::/112"),
        ("10.244.99.1", "is in the pod network 10.244.0.0/16"),
    ],
)
@pytest.mark.parametrize("field", ["externalIPs", "loadBalancer"])
def test_an_address_of_somebody_else_is_found(field: str, address: str, reason: str) -> None:
    taker = (
        service(clusterIP="10.96.7.7", externalIPs=[address])
        if field == "externalIPs"
        else service(type="LoadBalancer", ingress=(address,))
    )
    assert found_in(taker) == [f"Service/shop/web: {field} {address} {reason}"]


def test_an_address_of_a_node_is_found() -> None:
    assert found_in(service(externalIPs=[node_address()])) == [
        f"Service/shop/web: externalIPs {node_address()} is an address of the node n1"
    ]


FACTS = {
    "addresses": [
        {"interface": "lo", "address": "127.0.0.1", "prefix": 8},
        {"interface": "lo", "address": "203.0.113.1", "prefix": 32},
        {"interface": "eth0", "address": "172.18.0.11", "prefix": 24},
        {"interface": "eth1", "address": "203.0.113.2", "prefix": 24},
        {"interface": "eth1", "address": "2001:DB8::2", "prefix": 64},
        {"interface": "kube-ipvs0", "address": "203.0.113.3", "prefix": 32},
        "nonsense",
    ]
}
ELSEWHERE = Known.of({"n1": FACTS, "gone": {"addresses": ["203.0.113.4"]}}, "https://203.0.113.5:6443")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("203.0.113.1", ""),
        ("172.18.0.11", "is an address of the node n1"),
        ("203.0.113.2", "is an address of an interface of the node n1"),
        ("2001:db8::2", "is an address of an interface of the node n1"),
        ("203.0.113.3", ""),
        ("203.0.113.4", ""),
        ("203.0.113.5", "is an address of the API server"),
    ],
)
def test_what_nodes_and_the_way_to_the_api_server_tell_counts_too(address: str, reason: str) -> None:
    found = check_vips(cluster(service(externalIPs=[address])), config(), ANYWHERE, ELSEWHERE)
    assert [each.reason for each in found] == ([reason] if reason else [])


def test_who_keeps_an_address_on_a_node_for_a_service_can_say_so() -> None:
    """As keepalived does for an external IP, and kube-vip for that of a load balancer."""
    named, around = (vip_policy("warn", [each], None) for each in ("203.0.113.2", "203.0.113.0/24"))
    claim = cluster(service(externalIPs=["203.0.113.2"]))
    assert check_vips(claim, config(), named, ELSEWHERE) == ()
    assert len(check_vips(claim, config(), around, ELSEWHERE)) == 1
    balanced = [service(type="LoadBalancer", ingress=(each,)) for each in ("203.0.113.2", "203.0.113.5")]
    reasons = [[each.reason for each in check_vips(cluster(obj), config(), ANYWHERE, ELSEWHERE)] for obj in balanced]
    assert reasons == [[], ["is an address of the API server"]]


@pytest.mark.parametrize(
    ("url", "found"),
    [("https://[2001:db8::5]:6443", 1), ("https://api.example.org", 0), ("examples/shop", 0), ("https://[x", 0)],
)
def test_a_name_in_the_url_of_the_api_server_is_no_address(url: str, found: int) -> None:
    claim = cluster(service(externalIPs=["2001:db8::5"]))
    assert len(check_vips(claim, config(), ANYWHERE, Known({}, url))) == found


def test_the_pods_of_a_node_are_found_where_no_cluster_cidr_is_configured() -> None:
    with_pods = snapshot(service(externalIPs=["10.9.1.3"]), node("n1", pod_cidrs=("10.9.1.0/24",)))
    (found,) = check_vips(with_pods, config(), ANYWHERE)
    assert found.reason == "is in the pod CIDR 10.9.1.0/24 of the node n1"


def test_any_other_address_is_nobodys_business_unless_there_is_a_list() -> None:
    taker = service(type="LoadBalancer", externalIPs=["203.0.113.7", "2001:db8::7"], ingress=("198.51.100.1",))
    assert found_in(taker) == []
    listed = vip_policy("warn", ["203.0.113.0/28"], ["198.51.100.1", "2001:db8::/64"])
    assert found_in(taker, policy=listed) == [
        "Service/shop/web: externalIPs 2001:db8::7 is not in 203.0.113.0/28",
    ]
    assert found_in(taker, policy=vip_policy("warn", [], None)) == [
        "Service/shop/web: externalIPs 203.0.113.7 is not in any range, none is allowed",
        "Service/shop/web: externalIPs 2001:db8::7 is not in any range, none is allowed",
    ]


def test_being_on_the_list_does_not_make_an_address_of_a_node_free() -> None:
    listed = vip_policy("warn", ["0.0.0.0/0"], None)
    assert len(found_in(service(externalIPs=["10.96.0.1", "203.0.113.7"]), policy=listed)) == 1


def test_external_ips_that_the_configuration_ignores_are_ignored() -> None:
    off = config(featureGates={"AllowServiceExternalIPs": False})
    assert check_vips(cluster(service(externalIPs=["10.96.0.1"])), off, ANYWHERE) == ()


def test_a_claim_is_left_out_and_the_service_stays() -> None:
    taken = service(externalIPs=["10.96.0.1", "203.0.113.7"])
    kept, said = under_policy(cluster(taken), config(), vip_policy("omit", None, None))
    (web,) = [each for each in kept.services if each.name == "web"]
    assert web.external_ips == ("203.0.113.7",)
    claim = "Service/shop/web: externalIPs 10.96.0.1 is the cluster IP of default/kubernetes"
    assert said == (("claimed, but not theirs", f"{claim}; it is left out"),)
    same, said = under_policy(cluster(taken), config(), ANYWHERE)
    assert same == cluster(taken), "as kube-proxy does it"
    assert said == (("claimed, but not theirs", claim),)


def test_a_claim_can_stop_everything() -> None:
    with pytest.raises(RefusedVips, match=r"10\.96\.0\.1 is the cluster IP of default/kubernetes"):
        under_policy(cluster(service(externalIPs=["10.96.0.1"])), config(), vip_policy("refuse", None, None))
    clean = cluster(service(externalIPs=["203.0.113.7"]))
    assert under_policy(clean, config(), vip_policy("refuse", None, None)) == (clean, ())


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidPolicy, match="'drop' is not one of warn, omit, refuse"):
        vip_policy("drop", None, None)
    with pytest.raises(InvalidPolicy, match="external IPs: '10/8' is neither"):
        vip_policy("warn", ["10/8"], None)


def test_akp_render_says_it_leaves_it_out_or_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    objects = [service(externalIPs=["10.244.1.7"]), slice_of("web", "10.244.1.1"), node("n1")]
    (folder / "all.yaml").write_text(yaml.safe_dump_all(objects))
    argv = ["render", "--cluster", str(folder), "--config", str(ROOT / "examples/shop/kube-proxy.yaml")]
    argv += ["--all-nodes", "--output", str(tmp_path / "out")]
    rules = tmp_path / "out" / "n1" / "iptables-2-dispatch.rules"
    assert main(argv) == 0
    assert "warning: Service/shop/web: externalIPs 10.244.1.7 is in the pod CIDR" in capsys.readouterr().err
    assert "10.244.1.7" in rules.read_text()
    assert main([*argv, "--vips", "omit"]) == 0
    assert "it is left out" in capsys.readouterr().err
    assert "10.244.1.7" not in rules.read_text()
    assert main([*argv, "--vips", "refuse"]) == 2
    assert "akp: refused: Service/shop/web: externalIPs 10.244.1.7" in capsys.readouterr().err
    objects[0] = service(externalIPs=["203.0.113.2"])
    (folder / "all.yaml").write_text(yaml.safe_dump_all(objects))
    assert main([*argv, "--vips", "refuse"]) == 0
    (tmp_path / "facts.json").write_text(json.dumps({"addresses": FACTS["addresses"][:-1]}))
    assert main([*argv, "--vips", "refuse", "--facts", str(tmp_path / "facts.json")]) == 2
    assert "203.0.113.2 is an address of an interface of the node n1" in capsys.readouterr().err
    assert main([*argv, "--external-ips", "nonsense"]) == 2
    assert "neither a CIDR nor an address" in capsys.readouterr().err
