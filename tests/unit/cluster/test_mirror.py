"""Endpoints count where a Service has no EndpointSlices, as the slices that the mirroring controller would make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.addresses import Family
from agentless_kube_proxy.cluster.files import load
from agentless_kube_proxy.cluster.mirror import LOST
from agentless_kube_proxy.cluster.record import record_of, snapshot_of
from agentless_kube_proxy.cluster.store import Store, key_of, read_object
from agentless_kube_proxy.proxy.endpoints import merge_slices

from ..build import Object, node, render, service, slice_of, snapshot


def endpoints(name: str = "web", *subsets: Object, namespace: str = "shop", labels: Object | None = None) -> Object:
    """An Endpoints object."""
    metadata = {"namespace": namespace, "name": name, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": list(subsets)}


def subset(*ips: str, port: int = 8080, name: str = "http", dark: tuple[str, ...] = (), **ports: Any) -> Object:
    """A subset of one port; the addresses after `dark` are not ready."""
    return {
        "addresses": [{"ip": ip, "nodeName": "n1"} for ip in ips],
        "notReadyAddresses": [{"ip": ip} for ip in dark],
        "ports": [{"name": name, "port": port, **ports}],
    }


def test_rules_of_endpoints_are_those_of_the_slices_they_stand_for() -> None:
    old = render(service(), node(), endpoints("web", subset("10.244.1.1", "10.244.1.2", dark=("10.244.1.3",))))
    new = render(service(), node(), slice_of("web", "10.244.1.1", "10.244.1.2"))
    assert "10.244.1.2:8080" in str(dict(new.objects()))
    assert dict(old.objects()) == dict(new.objects())


def test_subsets_keep_their_ports_and_families_are_apart() -> None:
    read = snapshot(
        endpoints("web", subset("10.244.1.1", "fd00::1"), subset("10.244.1.9", port=9090, name="admin", protocol="UDP"))
    )
    ipv4, ipv6 = (merge_slices(read.slices, family) for family in (Family.IPV4, Family.IPV6))
    assert {key: [each.text for each in found] for key, found in ipv4.items()} == {
        ("shop", "web", "http", "tcp"): ["10.244.1.1:8080"],
        ("shop", "web", "admin", "udp"): ["10.244.1.9:9090"],
    }
    assert [each.text for found in ipv6.values() for each in found] == ["[fd00::1]:8080"]


def test_readiness_node_and_pod_are_kept() -> None:
    one = subset("10.244.1.1", dark=("10.244.1.2",))
    one["addresses"][0]["targetRef"] = {"kind": "Pod", "name": "web-0"}
    first, second = snapshot(endpoints("web", one)).slices[0].endpoints
    assert (first.node_name, first.pod, first.ready, first.terminating) == ("n1", "web-0", True, False)
    assert (second.ready, second.serving, second.terminating) == (False, True, False)


def test_an_address_that_is_ready_and_not_ready_is_ready_and_counts_once() -> None:
    (only,) = snapshot(endpoints("web", subset("10.244.1.1", dark=("10.244.1.1",)))).slices[0].endpoints
    assert only.ready


def test_slices_win_service_by_service_and_that_is_said_once() -> None:
    read = snapshot(
        service("web"),
        service("old", clusterIP="10.96.7.8"),
        slice_of("web", "10.244.1.1"),
        endpoints("web", subset("10.244.9.9")),
        endpoints("old", subset("10.244.9.8")),
    )
    found = {(each.service, e.address) for each in read.slices for e in each.endpoints}
    assert found == {("web", "10.244.1.1"), ("old", "10.244.9.8")}
    assert read.ignored == {LOST: 1}
    assert not read.problems


@pytest.mark.parametrize(
    ("labels", "sort"),
    [
        ({"service.kubernetes.io/headless": ""}, "Endpoints of a headless Service"),
        ({"endpointslice.kubernetes.io/skip-mirror": "true"}, "Endpoints that ask not to be mirrored"),
    ],
)
def test_what_the_controller_would_not_mirror_is_counted(labels: Object, sort: str) -> None:
    read = snapshot(endpoints("web", subset("10.244.1.1"), labels=labels))
    assert (read.slices, read.ignored) == ((), {sort: 1})


def test_the_api_servers_own_endpoints_count_where_an_export_has_only_them() -> None:
    labels = {"endpointslice.kubernetes.io/skip-mirror": "true"}
    own = endpoints("kubernetes", subset("192.168.7.1", port=6443), namespace="default", labels=labels)
    assert [each.service for each in snapshot(own).slices] == ["kubernetes"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (subset("10.244.1"), "subsets[0].addresses[0].ip: '10.244.1' is not an IP address; the endpoint is left out"),
        (subset("127.0.0.1"), "subsets[0].addresses[0].ip: '127.0.0.1' is a loopback address"),
        (subset("10.244.1.1", port=0), "subsets[0].ports[0].port: 0 is not between 1 and 65535"),
        (subset("10.244.1.1", name="a b"), "subsets[0].ports[0].name: 'a b' is no DNS label"),
        ({"addresses": [7]}, "subsets[0].addresses[0]: must be a mapping, not 7"),
        ({"addresses": [{"ip": "10.244.1.1", "nodeName": 7}]}, "subsets[0].addresses[0].nodeName: must be a string"),
        (
            subset(*(f"10.244.{n // 200}.{n % 200 + 1}" for n in range(1001))),
            "subsets[0]: has more than 1000 addresses; the others are left out",
        ),
    ],
)
def test_what_is_wrong_is_named(wrong: Object, message: str) -> None:
    (problem,) = snapshot(endpoints("web", wrong)).problems
    assert str(problem).startswith(f"Endpoints/shop/web: {message}")


def test_files_and_their_record_give_the_same(tmp_path: Path) -> None:
    objects = [service(), endpoints("web", subset("10.244.1.1", dark=("10.244.1.2",)))]
    (tmp_path / "all.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    assert load(tmp_path) == snapshot_of(record_of(objects, "files"))


def test_a_watch_goes_from_endpoints_to_slices_and_back() -> None:
    store = Store()

    def put(obj: Object) -> None:
        store.put(key_of(obj["kind"], obj), read_object(obj, obj["kind"], obj["apiVersion"]))

    def addresses() -> set[str]:
        return {e.address for each in store.snapshot().slices for e in each.endpoints}

    put(endpoints("web", subset("10.244.1.1")))
    assert addresses() == {"10.244.1.1"}
    (change,) = store.take()
    assert (change.kind, change.name, change.action) == ("Endpoints", "web", "added")
    before = store.snapshot().slices
    assert store.snapshot().slices is before
    new = slice_of("web", "10.244.1.2", name="web-1")
    put(new)
    assert addresses() == {"10.244.1.2"}
    assert store.snapshot().ignored == {LOST: 1}
    store.put(key_of("EndpointSlice", new), None)
    assert store.snapshot().slices == before
