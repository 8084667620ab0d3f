"""The event source of Event-Driven Ansible, loaded the way ansible-rulebook loads it."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.apiserver import Object, Server, serving, status
from tests.unit.cluster.test_wait_for_change import NODES, SERVICES, SLICES, changed

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "extensions" / "eda" / "plugins" / "event_source" / "service_changes.py"
CONFIG = {"clusterCIDR": "10.244.0.0/16", "conntrack": {"maxPerCore": 0}}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as served:
        served.objects[NODES] = [
            {**node, "status": {"addresses": [{"type": "InternalIP", "address": f"172.18.0.1{i}"}]}}
            for i, node in enumerate(served.objects[NODES])
        ]
        yield served


def endpoints(server: Server, *nodes: str) -> Object:
    """A slice of web-0 with an endpoint on each of these nodes."""
    listed = [{"addresses": [f"10.244.{number}.5"], "nodeName": name} for number, name in enumerate(nodes)]
    ports = [{"name": "", "port": 8080, "protocol": "TCP"}]
    return changed(server.objects[SLICES][0], endpoints=listed, ports=ports)


async def events(server: Server, *steps: Any, **options: Any) -> list[dict[str, Any]]:
    """The first event, and after each step the next."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    args = {"host": server.url, "api_key": "x", "kubeconfig": "", "config": CONFIG, "settle": 0.05, **options}
    # Ansible's finder, where it is loaded, takes every path in a collection for a package; ansible-rulebook has none.
    sys.path_importer_cache[str(SOURCE)] = None
    source = asyncio.create_task(runpy.run_path(str(SOURCE))["main"](queue, args))
    found = []
    try:
        for step in (lambda: None, *steps):
            step()
            waiting = asyncio.create_task(queue.get())
            await asyncio.wait({waiting, source}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            if source.done():
                await source
            found.append(await waiting)
    finally:
        source.cancel()
    return found


def test_the_first_event_is_for_all_and_the_next_for_those_that_are_concerned(server: Server) -> None:
    local = changed(server.objects[SERVICES][0])
    local["spec"]["internalTrafficPolicy"] = "Local"
    server.objects[SERVICES][0] = local
    server.objects[SLICES][0] = endpoints(server, "n0")

    def heartbeat_and_endpoint() -> None:
        server.tell(NODES, "MODIFIED", {**server.objects[NODES][0], "status": {**server.objects[NODES][0]["status"]}})
        server.tell(SLICES, "MODIFIED", endpoints(server, "n0", "n1"))

    first, second = asyncio.run(events(server, heartbeat_and_endpoint))
    assert first == {"everywhere": True, "nodes": ["n0", "n1"], "hosts": "n0,n1", "objects": []}
    assert (second["everywhere"], second["nodes"], second["hosts"]) == (False, ["n1"], "n1")
    assert second["objects"] == [{"kind": "EndpointSlice", "namespace": "shop", "name": "web-0", "action": "changed"}]


def test_all_nodes_are_looked_at_again_after_a_while(server: Server) -> None:
    # On a busy machine the first period is over before the first list has come.
    _first, *more = asyncio.run(events(server, lambda: None, lambda: None, sync_period=0.5))
    assert {"everywhere": True, "nodes": [], "hosts": "", "objects": []} in more


def test_missing_rights_end_the_rulebook_with_a_reason(server: Server) -> None:
    server.once(status(403, "no"), SERVICES, times=99)
    with pytest.raises(Exception, match='RBAC does not grant the verb "list" on the resource "services"'):
        asyncio.run(events(server))


def test_the_source_works_where_only_the_collection_is(tmp_path: Path) -> None:
    """ansible-rulebook imports nothing from collections, and the engine may not be installed as a package."""
    script = f"import runpy; runpy.run_path({str(SOURCE)!r})['_engine']('cluster.watch'); print('loaded')"
    (tmp_path / "hide.py").write_text(
        "import sys\nsys.path[:] = [each for each in sys.path if not each.endswith('/checkout')]\n" + script
    )
    done = subprocess.run([sys.executable, str(tmp_path / "hide.py")], capture_output=True, text=True, check=False)
    assert done.stdout == "loaded\n", done.stderr


def test_the_rulebook_names_what_there_is() -> None:
    (ruleset,) = yaml.safe_load((ROOT / "extensions" / "eda" / "rulebooks" / "sync_services.yml").read_text())
    (source,) = ruleset["sources"]
    assert f"agentless.kube_proxy.{SOURCE.stem}" in source
    for rule in ruleset["rules"]:
        namespace, name, playbook = rule["action"]["run_playbook"]["name"].split(".")
        assert (namespace, name) == ("agentless", "kube_proxy")
        assert (ROOT / "playbooks" / f"{playbook}.yml").exists()
