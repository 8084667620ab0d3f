"""Which faults each mode is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.conftest import unused_prefix
from tests.faults import conditions
from tests.faults.control import ControlHost, control_faults, session_faults
from tests.faults.site import Site
from tests.faults.uml import LabSite, sessions
from tests.faults.walk import VERBS, WITH_DELTAS, Finding, walk
from tests.lab import Lab

NAMESPACES = {
    "iptables-nft": ("iptables", "nft"),
    "iptables-legacy": ("iptables", "legacy"),
    "nftables": ("nftables", "nft"),
}
SWITCH = "switch"
MODES = (*NAMESPACES, SWITCH, "ipvs")


def site_of(mode: str, directory: Path) -> Site:
    """A node in a namespace. From one mode to another: those that differ most."""
    return Site(directory, *NAMESPACES.get(mode, (SWITCH, "nft")))


def inject(mode: str, directory: Path, thin: int = 1, shift: int = 0) -> Iterator[Finding]:
    """All faults of a mode; `thin` takes one of so many steps."""
    if mode == "ipvs":
        with Lab(unused_prefix(), 2, uml=1) as lab:
            yield from inject_ipvs(LabSite(lab, directory), thin, shift)
        with Lab(unused_prefix(), 2, uml=1) as lab:
            # It has a single node, and so few commands to thin out.
            yield from inject_control(ControlHost(lab, directory / "control", mode), max(1, thin // 4), shift)
        return
    site = site_of(mode, directory / "site")
    try:
        yield from inject_site(site, thin, shift)
    finally:
        site.close()
    if mode == SWITCH:
        return
    with Lab(unused_prefix(), 3, iptables=NAMESPACES[mode][1]) as lab:
        yield from inject_control(ControlHost(lab, directory / "control", mode), thin, shift)


def inject_control(host: ControlHost, thin: int, shift: int = 0) -> Iterator[Finding]:
    """Ansible as the carrier: a third of its commands, another one in each mode that has as many of them."""
    # An odd number of steps: every command has four faults, and each of them is to come round.
    yield from control_faults(host, 3 * thin | 1, shift + MODES.index(host.mode))
    yield from session_faults(host, max(1, (4 if host.mode == "ipvs" else 8) // thin))


def inject_site(site: Site, thin: int, shift: int = 0) -> Iterator[Finding]:
    """Every step of every verb is killed; of the milder faults there are fewer."""
    for condition in conditions.CONDITIONS:
        yield from condition(site)
    if site.host.flavour == "legacy":
        yield from conditions.xtables_lock(site)
    for number, verb in enumerate(VERBS, shift):
        if verb in WITH_DELTAS and not site.deltas:
            continue
        yield from walk(site, verb, "kill-before", stride=1, thin=thin, shift=number)
        yield from walk(site, verb, "kill-after", thin=thin, shift=number)
        yield from walk(site, verb, "failed", stride=3, thin=2 * thin, shift=number)
        yield from walk(site, verb, "killed", stride=5, thin=4 * thin, shift=number)
        yield from walk(site, verb, "killed-after", stride=5, thin=4 * thin, shift=number)
    yield from walk(site, "apply", "hangup", stride=10, thin=2 * thin)


def inject_ipvs(site: LabSite, thin: int, shift: int = 0) -> Iterator[Finding]:
    """The same, fewer of what changes nothing, as a kernel in a process takes its time; and connections that break."""
    yield from sessions(site)
    for condition in conditions.CONDITIONS:
        yield from condition(site)
    for number, verb in enumerate(VERBS, shift):
        yield from walk(site, verb, "kill-before", stride=10, thin=thin, shift=number)
        yield from walk(site, verb, "kill-after", thin=thin, shift=number)
        yield from walk(site, verb, "failed", stride=10, thin=2 * thin, shift=number)
        yield from walk(site, verb, "killed", stride=10, thin=4 * thin, shift=number)
        yield from walk(site, verb, "killed-after", stride=10, thin=4 * thin, shift=number)
    yield from walk(site, "apply", "hangup", stride=10, thin=2 * thin, shift=shift)
