"""akp service and akp prove, from files; since when a node has a Service, from a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.carry.live import printed
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.explain.ruleset import NoRules
from agentless_kube_proxy.explain.service import history
from agentless_kube_proxy.ledger import append

from tests.unit.build import service

from .test_question import OBJECTS, packet, written


def test_a_service_with_its_endpoints_by_node_and_its_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "shop/web", *written(tmp_path, OBJECTS), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    http = next(each for each in told["ports"] if (each["port"], each["family"]) == ("http", "IPv4"))
    assert {(each["kind"], each["address"]) for each in http["frontends"]} == {
        ("cluster IP", "10.96.7.7:80"),
        ("node port", "30080"),
    }
    assert [(each["node"], [one["pod"] for one in each["endpoints"]]) for each in http["endpoints"]] == [
        ("n1", ["web-1", "web-3"]),
        ("n2", ["web-2"]),
    ]
    own = [each["object"] for each in told["objects"]]
    assert any(name.startswith("IPv4 nat KUBE-SVC-") for name in own)
    assert "IPv4 nat KUBE-SERVICES" in own
    assert main(["service", "shop/web", *written(tmp_path, OBJECTS)]) == 0
    assert capsys.readouterr().out.startswith("shop/web, type NodePort\n")
    assert main(["service", "shop/wep", *written(tmp_path, OBJECTS)]) == 2
    assert "did you mean shop/web or" in capsys.readouterr().err


def test_since_when_by_which_run_and_by_whose_approval(tmp_path: Path) -> None:
    frontends = tmp_path / "frontends"
    frontends.mkdir()
    lines = {"1": '{"service":"shop/old"}\n', "2": '{"service":"shop/web"}\n', "3": '{"service":"shop/web"}\n{"x":1}\n'}
    for generation, text in lines.items():
        (frontends / f"g-{generation}").write_text(text)
    for run, generation in enumerate(lines, 1):
        entry = {"run": f"run-{run}", "who": {"user": "bob"}, "action": "apply", "result": "applied"}
        append(tmp_path / "ledger.jsonl", {**entry, "approvers": ["carol"], "nodes": {"n1": {"after": generation}}})
    (told,) = history(tmp_path, "shop/web")
    assert (told["node"], told["served"], told["run"], told["who"]) == ("n1", True, "run-2", "bob")
    assert told["approvers"] == ["carol"]
    (old,) = history(tmp_path, "shop/old")
    assert (old["served"], old["run"]) == (False, "run-2")
    (frontends / "g-3").unlink()
    (lost,) = history(tmp_path, "shop/web")
    assert (lost["served"], lost["run"]) == (None, "run-3"), "what is no longer known is not told to be gone"


def test_a_service_is_told_with_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = written(tmp_path, OBJECTS)
    assert main(["service", "shop/web", *options]) == 0
    assert capsys.readouterr().out.endswith("ask with --dir, the working directory of runs\n")
    assert main(["service", "shop/web", *options, "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("the ledger has no run that gave it to a node\n")
    (tmp_path / "frontends").mkdir()
    (tmp_path / "frontends" / "g-1").write_text('{"service":"shop/web"}\n')
    for host, approvers in (("n1", ["carol"]), ("node-2", [])):
        change = {host: {"after": "1", "node": host[-2:].replace("-", "n")}}
        entry = {
            "run": "4711-1",
            "who": {"user": "bob"},
            "result": "ok",
            "approvers": approvers,
            "reason": "it goes live",
        }
        append(tmp_path / "ledger.jsonl", {**entry, "nodes": change})
    assert main(["service", "shop/web", *options, "--dir", str(tmp_path)]) == 0
    one, other = capsys.readouterr().out.splitlines()[-2:]
    assert one.split()[:3] == ["n1", "served", "since"]
    assert one.endswith("run 4711-1 of bob  approved by carol  it goes live")
    assert other.split()[:3] == ["n2", "served", "since"]
    assert other.endswith("run 4711-1 of bob  without approval   it goes live")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("web", "web: must be NAMESPACE/NAME; did you mean shop/web?"),
        ("shop/db", "shop/db: is headless: "),
        ("other/web", "did you mean shop/web?"),
    ],
)
def test_a_service_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, said: str) -> None:
    headless = service("db", clusterIP="None", clusterIPs=["None"])
    assert main(["service", asked, *written(tmp_path, [*OBJECTS, headless])]) == 2
    assert said in capsys.readouterr().err


def test_a_proof_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", *written(tmp_path, OBJECTS), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is True
    assert [each["claim"] for each in told["claims"]] == ["rules", "modes", "frontends", "addresses"]


def test_a_proof_fails_with_a_counterexample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thief = service("thief", clusterIP="10.96.7.8", externalIPs=["172.18.0.12"])
    assert main(["prove", *written(tmp_path, [*OBJECTS, thief])]) == 1
    out = capsys.readouterr().out
    assert out.startswith("not proved: 172.18.0.12 is external IP of Service shop/thief and an address of node n2\n")


def test_bundles_are_proved_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = written(tmp_path, OBJECTS)
    bundles = tmp_path / "bundles"
    assert main(["render", *options, "--all-nodes", "--output", str(bundles)]) == 0
    assert main(["prove", *options, "--bundle", str(bundles)]) == 0
    question = ["explain", *packet("10.244.1.77", "shop/web:http"), *options, "--live", str(bundles / "n1")]
    assert main(question) == 0
    assert "the kernel does with this packet what was meant" in capsys.readouterr().out
    file = bundles / "n1" / "iptables-1-endpoints.rules"
    file.write_text(
        file.read_text().replace("DNAT --to-destination 10.244.2.1:8080", "DNAT --to-destination 10.9.9.9:1")
    )
    assert main(["prove", *options, "--bundle", str(bundles)]) == 1
    assert "10.9.9.9:1" in capsys.readouterr().out
    assert main(question) == 1
    out = capsys.readouterr().out
    assert "= live: does: 50.0% to 10.244.1.1:8080, 50.0% to 10.9.9.9:1; meant: " in out


def test_what_a_node_prints_is_read_below_its_marks() -> None:
    files: dict[str, Any] = dict(
        printed("### akp iptables.rules\n*nat\nCOMMIT\n### akp ipvs.rules\n### akp ip.batch\n\n").files
    )
    assert files == {"iptables.rules": "*nat\nCOMMIT\n"}
    with pytest.raises(NoRules):
        printed("### akp iptables.rules\n")
