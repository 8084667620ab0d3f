# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters for the KubeProxyConfiguration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.choices import Choices
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.errors import UserError, described
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.trust import plain


def config_mode(config: Any) -> str:
    """How rules are written: the mode of a configuration, or kube-proxy's default."""
    try:
        return Choices.of({"config": plain(config)}).proxy.mode
    except (UserError, OSError) as error:
        raise AnsibleFilterError(f"kube_proxy_config: {described(error)}") from None


class FilterModule:
    """Of the collection, for its role prepare."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"config_mode": config_mode}
