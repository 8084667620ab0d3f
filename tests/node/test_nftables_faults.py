"""What goes wrong in nftables mode, and what is left afterwards."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.backends.state import delta
from agentless_kube_proxy.bundle.write import write_delta

from tests.node.host import Host, with_path
from tests.node.nftables import foreign, listing, shop, state, wrap_nft, write
from tests.unit.build import service, slice_of

REFUSE = 'echo "/dev/stdin:1:1-3: Error: Could not process rule: Cannot allocate memory" >&2; exit 1'


@pytest.fixture(params=["dash", pytest.param("busybox", marks=pytest.mark.soak)])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Host]) -> Host:
    """A host under each shell."""
    made = new_host("nft", request.param)
    made.mode = "nftables"
    return made


def large(count: int = 400, ip: str = "10.245.0.1") -> tuple[object, ...]:
    """Enough Services for staging."""
    services = [service(f"s{i}", clusterIP=f"10.96.{i // 250}.{i % 250}") for i in range(count)]
    return (*services, *(slice_of(f"s{i}", ip) for i in range(count)))


# ------------------------------------------------------------------ the kernel says no


@pytest.mark.parametrize("first", [True, False], ids=["fresh", "applied"])
@pytest.mark.parametrize("part", ["stage.0000", "stage.0001", "switch"])
def test_a_refused_bundle_leaves_the_old_state(host: Host, tmp_path: Path, part: str, first: bool) -> None:
    if not first:
        host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    before, status = listing(host), host.akp("status").json["state"]
    env = wrap_nft(host, f'case "$1 $2" in "-f "*/{part}) {REFUSE} ;; esac') | {"AKP_CHUNK": "400"}
    result = host.akp("apply", write(state(*large()), tmp_path / "b"), **env)
    assert result.code == 4, result.stdout + result.stderr
    assert ("old state is back" in result.json["error"], result.json["asBefore"]) == (True, True)
    assert "Cannot allocate memory" in result.json["error"]
    assert listing(host) == before
    assert host.akp("status").json["state"] == status
    host.apply(tmp_path / "b")
    assert host.akp("status", "--verify").json["drift"] == 0


def test_what_was_staged_and_cannot_be_removed_is_said_and_goes_with_the_next_run(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    before = listing(host)
    env = wrap_nft(host, f'case "$1 $2" in "-f "*/switch|"-f "*/unstage) {REFUSE} ;; esac') | {"AKP_CHUNK": "400"}
    result = host.akp("apply", write(state(*large()), tmp_path / "b"), **env)
    assert (result.code, result.json["asBefore"]) == (4, False), result.stdout + result.stderr
    assert "what was staged could not be removed" in result.json["warnings"][0]
    assert host.akp("status").json["state"] == "partial"
    host.apply(tmp_path / "a")
    assert listing(host) == before


def test_what_was_staged_in_vain_is_no_failure_once_the_second_look_leads_there(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    refused = host.directory / "refused"
    once = f'case "$1 $2" in "-f "*/switch|"-f "*/unstage) [ -e {refused} ] || {{ {REFUSE}; }} ;; esac'
    once = once.replace("exit 1", f'case "$2" in *unstage) touch {refused} ;; esac; exit 1')
    env = wrap_nft(host, once) | {"AKP_CHUNK": "400"}
    result = host.akp("apply", write(state(*large()), tmp_path / "b"), **env)
    assert (result.code, refused.exists()) == (0, True), result.stdout + result.stderr
    assert host.akp("status", "--verify").json["drift"] == 0


# ------------------------------------------------------------------ a run is cut short


def cut_short(host: Host, bundle: Path, part: str) -> None:
    """Kill a run just before it loads a part of its plan."""
    mark = host.directory / "reached"
    env = wrap_nft(host, f'case "$1 $2" in "-f "*/{part}) touch {mark}; sleep 60 ;; esac') | {"AKP_CHUNK": "400"}
    shell = ["busybox", "ash"] if host.shell == "busybox" else ["dash"]
    run = subprocess.Popen(
        ["ip", "netns", "exec", host.name, *shell, bundle / "akp-node", "apply", bundle],
        env=with_path(host.environment | env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL


@pytest.mark.parametrize("part", ["stage.0000", "stage.0001", "switch", "drop"])
def test_a_run_that_was_killed_leaves_nothing_that_the_next_does_not_put_right(
    host: Host, new_host: Callable[..., Host], tmp_path: Path, part: str
) -> None:
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    before = listing(host)
    cut_short(host, write(state(*large()), tmp_path / "b"), part)
    if part != "drop":
        # What packets meet is what it was; chains that nothing leads to may be there.
        assert set(before.splitlines()) <= set(listing(host).splitlines())
        assert host.akp("status").json["generation"] == shop("10.244.1.1").generation
    wanted = write(shop("10.244.1.2"), tmp_path / "c")
    host.apply(wanted)
    alone = new_host()
    alone.apply(wanted)
    assert listing(host) == listing(alone)


@pytest.mark.parametrize(
    ("options", "again"),
    [((), False), (("--verify",), False), (("--verify",), True)],
    ids=["another generation", "verified", "the same once more"],
)
def test_a_switch_that_was_carried_out_and_yet_failed_counts(
    host: Host, tmp_path: Path, options: tuple[str, ...], again: bool
) -> None:
    """The tool dies on its way back. Once, the new rules were called the old state."""
    old = write(shop("10.244.1.1"), tmp_path / "a")
    host.apply(old)
    if again:
        host.sh("nft flush chain ip kube-proxy services")
    env = wrap_nft(host, 'case "$1 $2" in *aside*) ;; "-f "*/nft/switch) $nft "$@"; exit 1 ;; esac')
    new = old if again else write(state(*large()), tmp_path / "b")
    result = host.akp("apply", *options, new, **env)
    assert (result.code, result.json["changed"]) == (0, True), result.stdout + result.stderr
    status = host.akp("status", "--verify").json
    assert (status["state"], status["drift"]) == ("applied", 0)


def test_a_switch_that_failed_is_no_success_because_its_marker_is_there(host: Host, tmp_path: Path) -> None:
    """The same generation once more, as something is missing: its marker says nothing about what became of it."""
    bundle = write(shop("10.244.1.1"), tmp_path / "a")
    host.apply(bundle)
    host.sh("nft flush chain ip kube-proxy services")
    result = host.akp(
        "apply",
        "--verify",
        bundle,
        **wrap_nft(host, f'case "$1 $2" in *aside*) ;; "-f "*/nft/switch) {REFUSE} ;; esac'),
    )
    assert (result.code, result.json["asBefore"]) == (4, True), result.stdout + result.stderr
    host.apply(bundle, "--verify")
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_delta_that_was_carried_out_and_yet_failed_is_taken(host: Host, tmp_path: Path) -> None:
    """The tool dies on its way back, the kernel has the marker that only the delta makes."""
    old, new = shop("10.244.1.1"), shop("10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    write_delta(delta(old, new), new, tmp_path / "delta")
    env = wrap_nft(host, '[ "$1" != -f ] || { $nft "$@"; exit 1; }')
    result = host.akp("apply", "--confirm-within", "600", tmp_path / "delta", **env)
    assert (result.code, result.json["changed"]) == (0, True), result.stdout + result.stderr
    assert host.akp("confirm").code == 0
    status = host.akp("status", "--verify").json
    assert (status["state"], status["drift"], status["generation"]) == ("applied", 0, new.generation)


@pytest.mark.parametrize("dropped", ["", "nftables-4-drop.nft"], ids=["before its drop", "after its drop"])
def test_a_delta_that_was_killed_after_its_transaction_is_taken_the_next_time(
    host: Host, tmp_path: Path, dropped: str
) -> None:
    old, new = shop("10.244.1.1", extra=large(1)), shop("10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    write_delta(delta(old, new), new, tmp_path / "delta")
    host.sh(f"cat {tmp_path}/delta/nftables-[123]-*.nft | nft -f -")
    if dropped:
        host.sh(f"nft -f {tmp_path}/delta/{dropped}")
    assert host.akp("status").json["state"] == "foreign"
    result = host.akp("apply", tmp_path / "delta")
    assert (result.code, result.json["changed"]) == (0, True), result.stdout + result.stderr
    status = host.akp("status", "--verify").json
    assert (status["state"], status["drift"], status["generation"]) == ("applied", 0, new.generation)


def test_a_refused_delta_leaves_all_as_before(host: Host, tmp_path: Path) -> None:
    old, new = shop("10.244.1.1"), shop("10.244.1.2")
    host.apply(write(old, tmp_path / "a"))
    before = listing(host)
    write_delta(delta(old, new), new, tmp_path / "delta")
    result = host.akp("apply", tmp_path / "delta", **wrap_nft(host, f'case "$1" in -f) {REFUSE} ;; esac'))
    assert (result.code, result.json["need"], result.json["asBefore"]) == (0, "full", True), result.stdout
    assert "Cannot allocate memory" in result.json["reason"]
    assert (listing(host), host.akp("status").json["state"]) == (before, "applied")
    dead = wrap_nft(host, 'case "$1" in -f|-c) exit 137 ;; esac')
    result = host.akp("apply", tmp_path / "delta", **dead)
    assert (result.code, result.json["need"], result.json["asBefore"]) == (0, "full", False), result.stdout
    assert host.akp("status").json["state"] == "partial"
    host.apply(write(new, tmp_path / "b"))
    assert host.akp("status", "--verify").json["drift"] == 0


def test_a_refusal_does_not_forget_that_another_run_was_cut_short(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1"), tmp_path / "a"))
    cut_short(host, write(state(*large()), tmp_path / "b"), "switch")
    assert host.akp("status").json["state"] == "partial"
    c = write(shop("10.244.1.2"), tmp_path / "c")
    refused = host.akp("apply", c, **wrap_nft(host, f'case "$1 $2" in *aside*) ;; "-f "*/nft/switch) {REFUSE} ;; esac'))
    assert refused.code == 4, refused.stdout + refused.stderr
    assert host.akp("status").json["state"] == "partial"
    host.apply(c)
    status = host.akp("status", "--verify").json
    assert (status["state"], status["drift"]) == ("applied", 0), "what the first one had staged is gone as well"


# ------------------------------------------------------------------ kernels that let go of chains slowly

BUSY = 'echo "x:1:1-3: Error: Could not process rule: Device or resource busy" >&2; exit 1'


def test_a_chain_that_is_still_in_use_is_tried_again(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1", extra=large(1)), tmp_path / "a"))
    gate = host.directory / "asked"
    slow = f'if [ "$1" = -f ] && grep -q "^delete chain .*/" "$2" && [ ! -e {gate} ]; then touch {gate}; {BUSY}; fi'
    result = host.akp("apply", write(shop("10.244.1.1"), tmp_path / "b"), **wrap_nft(host, slow))
    assert (result.code, result.json["warnings"]) == (0, [])
    assert "shop/s0/" not in host.sh("nft list ruleset")


def test_a_chain_that_stays_in_use_is_empty_and_goes_with_the_next_run(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1", extra=large(1)), tmp_path / "a"))
    slow = f'if [ "$1" = -f ] && grep -q "^delete chain .*/" "$2"; then {BUSY}; fi'
    result = host.akp("apply", write(shop("10.244.1.1"), tmp_path / "b"), **wrap_nft(host, slow))
    assert result.code == 0
    assert "chains that should go stay, empty, until the next run" in result.json["warnings"][0]
    assert re.search(r"chain service-\S+shop/s0/tcp/http \{\n\t\}", host.sh("nft list ruleset"))
    host.apply(write(shop("10.244.1.2"), tmp_path / "c"))
    assert "shop/s0/" not in host.sh("nft list ruleset")


def test_a_stale_chain_that_is_wanted_again_is_not_deleted(host: Host, tmp_path: Path) -> None:
    with_it = write(shop("10.244.1.1", extra=large(1)), tmp_path / "a")
    host.apply(with_it)
    slow = f'if [ "$1" = -f ] && grep -q "^delete chain .*/" "$2"; then {BUSY}; fi'
    host.akp("apply", write(shop("10.244.1.1"), tmp_path / "b"), **wrap_nft(host, slow))
    host.apply(with_it)
    assert host.akp("status", "--verify").json["drift"] == 0


# ------------------------------------------------------------------ what a host lacks


def only(host: Host, *without: str) -> dict[str, str]:
    """An environment in which some tools are missing."""
    directory = host.directory / "tools"
    directory.mkdir()
    for name in (
        "awk",
        "cat",
        "cmp",
        "cp",
        "cut",
        "date",
        "flock",
        "grep",
        "head",
        "ip",
        "ls",
        "mkdir",
        "mv",
    ):
        (directory / name).symlink_to(str(shutil.which(name)))
    for name in ("readlink", "rm", "rmdir", "sed", "sha256sum", "sleep", "sort", "tail", "touch", "tr", "uname", "wc"):
        (directory / name).symlink_to(str(shutil.which(name)))
    for name in {"nft", "unshare", "conntrack", "iptables", "xargs"} - set(without):
        (directory / name).symlink_to(str(shutil.which(name)))
    return {"PATH": str(directory)}


def in_jail(host: Host, bundle: Path, env: dict[str, str], verb: str = "") -> tuple[int, str]:
    """Run apply, or another verb, where PATH is all there is: directories that the program adds are hidden."""
    hide = "mount -t tmpfs none /usr/local/sbin; for d in /usr/sbin /sbin; do mount -t tmpfs none $d; done"
    tools = env["PATH"]
    script = (
        f"set -e; mkdir -p {host.directory}/real; cp -L {tools}/* {host.directory}/real/ 2>/dev/null;"
        f"{hide}; PATH={host.directory}/real:/usr/bin:/bin exec sh {bundle}/akp-node {verb or f'apply {bundle}'}"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", host.name, "unshare", "-m", "sh", "-c", script],
        env=host.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_without_nft_nothing_is_done(host: Host, tmp_path: Path) -> None:
    bundle = write(shop("10.244.1.1"), tmp_path / "a")
    code, output = in_jail(host, bundle, only(host, "nft"))
    assert code == 3, output
    assert "missing tool: nft (package nftables)" in output


def test_without_iptables_it_works(host: Host, tmp_path: Path) -> None:
    bundle = write(shop("10.244.1.1"), tmp_path / "a")
    code, output = in_jail(host, bundle, only(host, "iptables"))
    assert code == 0, output
    assert host.akp("status").json["state"] == "applied"


def test_without_iptables_facts_still_tell_the_families(host: Host, tmp_path: Path) -> None:
    bundle = write(shop("10.244.1.1"), tmp_path / "a")
    code, output = in_jail(host, bundle, only(host, "iptables"), verb="facts")
    assert code == 0, output
    assert '"ipv4": true, "ipv6": true' in output


def test_without_namespaces_unknown_tables_are_written_anew_but_sessions_stay(host: Host, tmp_path: Path) -> None:
    host.apply(write(shop("10.244.1.1", sticky=("10.244.1.2",)), tmp_path / "a"))
    name = re.findall(r"set (affinity-\S+) ", host.sh("nft list ruleset"))[0]
    host.sh(f"nft add element ip kube-proxy {name} '{{ 192.0.2.77 }}'")
    (host.state / "record").unlink()
    directory = host.directory / "denied"
    directory.mkdir()
    (directory / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (directory / "unshare").chmod(0o755)
    denied = {"PATH": f"{directory}:{host.environment['PATH']}"}
    result = host.akp("apply", write(shop("10.244.1.3", sticky=("10.244.1.2",)), tmp_path / "b"), **denied)
    assert result.code == 0, result.stdout + result.stderr
    assert "192.0.2.77" in host.sh(f"nft list set ip kube-proxy {name}")
    assert host.akp("status", "--verify").json["drift"] == 0
    result = host.akp("status", "--verify", **denied)
    assert result.code == 3
    assert "unshare" in result.json["error"]


@pytest.mark.parametrize("version", ["0.9.8", "1.0.0"])
def test_an_nft_that_is_too_old_is_named(host: Host, tmp_path: Path, version: str) -> None:
    old = f'[ "$1" != --version ] || {{ echo "nftables v{version} (E.D.S.)"; exit 0; }}'
    result = host.akp("apply", write(shop("10.244.1.1"), tmp_path / "a"), **wrap_nft(host, old))
    assert result.code == 3
    assert result.json["error"] == f"missing tool: nft 1.0.1 or newer (package nftables), this is {version}"
    assert host.sh("nft list ruleset") == ""


@pytest.mark.parametrize(
    ("command", "feature"),
    [
        ("numgen random mod 2 vmap", "random verdict maps (module nft_numgen)"),
        ("masquerade fully-random", "masquerading (module nft_masq)"),
        ("fib saddr", "fib lookups (module nft_fib)"),
        ("flags dynamic,timeout", "dynamic sets with timeouts"),
        ("addr . port", "random maps of address and port (nft 1.0.1 and Linux 5.13)"),
    ],
)
def test_a_kernel_that_lacks_something_is_told_what(host: Host, tmp_path: Path, command: str, feature: str) -> None:
    lacking = f'if [ "$1 $2" = "-c -f" ] && grep -q "{command}" "$3"; then {REFUSE}; fi'
    result = host.akp("apply", write(shop("10.244.1.1"), tmp_path / "a"), **wrap_nft(host, lacking))
    assert result.code == 3, result.stdout + result.stderr
    assert f"missing kernel feature: {feature}, family ip" in result.json["error"]
    assert foreign(host) == ""
    assert host.akp("status").json["state"] == "absent"
