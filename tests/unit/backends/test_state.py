"""States and what lies between two of them: generations name states, deltas lead from one to the other."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from agentless_kube_proxy import backends
from agentless_kube_proxy.backends.state import Delta, State, delta
from agentless_kube_proxy.proxy.facts import node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.unit.build import config, dual_stack, endpoint, node, port, render, service, slice_of, snapshot, text

WEB = [service(), slice_of("web", "10.244.1.1", "10.244.1.2")]
API = [service("api", clusterIP="10.96.0.8"), slice_of("api", "10.244.1.3")]
SVC, SEP1, SEP2 = ("KUBE-SVC-67NZLRHBNDSAWJRO", "KUBE-SEP-3B5XO7OSMV7VPARF", "KUBE-SEP-XTJTEC7KOHLCQM25")


def chains(change: Delta) -> tuple[list[str], list[str]]:
    """What of the nat table of IPv4 is written and what is removed."""
    nat = ("IPv4", "nat")
    return (
        [obj[2] for obj in change.changed if obj[:2] == nat],
        [obj[2] for obj in change.removed if obj[:2] == nat],
    )


def applied(change: Delta, base: State) -> dict[Any, str]:
    """The objects of a kernel in state base after the change."""
    assert change.base == base.generation
    objects = dict(base.objects())
    for obj in change.removed:
        del objects[obj]
    return {**objects, **change.changed}


def test_no_change() -> None:
    change = delta(render(*WEB), render(*WEB))
    assert (change.changed, change.before, change.removed, change.names) == ({}, {}, (), ())
    assert change.base == change.generation


def test_a_service_more() -> None:
    old, new = render(*WEB), render(*WEB, *API)
    change = delta(old, new)
    written, removed = chains(change)
    assert removed == []
    assert len(written) == 3  # its chain, its endpoint's and KUBE-SERVICES
    assert change.names == ("shop/api:http tcp",)
    assert change.before[("IPv4", "nat", "KUBE-SERVICES")] == dict(old.objects())[("IPv4", "nat", "KUBE-SERVICES")]
    assert applied(change, old) == dict(new.objects())


def test_a_service_less() -> None:
    old, new = render(*WEB, *API), render(*WEB)
    change = delta(old, new)
    written, removed = chains(change)
    assert written == ["KUBE-SERVICES"]
    assert len(removed) == 2
    assert applied(change, old) == dict(new.objects())


def test_an_endpoint_less_touches_its_service_and_nothing_else() -> None:
    old = render(*WEB, *API)
    new = render(service(), slice_of("web", "10.244.1.1"), *API)
    change = delta(old, new)
    assert chains(change) == ([SVC], [SEP2])
    assert change.names == ("shop/web:http tcp",)
    assert [obj for obj in change.changed if obj[0] == "file"] == [("file", "services.jsonl")]
    assert applied(change, old) == dict(new.objects())


def test_the_last_endpoint_moves_a_service_from_one_table_to_the_other() -> None:
    old, new = render(*WEB), render(service())
    change = delta(old, new)
    assert ("IPv4", "filter", "KUBE-SERVICES") in change.changed
    assert chains(change) == (["KUBE-SERVICES"], [SVC, SEP1, SEP2])
    assert applied(change, old) == dict(new.objects())


def test_a_changed_configuration_touches_the_frame() -> None:
    old, new = render(*WEB), render(*WEB, iptables={"masqueradeBit": 5})
    change = delta(old, new)
    assert chains(change)[0] == ["KUBE-POSTROUTING", "KUBE-MARK-MASQ"]
    assert change.names == ()
    assert applied(change, old) == dict(new.objects())


def test_a_family_less_takes_all_its_objects_along() -> None:
    old, new = render(*WEB), render(*WEB, facts={"capabilities": {"ipv6": False}})
    change = delta(old, new)
    assert ("IPv6", "nat", "KUBE-SERVICES") in change.removed
    assert applied(change, old) == dict(new.objects())
    back = delta(new, old)
    assert applied(back, new) == dict(old.objects())
    assert change.needs_full
    assert back.needs_full
    assert not delta(old, old).needs_full


@pytest.mark.parametrize(
    "other",
    [
        render(*WEB, on="n1", conntrack={"udpTimeout": "5s"}),
        render(*WEB, facts={"capabilities": {"nfacct": False}}),
        render(service(), slice_of("web", "10.244.1.1")),
        render(service(ports=[port(81)]), WEB[1]),
        render(*WEB, *API),
        render(dual_stack(), WEB[1]),
    ],
)
def test_a_generation_names_a_state(other: State) -> None:
    assert render(*WEB).generation != other.generation


def test_the_generation_is_about_kernel_objects_not_about_the_node() -> None:
    nodes = [node("n1", "172.18.0.11"), node("n2", "172.18.0.12")]
    assert render(*WEB, *nodes, on="n1").generation == render(*WEB, *nodes, on="n2").generation


def test_the_mode_and_the_minor_are_part_of_it() -> None:
    state = render(*WEB)
    others = (dataclasses.replace(state, compat="1.36"), dataclasses.replace(state, mode="ipvs"))
    assert len({state.generation, *(other.generation for other in others)}) == 3


def test_what_cannot_change_a_packet_does_not_change_the_generation() -> None:
    unready = endpoint("10.244.9.9", ready=False, serving=False)
    more = [service(labels={"a": "b"}, annotations={"c": "d"}), slice_of("web", "10.244.1.2", "10.244.1.1", unready)]
    assert render(*more, on="n1").generation == render(*WEB).generation


def test_nodes_share_fragments_where_they_see_the_same() -> None:
    objects = [service(clusterIP="10.96.0.1"), slice_of("web", "10.244.1.1", endpoint("10.244.2.1", node="n2"))]
    local = [service("own", clusterIP="10.96.0.2", internalTrafficPolicy="Local"), slice_of("own", "10.244.1.2")]
    read = snapshot(*objects, *local, *(node(f"n{i}", f"172.18.0.{10 + i}") for i in (1, 2, 3)))
    settings = config()
    cluster, renderer = ClusterView(read, settings), backends.renderer(settings)
    n1, n2, n3 = (renderer.state(cluster.node_view(node_facts(each))) for each in read.nodes)
    own, web = range(2)
    assert n1.fragments[web] is n2.fragments[web] is n3.fragments[web]
    assert n2.fragments[own] is n3.fragments[own]
    assert n1.fragments[own] is not n2.fragments[own]
    assert n2.generation == n3.generation != n1.generation


@pytest.mark.parametrize(
    ("fields", "compat", "message"),
    [({}, "1.20", "compat '1.20' is not one of 1.36, 1.37")],
)
def test_a_minor_that_nothing_here_writes_is_refused(fields: Any, compat: str, message: str) -> None:
    with pytest.raises(backends.UnknownBackend) as caught:
        backends.renderer(config(**fields), compat)
    assert str(caught.value) == message


# ------------------------------------------------------------------ the delta as files


def test_a_delta_rewrites_changed_chains_and_deletes_stale_ones_in_one_transaction() -> None:
    old, new = render(*WEB), render(service(), slice_of("web", "10.244.1.1"))
    files = dict(backends.delta_files(delta(old, new), new))
    was, is_ = (f"KUBE-PROXY-GEN-{each.generation[:13].upper()}" for each in (old, new))
    assert "iptables-2-dispatch.rules" not in files
    head, nat, filter_ = re.split(r"^\*", files["iptables-1-endpoints.rules"], flags=re.M)
    assert head == f"# node n1, iptables mode, IPv4, {old.generation} to {new.generation}\n"
    assert nat == text(f"""
        nat
        -F {was}
        -X {was}
        -C OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -C PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
        -C POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
        :{SVC} - [0:0]
        :{SEP2} - [0:0]
        -A {SVC} ! -s 10.244.0.0/16 -d 10.96.7.7/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
        -A {SVC} -m comment --comment "shop/web:http -> 10.244.1.1:8080" -j {SEP1}
        -X {SEP2}
        :{is_} - [0:0]
        -A {is_} -m comment --comment {new.generation}
        COMMIT
    """)
    lines = filter_.splitlines()
    assert lines[:3] == ["filter", f"-F {was}", f"-X {was}"]
    assert [line[:2] for line in lines[3:-3]] == ["-C"] * 11
    assert lines[-3:] == [f":{is_} - [0:0]", f"-A {is_} -m comment --comment {new.generation}", "COMMIT"]


def test_a_chain_goes_after_what_refers_to_it() -> None:
    old, new = render(*WEB), render(service())
    files = dict(backends.delta_files(delta(old, new), new))
    first, second = (files[f"iptables-{part}.rules"] for part in ("1-endpoints", "2-dispatch"))
    assert f":{SVC} - [0:0]\n" in first
    assert "-X KUBE-S" not in first
    nat = second.partition("*nat\n")[2].partition("COMMIT\n")[0]
    assert nat.endswith(f"-X {SVC}\n-X {SEP1}\n-X {SEP2}\n")
    assert "has no endpoints" in second


def test_no_delta_writes_the_chain_that_kubelet_shares() -> None:
    old, new = render(*WEB), render(*WEB, iptables={"localhostNodePorts": False})
    assert old.frame["IPv4", "filter", "KUBE-FIREWALL"] != new.frame["IPv4", "filter", "KUBE-FIREWALL"]
    assert delta(old, new).needs_full
    assert delta(new, old).needs_full


def test_a_delta_carries_the_new_generation_also_where_nothing_else_changed() -> None:
    old, new = render(*WEB), render(*WEB, conntrack={"udpTimeout": "5s"})
    files = dict(backends.delta_files(delta(old, new), new))
    assert list(files) == ["iptables-1-endpoints.rules", "ip6tables-1-endpoints.rules", "sysctls.conf"]
    for name in ("iptables-1-endpoints.rules", "ip6tables-1-endpoints.rules"):
        assert files[name].count(f" -m comment --comment {new.generation}\n") == 2
        assert files[name].count("\n-A") == 2
