"""Push to many nodes: what forks, news and slices cost; numbers for docs/scaling.md."""

from __future__ import annotations

import json
import os
import resource
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.lab import Lab

from . import ROOT, Measure, timed
from .collection import BIN, ENVIRONMENT, _shop

SYNC = str(ROOT / "playbooks" / "sync-services.yml")
NODES = int(os.environ.get("AKP_BENCH_NODES", "20"))
RUNS = 3


def measures(tmp: Path) -> Iterator[Measure]:
    """One run over all nodes, few forks and many, with and without news, and the same nodes in two slices at once."""
    with Lab(f"slices-{os.getpid()}", NODES) as lab:
        bench = _Bench(lab.inventory(tmp / "hosts.yml"), _shop(tmp / "shop"), tmp)
        first, first_cpu = bench.cost()
        yield Measure(f"push of first bundles to {NODES} nodes, forks {NODES}", first, "60 s", 60.0, float("inf"))
        many, many_cpu = bench.costs()
        few = bench.median(forks=5)
        yield Measure(f"no news, {NODES} nodes, forks 5", few, f"forks {NODES}", many, float("inf"))
        news, news_cpu = bench.costs(news=True)
        yield Measure(f"one endpoint changed on {NODES} nodes, forks {NODES}", news, "no news", many, float("inf"))
        _one, one_cpu = bench.costs("--limit", "n1")
        cpu = "CPU of ansible-playbook and the ssh that it waits for"
        for what, seconds in (("no news", many_cpu), ("one endpoint changed", news_cpu), ("first bundles", first_cpu)):
            yield Measure(f"{cpu}: {what}, {NODES} nodes", seconds, "no news, 1 node", one_cpu, float("inf"))
        sliced = statistics.median(bench.slices(2) for _ in range(RUNS))
        # No bar: both have a start-up of their own, and the nodes of the lab run on the same cores.
        yield Measure(f"no news, {NODES} nodes, two slices at once", sliced, "one run", many, float("inf"))


class _Bench:
    def __init__(self, inventory: Path, shop: Path, tmp: Path) -> None:
        self._inventory = inventory
        self._shop = shop
        self._tmp = tmp
        self._changes = 0

    def run(self, *arguments: str, forks: int = NODES, **variables: Any) -> float:
        chosen = {
            "kube_proxy_dir": str(self._tmp / "akp"),
            "kube_proxy_cluster_dir": str(self._shop),
            "kube_proxy_config": str(ROOT / "examples" / "shop" / "kube-proxy.yaml"),
            **variables,
        }
        argv = [str(BIN / "ansible-playbook"), "-i", str(self._inventory), "-e", json.dumps(chosen), SYNC, *arguments]
        return timed(argv, env={**ENVIRONMENT, "ANSIBLE_FORKS": str(forks)})

    def median(self, **options: Any) -> float:
        return statistics.median(self.run(**options) for _ in range(RUNS))

    def cost(self, *arguments: str) -> tuple[float, float]:
        """Seconds that a run takes, and those that processors work for it here."""
        before = _cpu()
        seconds = self.run(*arguments)
        return seconds, _cpu() - before

    def costs(self, *arguments: str, news: bool = False) -> tuple[float, float]:
        """Medians of both."""
        found = []
        for _ in range(RUNS):
            if news:
                self.change()
            found.append(self.cost(*arguments))
        seconds, cpu = zip(*found, strict=True)
        return statistics.median(seconds), statistics.median(cpu)

    def change(self) -> None:
        """One more endpoint, which all nodes have to know."""
        self._changes += 1
        file = self._shop / "catalog.yaml"
        found = list(yaml.safe_load_all(file.read_text()))
        endpoints = next(each for each in found if each["kind"] == "EndpointSlice")["endpoints"]
        endpoints.append({**endpoints[-1], "addresses": [f"10.244.9.{self._changes}"]})
        file.write_text(yaml.safe_dump_all(found))

    def slices(self, count: int) -> float:
        """All nodes, shared out among runs at the same time that are given one snapshot. The slowest counts."""
        names = [f"n{number}" for number in range(1, NODES + 1)]
        snapshot = str(self._tmp / "akp" / "snapshot.json")

        def run(index: int) -> float:
            limit = ",".join(names[index::count])
            return self.run("--limit", limit, kube_proxy_snapshot=snapshot)

        with ThreadPoolExecutor(count) as pool:
            return max(pool.map(run, range(count)))


def _cpu() -> float:
    """Of all children that have ended; nodes and the masters of shared connections are not among them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
