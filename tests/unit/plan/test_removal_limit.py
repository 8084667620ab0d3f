"""What a change means for all nodes, before the first is touched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.bundle.archive import UnreadableArchive, archive, lines_of
from agentless_kube_proxy.bundle.write import bundle_parts
from agentless_kube_proxy.plan.approval import unapproved
from agentless_kube_proxy.plan.removal_limit import (
    Frontends,
    Port,
    Ports,
    Shrunken,
    losses,
    recorded_ports,
    refuse_shrinkage,
    service_ports,
)

from tests.unit.build import port, render, service, slice_of


def state(services: int, *endpoints: str, **config: Any) -> State:
    """So many Services; the endpoints are those of the first."""
    objects = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, services + 1)]
    slices = [slice_of("s1", *endpoints)] if endpoints else []
    return render(*objects, *slices, **config)


PLAIN = json.dumps([{"kind": "KubeProxyConfiguration", "clusterCIDR": "10.244.0.0/16"}, {"annotations": False}])
MASQUERADING = PLAIN.replace("{", '{"iptables": {"masqueradeAll": true}, ', 1)


@pytest.fixture
def frontends(tmp_path: Path) -> Frontends:
    return Frontends(tmp_path / "frontends")


def learned(frontends: Frontends, *states: State, settings: str = "") -> list[str]:
    for each in states:
        frontends.learn(each, settings)
    return [each.generation for each in states]


def test_generations_that_differ_in_endpoints_have_the_same_frontends(frontends: Frontends, tmp_path: Path) -> None:
    one, two, other = learned(frontends, state(3), state(3, "10.244.1.1"), state(2))
    assert one != two
    assert frontends.name(one) == frontends.name(two) != frontends.name(other)
    assert len(list((tmp_path / "frontends").glob("*.jsonl"))) == 2
    assert frontends.name("0" * 64) == ""


def test_settings_are_frontends_too(frontends: Frontends) -> None:
    masquerading = state(3, "10.244.1.1", iptables={"masqueradeAll": True})
    (one,), (two,) = learned(frontends, state(3)), learned(frontends, masquerading, settings=MASQUERADING)
    assert frontends.name(one) != frontends.name(two)
    assert [each.service for each in frontends.changes(frontends.name(one), frontends.name(two))] == ["node"]


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "nftables"])
def test_endpoints_of_the_node_itself_are_no_frontends(frontends: Frontends, mode: str) -> None:
    none, one, two = learned(
        frontends, *(state(3, *ips, mode=mode) for ips in ((), ("10.244.1.1",), ("10.244.1.1", "10.244.1.2")))
    )
    assert frontends.name(none) == frontends.name(one) == frontends.name(two)
    assert frontends.frame_changes(one, two) == frontends.frame_changes(none, one) == []


def test_settings_are_told_whatever_else_changes(frontends: Frontends) -> None:
    (one,) = learned(frontends, state(3), settings=PLAIN)
    (two,) = learned(frontends, state(4, iptables={"masqueradeAll": True}), settings=MASQUERADING)
    told = [each.title for each in frontends.changes(frontends.name(one), frontends.name(two))]
    assert told == ["node", "shop/s4:http tcp IPv4"]
    (change,) = frontends.frame_changes(one, two)
    assert (change.action, change.title) == ("changed", "node: settings")
    assert change.details == ("+ iptables.masqueradeAll true",)
    needed = unapproved("frontends", frontends, {"n1": (one, two)})
    assert "(changed node, added shop/s4:http tcp IPv4)" in needed["n1"]


def frame(frontends: Frontends, before: str, after: str) -> dict[str, tuple[str, ...]]:
    return {each.title: each.details for each in frontends.frame_changes(before, after)}


def test_what_belongs_to_no_service_is_told_line_by_line(frontends: Frontends) -> None:
    bit = {"iptables": {"masqueradeBit": 15}}
    conntrack = {"conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "5s", "tcpCloseWaitTimeout": "0s"}}
    one, two = learned(frontends, state(3), state(4, **bit, **conntrack, nodePortAddresses=["172.18.0.0/24"]))
    told = frame(frontends, one, two)
    assert told["node: IPv4 nat KUBE-MARK-MASQ"] == (
        "- -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
        "+ -A KUBE-MARK-MASQ -j MARK --set-xmark 0x8000/0x8000",
    )
    assert "+ net.netfilter.nf_conntrack_tcp_timeout_established = 5" in told["node: sysctls.conf"]
    assert told["node: health.conf"] == ("- listen ipv4 0.0.0.0", "+ listen ipv4 172.18.0.11")
    assert not any("s4" in each for each in (*told, *told.values()))


def test_what_there_is_nothing_to_compare_with_is_told_in_full(frontends: Frontends) -> None:
    one, other = learned(frontends, state(1), state(1, mode="nftables"), settings=PLAIN)
    first = frame(frontends, "", one)
    assert first["node: settings"] == ("+ mode iptables", "+ compat 1.37", '+ clusterCIDR "10.244.0.0/16"')
    assert set(first) == {"node: settings", "node: sysctls.conf", "node: nfacct.rules", "node: health.conf"}
    unknown = frame(frontends, "f" * 64, one)
    assert unknown["node: settings"][0].startswith("~ what it had before was not computed here")
    assert unknown["node: settings"][1:] == first["node: settings"]
    assert "were not computed here" in str(frontends.frame_changes(one, "f" * 64))
    assert frame(frontends, one, other)["node: settings"] == ("~ mode iptables -> nftables",)
    assert not [name for name in frame(frontends, one, other) if "IPv4" in name], "all rules are others"


def test_frames_that_an_earlier_version_did_not_keep_are_learned(frontends: Frontends, tmp_path: Path) -> None:
    (one,) = learned(frontends, state(1), settings=PLAIN)
    (tmp_path / "frontends" / f"f-{one}").unlink()
    learned(frontends, state(1), settings=PLAIN)
    assert "node: settings" in frame(frontends, "", one)


def test_a_node_may_lose_so_much_and_no_more(frontends: Frontends) -> None:
    full, half, one, none = learned(frontends, state(4), state(2), state(1), state(0))
    refuse_shrinkage(frontends, {"n1": (full, half), "n2": (none, full), "n3": ("", full)}, 50)
    with pytest.raises(
        Shrunken, match="on n1, n2, 3 of 4 service ports would be removed, more than 50 %: shop/s2:http"
    ):
        refuse_shrinkage(frontends, {"n2": (full, one), "n1": (full, one), "n3": (full, half)}, 50)
    with pytest.raises(Shrunken, match=r"no node was touched.*4 of 4.*kube_proxy_max_removed_percent=100"):
        refuse_shrinkage(frontends, {"n1": (full, none)}, 99)
    refuse_shrinkage(frontends, {"n1": (full, none)}, 100)
    with pytest.raises(Shrunken):
        refuse_shrinkage(frontends, {"n1": (full, learned(frontends, state(3))[0])}, 0)


def test_a_state_and_what_is_kept_of_it_name_the_same_service_ports(frontends: Frontends) -> None:
    one = state(3, "10.244.1.1")
    learned(frontends, one)
    ports = service_ports(one.fragments)
    assert ports == frontends.ports(one.generation)
    archived = archive((name, text.encode()) for name, text in bundle_parts(one)[1])
    assert ports == recorded_ports(lines_of(archived, "services.jsonl"))
    assert set(map(str, ports.idle)) == {"shop/s2:http tcp IPv4", "shop/s3:http tcp IPv4"}
    fewer = service_ports(state(1, "10.244.1.1").fragments)
    assert losses({"n1": (ports, fewer, 70)}) == ""
    assert losses({"n1": (ports, fewer, 60), "n2": (ports, fewer, 100)}).startswith("on n1, 2 of 3 service ports")


def test_an_archive_gives_back_what_was_put_in_or_says_that_it_cannot() -> None:
    whole = archive([("one", b"1\n== two 1\n"), ("none", b""), ("two", b"2\n")])
    found = [lines_of(whole, name) for name in ("one", "none", "two", "three")]
    assert found == [["1", "== two 1"], [], ["2"], []]
    for broken in (b"", b"text", whole[:-9], gzip.compress(b"== one 1\n"), gzip.compress(b"no mark\n==\n")):
        with pytest.raises(UnreadableArchive):
            lines_of(broken, "two")


def served(live: int, services: int = 4) -> State:
    """So many Services, of which the first few have endpoints."""
    objects = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, services + 1)]
    return render(*objects, *(slice_of(f"s{i}", f"10.244.1.{i}") for i in range(1, live + 1)))


def test_a_cluster_whose_services_all_lose_their_endpoints_is_shrunken(frontends: Frontends, tmp_path: Path) -> None:
    all_, one, none, fewer = learned(frontends, served(4), served(1), served(0), served(0, 3))
    refuse_shrinkage(frontends, {"n1": (all_, one), "n2": (none, all_), "n3": (none, none)}, 50)
    with pytest.raises(Shrunken) as refused:
        refuse_shrinkage(frontends, {"n1": (all_, none)}, 50)
    assert (
        "on n1, 4 of 4 service ports that have endpoints would be removed or have none left, more than 50 %: "
        "shop/s1:http tcp IPv4 (no endpoints left), shop/s2:http" in str(refused.value)
    )
    with pytest.raises(Shrunken, match=r"4 of 4 .*: shop/s1:http tcp IPv4 \(no .*, shop/s4:http tcp IPv4\. If that"):
        refuse_shrinkage(frontends, {"n1": (all_, fewer)}, 50)
    refuse_shrinkage(frontends, {"n1": (all_, none)}, 100)
    # As an earlier version left it, which kept nothing of endpoints.
    (tmp_path / "frontends" / f"i-{all_}").unlink()
    refuse_shrinkage(Frontends(tmp_path / "frontends"), {"n1": (all_, none)}, 50)


def test_a_watch_counts_lost_endpoints_the_same() -> None:
    before, after = service_ports(served(4).fragments), service_ports(served(0).fragments)
    assert "4 of 4 service ports that have endpoints would be" in losses({"n1": (before, after, 50)})
    assert losses({"n1": (after, before, 0), "n2": (before, service_ports(served(1).fragments), 0)}) == ""


API_SERVER = [
    service("kubernetes", "default", clusterIP="10.96.0.1", ports=[port(443, "https")]),
    slice_of(
        "kubernetes", "192.0.2.5", namespace="default", ports=[{"name": "https", "port": 6443, "protocol": "TCP"}]
    ),
]


def test_the_slice_that_the_api_server_keeps_itself_does_not_make_an_answer_a_whole_one() -> None:
    """It is there as long as there is an API server, even if all other slices are lost."""
    slices = [slice_of(f"s{i}", f"10.244.1.{i}") for i in range(1, 5)]
    objects = [*API_SERVER, *(service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, 5))]
    full, one, none = (service_ports(render(*objects, *slices[:live]).fragments) for live in (4, 1, 0))
    assert none.idle != none.known
    assert losses({"n1": (full, none, 50)}).startswith("on n1, 4 of 4 service ports that have endpoints would be ")
    assert losses({"n1": (full, one, 50), "n2": (none, full, 0), "n3": (none, none, 0)}) == ""


def test_services_that_never_had_endpoints_do_not_outweigh_those_that_lose_theirs() -> None:
    before, after = service_ports(served(2, 10).fragments), service_ports(served(0, 10).fragments)
    assert losses({"n1": (before, after, 50)}).startswith("on n1, 2 of 2 service ports that have endpoints would be ")
    assert losses({"n1": (before, after, 100)}) == ""


def test_a_cluster_that_loses_one_of_its_families_is_shrunken() -> None:
    """All Services are there, and half of their addresses."""

    def both(*families: str) -> Ports:
        ips = {"IPv4": "10.96.1.{}", "IPv6": "fd00:10:96::{}"}
        names = range(1, 4)
        spec = [[ips[each].format(i) for each in families] for i in names]
        made = [
            service(f"s{i}", ipFamilies=list(families), clusterIPs=each, clusterIP=each[0])
            for i, each in zip(names, spec, strict=True)
        ]
        return service_ports(render(*made, service("old", clusterIP="10.96.2.1")).fragments)

    full, half = both("IPv4", "IPv6"), both("IPv4")
    assert losses({"n1": (full, half, 50)}).startswith(
        "on n1, 3 of 4 service ports would be removed, more than 50 %: shop/s1:http tcp IPv6, shop/s2:http tcp IPv6"
    )
    assert losses({"n1": (full, half, 75), "n2": (half, full, 0)}) == ""
    few = Ports(half.known | {Port("shop/old:http tcp", "IPv6", "shop/old")}, half.idle)
    assert losses({"n1": (few, half, 50)}) == "", "the one that had both families is one of four"


def test_what_is_not_known_here_is_left_to_the_node(frontends: Frontends) -> None:
    (none,) = learned(frontends, state(0))
    refuse_shrinkage(frontends, {"n1": ("f" * 64, none)}, 0)


def test_old_generations_are_forgotten_and_needed_ones_kept(frontends: Frontends, tmp_path: Path) -> None:
    generations = learned(frontends, *(state(2, f"10.244.1.{i}") for i in range(1, 120)))
    frontends.forget({generations[0]})
    links = {each.name[2:] for each in (tmp_path / "frontends").glob("g-*")}
    assert generations[0] in links
    assert len(links) == 102
    for kind in "fi":
        assert {each.name[2:] for each in (tmp_path / "frontends").glob(f"{kind}-*")} == links
    assert frontends.name(generations[0])


def test_who_needs_a_plan(frontends: Frontends) -> None:
    one, moved, more = learned(frontends, state(3), state(3, "10.244.1.1"), state(4))
    steps = {"same": (one, one), "moved": (one, moved), "more": (one, more), "first": ("", one)}
    assert unapproved("none", frontends, steps) == {}
    needed = unapproved("frontends", frontends, steps)
    assert set(needed) == {"more", "first"}
    assert needed["more"].startswith("needs an approved plan (added shop/s4:http tcp IPv4): run plan_services")
    assert set(unapproved("all", frontends, steps)) == {"moved", "more", "first"}


def test_what_others_were_given_by_a_plan_needs_no_other(frontends: Frontends) -> None:
    one, more, most = learned(frontends, state(3), state(4, "10.244.1.1"), state(5))
    steps = {"away": (one, more), "new": ("", more), "unknown": ("f" * 64, more), "beyond": (one, most)}
    approved = {frontends.name(learned(frontends, state(4))[0])}
    assert set(unapproved("frontends", frontends, steps, approved)) == {"beyond"}
    assert set(unapproved("all", frontends, steps, approved)) == set(steps)
