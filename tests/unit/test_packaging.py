"""The collection and the Python package are one tree, and say the same of themselves."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import agentless_kube_proxy
import yaml
from agentless_kube_proxy.bundle.program import MODES, node_program

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "plugins" / "plugin_utils"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_collection_has_the_version_of_the_package() -> None:
    assert yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"] == agentless_kube_proxy.__version__


def test_the_node_program_has_the_version_of_the_package() -> None:
    for mode in MODES:
        assert f"\nVERSION={agentless_kube_proxy.__version__}" in node_program(mode)


def test_every_part_of_the_engine_is_packaged() -> None:
    parts = {path.parent.relative_to(ENGINE).as_posix() for path in ENGINE.rglob("__init__.py")}
    names = {
        "agentless_kube_proxy" if part == "." else f"agentless_kube_proxy.{part.replace('/', '.')}" for part in parts
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names


def test_every_file_of_the_engine_that_is_not_python_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    packaged = {
        path
        for package, globs in patterns.items()
        for pattern in globs
        for path in ENGINE.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    others = {path for path in ENGINE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert others == packaged


def test_the_command_akp_is_this_engine() -> None:
    (script,) = entry_points(group="console_scripts", name="akp")
    assert script.load().__module__ == "agentless_kube_proxy.cli"
    assert Path(agentless_kube_proxy.__file__).parent.samefile(ENGINE)
