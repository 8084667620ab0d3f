"""What can be wrong with a host: disks, locks, tools, the clock, and others who do the same at the same time."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.publish.store import Publication, Terms

from tests.faults.inject import Fault, changes_something
from tests.faults.site import Site, objects
from tests.faults.views import halves
from tests.faults.walk import Finding, Move, examine, prepare
from tests.node.host import Result
from tests.node.nftables import NO_SYSCTLS
from tests.node.signing import CLUSTER, new_key, release_of, sign_bundle
from tests.node.test_faults import hiding
from tests.unit.build import render

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
    for spare in (0, 4, 8, 16, 32, 128):
        mount = (
            f"rm -rf {copy}; cp -a {state} {copy}; mount -t tmpfs -o size=2m none {state}; cp -a {copy}/. {state}/; "
            f'for kept in {state}/bundles/*; do grep -q "${{kept##*/}}" {state}/record || rm -rf "$kept"; done; '
            f"dd if=/dev/zero of={state}/other bs=1k 2>/dev/null; truncate -s -{spare}k {state}/other; "
            'exec "$@"'
        )
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
    own = {"nftables": ["nft"], "ipvs": ["ipvsadm", "ipset", "ip"]}.get(
        site.mode, [f"{ip}tables-{site.host.flavour}-{v}" for ip in ("ip", "ip6") for v in ("save", "restore")]
    )
    for tool in (*TOOLS, *own):
        real = shutil.which(tool)
        if real and Path(real).resolve().name in ("busybox", "xtables-nft-multi", "xtables-legacy-multi"):
            continue  # it would take others with it
        yield from _one(site, "apply", "missing tool", tool, prefix=hiding(tool), PATH=os.environ["PATH"])


def memory(site: Site) -> Iterator[Finding]:
    """Less memory for each process than some of the tools need."""
    for kib in (3600, 4000, 4400, 5000, 5600, 6400):
        limit = ("sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh")
        yield from _one(site, "apply", "out of memory", f"{kib} KiB", prefix=limit)


def modules(site: Site) -> Iterator[Finding]:
    """What the kernel, or the tool that speaks to it, does not know."""
    if site.mode == "nftables":
        lacking = site.host.directory / "lacking"
        lacking.mkdir(exist_ok=True)
        for word in ("numgen", "masquerade", "fib "):
            refuse = "echo 'Error: Could not process rule: No such file or directory' >&2; exit 1"
            script = f'#!/bin/sh\ncase $1 in -c) ! grep -q "{word}" "$3" || {{ {refuse}; }} ;; esac\n'
            (lacking / "nft").write_text(f'{script}exec {shutil.which("nft")} "$@"\n')
            (lacking / "nft").chmod(0o755)
            yield from _one(site, "apply", "missing module", word.strip(), PATH=f"{lacking}:{os.environ['PATH']}")
    else:
        iptables = ("statistic", "recent", "comment", "conntrack", "MARK")
        for name in ("set", "comment", "MARK") if site.mode == "ipvs" else iptables:
            library = next(Path("/usr/lib").glob(f"*/xtables/libxt_{name}.so"))
            mount = f'mount --bind /dev/null {library} && exec "$@"'
            yield from _one(site, "apply", "missing module", name, prefix=("unshare", "-m", "sh", "-c", mount, "sh"))
    if site.mode != "ipvs" and not Path("/proc/net/ip_vs").exists():
        move = prepare(site, "apply")
        made = site.host.directory / "ipvs"
        write_bundle(render(*objects(move.new), mode="ipvs", conntrack=NO_SYSCTLS), made)
        yield examine(site, move, "missing module", "ip_vs", site.run("apply", made))


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
        yield _both(site, move, "two carriers", f"round {number}", result)
        assert rival.result().code in (0, 5), rival.result().stdout + rival.result().stderr


def push_and_pull(site: Site, rounds: int = 6) -> Iterator[Finding]:
    """A push meets the pull of a cron, which fetches the same state or the one before; every second push is killed."""
    directory, node = site.host.directory, site.states["A"].node
    key = new_key(directory / "keys", "publisher")
    publication = Publication(directory / "www", Terms(CLUSTER, (key,), 3600))
    with site.trusting(key, f"cluster {CLUSTER}\nnode {node}\nurl file://{directory / 'www'}\n"):
        for number in range(rounds):
            move = prepare(site, "apply")
            with publication.locked():
                publication.add(site.states[move.old if number % 3 == 2 else move.new], [])
                publication.switch()
            published = publication.current(node)
            assert published
            push = release_of(site.bundles[move.new], after=published.counter)
            sign_bundle(site.bundles[move.new], key, release=push)
            fault = Fault("kill-after", 20 + 10 * number) if number % 2 else None
            with ThreadPoolExecutor(1) as pool:
                rival = pool.submit(site.pull)
                result = site.run(*move.arguments, fault=fault)
            yield _both(site, move, "push and pull", f"round {number}", result)
            # 2: what was published is older than what was pushed.
            assert rival.result().code in (0, 2, 5), rival.result().stdout + rival.result().stderr
    for bundle in site.bundles.values():
        for file in bundle.glob("release*"):
            file.unlink()


def _both(site: Site, move: Move, kind: str, where: str, result: Result) -> Finding:
    """What two carriers led to. Whose state it is in the end is open; that it is whole is not."""
    said = "kill-after" if site.steps.fired else "carriers"
    found = examine(site, Move("carriers", move.arguments, move.old, move.new), said, where, result)
    return dataclasses.replace(found, verb="apply", kind=kind)


def unconfirmed(site: Site, every: int = 4) -> Iterator[Finding]:
    """A change with a term is killed, and the node goes back by itself."""
    move = prepare(site, "apply")
    site.run(*move.arguments)
    calls = site.steps.taken()
    site.current = move.new
    steps = [number for number, call in enumerate(calls, 1) if changes_something(call)]
    for step in steps[::every]:
        move = prepare(site, "apply")
        result = site.run("apply", "--confirm-within", "1", *move.arguments[1:], fault=Fault("kill-after", step))
        if not site.steps.fired:
            site.host.akp("rollback")
            continue
        back = Move("unconfirmed", move.arguments, move.new, move.old)
        yield examine(site, back, "kill-after", f"step {step}, {site.steps.fired[:80]}", result)


CONDITIONS = (disks, memory, tools, modules, clock, carriers, push_and_pull, unconfirmed)
