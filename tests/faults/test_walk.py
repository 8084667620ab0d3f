"""A few faults of every kind. `make soak` injects them all; with AKP_WRITE_DOCS=1 it writes the table of the docs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.faults import conditions, table
from tests.faults.inject import Fault
from tests.faults.plan import MODES, NAMESPACES, SWITCH, inject, site_of
from tests.faults.site import NOTHING, Site
from tests.faults.views import halves, iptables_views, member_views, nftables_views
from tests.faults.walk import Finding, examine, prepare, walk

# One of so many steps is injected, in ipvs mode one of a few more, as each takes longer; 1 takes all of them, and more
# than an hour.
THIN = int(os.environ.get("AKP_THIN", "6"))


@pytest.fixture(scope="module", params=list(NAMESPACES))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A node of each way to write rules, for all tests of this file."""
    made = site_of(request.param, tmp_path_factory.mktemp("site") / "site")
    yield made
    made.close()


def trouble(findings: Iterator[Finding]) -> tuple[int, list[str]]:
    """How many faults there were, and what went wrong."""
    found = list(findings)
    return len(found), [line for each in found for line in each.trouble]


@pytest.mark.parametrize("kind", ["kill-before", "kill-after"])
def test_a_killed_run_leaves_the_old_or_the_new_state_and_the_next_heals(site: Site, kind: str) -> None:
    count, bad = trouble(walk(site, "apply", kind, stride=1000, thin=10))
    assert (count > 0, bad) == (True, [])


def test_a_tool_that_fails_changes_nothing_or_nothing_of_importance(site: Site) -> None:
    count, bad = trouble(walk(site, "apply", "failed", stride=1000, thin=14))
    assert (count > 0, bad) == (True, [])


@pytest.mark.parametrize("site", ["nftables"], indirect=True)
def test_a_tool_that_fails_once_the_new_state_is_in_force_leaves_nothing_of_the_old_for_good(site: Site) -> None:
    """Once, chains that were to be dropped were forgotten with the copy of a list."""
    move = prepare(site, "apply")
    site.run(*move.arguments)
    calls = site.steps.taken()
    site.current = move.new
    switch = next(i for i, call in enumerate(calls, 1) if call.startswith("nft -f") and call.endswith("/nft/switch"))
    recorded = next(i for i, call in enumerate(calls, 1) if call.startswith("mv") and call.endswith("/record"))
    for step in range(switch + 1, recorded):
        move = prepare(site, "apply")
        result = site.run(*move.arguments, fault=Fault("failed", step))
        assert examine(site, move, "failed", f"step {step}, {site.steps.fired}", result).trouble == []


@pytest.mark.parametrize("site", [SWITCH], indirect=True)
@pytest.mark.parametrize(("kind", "thin"), [("kill-before", 12), ("failed", 7)])
def test_a_mode_takes_over_from_another_or_does_not(site: Site, kind: str, thin: int) -> None:
    count, bad = trouble(walk(site, "apply", kind, stride=1, thin=thin))
    assert (count > 0, bad) == (True, [])


def test_two_carriers_take_turns(site: Site) -> None:
    assert trouble(conditions.carriers(site, 1)) == (1, [])


def test_a_push_meets_a_pull(site: Site) -> None:
    assert trouble(conditions.push_and_pull(site, 2)) == (2, [])


def test_a_record_that_was_not_finished_is_finished_by_the_next_run(site: Site) -> None:
    """Killed between the new record and the end of what it replaces: once that stayed so for ever."""
    move = prepare(site, "apply")
    site.run(*move.arguments)
    calls = site.steps.taken()
    site.current = move.new
    written = next(i for i, call in enumerate(calls, 1) if call.startswith("mv") and call.endswith("/record"))
    move = prepare(site, "apply")
    result = site.run(*move.arguments, fault=Fault("kill-after", written))
    assert site.steps.fired.endswith("/record")
    assert examine(site, move, "kill-after", "the record", result).trouble == []


def test_a_kernel_that_cannot_be_read_is_not_taken_for_an_empty_one(site: Site) -> None:
    """Once, jumps were inserted a second time."""
    move = prepare(site, "rollback")
    site.run(*move.arguments)
    site.current = move.new
    reads = [
        i for i, call in enumerate(site.steps.taken(), 1) if "-save" in call.split()[0] or call.startswith("nft list")
    ]
    for step in reads[:2]:
        move = prepare(site, "apply")
        arguments = [move.arguments[0], "--verify", *move.arguments[1:]]
        result = site.run(*arguments, fault=Fault("failed", step))
        assert examine(site, move, "failed", f"step {step}, {site.steps.fired}", result).trouble == []


