"""A control host where something is not installed: every plugin names it, with the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .play import BIN, ROOT, ansible_environment, playbook

PIP = f"{sys.executable} -m pip install 'kubernetes>=30'"
WATCH = "import sys; from agentless_kube_proxy.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """A path on which the package kubernetes cannot be found."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "kubernetes.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'kubernetes'\", name='kubernetes')\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_reading_a_cluster_names_the_package(without: dict[str, str], tmp_path: Path) -> None:
    variables = {"kube_proxy_cluster_dir": "", "kube_proxy_api_host": "https://127.0.0.1:1"}
    play = tmp_path / "wait.yml"
    play.write_text(
        "- {hosts: localhost, gather_facts: false, tasks: [{agentless.kube_proxy.wait_for_change: {timeout: 1}}]}\n"
    )
    for name in ("snapshot_services", str(play)):
        run = playbook(
            name, Path("localhost,"), tmp_path / "work", variables=variables, environment=without, check=False
        )
        assert run.code == 2
        assert PIP in " ".join(run.output.split()), run.output


def test_netaddr_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "netaddr.py").write_text("raise ModuleNotFoundError(\"No module named 'netaddr'\", name='netaddr')\n")
    environment = {"PYTHONPATH": str(folder)}
    config = tmp_path / "config.yml"
    config.write_text(
        "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration, clusterCIDR: 10.244.7.1/16}\n"
    )
    # The first playbook that reads a configuration, and needs no node for it.
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    variables = {
        "kube_proxy_config": str(config),
        "kube_proxy_publish_path": str(tmp_path / "published"),
        "kube_proxy_publish_keys": [str(key)],
    }
    run = playbook(
        "publish_services",
        Path("localhost,"),
        tmp_path / "work",
        variables=variables,
        environment=environment,
        check=False,
    )
    assert run.code != 0
    assert f"{sys.executable} -m pip install 'netaddr>=1.0'" in " ".join(run.output.split()), run.output


def test_the_inventory_names_the_package(without: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "kube_nodes.yml"
    file.write_text("{plugin: agentless.kube_proxy.nodes, host: 'https://127.0.0.1:1'}\n")
    environment = ansible_environment(tmp_path / "record") | without
    argv = [str(BIN / "ansible-inventory"), "-i", str(file), "--list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert PIP in " ".join(done.stderr.split()), done.stderr


def test_files_need_no_package_at_all(without: dict[str, str], tmp_path: Path) -> None:
    playbook("snapshot_services", Path("localhost,"), tmp_path, environment=without)


def test_akp_watch_from_pip_alone_says_that_the_collection_is_missing(tmp_path: Path) -> None:
    installed = tmp_path / "site"
    installed.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.name != "ansible_collections" and each.suffix != ".pth":
            (installed / each.name).symlink_to(each)
    (installed / "agentless_kube_proxy").symlink_to(ROOT / "plugins" / "plugin_utils")
    python = Path(sys.base_prefix) / "bin" / "python3"
    done = subprocess.run(
        [str(python), "-c", WATCH, "watch", "-i", "localhost,"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 2
    assert "the collection agentless.kube_proxy is missing there: ansible-galaxy collection install" in done.stderr
    assert "couldn't resolve module" not in done.stderr
