"""Questions as people ask them, on the command line; wrong ones get the nearest right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.explain.needed import COUNTED
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.build import CLUSTER_CIDR, Object, document, dual_stack, endpoint, node, port, service, slice_of
from tests.unit.clusters import clusters


def pod(address: str, name: str, **fields: Any) -> Object:
    return {**endpoint(address, **fields), "targetRef": {"kind": "Pod", "name": name, "namespace": "shop"}}


OBJECTS = [
    dual_stack("web", ports=[port(80, "http", nodePort=30080), port(53, "dns", "UDP")], type="NodePort"),
    slice_of("web", pod("10.244.1.1", "web-1"), pod("10.244.2.1", "web-2", node="n2"), pod("10.244.1.3", "web-3", ready=False)),
    slice_of("web", pod("fd00:10:244:1::1", "web-1"), name="web-6"),
    service("empty", clusterIP="10.96.7.9"),
    node("n1", "172.18.0.11", "fd00:172:18::11", zone="a"),
    node("n2", "172.18.0.12", "fd00:172:18::12", zone="b", pod_cidrs=("10.244.2.0/24",)),
]  # fmt: skip
# What only wrong questions ask for.
OTHERS = [
    service("db", clusterIP="None", clusterIPs=["None"]),
    service("mail", type="ExternalName", externalName="mail.test", clusterIP="", clusterIPs=[]),
    node("n3", "172.18.0.13", pod_cidrs=("10.244.3.0/24",)),
]


def written(directory: Path, objects: list[Object], **fields: Any) -> list[str]:
    """The options that name a cluster."""
    (directory / "cluster.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    config = document(**{"clusterCIDR": CLUSTER_CIDR, **fields})
    (directory / "config.yaml").write_text(json.dumps(config))
    return ["--cluster", str(directory / "cluster.json"), "--config", str(directory / "config.yaml")]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Asks; answers with exit code, stdout and stderr."""

    def asked(*question: str, objects: list[Object] = OBJECTS, command: str = "explain", **fields: Any) -> Any:
        code = main([command, *question, *written(tmp_path, objects, **fields)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return asked


def packet(source: str, to: str, on: str = "n1") -> list[str]:
    return ["--node", on, "--from", source, "--to", to]


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
@pytest.mark.parametrize(
    ("source", "to", "outcome", "endpoints", "masquerade"),
    [
        ("10.244.1.77", "10.96.7.7:80/tcp", "endpoints", {"10.244.1.1:8080", "10.244.2.1:8080"}, False),
        ("10.244.1.77", "10.96.7.7:80", "endpoints", {"10.244.1.1:8080", "10.244.2.1:8080"}, False),
        ("shop/web-2", "shop/web:http", "endpoints", {"10.244.1.1:8080", "10.244.2.1:8080"}, False),
        ("n1", "shop/web:80", "endpoints", {"10.244.1.1:8080", "10.244.2.1:8080"}, True),
        ("n2", "n1:30080", "endpoints", {"10.244.1.1:8080", "10.244.2.1:8080"}, True),
        ("fd00:10:244:1::77", "shop/web:http", "endpoints", {"[fd00:10:244:1::1]:8080"}, False),
        ("198.51.100.7", "172.18.0.11:30080/tcp", "endpoints", {"10.244.1.1:8080", "10.244.2.1:8080"}, True),
        ("10.244.1.77", "10.96.7.9:80/tcp", "refused", set(), False),
        ("10.244.1.77", "192.0.2.200:80/tcp", "passed", set(), False),
    ],
)
def test_answers(
    ask: Any, mode: str, source: str, to: str, outcome: str, endpoints: set[str], masquerade: bool
) -> None:
    code, out, _err = ask(*packet(source, to), "--json", mode=mode)
    told = json.loads(out)
    assert code == 0
    assert (told["outcome"], told["masquerade"]) == (outcome, masquerade)
    assert {each["address"] for each in told["endpoints"]} == endpoints
    assert not endpoints or sum(each["share"] for each in told["endpoints"]) == pytest.approx(1)
    assert told["service"] == (None if outcome == "passed" else "shop/empty" if outcome == "refused" else "shop/web")
    assert told["rules"] or outcome == "passed"
    assert told["problems"] == []


def test_each_endpoint_is_in_or_out_for_a_reason(ask: Any) -> None:
    _code, out, _err = ask(*packet("10.244.1.77", "shop/web:http"), "--json")
    told = json.loads(out)
    assert [(each["pod"], each["reason"]) for each in told["endpoints"]] == [("web-1", "ready"), ("web-2", "ready")]
    assert [(each["pod"], each["reason"]) for each in told["unused"]] == [("web-3", "notReady")]


def test_words_begin_with_the_verdict(ask: Any) -> None:
    _code, out, _err = ask(*packet("shop/web-1", "shop/web:http"))
    lines = out.splitlines()
    assert lines[0] == "delivered: to one of 2 endpoints of shop/web:http"
    assert "from pod shop/web-1 (10.244.1.1, on n1)" in lines[1]
    assert "source      kept: the endpoint sees 10.244.1.1, except if it is sent back to itself" in lines
    assert any(line.startswith("out  10.244.1.3:8080") and line.endswith("not ready") for line in lines)
    assert "the same, if it is sent to 10.244.1.1:8080" in lines


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (
            packet("10.244.1.1", "shop/web:http", on="x9"),
            "--node x9: the cluster has no such Node; it has n1, n2, n3",
        ),
        (
            packet("10.244.1.1", "shop/wep:http"),
            "shop/wep: the cluster has no such Service with a cluster IP; did you mean shop/web or",
        ),
        (packet("10.244.1.1", "web/web:http"), "did you mean shop/web?"),
        (packet("10.244.1.1", "shop/web"), "which port? One of shop/web:http/tcp, shop/web:dns/udp"),
        (packet("10.244.1.1", "shop/web:htp"), "the Service has no such port; did you mean shop/web:http/tcp or"),
        (packet("shop/web-9", "shop/web:http"), "no EndpointSlice names such a Pod; did you mean shop/web-"),
        (packet("n7", "shop/web:http"), "is no address, no Pod as NAMESPACE/NAME, and no Node"),
        (packet("10.244.1.1", "10.96.7.7"), "which port? Say for example --to 10.96.7.7:80/tcp"),
        (packet("10.244.1.1", "10.96.7.7:80/icmp"), "icmp is not one of tcp, udp, sctp"),
        (packet("10.244.1.1", "10.96.7.7:99999"), "a port is between 1 and 65535"),
        (packet("10.244.1.1", "[fd00:10:96::77]:80"), "are of different families"),
        (packet("10.244.1.1", "what"), "must be ADDRESS:PORT/PROTOCOL"),
        (packet("10.244.1.1", "web"), "did you mean shop/web:http?"),
        (packet("10.244.1.1", "web:dns"), "did you mean shop/web:dns?"),
        (packet("10.244.1.1", "web.shop:80"), "is neither an address nor a Node; did you mean shop/web:http?"),
        (packet("10.244.1.1", "web.shop.svc.cluster.local:53"), "did you mean shop/web:dns?"),
        (packet("10.244.1.1", "wep.shop:80"), "did you mean shop/web"),
        (packet("10.244.1.1", "http://10.96.7.7/cart"), "did you mean 10.96.7.7:80/tcp?"),
        (packet("10.244.1.1", "https://10.96.7.7:443"), "did you mean 10.96.7.7:443/tcp?"),
        (packet("10.244.1.1", "30080"), "did you mean n1:30080?"),
        (packet("10.244.1.1", ":30080"), "did you mean n1:30080?"),
        (packet("10.244.1.1", ":31999"), "did you mean ADDRESS:31999?"),
        (
            packet("10.244.1.1", "shop/db:sql"),
            "shop/db: is headless: clients get the addresses of its endpoints from DNS",
        ),
        (
            packet("10.244.1.1", "shop/mail:smtp"),
            "shop/mail: is of type ExternalName: clients are told the name mail.test",
        ),
        (packet("web-1", "shop/web:http"), "no Node; did you mean shop/web-1?"),
        (packet("shop/web", "shop/web:http"), "is a Service; ask for one of its Pods; it has shop/web-1, shop/web-2"),
        (packet("999.1.1.1", "shop/web:http"), "Nodes are n1, n2"),
        (packet("n3", "[fd00:10:96::77]:80"), "no address of the family of the destination; it has 172.18.0.13"),
    ],
)
def test_a_wrong_question_gets_the_nearest_right_one(ask: Any, question: list[str], said: str) -> None:
    code, _out, err = ask(*question, objects=[*OBJECTS, *OTHERS])
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("10.96.7.7:81", "Services answer there at 10.96.7.7:80/tcp (shop/web), 10.96.7.7:53/udp (shop/web)"),
        ("10.96.7.6:80", "the nearest one with that port is 10.96.7.7:80/tcp (shop/web)"),
        ("10.244.2.1:8080", "10.244.2.1 is an endpoint of shop/web: ask for that Service"),
        ("172.18.0.11:30081", "Services answer there at 172.18.0.11:30080/tcp (shop/web)"),
    ],
)
def test_where_no_service_is_the_nearest_is_named(ask: Any, to: str, said: str) -> None:
    code, out, _err = ask(*packet("10.244.1.1", to))
    assert code == 0
    assert out.startswith("passed on: no Service has this destination")
    assert said in out


