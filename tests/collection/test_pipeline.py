"""What users copy and install, from the built collection and pip alone: examples/pipeline, execution environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import unused_prefix
from tests.lab import Lab
from tests.pages import blocks

from .play import BIN, ROOT, SHOP
from .test_sync import rules

PIPELINE = ROOT / "examples" / "pipeline"
# Python packages come from the package index, which takes a minute.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


def environment(home: Path) -> dict[str, str]:
    """A shell of a user who has nothing of this checkout."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "http", "HTTP"))}
    path = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return kept | {"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}


def shell(command: str, place: Path, **own: str) -> str:
    """What a command prints, run as a CI does."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=place,
        env=environment(place.parent) | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact")
    build = [str(BIN / "ansible-galaxy"), "collection", "build", "--output-path", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (file,) = folder.glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def repository(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the skeleton, installed by its own script."""
    copied = Path(shutil.copytree(PIPELINE, tmp_path_factory.mktemp("user") / "services"))
    shell(f"./install {artefact}", copied)
    return copied


def steps(job: str) -> dict[str, dict[str, Any]]:
    """The commands of a job of the workflow, by name."""
    jobs = yaml.safe_load((PIPELINE / ".github" / "workflows" / "services.yml").read_text())["jobs"]
    return {step["name"]: step for step in jobs[job]["steps"] if "run" in step}


def test_the_scenario_works_from_an_empty_directory(repository: Path) -> None:
    (block,) = blocks(PIPELINE / "README.md")
    (command,) = block.commands
    assert steps("try")["Try"]["run"] == f"sudo env {command}"
    said = shell(command, repository, LAB=unused_prefix())
    assert "idempotence" in said
    assert str(ROOT) not in said


def test_plan_approve_and_sync_as_the_workflow_has_them(repository: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    shutil.copytree(SHOP, cluster, ignore=shutil.ignore_patterns("kube-proxy.yaml"))
    with Lab(unused_prefix(), 3) as lab:
        lab.inventory(repository / "inventory" / "hosts.yml")
        # Files stand for the API server.
        nodes = repository / "inventory" / "group_vars" / "nodes.yml"
        nodes.write_text(yaml.safe_dump({"kube_proxy_cluster_dir": str(cluster)}))

        def plan() -> dict[str, str]:
            files = {name: tmp_path / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
            for file in files.values():
                file.write_text("")
            shell(steps("plan")["Plan"]["run"], repository, **{name: str(file) for name, file in files.items()})
            assert files["GITHUB_STEP_SUMMARY"].read_text()
            return dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())

        def sync(digest: str) -> str:
            job = steps("sync")
            return shell(f"{job['Sync']['run']}\n{job['Verify']['run']}", repository, DIGEST=digest)

        first = plan()
        assert int(first["changes"]) > 0
        assert "kube-proxy" not in lab.node("n1").run(["nft", "list", "tables"]).stdout, "a plan changes nothing"
        sync(first["digest"])
        assert all("shop/catalog" in node.run(["nft", "list", "ruleset"]).stdout for node in lab.nodes)
        assert plan()["changes"] == "0"
        (cluster / "metrics.yaml").unlink()
        second = plan()
        assert int(second["changes"]) > 0
        with pytest.raises(AssertionError, match="digest"):
            sync(first["digest"])
        sync(second["digest"])
        assert not any("shop/metrics" in node.run(["nft", "list", "ruleset"]).stdout for node in lab.nodes)


def test_an_execution_environment_has_all_that_a_sync_needs(artefact: Path, lab: Lab, tmp_path: Path) -> None:
    """ansible-core and ansible-runner as its file has them, and what ansible-builder finds in the collection."""
    definition = yaml.safe_load((ROOT / "examples/execution-environment/execution-environment.yml").read_text())
    needed = definition["dependencies"]
    chosen = " ".join(f"'{needed[name]['package_pip']}'" for name in ("ansible_core", "ansible_runner"))
    work = tmp_path / "work"
    work.mkdir()
    shell(
        "python3 -m venv venv\n"
        f"venv/bin/pip install -q {chosen}\n"
        f"venv/bin/ansible-galaxy collection install --collections-path collections {artefact}\n"
        f"{BIN}/ansible-builder introspect --write-pip python.txt --write-bindep system.txt collections\n"
        "venv/bin/pip install -q --requirement python.txt",
        work,
    )
    assert not any(line.startswith("ansible") for line in (work / "python.txt").read_text().splitlines())
    assert "openssh-client" in (work / "system.txt").read_text()
    lab.inventory(work / "hosts.yml")
    run = (
        "venv/bin/ansible-playbook agentless.kube_proxy.sync_services -i hosts.yml"
        f" -e kube_proxy_cluster_dir={SHOP} -e kube_proxy_config={SHOP}/kube-proxy.yaml"
    )
    said = shell(run, work, ANSIBLE_COLLECTIONS_PATH=f"{work}/collections")
    assert "3 nodes: 3 changed, 0 unchanged, 0 failed" in said
    assert all("KUBE-SERVICES" in rules(node) for node in lab.nodes)
