"""python -m tests.conformance: draw clusters, run them through a real kube-proxy and through us, compare."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane import DEFAULT_MINOR, binaries

from . import draw, goldens, history, userspace
from .report import Report
from .run import Settings, run, stop_on_term
from .windows import run as windows
from .windows.draw import NETWORK_TYPES, OLD, VERSIONS

MODES = ("iptables", "nftables", "ipvs")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("kernelspace",), help="Windows nodes, by kube-proxy.exe under Wine")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the clusters after it have the next ones")
    parser.add_argument("--clusters", type=int, default=25, help="how many clusters per mode")
    parser.add_argument("--mode", action="append", choices=MODES, help=f"default: {', '.join(MODES)}")
    parser.add_argument("--kubernetes", default=DEFAULT_MINOR, metavar="MINOR", help="of kube-proxy and the API server")
    parser.add_argument("--compat", metavar="MINOR", help="of our rules (default: the same)")
    parser.add_argument("--steps", type=int, default=3, help="changes in the life of each cluster")
    parser.add_argument("--no-packets", action="store_true", help="compare rules only")
    parser.add_argument("--shrink", type=float, default=120, metavar="SECONDS", help="how long to look for the cause")
    parser.add_argument("--output", type=Path, default=Path("build/conformance"), help="where the report goes")
    parser.add_argument("--record", action="store_true", help="record the goldens anew, and nothing else")
    group = parser.add_argument_group("kernelspace")
    group.add_argument("--network-type", action="append", choices=NETWORK_TYPES, help="default: each")
    group.add_argument("--hns", action="append", choices=(OLD, *VERSIONS), help=f"default: {', '.join(VERSIONS)}")
    own = parser.add_argument_group("a cluster of yours instead of drawn ones")
    own.add_argument("--cluster", type=Path, metavar="FILE", help="its objects: YAML or JSON, or a folder of them")
    own.add_argument("--config", type=Path, metavar="FILE", help="its KubeProxyConfiguration")
    own.add_argument("--node", help="the node to be")
    own.add_argument(
        "--changes", type=Path, metavar="FILE", help="what happens to it: a JSON object with an action a line"
    )
    args = parser.parse_args()
    stop_on_term()
    if args.what == "kernelspace":
        seeds = range(args.seed, args.seed + args.clusters)
        types, versions = args.network_type or NETWORK_TYPES, args.hns or VERSIONS
        failed = windows.record(types, versions) if args.record else windows.run(seeds, args.steps, types, versions)
        return 1 if failed else 0
    clusters = list(_given(args) if args.cluster else _recorded(args) if args.record else _drawn(args))
    settings = Settings(
        steps=0 if args.record else args.steps, packets=not (args.no_packets or args.record),
        shrink_seconds=args.shrink, output=args.output, record=goldens.FOLDER if args.record else None,
        given=bool(args.cluster),
        changes=_step(clusters[0], args.changes) if args.changes else None,
    )  # fmt: skip
    report = Report(binaries(args.kubernetes).name, args.compat or args.kubernetes)
    report.cases += run(clusters, settings, args.kubernetes, args.compat)
    print(f"\n{report.summary()}\n{report.write(args.output)}")
    # Once more where the eye falls: a lane that ran beside has printed over it long since.
    for case in report.failed:
        print(report.brief(case))
    return 1 if report.failed or not report.cases else 0


def _drawn(args: argparse.Namespace) -> Iterator[draw.Cluster]:
    for mode in args.mode or MODES:
        for seed in range(args.seed, args.seed + args.clusters):
            yield draw.cluster(seed, mode, args.kubernetes)


def _recorded(args: argparse.Namespace) -> Iterator[draw.Cluster]:
    for mode in args.mode or MODES:
        for seed in goldens.SEEDS[mode]:
            yield draw.cluster(seed, mode, args.kubernetes)


def _given(args: argparse.Namespace) -> Iterator[draw.Cluster]:
    files = (
        sorted(p for p in args.cluster.iterdir() if p.suffix in (".json", ".yaml", ".yml"))
        if args.cluster.is_dir()
        else [args.cluster]
    )
    objects = [obj for file in files for document in yaml.safe_load_all(file.read_text()) for obj in _items(document)]
    config = yaml.safe_load(args.config.read_text())
    # The size of the conntrack table belongs to the whole machine, so neither side may touch it.
    config["conntrack"] = {**(config.get("conntrack") or {}), "maxPerCore": 0}
    node = args.node or config["hostnameOverride"].strip().lower()
    yield draw.Cluster(0, config.get("mode") or "iptables", node, config, tuple(objects), args.kubernetes)


def _step(cluster: draw.Cluster, file: Path) -> history.Step:
    changes = [json.loads(line) for line in file.read_text().splitlines()]
    made = [history.Change(change.pop("action"), change) for change in changes]
    objects = {history.key(obj): obj for obj in cluster.objects}
    for change in made:
        if change.action == "delete":
            objects.pop(history.key(change.object), None)
        else:
            objects[history.key(change.object)] = change.object
    return history.Step(tuple(made), replace(cluster, objects=tuple(objects.values())))


def _items(document: Any) -> list[draw.Object]:
    """The objects of a document or a List, without what only the API server may set."""
    if document is None:
        return []
    if "items" in document:
        kind, version = document["kind"].removesuffix("List"), document["apiVersion"]
        found = [{**({"kind": kind, "apiVersion": version} if kind else {}), **item} for item in document["items"]]
        return [obj for item in found for obj in _items(item)]
    meta = {k: v for k, v in document["metadata"].items() if k in ("name", "namespace", "labels", "annotations")}
    if (document["kind"], meta["name"]) in {
        ("Service", "kubernetes"),
        ("EndpointSlice", "kubernetes"),
        ("ServiceCIDR", "kubernetes"),
    }:
        return []
    lists = ("endpoints", "ports") if document["kind"] == "EndpointSlice" else ()
    return [{**document, **{name: document.get(name) or [] for name in lists}, "metadata": meta}]


if __name__ == "__main__":
    sys.exit(userspace.main(sys.argv[2:]) if sys.argv[1:2] == ["userspace"] else main())