# ------------------------------------------------------------------ the judges themselves


def test_a_half_switched_table_is_seen() -> None:
    old = (
        "*nat\n:OUTPUT ACCEPT [0:0]\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n-A OUTPUT -j KUBE-A\n-A KUBE-A -j DNAT\nCOMMIT\n"
    )
    new = old.replace("-A OUTPUT -j KUBE-A", "-A OUTPUT -j KUBE-B").replace("-A KUBE-A", "-A KUBE-B")
    half = old.replace("-A OUTPUT -j KUBE-A", "-A OUTPUT -j KUBE-B")
    staged = old.replace("COMMIT", "-A KUBE-B -j DNAT\nCOMMIT")
    views = {
        name: iptables_views({"ipv4": text})
        for name, text in {"old": old, "new": new, "half": half, "s": staged}.items()
    }
    assert halves(views["s"], views["old"], views["new"]) == []
    assert halves(views["new"], views["old"], views["new"]) == []
    assert len(halves(views["half"], views["old"], views["new"])) == 1
    assert halves({}, views["old"], {}) == []


def test_a_half_switched_nftables_table_is_seen() -> None:
    hook = "\tchain nat {\n\t\ttype nat hook output priority 0;\n\t\tjump services\n\t}\n"
    text = "table ip kube-proxy {\n" + hook + "\tchain services {\n\t\tX\n\t}\n}\n"
    old, new = (
        nftables_views(text.replace("X", "dnat to 192.0.2.1")),
        nftables_views(text.replace("X", "dnat to 192.0.2.2")),
    )
    assert halves(old, old, new) == halves(new, old, new) == []
    assert len(halves(nftables_views(text.replace("X", "")), old, new)) == 1


def test_a_missing_virtual_server_is_seen() -> None:
    old, new = member_views({"servers": ["a", "b"]}), member_views({"servers": ["b", "c"]})
    assert halves(member_views({"servers": ["a", "b", "c"]}), old, new) == []
    assert len(halves(member_views({"servers": ["a", "c"]}), old, new)) == 1
    assert len(halves(member_views({"servers": ["b", "d"]}), old, new)) == 1


def test_a_lost_service_is_seen(site: Site) -> None:
    site.go("A")
    assert site.silent() == []
    site.flush()
    assert len(site.silent()) == 4
    site.host.apply(site.bundles["A"])
    site.current = "A"
    assert site.settled("A") == []
    assert site.settled(NOTHING) != []


# ------------------------------------------------------------------ all of them


@dataclass(frozen=True)
class Walked:
    """What one run found, in all modes, and how long it took."""

    found: dict[str, list[Finding]]
    seconds: float


def _injected(mode: str, directory: Path) -> list[Finding]:
    found = []
    for finding in inject(mode, directory, 4 * THIN // 3 if mode == "ipvs" else THIN):
        found.append(finding)
        if len(found) % 25 == 0:
            print(f"{mode}: {len(found)} faults so far, the last {finding.kind} at {finding.where}", flush=True)
    return found


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """All of them; the modes beside each other, the slowest first."""
    begun = time.monotonic()
    modes = MODES[::-1]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        found = dict(zip(modes, pool.map(_injected, modes, map(tmp_path_factory.mktemp, modes)), strict=True))
    return Walked(found, time.monotonic() - begun)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("mode", MODES)
def test_every_fault(mode: str, walked: Walked) -> None:
    assert [line for each in walked.found[mode] for line in each.trouble] == []


@pytest.mark.soak
def test_the_table_has_enough_of_them(walked: Walked) -> None:
    """Of all modes, and from this run alone. AKP_WRITE_DOCS=1 writes it, whatever was found, into the page."""
    found = [each for of_mode in walked.found.values() for each in of_mode]
    assert {each.mode for each in found} == {*MODES}
    assert (len(found) >= 300, len(walked.found["ipvs"]) >= 40) == (True, True)
    if os.environ.get("AKP_WRITE_DOCS"):
        table.write(found, walked.seconds, THIN)
