"""What the page says of a Service is what each node decides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.engine import Engine
from agentless_kube_proxy.explain.intent import Intent
from agentless_kube_proxy.proxy.traffic import Caller, Frontend, Reach
from agentless_kube_proxy.report.services import Lane, Port, Row, Table, Texts

from tests.page.fleet import objects, snapshot_of
from tests.unit.clusters import cluster

SHOP = {"clusterCIDR": "10.244.0.0/16,fd00:10:244::/48", "detectLocalMode": "ClusterCIDR"}


def table(found: list[dict[str, Any]], **config: Any) -> tuple[Table, dict[str, Row]]:
    engine = Engine(Choices.of({"config": {**SHOP, **config}}))
    engine.update(snapshot_of(found))
    made = Table(engine, {})
    return made, {f"{row.namespace}/{row.name}": row for row in made.rows()}


def lane(port: Port, node: int, *, outside: bool = False) -> Lane:
    (choice,) = [each for each in port.choices if node in each.nodes]
    found = choice.outside if outside else choice.inside
    assert found is not None
    return found


@pytest.mark.parametrize(("mode", "seed"), list(itertools.product(("iptables", "ipvs", "nftables"), range(8))))
def test_every_node_has_one_choice_and_it_is_what_the_node_decides(mode: str, seed: int) -> None:
    found = cluster(5, seed)
    made, rows = table(found, mode=mode)
    intent = Intent(snapshot_of(found), Choices.of({"config": {**SHOP, "mode": mode}}), {})
    compared = 0
    for node, name in enumerate(made.nodes):
        place = intent.place(name)
        for family, view in place.families.items():
            pod = Caller("10.244.0.0" if family.value == "IPv4" else "fd00:10:244::", interface="veth0")
            for each in view.ports:
                port = each.port
                (row,) = [
                    one
                    for one in rows[f"{port.namespace}/{port.name}"].ports
                    if one.family == family.value
                    and one.title == f"{port.port_name} {port.port}/{port.protocol}".strip()
                ]
                decided = place.traffic(family).decide(Frontend(each, Reach.CLUSTER_IP, port.cluster_ip), pod)
                used = [row.endpoints[index][0] for index in lane(row, node).used]
                assert used == [endpoint.text for endpoint, _replaced in decided.endpoints], (name, port.name_string)
                assert bool(lane(row, node).end) == (not decided.endpoints)
                compared += 1
    assert compared or not rows


def test_the_page_tells_pods_reasons_shares_and_what_becomes_of_the_source() -> None:
    _made, rows = table(objects())
    (port,) = rows["shop/checkout"].ports
    assert [each[2] for each in port.endpoints] == ["checkout-1", "checkout-2"]
    away = lane(port, 0, outside=True)
    assert (away.used, away.end) == ((), "dropped")
    assert {why for _index, why in away.unused} == {"on another node; the policy is Local"}
    here = lane(port, 1, outside=True)
    assert (here.data(Texts())[1], here.source) == (50.0, "The endpoint sees the caller's address.")
    assert lane(port, 0).source.startswith("The endpoint sees a pod's own address")
    (empty,) = rows["shop/orders"].ports
    assert (lane(empty, 0).end, rows["shop/orders"].tags) == ("refused", ("without endpoints",))


def test_a_hint_for_another_zone_is_the_reason_why_an_endpoint_gets_nothing() -> None:
    found = objects()
    for each in found:
        for endpoint in each.get("endpoints") or ():
            if each["metadata"]["name"].startswith("catalog"):
                endpoint["hints"] = {"forZones": [{"name": endpoint["zone"]}]}
    _made, rows = table(found)
    port = rows["shop/catalog"].ports[0]
    assert len(port.choices) == 3
    assert lane(port, 0).used == (0,)
    assert dict(lane(port, 0).unused) == {1: "hint for zone zone-b", 2: "hint for zone zone-c"}
    assert "topology hints" in rows["shop/catalog"].tags
