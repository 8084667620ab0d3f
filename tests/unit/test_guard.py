"""What a change means for all nodes, before the first is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.backends.state import State
from agentless_kube_proxy.controller.approval import unapproved
from agentless_kube_proxy.controller.guard import Frontends, Shrunken, losses, refuse_shrinkage, service_ports

from .build import render, service, slice_of


def state(services: int, *endpoints: str, **config: Any) -> State:
    """So many Services; the endpoints are those of the first."""
    objects = [service(f"s{i}", clusterIP=f"10.96.1.{i}") for i in range(1, services + 1)]
    slices = [slice_of("s1", *endpoints)] if endpoints else []
    return render(*objects, *slices, **config)


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
    (one,), (two,) = learned(frontends, state(3)), learned(frontends, masquerading, settings="masqueradeAll")
    assert frontends.name(one) != frontends.name(two)
    assert [each.service for each in frontends.changes(frontends.name(one), frontends.name(two))] == ["node"]


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
    assert ports == frontends.ports(frontends.name(one.generation))
    fewer = service_ports(state(1).fragments)
    assert losses({"n1": (ports, fewer, 70)}) == ""
    assert losses({"n1": (ports, fewer, 60), "n2": (ports, fewer, 100)}).startswith("on n1, 2 of 3 service ports")


def test_what_is_not_known_here_is_left_to_the_node(frontends: Frontends) -> None:
    (none,) = learned(frontends, state(0))
    refuse_shrinkage(frontends, {"n1": ("f" * 64, none)}, 0)


def test_old_generations_are_forgotten_and_needed_ones_kept(frontends: Frontends, tmp_path: Path) -> None:
    generations = learned(frontends, *(state(2, f"10.244.1.{i}") for i in range(1, 120)))
    frontends.forget({generations[0]})
    links = {each.name[2:] for each in (tmp_path / "frontends").glob("g-*")}
    assert generations[0] in links
    assert len(links) == 102
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
