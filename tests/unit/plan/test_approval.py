"""Plans: what they hold for, and who agreed to what."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.manifest import bundle_digest
from agentless_kube_proxy.bundle.release import sign
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.cluster.record import peek, record_of
from agentless_kube_proxy.plan.approval import (
    Approval,
    NotApproved,
    approval_of,
    beside,
    plan_file,
    plan_text,
    uncovered,
    write_plan,
)
from agentless_kube_proxy.plan.report import plan_digest, plan_of, service_changes
from agentless_kube_proxy.tasks.directory import WorkDirectory, read_json, write_json
from agentless_kube_proxy.tasks.notes import Pushed

from tests.node.signing import new_key
from tests.unit.build import render, service

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64


def plan(**hosts: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "akp/v1", "kind": "Plan", "snapshot": "5" * 64, "hosts": hosts}


CHANGES = {"node": "n1", "previous": OLD, "generation": NEW, "changed": True, "changes": []}
FIRST = {**CHANGES, "previous": None}
# Of a host that was not even asked what it would become, as it had it.
STAYS = {"node": None, "previous": None, "generation": NEW, "changed": False, "changes": None}


@pytest.mark.parametrize(
    ("entry", "has"), [(CHANGES, OLD), (CHANGES, NEW), (FIRST, ""), (FIRST, NEW), (STAYS, NEW)], ids=str
)
def test_a_plan_holds_for_hosts_as_they_were_and_for_those_that_have_it(entry: dict[str, Any], has: str) -> None:
    assert beside(plan(n1=entry), {"n1": NEW}, {"n1": has}) == {}


@pytest.mark.parametrize(
    ("entry", "has", "told"),
    [
        (CHANGES, OTHER, f"has generation {OTHER}, but the plan was made when it had generation {OLD}, and says"),
        (CHANGES, "", f"has nothing applied, but the plan was made when it had generation {OLD}, and says"),
        (FIRST, OTHER, f"has generation {OTHER}, but the plan was made when it had nothing applied, and says"),
        (STAYS, OLD, f"has generation {OLD}, but the plan was made when it had generation {NEW}, and says"),
    ],
    ids=str,
)
def test_a_plan_does_not_hold_for_hosts_that_became_something_else(entry: dict[str, Any], has: str, told: str) -> None:
    wrong = beside(plan(n1=entry, n2=CHANGES), {"n1": NEW, "n2": NEW}, {"n1": has, "n2": OLD})
    assert set(wrong) == {"n1"}
    assert wrong["n1"].startswith(told)
    assert wrong["n1"].endswith("make a new plan")


def test_a_plan_is_for_its_hosts_and_its_generations() -> None:
    wrong = beside(plan(n1=CHANGES), {"n1": OTHER, "n9": NEW}, {"n1": OLD, "n9": ""})
    assert wrong == {
        "n1": f"would get generation {OTHER}, but the plan says {NEW}; make a new plan",
        "n9": "is not in the plan; make a new plan",
    }


SHOWN = "on n1:\n  + shop/web:http tcp IPv4\n      + clusterIP 10.96.7.7:80\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A plan that adds a Service to a node, as plan_services leaves it."""
    directory = WorkDirectory(tmp_path / "akp").make()
    state = render(service("web"))
    write_bundle(state, directory.bundles / "n1")
    cluster = tmp_path / "cluster.json"
    record_of([service("web")], "test").write(cluster)
    changes = service_changes((), (directory.bundles / "n1" / "services.jsonl").read_text().splitlines())
    digest = bundle_digest(directory.bundles / "n1")
    pushed = Pushed(1.0, 2.0, changed=True, node="n1", generation=state.generation, digest=digest, changes=changes)
    content = plan_of([("n1", pushed)], peek(cluster))
    path = tmp_path / "plan.json"
    write_plan(path, content, cluster, "shop", ["what plan_services said"])
    return path


