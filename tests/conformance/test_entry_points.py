"""Whichever way a bundle is made, its files are the same bytes: there is one engine."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.cluster.files import cluster_files, documents
from agentless_kube_proxy.cluster.record import Record, record_of, snapshot_of
from agentless_kube_proxy.plan.bundles import Target, render
from agentless_kube_proxy.proxy.compat import COMPATS, DEFAULT_COMPAT
from agentless_kube_proxy.publish.publishing import History, Inputs, publish
from agentless_kube_proxy.publish.store import Publication, Terms
from agentless_kube_proxy.tasks.directory import WorkDirectory

from tests.unit.watch.test_loop import Following

from . import goldens

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "plugins" / "plugin_utils"
BESIDE = ("akp-leave", "akp-node", "manifest.json")  # a published bundle has no program, and a manifest that names none


class Golden:
    """The cluster, the configuration and the node of a recording."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        version, _mode, self.node = (folder / "kube-proxy").read_text().split()
        minor = ".".join(version.removeprefix("v").split(".")[:2])
        self.compat = minor if minor in COMPATS else DEFAULT_COMPAT  # of userspace mode there is one minor only
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())

    @property
    def record(self) -> Record:
        files = cluster_files(self.folder / "cluster")
        return record_of((each for file in files for each in documents(file)), "https://203.0.113.5:6443")

    @property
    def settings(self) -> dict[str, Any]:
        return {"config": str(self.folder / "config.json"), "compat": self.compat}


class Host(Following):
    """The host of a recording, followed by akp watch."""

    def __init__(self, path: Path, golden: Golden) -> None:
        self.facts = golden.facts
        super().__init__(path, golden.node, **golden.settings)

    def _result(self, host: str, arguments: dict[str, Any]) -> Any:
        result = super()._result(host, arguments)
        return {**result, "facts": self.facts} if "facts" in result else result


def files_of(bundle: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in bundle.iterdir() if each.name not in BESIDE}


def by_render(golden: Golden, folder: Path) -> dict[str, bytes]:
    """As `akp render` writes it."""
    arguments = ["render", "--cluster", golden.folder / "cluster", "--config", golden.folder / "config.json"]
    arguments += ["--facts", golden.folder / "facts.json", "--node", golden.node, "--compat", golden.compat]
    assert main([str(each) for each in (*arguments, "--output", folder)]) == 0
    return files_of(folder / golden.node)


def by_sync(golden: Golden, folder: Path) -> dict[str, bytes]:
    """As the module bundle writes it."""
    directory = WorkDirectory(folder).make()
    golden.record.write(directory.snapshot)
    host = Target("host", golden.node, golden.facts, "")
    outcome = render(directory, directory.snapshot, Choices.of(golden.settings), [host])
    assert not outcome.errors
    return files_of(directory.bundles / golden.node)


def by_watch(golden: Golden, folder: Path) -> dict[str, bytes]:
    """As `akp watch` writes it for a host that has nothing yet."""
    host = Host(folder, golden)
    host.cluster(snapshot_of(golden.record))
    assert host.hosts.applied[golden.node]
    return files_of(host.directory.bundles / golden.node)


def by_publish(golden: Golden, folder: Path) -> dict[str, bytes]:
    """As nodes fetch it."""
    key = folder / "key"
    folder.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    inputs = Inputs(golden.record, Choices.of(golden.settings), {golden.node: golden.facts})
    publication = Publication(folder / "www", Terms("shop", (key,), 3600.0))
    report = publish(publication, History(folder / "history", 1), inputs, [golden.node])
    assert not report.errors
    (packed,) = (folder / "www" / "objects").iterdir()
    lines = gzip.decompress(packed.read_bytes()).decode().splitlines(keepends=True)
    found, at = {}, 0
    while lines[at] != "==\n":
        _mark, name, count = lines[at].split()
        found[name] = "".join(lines[at + 1 : at + 1 + int(count)]).encode()
        at += 1 + int(count)
    return {name: content for name, content in found.items() if name not in BESIDE}


@pytest.mark.parametrize("folder", goldens.recorded(), ids=lambda path: path.name)
def test_every_entry_point_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    golden = Golden(folder)
    first = by_render(golden, tmp_path / "render")
    assert first
    for way in (by_sync, by_watch, by_publish):
        assert way(golden, tmp_path / way.__name__) == first, way.__name__


def test_only_the_engine_puts_states_together() -> None:
    """The event source makes no bundle, but it too must not decide by itself."""
    composing = re.compile(r"\bunder_policy\(|\bOwnAddresses\(|\bClusterView\(|\bbackends\.renderer\(|\bvip_policy\(")
    sources = [*ENGINE.rglob("*.py"), *(ROOT / "plugins").glob("[a-or-z]*/*.py"), *ROOT.glob("extensions/**/*.py")]
    found = {
        str(file.relative_to(ROOT))
        for file in sources
        for line in file.read_text().splitlines()
        if composing.search(line) and not line.lstrip().startswith(("def ", "class "))
    }
    assert found == {
        "plugins/plugin_utils/choices.py",  # the policy, from what was chosen
        "plugins/plugin_utils/engine.py",
        "plugins/plugin_utils/proxy/own.py",  # the view of a node that claims an address
    }
