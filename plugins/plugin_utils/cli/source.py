# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Where `explain`, `service`, `prove` and `report` get a cluster from: files, an API server or a working directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster.files import UnreadableFile, cluster_files, documents
from ..cluster.objects import Reader
from ..cluster.snapshot import Snapshot
from ..configuration import Configuration, read_kept
from ..explain.intent import Intent
from ..explain.needed import Needed, Object, Wanted, needed, objects_of
from ..proxy.compat import DEFAULT_COMPAT
from .console import UsageError
from .options import add_facts

if TYPE_CHECKING:
    from ..tasks.directory import WorkDirectory


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the cluster, the configuration and facts of nodes are."""
    where = parser.add_argument_group("the cluster")
    where.add_argument(
        "--cluster",
        type=Path,
        metavar="PATH",
        help="what kubectl prints of Services, EndpointSlices, Nodes and ServiceCIDRs: a file, or a directory of them",
    )
    where.add_argument("--kubeconfig", metavar="FILE", help="ask the API server that this file names")
    where.add_argument("--context", metavar="NAME", help="which context of the kubeconfig")
    where.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="a working directory: the facts of its nodes, and its snapshot if no other cluster is given",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a KubeProxyConfiguration, as kube-proxy reads it (default: that of the last run in --dir)",
    )
    add_facts(parser)
    parser.add_argument(
        "--compat",
        default="",
        metavar="MINOR",
        help=f"the kube-proxy minor whose rules are meant (default: that of --dir, or {DEFAULT_COMPAT})",
    )


class Source:
    """The cluster that the options name; read once, and no more of it than is asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        given = [name for name in ("cluster", "kubeconfig") if getattr(args, name)]
        if len(given) > 1 or not (given or args.dir):
            raise UsageError("say where the cluster is: one of --cluster PATH, --kubeconfig FILE and --dir DIR")
        self._args = args
        self._objects: list[tuple[str, Object]] | None = None
        # Of a working directory, the configuration that the last run left there.
        kept = read_kept(_work_directory(args.dir).config) if args.dir else None
        self.choices = Configuration.of({"config": str(args.config or ""), "compat": args.compat}, kept=kept).choices

    def objects(self) -> list[tuple[str, Object]]:
        """Kind and object of everything, as it was printed."""
        if self._objects is None:
            self._objects = list(objects_of(self._documents()))
        return self._objects

    def snapshot(self) -> Snapshot:
        """All of the cluster."""
        return _read([each for _kind, each in self.objects()])

    def needed(self, wanted: Wanted) -> tuple[Snapshot, Needed]:
        """What a question depends on."""
        found = needed(((kind, each) for kind, each in self.objects() if kind != "Node"), wanted)
        return dataclasses.replace(_read(found.objects), nodes=self.nodes.nodes), found

    @cached_property
    def nodes(self) -> Snapshot:
        """The Nodes alone."""
        return self.only("Node")

    def only(self, *kinds: str) -> Snapshot:
        """The objects of some kinds alone."""
        return _read([each for kind, each in self.objects() if kind in kinds])

    def intent(self, snapshot: Snapshot, node: str = "") -> Intent:
        """What nodes are meant to have."""
        return Intent(snapshot, self.choices, self.facts(node))

    def facts(self, node: str = "") -> Mapping[str, Mapping[str, Any]]:
        """What nodes say of themselves; a file with the facts of one node is that of the node that is asked for."""
        if self._args.facts:
            content = next(documents(self._args.facts), None)
            if not isinstance(content, Mapping):
                raise UnreadableFile(f"{self._args.facts}: must be a mapping")
            if {"capabilities", "addresses", "hns"} & content.keys():
                if not node:
                    raise UsageError(f"{self._args.facts}: holds the facts of one node; say which with --node")
                return {node: content}
            return dict(content)
        if self._args.dir:
            return _work_directory(self._args.dir).gathered()
        return {}

    def _documents(self) -> Iterator[Any]:
        if self._args.kubeconfig:
            from ..cluster.access import Access
            from ..cluster.api import connect

            access = Access.of({"kubeconfig": self._args.kubeconfig, "context": self._args.context})
            with connect(access) as api:
                for each in api.record().lists:
                    items = [json.loads(item) for item in each.items]
                    yield {"kind": f"{each.kind}List", "apiVersion": each.api_version, "items": items}
            return
        path = self._args.cluster or self._args.dir.expanduser() / "snapshot.json"
        for file in cluster_files(path):
            yield from documents(file)


def _work_directory(path: Path) -> WorkDirectory:
    # Notes of runs are many classes, and a question about files needs none of them.
    from ..tasks.directory import WorkDirectory

    return WorkDirectory(path.expanduser())


def _read(objects: list[Object]) -> Snapshot:
    reader = Reader()
    for each in objects:
        reader.add(each)
    return reader.snapshot()
