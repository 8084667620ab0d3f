"""Every option is documented as it is, and every module is where conventions want it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.proxy.compat import DEFAULT_COMPAT

ROOT = Path(__file__).parents[3]
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py"))
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())


@pytest.fixture(scope="module")
def documentation() -> dict[str, Any]:
    """What ansible-doc says about the modules."""
    names = [f"agentless.kube_proxy.{name}" for name in MODULES]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-doc")), "--json", *names],
        capture_output=True,
        check=True,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_COLLECTIONS_PATH": "/nonexistent"},
    )
    return {name.rpartition(".")[2]: entry for name, entry in json.loads(done.stdout).items()}


@pytest.mark.parametrize("module", MODULES)
def test_the_options_of_an_action_are_those_of_its_documentation(module: str, documentation: dict[str, Any]) -> None:
    action = importlib.import_module(f"ansible_collections.agentless.kube_proxy.plugins.action.{module}").ActionModule
    documented = documentation[module]["doc"]["options"]
    assert {name: essence(option) for name, option in documented.items()} == {
        name: essence(option) for name, option in action.SPEC.items()
    }


def essence(option: dict[str, Any]) -> dict[str, Any]:
    keys = ("type", "default", "choices", "elements", "aliases", "required")
    found = {key: option[key] for key in keys if option.get(key) not in (None, [], False)}
    if found.get("default") is False:
        del found["default"]
    nested = option.get("suboptions") or option.get("options")
    return {**found, "nested": {name: essence(each) for name, each in nested.items()}} if nested else found


@pytest.mark.parametrize("module", MODULES)
def test_the_documentation_is_complete(module: str, documentation: dict[str, Any]) -> None:
    entry = documentation[module]
    assert entry["examples"].strip()
    assert entry["return"]
    assert {"check_mode", "diff_mode", "idempotent", "platform", "action", "async", "action_group"} <= set(
        entry["doc"]["attributes"]
    )


def test_every_module_is_in_the_action_group() -> None:
    runtime = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text())
    assert runtime["action_groups"]["kube_proxy"] == MODULES


def test_every_variable_that_an_option_falls_back_to_is_a_variable_of_a_role() -> None:
    known = {name for role in ROLES for name in defaults(role)}
    known |= {"kube_proxy_plan_file", "kube_proxy_planning"}
    for module in MODULES:
        action = importlib.import_module(f"ansible_collections.agentless.kube_proxy.plugins.action.{module}")
        assert set(action.ActionModule.VARIABLES.values()) <= known, module
        assert set(action.ActionModule.VARIABLES) <= set(action.ActionModule.SPEC), module


@pytest.mark.parametrize("role", ROLES)
def test_a_role_documents_its_defaults_and_nothing_else(role: str) -> None:
    specs = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    documented = specs["main"]["options"]
    assert set(documented) == set(defaults(role))
    for name, default in defaults(role).items():
        if "default" in documented[name]:
            assert documented[name]["default"] == default, name
        else:
            assert "{{" in str(default), f"{name} has a plain default that is not documented"


# A role is for production, a module does what it is told: these defaults are others on purpose.
CAREFUL = {
    "kube_proxy_max_removed_percent": (50, 100),
    "kube_proxy_confirm_within": (60, 0),
    "kube_proxy_keep": (3, 0),
    "kube_proxy_mode": (None, "iptables"),  # that of kube_proxy_config
}


@pytest.mark.parametrize("role", ROLES)
def test_a_variable_of_a_role_is_what_the_option_is_that_falls_back_to_it(role: str) -> None:
    specs = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    for name, documented in specs["main"]["options"].items():
        for module, option in options_of_modules().get(name, ()):
            where = f"{name} of the role {role} and the module {module}"
            assert documented.get("choices") == option.get("choices"), where
            assert kind(documented) == kind(option) or (documented["type"], option["type"]) == ("raw", "list"), where
            found = (documented.get("default"), option.get("default"))
            # A role cannot leave a variable unset, and says so with an empty value.
            assert found in (CAREFUL.get(name), (option.get("default"),) * 2) or (
                found[0] in ("", [], {}) and not found[1]
            ), where


def options_of_modules() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Variable -> the options that fall back to it, with their modules."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for module in MODULES:
        action = importlib.import_module(f"ansible_collections.agentless.kube_proxy.plugins.action.{module}")
        for option, variable in {"dir": "kube_proxy_dir", **action.ActionModule.VARIABLES}.items():
            found.setdefault(variable, []).append((module, action.ActionModule.SPEC[option]))
    return found


def kind(option: dict[str, Any]) -> tuple[str, str]:
    """A path in a variable is a text: it is expanded where it is used."""
    first, second = ("str" if option.get(key) == "path" else option.get(key, "") for key in ("type", "elements"))
    return first, second


def test_the_default_of_compat_is_the_same_wherever_it_is_written_down() -> None:
    options = [option for _module, option in options_of_modules()["kube_proxy_compat"]]
    assert {option.get("default") for option in options} == {None}, "it is that of the last run"
    for role in ("sync", "publish"):
        text = (ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text()
        assert f"The default is that of the last run, or V({DEFAULT_COMPAT})." in text


def defaults(role: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text()))


@pytest.mark.parametrize("dashed", sorted((ROOT / "playbooks").glob("*-*.yml")), ids=lambda path: path.stem)
def test_a_playbook_with_a_dash_is_an_import_of_one_without(dashed: Path) -> None:
    assert dashed.name == "sync-services.yml", "the one that users call by this name"
    (play,) = yaml.safe_load(dashed.read_text())
    real = dashed.with_name(play["ansible.builtin.import_playbook"])
    assert real.name == dashed.name.replace("-", "_")
    assert real.exists()
