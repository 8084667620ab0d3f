"""A release can be built again, from another checkout, to the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import agentless_kube_proxy
import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERSION = agentless_kube_proxy.__version__
COLLECTION = f"agentless-kube_proxy-{VERSION}.tar.gz"
WHEEL = f"agentless_kube_proxy-{VERSION}-py3-none-any.whl"
SBOM = f"agentless-kube_proxy-{VERSION}.cdx.json"


def checkout(folder: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def release(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / ".ci" / "release")]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = checkout(tmp_path_factory.mktemp("release") / "tree")
    done = release(tree)
    assert done.returncode == 0, done.stderr
    return tree / "dist"


def test_two_checkouts_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        tree = checkout(tmp_path / "elsewhere")
        # A file that git ignores, and the caches of a checkout that was worked in, stay out.
        (tree / "dist").mkdir()
        (tree / "dist" / "agentless-kube_proxy-0.0.1.tar.gz").touch()
        (tree / "plugins" / "left.pyc").touch()
        done = release(tree, TZ="Asia/Tokyo", SOURCE_DATE_EPOCH="1")
    finally:
        os.umask(umask)
    assert done.returncode == 0, done.stderr
    built = {file.name: file.read_bytes() for file in (tree / "dist").iterdir()}
    assert built == {file.name: file.read_bytes() for file in dist.iterdir()}
    assert set(built) == {COLLECTION, WHEEL, SBOM, "SHA256SUMS"}


def test_the_checksums_are_those_of_the_files(dist: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True, capture_output=True)
    assert len((dist / "SHA256SUMS").read_text().splitlines()) == 3


def test_the_collection_agrees_with_its_own_manifest(dist: Path) -> None:
    with tarfile.open(dist / COLLECTION) as archive:
        data = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr]
    manifest, files = json.loads(data["MANIFEST.json"]), json.loads(data["FILES.json"])
    assert manifest["collection_info"]["version"] == VERSION
    assert manifest["file_manifest_file"]["chksum_sha256"] == hashlib.sha256(data["FILES.json"]).hexdigest()
    listed = {each["name"]: each["chksum_sha256"] for each in files["files"] if each["ftype"] == "file"}
    assert listed == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in data.items()
        if name not in {"MANIFEST.json", "FILES.json"}
    }


def test_the_wheel_has_the_node_program(dist: Path) -> None:
    name = "agentless_kube_proxy/bundle/akp_node/core/10-program.sh"
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        assert wheel.read(name) == subprocess.check_output(
            ["git", "-C", str(ROOT), "show", "HEAD:plugins/plugin_utils/bundle/akp_node/core/10-program.sh"]
        )


def test_the_sbom_names_every_requirement_and_both_artefacts(dist: Path) -> None:
    bom = json.loads((dist / SBOM).read_text())
    wanted = {each["name"] + each["versionRange"].removeprefix("vers:pypi/") for each in bom["components"]}
    assert wanted == {
        line for file in ("requirements-ansible.txt", "requirements.txt") for line in (ROOT / file).read_text().split()
    }
    assert {each["name"]: each["hashes"][0]["content"] for each in bom["metadata"]["component"]["components"]} == {
        name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in (COLLECTION, WHEEL)
    }


def test_a_checkout_with_changes_is_refused(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    (tree / "README.md").write_text("changed")
    done = release(tree)
    assert done.returncode != 0
    assert "this checkout has changes" in done.stderr
    assert not (tree / "dist").exists()


def test_versions_that_differ_are_refused(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    file = tree / "galaxy.yml"
    file.write_text(file.read_text().replace(f"version: {VERSION}", "version: 9.9.9"))
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(tree), *who, "commit", "--quiet", "--all", "--message", "x"], check=True)
    done = release(tree)
    assert done.returncode != 0
    assert "galaxy.yml has 9.9.9" in done.stderr
    assert not (tree / "dist").exists()


def test_the_changelog_knows_this_version() -> None:
    releases = yaml.safe_load((ROOT / "changelogs" / "changelog.yaml").read_text())["releases"]
    assert VERSION in releases
