# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters for the KubeProxyConfiguration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.files import UnreadableFile
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.base import ControlAction, plain
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.controller.render import load_config
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.proxy.config import InvalidConfig, parse_config


def config_mode(config: Any) -> str:
    """How rules are written: the mode of a configuration, or kube-proxy's default."""
    try:
        return parse_config(load_config(plain(config))).mode
    except (InvalidConfig, UnreadableFile, OSError) as error:
        raise AnsibleFilterError(f"kube_proxy_config: {ControlAction.described(error)}") from None


class FilterModule:
    """Of the collection, for its role prepare."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"config_mode": config_mode}
