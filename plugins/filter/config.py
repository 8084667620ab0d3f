# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters for the KubeProxyConfiguration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import peek_configuration
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.configuration import Configuration, read_kept
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.errors import UserError, described
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import WorkDirectory
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.trust import plain


def config_mode(config: Any, directory: str = "", cluster_name: str = "") -> str:
    """How rules are written: the mode of a configuration, else of the last run there, or kube-proxy's default."""
    try:
        found = Configuration.of({"config": plain(config)}, **_known(plain(directory), plain(cluster_name)))
        return found.choices.proxy.mode
    except (UserError, OSError) as error:
        raise AnsibleFilterError(f"kube_proxy_config: {described(error)}") from None


def _known(directory: str, cluster_name: str) -> dict[str, Any]:
    """What is known of the cluster, if it is said which one is meant."""
    if not directory and not cluster_name:
        return {}
    work = WorkDirectory.of({"dir": directory, "cluster_name": cluster_name})
    return {"kept": read_kept(work.config), "cluster": peek_configuration(work.snapshot)}


class FilterModule:
    """Of the collection, for its role prepare."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {"config_mode": config_mode}
