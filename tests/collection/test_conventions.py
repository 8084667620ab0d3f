"""What is shipped: complete, clean, and working from an empty path."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from agentless_kube_proxy.bundle.program import node_program

from tests.lab import Lab

from .play import BIN, ROOT, playbook

GIT = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact")
    subprocess.run(
        [str(BIN / "ansible-galaxy"), "collection", "build", "--output-path", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (file,) = folder.glob("agentless-kube_proxy-*.tar.gz")
    return file


@pytest.fixture(scope="module")
def installed(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collection in a path that was empty, without a network."""
    path = tmp_path_factory.mktemp("collections")
    subprocess.run(
        [
            *("unshare", "--net", str(BIN / "ansible-galaxy"), "collection", "install"),
            # By force, since the tree that is worked on is on Python's path and counts as installed.
            *("--force", "--offline", "--collections-path", str(path), str(artefact)),
        ],
        check=True,
        capture_output=True,
    )
    return path


def test_the_artefact_holds_what_is_in_git_and_nothing_else(artefact: Path) -> None:
    tracked = set(subprocess.run(GIT, check=True, capture_output=True, text=True).stdout.splitlines())
    with tarfile.open(artefact) as archive:
        shipped = {member.name for member in archive if member.isfile()}
    assert shipped - tracked == {"MANIFEST.json", "FILES.json"}
    left_out = {name.split("/")[0] for name in tracked - shipped}
    assert left_out <= {
        *(".ansible-lint", ".ci", ".editorconfig", ".gitignore", ".pre-commit-config.yaml", ".shellcheckrc"),
        *(".yamllint", ".github", "Makefile", "galaxy.yml", "pyproject.toml", "tests"),
        *("requirements-ansible.txt", "requirements-dev.txt"),
    }
    for needed in ("README.md", "LICENSE", "requirements.txt", "bindep.txt", "meta/execution-environment.yml"):
        assert needed in shipped


def test_nothing_of_a_development_machine_is_shipped(artefact: Path) -> None:
    with tarfile.open(artefact) as archive:
        for member in archive:
            assert "__pycache__" not in member.name
            assert member.name.split("/")[0] not in ("build", ".venv")
            assert not member.issym()


def test_an_execution_environment_gets_what_the_collection_needs_but_no_ansible(installed: Path) -> None:
    """What a build of an image asks of the collections that it has installed."""
    done = subprocess.run(
        [str(BIN / "ansible-builder"), "introspect", str(installed)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = yaml.safe_load(done.stdout)
    python, system = ({line.split("  #")[0] for line in found[kind]} for kind in ("python", "system"))
    required = set((ROOT / "requirements.txt").read_text().split())
    assert not any(line.startswith("ansible") for line in required)
    # ansible-builder leaves out what comes with ansible-core anyway.
    assert required - python == {"PyYAML>=6.0"}
    assert python <= required
    assert {"openssh-client [platform:dpkg]", "openssh-clients [platform:rpm]"} <= system


def test_the_context_of_an_execution_environment_can_be_made(tmp_path: Path) -> None:
    definition = ROOT / "examples" / "execution-environment" / "execution-environment.yml"
    subprocess.run(
        [
            *(str(BIN / "ansible-builder"), "create", "--output-filename", "Containerfile"),
            *("--file", str(definition), "--context", str(tmp_path)),
        ],
        check=True,
        capture_output=True,
    )
    wanted = yaml.safe_load((tmp_path / "_build" / "requirements.yml").read_text())
    assert wanted == {"collections": ["agentless.kube_proxy"]}
    assert "ansible-galaxy collection install" in (tmp_path / "Containerfile").read_text()


def test_the_installed_collection_works(installed: Path, nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    environment = {"ANSIBLE_COLLECTIONS_PATH": str(installed)}
    run = playbook("agentless.kube_proxy.sync_services", inventory, tmp_path, environment=environment)
    assert run.changed == {"n1": 1, "n2": 1, "n3": 1}
    program = nodes.node("n1").run(["sh", "-c", "cat /var/lib/akp/bundles/*/akp-node"]).stdout
    assert program == node_program("iptables")


def test_every_plugin_has_documentation(installed: Path) -> None:
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(installed)}
    root = installed / "ansible_collections" / "agentless" / "kube_proxy"
    for kind, folder, suffix in (
        ("module", "modules", ".py"),
        ("inventory", "inventory", ".py"),
        ("filter", "filter", ".yml"),
    ):
        names = [f"agentless.kube_proxy.{path.stem}" for path in (root / "plugins" / folder).glob(f"*{suffix}")]
        assert names
        done = subprocess.run(
            [str(BIN / "ansible-doc"), "--type", kind, "--json", *names],
            check=True,
            capture_output=True,
            env=environment,
        )
        shown = json.loads(done.stdout)
        assert set(shown) == set(names)
        assert all(str(installed) in each["doc"]["filename"] for each in shown.values())
    done = subprocess.run(
        [str(BIN / "ansible-doc"), "--type", "role", "--json", "agentless.kube_proxy.sync"],
        check=True,
        capture_output=True,
        env=environment,
    )
    assert "kube_proxy_kubeconfig" in done.stdout.decode()
