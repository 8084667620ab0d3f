"""What can be wrong with a host: disks, locks, tools, the clock, and others who do the same at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.inject import Fault, changes_something
from tests.faults.site import Site
from tests.faults.views import halves
from tests.faults.walk import Finding, Move, examine, prepare
from tests.node.test_faults import hiding

TOOLS = ("awk", "sed", "grep", "cp", "mv", "cat", "sha256sum", "flock", "mktemp", "wc", "tr", "cmp", "date", "unshare")


def _one(site: Site, verb: str, kind: str, where: str, **how: object) -> Iterator[Finding]:
    """A verb under a condition. What it makes no difference to is no fault."""
    move = prepare(site, verb)
    result = site.run(*move.arguments, **how)  # type: ignore[arg-type]
    half = halves(site.view(), site.views[move.old], site.views[move.new])
    if result.code or half:
        yield examine(site, move, kind, where, result)
    else:
        # What it wrote may have gone with the disk that it was written to.
        site.host.apply(site.bundles[move.new])
        site.current = move.new


def disks(site: Site) -> Iterator[Finding]:
    """A full disk for temporary files, for the state directory, and a state directory that cannot be written."""
    small = site.host.directory / "small"
    small.mkdir(exist_ok=True)
    for size in (16, 40, 64, 100, 140, 180):
        mount = f'mount -t tmpfs -o size={size}k none {small} && exec "$@"'
        yield from _one(
            site,
            "apply",
            "full disk",
            f"{size} KiB of TMPDIR",
            prefix=("unshare", "-m", "sh", "-c", mount, "sh"),
            TMPDIR=str(small),
        )
    state, copy = site.host.state, site.host.directory / "copy"
    for spare in (0, 8, 40, 120):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(state, copy)
        used = sum((file.stat().st_size + 4095) // 4096 * 4 + 4 for file in copy.rglob("*"))
        mount = f'mount -t tmpfs -o size={used + spare}k none {state} && cp -a {copy}/. {state}/ && exec "$@"'
        yield from _one(
            site,
            "apply",
            "full disk",
            f"{spare} KiB left of the state directory",
            prefix=("unshare", "-m", "sh", "-c", mount, "sh"),
        )
    for verb in ("apply", "rollback", "cleanup"):
        mount = f'mount --bind {state} {state} && mount -o remount,bind,ro {state} && exec "$@"'
        yield from _one(site, verb, "read-only state", verb, prefix=("unshare", "-m", "sh", "-c", mount, "sh"))


def tools(site: Site) -> Iterator[Finding]:
    """Tools that are not there, by name."""
    own = (
        ["nft"]
        if site.mode == "nftables"
        else [f"{ip}tables-{site.host.flavour}-{v}" for ip in ("ip", "ip6") for v in ("save", "restore")]
    )
    for tool in (*TOOLS, *own):
        real = shutil.which(tool)
        if real and Path(real).resolve().name in ("busybox", "xtables-nft-multi", "xtables-legacy-multi"):
            continue  # it would take others with it
        yield from _one(site, "apply", "missing tool", tool, prefix=hiding(tool), PATH=os.environ["PATH"])


def clock(site: Site) -> Iterator[Finding]:
    """A clock that is set while the program runs: what it wrote down is from another time."""
    directory = site.host.directory / "clock"
    directory.mkdir(exist_ok=True)
    for seconds in ("0", "99999999999"):
        (directory / "date").write_text(f"#!/bin/sh\necho {seconds}\n")
        (directory / "date").chmod(0o755)
        move = prepare(site, "apply")
        result = site.run(*move.arguments, PATH=f"{directory}:{os.environ['PATH']}")
        yield examine(site, move, "clock jump", f"to {seconds}", result)


def xtables_lock(site: Site) -> Iterator[Finding]:
    """Another program holds the xtables lock for longer than one waits."""
    lock = site.host.directory / "xtables.lock"
    for verb in ("apply", "rollback", "delta"):
        move = prepare(site, verb)
        with subprocess.Popen(
            ["flock", lock, "sh", "-c", "echo held; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout
            assert holder.stdin
            assert holder.stdout.readline() == b"held\n"
            result = site.run(*move.arguments)
            holder.stdin.close()
        yield examine(site, move, "xtables lock held", verb, result)


def carriers(site: Site, rounds: int = 4) -> Iterator[Finding]:
    """Two carriers at once, one of them with the other state, and one of them killed in every second round."""
    for number in range(rounds):
        move = prepare(site, "apply")
        fault = Fault("kill-after", 40 + number) if number % 2 else None
        with ThreadPoolExecutor(1) as pool:
            rival = pool.submit(site.host.akp, "apply", site.bundles[move.old])
            result = site.run(*move.arguments, fault=fault)
        kind = "kill-after" if site.steps.fired else "carriers"
        both = Move("carriers", move.arguments, move.old, move.new)
        found = examine(site, both, kind, f"round {number}", result)
        yield Finding(
            found.mode,
            "apply",
            "two carriers",
            found.where,
            found.half,
            found.lost,
            found.unhealed,
            found.unsaid,
            found.seconds,
        )
        assert rival.result().code in (0, 5), rival.result().stdout + rival.result().stderr


def unconfirmed(site: Site) -> Iterator[Finding]:
    """A change with a term is killed, and the node goes back by itself."""
    move = prepare(site, "apply")
    site.run(*move.arguments)
    calls = site.steps.taken()
    site.current = move.new
    steps = [number for number, call in enumerate(calls, 1) if changes_something(call)]
    for step in steps[::4]:
        move = prepare(site, "apply")
        result = site.run("apply", "--confirm-within", "1", *move.arguments[1:], fault=Fault("kill-after", step))
        if not site.steps.fired:
            site.host.akp("rollback")
            continue
        back = Move("unconfirmed", move.arguments, move.new, move.old)
        yield examine(site, back, "kill-after", f"step {step}, {site.steps.fired[:80]}", result)


CONDITIONS = (disks, tools, clock, carriers, unconfirmed)