def test_a_service_is_found_however_its_addresses_are_written(ask: Any) -> None:
    odd = service(
        "odd", clusterIP="10.96.7.10", externalIPs=["198.051.100.009", "2001:DB8:51:0::9", "::ffff:198.51.100.8"]
    )
    objects = [*OBJECTS, odd, slice_of("odd", endpoint("10.244.1.9"))]
    for to in ("198.51.100.9:80", "198.51.100.8:80"):
        _code, out, _err = ask(*packet("10.244.1.77", to), "--json", objects=objects)
        assert (json.loads(out)["service"], json.loads(out)["outcome"]) == ("shop/odd", "endpoints")


@pytest.mark.parametrize(
    ("source", "masquerade"),
    [
        ("fd00:10:244:1::77", False),  # the Node tells only its pod CIDR of IPv4
        ("fd00:10:244:2::77", True),  # of another node
        ("2001:db8::7", True),
    ],
)
def test_a_pod_of_a_node_that_does_not_tell_its_pod_cidr(ask: Any, source: str, masquerade: bool) -> None:
    objects = [*OBJECTS[:-1], node("n2", "172.18.0.12", pod_cidrs=("10.244.2.0/24", "fd00:10:244:2::/64"))]
    by_interface = {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "cali"}}
    _code, out, _err = ask(*packet(source, "[fd00:10:96::77]:80"), "--json", objects=objects, **by_interface)
    assert json.loads(out)["masquerade"] is masquerade


