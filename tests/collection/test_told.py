"""What commands say: all errors at once, what they found, and what there is instead of what was asked for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .play import BIN, SHOP, Run, playbook

CONFIG = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())


@pytest.fixture
def publish(tmp_path: Path) -> Any:
    """publish_services --check, with a configuration; it needs no nodes."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)

    def run(*arguments: str, check: bool = True, **fields: Any) -> Run:
        variables = {
            "kube_proxy_config": {**CONFIG, **fields},
            "kube_proxy_publish_path": str(tmp_path / "www"),
            "kube_proxy_publish_keys": [str(tmp_path / "key")],
        }
        return playbook(
            "publish_services", Path("localhost,"), tmp_path / "work", *arguments, variables=variables, check=check
        )

    return run


def test_all_errors_of_a_configuration_are_named_at_once(publish: Any) -> None:
    wrong = publish("--check", check=False, mode="ebpf", conntrack={"min": "x"}, nodePortAddresses=["10.0.0.1"])
    said = " ".join(wrong.output.split())
    assert wrong.code == 2
    for each in (
        "conntrack.min: must be an integer, not 'x'",
        "mode: 'ebpf' is not one of iptables, ipvs, nftables, userspace",
        "nodePortAddresses[0]: '10.0.0.1' is neither a CIDR nor one of primary, localhost, all",
    ):
        assert each in said, each


def test_a_field_that_kube_proxy_does_not_know_is_a_warning_that_names_it(publish: Any) -> None:
    run = publish("--check", futureField={"a": 1}, iptables={"masqBit": 3})
    said = " ".join(run.output.split())
    assert "KubeProxyConfiguration: futureField: is not a field of KubeProxyConfiguration" in said
    assert "KubeProxyConfiguration: iptables.masqBit: is not a field of KubeProxyConfiguration" in said


def test_publishing_says_what_it_found_and_what_it_did(publish: Any, tmp_path: Path) -> None:
    would = " ".join(publish("--check").output.split())
    assert "3 nodes: 3 would be given a new state (n1, n2, n3), 0 would be signed anew, 0 unchanged" in would
    assert not (tmp_path / "www" / "n1.release").exists()
    assert "3 nodes: 3 given a new state (n1, n2, n3)" in " ".join(publish().output.split())
    again = " ".join(publish("--check").output.split())
    assert "3 nodes: 0 would be given a new state, 0 would be signed anew, 3 unchanged" in again


def names(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "akp"), "names", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(home)},
    )


def test_names_of_a_port_that_does_not_exist_are_not_given(tmp_path: Path) -> None:
    wrong = names("shop/frontend:web", "--cluster", str(SHOP), home=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert (
        "Service shop/frontend has no port web of protocol tcp; it has shop/frontend:http --protocol tcp"
        in wrong.stderr
    )
    none = names("shop/front", "--cluster", str(SHOP), home=tmp_path)
    assert "namespace shop has no Service front with a cluster IP; it has admin, cart, catalog" in none.stderr
    # Where nothing is known of the cluster, names are names; after a run, what it saw is compared.
    assert names("shop/frontend:web", home=tmp_path).stderr == ""
    left = tmp_path / ".akp" / "default"
    left.mkdir(parents=True)
    playbook("snapshot_services", Path("localhost,"), tmp_path / "work")
    shutil.copy(tmp_path / "work" / "akp" / "snapshot.json", left)
    young = names("shop/frontend:web", home=tmp_path)
    assert young.returncode == 0
    assert young.stderr.startswith("warning: Service shop/frontend has no port web of protocol tcp")
    assert "KUBE-SVC-" in young.stdout
