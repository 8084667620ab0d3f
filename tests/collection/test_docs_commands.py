"""Commands and plays of the documentation, as they stand there."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import Lab
from tests.node.signing import new_key

from .play import ROOT, SHOP, ansible_environment, playbook
from .test_configuration import CONFIG, with_config_map
from .test_sync import ALL, rules

pytestmark = pytest.mark.slow


def first_block(page: str) -> list[str]:
    """The commands of the first block of a page."""
    found = re.search(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    assert found
    return [line for line in found[1].replace("\\\n", " ").splitlines() if line.strip()]


def test_the_first_commands_of_the_page_on_approval_work_as_they_stand(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    content = yaml.safe_load(inventory.read_text())
    content["nodes"]["vars"] |= {
        # The configuration is that of its kube-proxy.
        "kube_proxy_cluster_dir": str(with_config_map(tmp_path / "cluster", CONFIG)),
        "kube_proxy_batches": ["100%"],
    }
    (tmp_path / "inventory").write_text(yaml.safe_dump(content))
    key = new_key(tmp_path / ".ssh", "id_ed25519")
    (tmp_path / "allowed_signers").write_text(f"alice {key.with_suffix('.pub').read_text()}")
    environment = ansible_environment(tmp_path / "record") | {"HOME": str(tmp_path)}
    commands = first_block("approval.md")
    assert len(commands) == 3
    for command in commands:
        # akp approve asks, and needs a terminal for that.
        done = subprocess.run(
            ["script", "-qec", command, "/dev/null"],
            cwd=tmp_path,
            env={**environment, "SHELL": "/bin/bash"},
            capture_output=True,
            text=True,
            input="yes\n",
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert all("KUBE-SERVICES" in rules(node) for node in nodes.nodes)


def examples(module: str) -> list[dict[str, Any]]:
    """The tasks that ansible-doc shows for a module."""
    found = importlib.import_module(f"ansible_collections.agentless.kube_proxy.plugins.modules.{module}")
    return list(yaml.safe_load(found.EXAMPLES))


def test_a_play_of_the_examples_works_with_a_fresh_directory_and_nodes_that_are_current(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    from_files = next(each for each in examples("snapshot") if "cluster_dir" in each["agentless.kube_proxy.snapshot"])
    tasks = [from_files, examples("node")[0], examples("bundle")[0], examples("node")[1], examples("summary")[0]]
    (tmp_path / "own.yml").write_text(
        yaml.safe_dump([{"hosts": "nodes", "gather_facts": False, "become": True, "tasks": tasks}])
    )
    (tmp_path / "cluster").symlink_to(SHOP)
    (tmp_path / "kube-proxy.yaml").symlink_to(SHOP / "kube-proxy.yaml")
    first = playbook(str(tmp_path / "own.yml"), inventory, tmp_path)
    assert [each.result["changed"] for each in first.of("node") if "services" in each.result] == [True] * len(ALL)
    assert all("KUBE-SERVICES" in rules(node) for node in nodes.nodes)
    fresh = {"kube_proxy_dir": str(tmp_path / "fresh")}
    again = playbook(str(tmp_path / "own.yml"), inventory, tmp_path, variables=fresh)
    assert again.summary[0] == "3 nodes: 0 changed, 3 unchanged, 0 failed"
    assert [each.result["changed"] for each in again.of("node")] == [False] * 2 * len(ALL)
