"""Windows nodes of a mixed cluster: what the commands that look at rules say of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agentless_kube_proxy.cli import main

from tests.unit.build import document, endpoint, node, port, service, slice_of

HERE, THERE = "10.244.1.5", "10.244.2.5"


@pytest.fixture
def cluster(tmp_path: Path) -> list[str]:
    """The options that name a cluster with one node of Linux, and one of Windows."""
    windows = node("w1", "172.18.0.21")
    windows["metadata"]["labels"]["kubernetes.io/os"] = "windows"
    web = service(type="LoadBalancer", ports=[port(80, nodePort=30080)], ingress=("192.0.2.8",))
    web["spec"] |= {"externalTrafficPolicy": "Local", "healthCheckNodePort": 31000}
    both = slice_of("web", endpoint(HERE, node="w1"), endpoint(THERE, node="n2"))
    items = [windows, node("n2", "172.18.0.22"), web, both, service("idle", clusterIP="10.96.7.8")]
    (tmp_path / "cluster.json").write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": items}))
    config = document(mode="nftables", winkernel={"networkName": "pods"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ["--cluster", str(tmp_path / "cluster.json"), "--config", str(tmp_path / "config.json")]


WEB = "10.96.7.7:80/tcp"


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (WEB, {f"{HERE}:8080": 0.5, f"{THERE}:8080": 0.5}),
        ("shop/web:http", {f"{HERE}:8080": 0.5, f"{THERE}:8080": 0.5}),
        ("192.0.2.8:80", {f"{HERE}:8080": 1.0}),  # the external policy is Local
        ("w1:30080", {f"{HERE}:8080": 1.0}),
        ("n2:30080", {}),  # another node's
        ("10.96.7.7:80/udp", {}),
        ("10.96.7.8:80", {}),  # no endpoints
    ],
)
def test_explain_finds_the_load_balancer(
    cluster: list[str], capsys: pytest.CaptureFixture[str], to: str, expected: dict[str, float]
) -> None:
    assert main(["explain", *cluster, "--node", "w1", "--from", THERE, "--to", to, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {each["address"]: each["share"] for each in told["endpoints"]} == expected
    assert told["mode"] == "kernelspace"
    assert told["outcome"] == ("endpoints" if expected else "passed")
    assert told["service"] == ("shop/web" if expected else None)
    assert len(told["rules"]) == bool(expected)


def test_explain_says_that_it_is_a_preview(cluster: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for to in (WEB, "1.2.3.4:5"):
        assert main(["explain", *cluster, "--node", "w1", "--from", THERE, "--to", to]) == 0
        assert "a preview, never run on Windows" in capsys.readouterr().out
    assert main(["explain", *cluster, "--node", "w1", "--from", THERE, "--to", WEB, "--live"]) == 2
    assert "w1 runs Windows" in capsys.readouterr().err


def test_prove_leaves_windows_nodes_out(cluster: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", *cluster]) == 0
    assert "2 service ports of 1 nodes" in capsys.readouterr().out
    assert main(["prove", *cluster, "--node", "w1"]) == 2
    assert "--node w1: it runs Windows" in capsys.readouterr().err


def test_service_shows_the_documents(cluster: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", *cluster, "shop/web", "--node", "w1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mode"] == "kernelspace"
    assert len(told["objects"]) == 3


def test_bundles_of_a_mixed_cluster_are_compared(
    cluster: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each node is rendered in its own mode; the health check that no Windows node answers is warned about."""
    assert main(["render", *cluster, "--all-nodes", "--output", str(tmp_path / "old")]) == 0
    told = capsys.readouterr()
    assert "w1  kernelspace" in told.out
    assert "n2  nftables" in told.out
    assert "node w1: Service/shop/web: load balancers get no answer at healthCheckNodePort there" in told.err
    file = tmp_path / "cluster.json"
    file.write_text(file.read_text().replace(THERE, "10.244.2.6"))
    main(["render", *cluster, "--all-nodes", "--output", str(tmp_path / "new")])
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert "on w1:\n~ shop/web:http tcp IPv4\n    - endpoint 10.244.2.5:8080" in capsys.readouterr().out


def test_the_program_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["program", "--mode", "kernelspace"]) == 0
    assert "A PREVIEW, never run on Windows" in capsys.readouterr().out
