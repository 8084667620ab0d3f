# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.service_changes: an event whenever the rules of some node would have to change."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import time
from pathlib import Path
from typing import Any

DOCUMENTATION = r"""
short_description: Events when a rule somewhere would have to change
description:
  - Watches Services, EndpointSlices, Nodes and ServiceCIDRs of a cluster, and puts an event in the queue when the rules
    of at least one node are not what they should be any more. Heartbeats, annotations and the like make none.
  - The first event, at the start, is for all nodes, and so is one every O(sync_period) seconds.
  - Changes that come while an event waits to be taken are one event together.
options:
  kubeconfig:
    description:
      - Path of a kubeconfig. This and the options C(context), C(host), C(api_key), C(username), C(password),
        C(client_cert), C(client_key), C(ca_cert), C(validate_certs), C(proxy) and C(impersonate_user) are those of the
        module agentless.kube_proxy.snapshot; so are the variables C(K8S_AUTH_*) in the environment.
    type: str
  config:
    description:
      - The C(KubeProxyConfiguration) of the nodes, as path or mapping, to tell which of them a change concerns; or
        V(cluster) for that of the cluster's own kube-proxy. The default is the one that the last run left in the
        working directory, which C(dir) or C(cluster_name) among the O(settings) name.
    type: raw
  settings:
    description:
      - The variables C(kube_proxy_*) that rules depend on beside it, without that prefix, such as C(compat).
    type: dict
  settle:
    description: Seconds without a further change after which an event is made, for at most ten times as long.
    type: float
    default: 1.0
  sync_period:
    description: Seconds after which an event for all nodes is made in any case; 0 for never.
    type: float
    default: 300
"""

EXAMPLES = r"""
- agentless.kube_proxy.service_changes:
    kubeconfig: /home/ops/.kube/config
    config: /home/ops/kube-proxy.yaml
"""

# An event names so many changed objects at most; the run reads all of them anyway.
_MOST_OBJECTS = 100
_COLLECTION = Path(__file__).resolve().parents[4]

log = logging.getLogger(__name__)


def _engine(name: str) -> Any:
    """A module of the engine of this collection; ansible-rulebook does not know how to import from collections."""
    package = "agentless_kube_proxy"
    if package not in sys.modules:
        folder = _COLLECTION / "plugins" / "plugin_utils"
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder}: there is no engine")
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{name}")


def _choices(settings: dict[str, Any], api: Any, access: Any) -> Any:
    """What rules depend on. The configuration is that of the runs which the events start."""
    configuration = _engine("configuration")
    kept = configuration.read_kept(_engine("tasks.directory").WorkDirectory.of(settings).config)
    wanted, cluster = configuration.from_cluster(settings, kept), ""
    if wanted:
        with api.connect(access) as connection:
            cluster = connection.configuration_if(wanted)
    return configuration.Configuration.of(settings, kept=kept, cluster=cluster).choices


async def main(queue: asyncio.Queue[Any], args: dict[str, Any]) -> None:
    """Watch until the rulebook ends."""
    api = _engine("cluster.api")
    access = _engine("cluster.access").Access.of({key: value for key, value in args.items() if value != ""})
    settings = {**(args.get("settings") or {}), "config": args.get("config")}
    engine = _engine("engine").Engine(await asyncio.to_thread(_choices, settings, api, access))
    visible, is_name = _engine("texts").visible, _engine("cluster.fields").DNS_SUBDOMAIN.fullmatch
    settle = float(args.get("settle", 1.0))
    period = float(args.get("sync_period", 300)) or None
    with _engine("cluster.watch").Watch(lambda: api.connect(access)) as watch:
        due = None if period is None else time.monotonic() + period
        while True:
            left = 60.0 if due is None else max(0.0, min(60.0, due - time.monotonic()))
            # In a thread of its own; if the rulebook ends meanwhile, leaving this block ends the wait.
            update = await asyncio.to_thread(watch.next, left, settle=settle)
            if watch.trouble:
                log.warning("the watch is interrupted %s", visible(watch.trouble))
            everywhere = due is not None and time.monotonic() >= due
            event: dict[str, Any] = {"everywhere": everywhere, "objects": [], "nodes": []}
            if update is not None:
                await asyncio.to_thread(engine.update, update.snapshot)
                # Rulebooks put events into templates, so nothing but names goes into one.
                event["nodes"] = [each for each in await asyncio.to_thread(engine.affected) if is_name(each)]
                event["everywhere"] = everywhere or update.initial
                event["objects"] = [
                    {"kind": each.kind, "namespace": each.namespace, "name": each.name, "action": each.action}
                    for each in update.changes[:_MOST_OBJECTS]
                    if is_name(each.name) and (not each.namespace or is_name(each.namespace))
                ]
            if not event["everywhere"] and not event["nodes"]:
                continue
            if everywhere and period is not None:
                due = time.monotonic() + period
            event["hosts"] = ",".join(event["nodes"])
            await queue.put(event)


if __name__ == "__main__":

    class _Printed:
        """Stands in for the queue: `python service_changes.py KUBECONFIG` shows the events."""

        async def put(self, event: dict[str, Any]) -> None:
            print(event, flush=True)

    asyncio.run(main(_Printed(), {"kubeconfig": sys.argv[1]}))  # type: ignore[arg-type]