@pytest.mark.parametrize("text", ["", "a release"], ids=["by digest", "by signatures"])
def test_a_plan_is_for_its_bundles_not_only_for_what_they_serve(written: Path, tmp_path: Path, text: str) -> None:
    content = read_json(written) or {}
    bundle = tmp_path / "akp" / "bundles" / "n1"
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert content["hosts"]["n1"]["digest"] == bundle_digest(bundle)
    agreed = Approval(content, (), text)
    assert uncovered(agreed, {"n1": bundle}) == {}
    # The same rules, with another node program.
    write_json(bundle / "manifest.json", {**manifest, "files": {**manifest["files"], "akp-node": f"{OTHER} 1"}})
    wrong = uncovered(agreed, {"n1": bundle})
    assert wrong["n1"].startswith("would get another bundle of the generation that the plan says")
    # What a plan leaves as it is may be put right, but no signature is good for that.
    stays = Approval(plan(n1=STAYS), (), text)
    assert uncovered(stays, {"n1": bundle}) == (
        {"n1": "its bundle is not in the signed release; make a new plan"} if text else {}
    )


@pytest.fixture
def alice(tmp_path: Path) -> Path:
    return new_key(tmp_path / "keys", "alice")


@pytest.fixture
def allowed(alice: Path, tmp_path: Path) -> Path:
    file = tmp_path / "allowed_signers"
    file.write_text(f"alice {alice.with_suffix('.pub').read_text()}")
    return file


def akp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [str(Path(sys.executable).parent / "akp"), "approve", *map(str, arguments)]
    return subprocess.run(argv, check=False, capture_output=True, text=True)


def forge(path: Path, **fields: Any) -> None:
    """Change a plan, as somebody would who knows how its digest is made."""
    content = {**(read_json(path) or {}), **fields}
    write_json(path, {**content, "digest": plan_digest(content)})


def reissue(path: Path) -> None:
    """Make the release of a changed plan fit it again."""
    release = plan_file(path, "release")
    content = {key: value for key, value in (read_json(path) or {}).items() if key != "release"}
    release.write_text(re.sub("note plan .*", f"note plan {plan_digest(content)}", release.read_text()))
    forge(path, release=hashlib.sha256(release.read_bytes()).hexdigest())


def test_what_belongs_to_no_service_is_shown_before_services(written: Path) -> None:
    plan = read_json(written) or {}
    titles = {"service": "node: settings", "port": "", "protocol": "", "family": ""}
    setting = {"action": "changed", **titles, "details": ["+ iptables.masqueradeAll true"]}
    (group,) = plan["changes"]
    told = plan_text({**plan, "changes": [{**group, "changes": [setting, *group["changes"]]}]})
    assert told[:4] == [
        "on n1:",
        "  ~ node: settings",
        "      + iptables.masqueradeAll true",
        "  + shop/web:http tcp IPv4",
    ]


