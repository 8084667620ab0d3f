"""What a watch may push without a plan, and in whose name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.release import DeltaEntry
from agentless_kube_proxy.cluster.record import record_of
from agentless_kube_proxy.plan.consent import Consent, NoConsent
from agentless_kube_proxy.plan.progress import begin
from agentless_kube_proxy.plan.removal_limit import Frontends
from agentless_kube_proxy.tasks.directory import WorkDirectory

from tests.unit.build import render, service, slice_of, snapshot


@pytest.fixture
def approved(tmp_path: Path) -> WorkDirectory:
    directory = WorkDirectory(tmp_path)
    record_of([service("web"), slice_of("web", "10.0.0.1")], "test").write(directory.approved)
    return directory


def test_without_a_policy_everything_may_be_pushed(tmp_path: Path) -> None:
    now = snapshot(service("web"), service("new"))
    assert Consent(WorkDirectory(tmp_path), {}).allowed(now) == (now, ())


def test_where_every_change_needs_a_plan_nothing_may(approved: WorkDirectory) -> None:
    with pytest.raises(NoConsent, match="every change needs an approved plan"):
        Consent(approved, {"approval": "all"})


def test_endpoints_need_a_first_plan(tmp_path: Path) -> None:
    with pytest.raises(NoConsent, match="run plan_services"):
        Consent(WorkDirectory(tmp_path), {"approval": "frontends"})


def test_services_wait_for_approval_and_endpoints_do_not(approved: WorkDirectory) -> None:
    consent = Consent(approved, {"approval": "frontends"})
    now = snapshot(service("web", externalIPs=["192.0.2.1"]), service("new"), slice_of("web", "10.0.0.2"))
    allowed, waiting = consent.allowed(now)
    assert allowed.services == snapshot(service("web")).services
    assert allowed.slices == now.slices
    assert waiting == ("Service/shop/new waits for approval", "Service/shop/web waits for approval")
    assert consent.allowed(now)[0].services is allowed.services, "so that nothing is decided anew"


def test_a_plan_that_is_followed_later_is_noticed(approved: WorkDirectory) -> None:
    consent = Consent(approved, {"approval": "frontends"})
    now = snapshot(service("web"), service("new"))
    consent.allowed(now)
    assert not consent.renewed
    record_of([service("web"), service("new")], "test").write(approved.approved)
    assert consent.renewed
    assert consent.allowed(now)[1] == ()


def test_hosts_that_took_a_plan_which_others_do_not_have_keep_its_services(approved: WorkDirectory) -> None:
    consent = Consent(approved, {"approval": "frontends"})
    now = snapshot(service("web"), service("new"), service("newer"), slice_of("web", "10.0.0.2"))
    assert consent.allowed(now)[0].services == snapshot(service("web")).services
    assert consent.ahead(now) is None
    frontends = Frontends(approved.frontends)
    target = render(service("web"), service("new"))
    frontends.learn(target, "")
    plan = {"digest": "d", "hosts": {"n1": {"generation": target.generation}, "n2": {"generation": "0" * 64}}}
    cluster = approved.path / "cluster.json"
    record_of([service("web"), service("new"), slice_of("web", "10.0.0.1")], "test").write(cluster)
    assert not consent.under_way
    begin(approved, plan, cluster, frontends)
    assert consent.under_way, "this is the process that started this one"
    assert consent.renewed
    assert consent.allowed(now)[0].services == snapshot(service("web")).services
    ahead = consent.ahead(now)
    assert ahead is not None
    assert ahead.services == snapshot(service("web"), service("new")).services
    assert ahead.slices == now.slices
    name = frontends.name(target.generation)
    assert [consent.took_plan(host, name) for host in ("n1", "n2", "n3")] == [True, False, False]
    assert not consent.took_plan("n2", "")
    assert Consent(approved, {}).under_way, "what nobody has to approve waits as well: they write the same bundles"


def test_what_is_pushed_is_signed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    consent = Consent(WorkDirectory(tmp_path), {"signing_key": str(key), "cluster_name": "shop"})
    files = dict(consent.signed(DeltaEntry("n1", "a" * 64, "b" * 64, "c" * 64)))
    text = files["release"].decode()
    assert "cluster shop\n" in text
    assert f"delta n1 {'a' * 64} {'b' * 64} {'c' * 64}\n" in text
    (tmp_path / "signers").write_text(f"automation {key.with_suffix('.pub').read_text()}")
    (tmp_path / "release.sig").write_bytes(files["release.sig"])
    argv = ["ssh-keygen", "-Y", "verify", "-f", str(tmp_path / "signers"), "-I", "automation", "-n", "akp-release"]
    done = subprocess.run([*argv, "-s", str(tmp_path / "release.sig")], input=text.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