def test_a_cluster_must_be_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *packet("10.0.0.1", "10.0.0.2:80")]) == 2
    assert "one of --cluster PATH, --kubeconfig FILE and --dir DIR" in capsys.readouterr().err


@given(objects=clusters(), mode=st.sampled_from(["iptables", "nftables", "ipvs"]), many=st.booleans())
@settings(max_examples=25, deadline=None)
def test_what_is_not_read_does_not_matter(tmp_path_factory: Any, objects: list[Object], mode: str, many: bool) -> None:
    """The answer from what a question needs is that from the whole cluster, to the letter."""
    from agentless_kube_proxy.cli import explain as command
    from agentless_kube_proxy.cli import parser
    from agentless_kube_proxy.cli.source import Source
    from agentless_kube_proxy.explain.answer import as_json

    large = [
        service("many", "other", clusterIP="10.96.9.9"),
        slice_of("many", *(f"10.200.{i // 250}.{i % 250 + 1}" for i in range(COUNTED + 9)), namespace="other"),
    ]
    options = written(tmp_path_factory.mktemp("cluster"), [*objects, *(large if many else [])], mode=mode)
    for obj in objects:
        if obj["kind"] != "Service":
            continue
        for each in obj["spec"]["ports"]:
            to = f"{obj['metadata']['namespace']}/{obj['metadata']['name']}:{each['port']}"
            args = parser("explain").parse_args(["explain", *packet("n1", to), *options])
            source = Source(args)
            quick, _help = command._answer(args, source)
            whole = source.intent(source.snapshot(), "n1").place("n1")
            told, _help = command._asked(args, source, source.snapshot(), whole, command.parse_destination(to))
            assert as_json(quick) == as_json(told)