def undersign(path: Path, line: str) -> None:
    """Let the release of a plan let a node take something more; plan and release still name each other."""
    release = plan_file(path, "release")
    lines = release.read_text().splitlines()
    first = next(index for index, each in enumerate(lines) if each.startswith("bundle "))
    release.write_text("\n".join([*lines[:first], line, *lines[first:], ""]))
    forge(path, release=hashlib.sha256(release.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    "line",
    [
        f"bundle n1 {OTHER} {OTHER}",
        f"bundle n9 {OTHER} {OTHER}",
        f"delta n1 {OLD} {OTHER} {OTHER}",
        f"object {OTHER} {OTHER} 100",
        "note nothing to see here",
    ],
)
def test_a_release_lets_nodes_take_what_the_plan_says_and_nothing_more(
    written: Path, alice: Path, allowed: Path, line: str
) -> None:
    undersign(written, line)
    refused = akp(written, "--key", alice, "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "plan.release: is the release of another plan" in refused.stderr
    plan_file(written, "release.sig").write_text(sign(plan_file(written, "release").read_text(), alice))
    with pytest.raises(NotApproved, match="is the release of another plan"):
        approval_of(written, "", allowed, 1)


def test_a_bundle_that_is_named_twice_is_no_plan(written: Path, alice: Path) -> None:
    (line,) = [each for each in plan_file(written, "release").read_text().splitlines() if each.startswith("bundle")]
    undersign(written, line.replace(line.split()[3], OTHER))
    assert "is the release of another plan" in akp(written, "--key", alice, "--yes").stderr


def test_a_host_that_is_called_otherwise_than_its_node_is_shown_with_it(written: Path) -> None:
    hosts = json.loads(written.read_text())["hosts"]
    forge(written, hosts={"edge-1": hosts["n1"]})
    reissue(written)
    assert "on edge-1 (Node n1):" in akp(written).stdout


def test_a_plan_does_not_speak_to_the_terminal(written: Path) -> None:
    hosts = json.loads(written.read_text())["hosts"]
    forge(written, hosts={"n1\x1b[8m": hosts["n1"]})
    reissue(written)
    shown = akp(written).stdout
    assert "on n1\\x1b[8m (Node n1):" in shown
    assert "\x1b" not in shown


def test_what_is_shown_is_what_is_signed(written: Path, alice: Path, allowed: Path) -> None:
    plan_file(written, "txt").write_text("no node would change\n")
    done = akp(written, "--key", alice, "--yes", "--allowed-signers", allowed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(SHOWN)
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
    assert re.search(f"\nfor the cluster shop, made at {when}, good until {when}\n", done.stdout)
    assert "no node would change" not in done.stdout
    assert done.stdout.endswith("signed by 1: alice\n")
    assert approval_of(written, "", allowed, 1).approvers == ("alice",)


def test_a_signature_is_good_for_no_other_plan(written: Path, alice: Path, allowed: Path) -> None:
    genuine = written.read_text()
    forge(written, changes=[])
    refused = akp(written, "--key", alice, "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "plan.release: is the release of another plan" in refused.stderr
    # Who has the release made for the forged plan gets a signature of that, which is none of the genuine one.
    release = plan_file(written, "release")
    text = release.read_text()
    reissue(written)
    assert "rules of no Service" in akp(written, "--key", alice, "--yes").stdout
    release.write_text(text)
    written.write_text(genuine)
    shown = akp(written, "--allowed-signers", allowed).stdout
    assert shown.startswith(SHOWN)
    assert shown.endswith("\nsigned by 0: none\n")
    with pytest.raises(NotApproved, match="0 of 1 approvers have signed it"):
        approval_of(written, "", allowed, 1)


def test_a_plan_that_was_changed_is_not_followed(written: Path, alice: Path, allowed: Path) -> None:
    akp(written, "--key", alice, "--yes")
    hosts = (read_json(written) or {})["hosts"]
    write_json(written, {**(read_json(written) or {}), "hosts": {}})
    with pytest.raises(NotApproved, match="was changed, its digest does not fit"):
        approval_of(written, "", allowed, 1)
    forge(written, hosts={"n1": {**hosts["n1"], "previous": "0" * 64}})
    with pytest.raises(NotApproved, match="is the release of another plan"):
        approval_of(written, "", allowed, 1)


def test_a_plan_that_expired_is_neither_signed_nor_followed(written: Path, alice: Path, allowed: Path) -> None:
    release = plan_file(written, "release")
    release.write_text(re.sub("expires .*", "expires 1000000000", release.read_text()))
    forge(written, release=hashlib.sha256(release.read_bytes()).hexdigest())
    plan_file(written, "release.sig").write_text(sign(release.read_text(), alice))
    digest = (read_json(written) or {})["digest"]
    told = r"plan\.json: was good until 2001-09-09 01:46:40Z, and has expired; make a new plan"
    for arguments in (("", allowed), (digest, None)):
        with pytest.raises(NotApproved, match=told):
            approval_of(written, *arguments, 1)
    refused = akp(written, "--key", alice, "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.search(told, refused.stderr)


def test_nobody_is_not_enough(written: Path, allowed: Path) -> None:
    for wanted in (0, -1):
        with pytest.raises(NotApproved, match=f"kube_proxy_signatures is {wanted}: a plan needs one at least"):
            approval_of(written, "", allowed, wanted)
    with pytest.raises(NotApproved, match="0 of 1 approvers"):
        approval_of(written, "", allowed, 1)
    with pytest.raises(NotApproved, match="who agreed to it"):
        approval_of(written, "", None, 1)
    with pytest.raises(NotApproved, match=f"but {'0' * 64} was approved"):
        approval_of(written, "0" * 64, None, 1)


def test_files_that_are_not_there_are_named(written: Path, alice: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    done = akp(written, "--allowed-signers", missing, "--key", alice, "--yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{missing}: there are no allowed signers" in done.stderr
    assert not list(tmp_path.glob("*.sig"))
    with pytest.raises(NotApproved, match=r"nope\.json: there is no plan"):
        approval_of(tmp_path / "nope.json", "", None, 1)
    with pytest.raises(NotApproved, match=r"cluster\.json: is no plan"):
        approval_of(tmp_path / "cluster.json", "", None, 1)
