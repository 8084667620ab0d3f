# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The options of the modules, from their documentation: names, types and defaults are written nowhere else.

    SPEC = spec("node")                     # for validate_argument_spec
    RULES = of_fragment("rules")            # those that modules share

An action plugin asks for it when it is imported. Ansible does that once, in the process that all workers are forked
from.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import yaml

_PLUGINS = "ansible_collections.agentless.kube_proxy.plugins"
_KEYS = ("type", "elements", "choices", "default", "aliases", "required")
# Documentation has no word for it: values that Ansible must not print, and names that only look like such.
_SECRETS = frozenset({"kubeconfig", "api_key", "password", "proxy_basic_auth", "basic_auth"})
_NO_SECRETS = frozenset({"client_key", "keys", "signing_key"})
# The C loader is ten times as fast, but not in every build of PyYAML.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def spec(module: str) -> dict[str, Any]:
    """The argument spec of a module."""
    text = importlib.import_module(f"{_PLUGINS}.modules.{module}").DOCUMENTATION
    document = yaml.load(text, Loader=_LOADER)
    found: dict[str, Any] = {}
    for fragment in document.get("extends_documentation_fragment", ()):
        name, _dot, part = fragment.removeprefix("agentless.kube_proxy.").partition(".")
        found |= of_fragment(name) if not part else {}
    return found | _options(document.get("options") or {})


def of_fragment(name: str) -> dict[str, Any]:
    """The options of a documentation fragment."""
    fragment = importlib.import_module(f"{_PLUGINS}.doc_fragments.{name}").ModuleDocFragment
    return _options(yaml.load(fragment.DOCUMENTATION, Loader=_LOADER).get("options") or {})


def _options(documented: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, option in documented.items():
        each = {key: option[key] for key in _KEYS if key in option}
        if "suboptions" in option:
            each["options"] = _options(option["suboptions"])
        if name in _SECRETS or name in _NO_SECRETS:
            each["no_log"] = name in _SECRETS
        found[name] = each
    return found
