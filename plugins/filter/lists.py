# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters for variables that are lists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.list_variables import NotAList, as_batches, as_list


def _taken(take: Callable[[Any, str], list[Any]], value: Any, variable: str) -> list[Any]:
    try:
        return take(value, variable)
    except NotAList as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    """Of the collection, for its roles and playbooks."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {
            "as_list": partial(_taken, as_list),
            "as_batches": partial(_taken, as_batches),
        }
