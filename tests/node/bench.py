"""How long the node program takes, as ratios within one run: `python -m tests.node.bench [SERVICES] [ENDPOINTS]`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.node import bundles
from tests.node.host import Host


def timed(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def measure(flavour: str, bundle: Path, changed: Path, directory: Path) -> dict[str, float]:
    """Seconds of each step on a fresh host; `batch` is the same state by one restore."""
    directory.mkdir()
    host = Host(directory, flavour)
    try:
        seconds = {
            "first apply": timed(lambda: host.apply(bundle)),
            "second apply": timed(lambda: host.apply(bundle)),
            "apply --verify": timed(lambda: host.apply(bundle, "--verify")),
            "one service changed": timed(lambda: host.apply(changed)),
            "cleanup": timed(lambda: host.akp("cleanup")),
        }
        restore = f"$ipt-restore --noflush --counters <{bundle / 'iptables.rules'}"
        seconds["one batch"] = timed(lambda: host.sh(restore))
        return seconds
    finally:
        host.close()


def main(services: int = 2000, endpoints: int = 10) -> None:
    with tempfile.TemporaryDirectory(prefix="akpnode-bench-") as name:
        directory = Path(name)
        some = list(bundles.many(services, endpoints))
        bundle = bundles.simple(directory / "a", some)
        some[services // 2] = bundles.Service(some[0].name + "x", some[0].ip, ("10.244.0.1:80",))
        changed = bundles.simple(directory / "b", some)
        lines = len((bundle / "iptables.rules").read_text().splitlines())
        print(f"{services} services x {endpoints} endpoints, {lines} lines")
        for flavour in ("nft", "legacy"):
            seconds = measure(flavour, bundle, changed, directory / flavour)
            print(f"iptables-{flavour}:")
            for step, value in seconds.items():
                print(f"  {step:20} {value:7.2f} s  {value / seconds['one batch']:6.1%} of one batch,"
                      f" {value / seconds['first apply']:6.1%} of the first apply")  # fmt: skip


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
