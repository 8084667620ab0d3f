# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.wait_for_change: block until a rule somewhere would have to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.access import Access
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.api import connect
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import read_record
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.watch import wait_for_change
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import API_VARIABLES, ControlAction
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import Stopwatch
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec

_MOST_CHANGES = 1000


class ActionModule(ControlAction):
    """Watches the cluster."""

    SPEC: ClassVar[dict[str, Any]] = spec("wait_for_change")

    VARIABLES: ClassVar[dict[str, str]] = API_VARIABLES

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Wait; nothing is written anywhere."""
        watch = Stopwatch()
        path = Path(options["snapshot"]).expanduser() if options["snapshot"] else self.directory(options).snapshot
        base = read_record(path) if path.exists() or options["snapshot"] else None
        access = Access.of(options)
        found = wait_for_change(lambda: connect(access), base, timeout=options["timeout"], settle=options["settle"])
        times = watch.fields()
        return {
            "changed": bool(found),
            "timed_out": not found,
            "objects": [dataclasses.asdict(each) for each in found[:_MOST_CHANGES]],
            "count": len(found),
            "seconds": round(times["ended"] - times["began"], 2),
        }
