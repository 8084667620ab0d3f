"""Recorded stores: a cluster, a Windows node, and what kube-proxy.exe then had told the Host Networking Service.

goldens/kernelspace-3/cluster, config.json, kube-proxy    the cluster, its configuration, the node and the version
goldens/kernelspace-3/Overlay-13.2/given                  what the service had before, as a store
goldens/kernelspace-3/Overlay-13.2/facts.json             what akp-node.cs told of it
goldens/kernelspace-3/Overlay-13.2/hns.json               what kube-proxy.exe made, endpoints by address
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conformance.goldens import FOLDER, keep_cluster

from .oracle import Documents, binaries, given

if TYPE_CHECKING:
    from tests.controlplane import ControlPlane

    from .run import Pair

Object = dict[str, Any]

# Small clusters that between them have every kind of load balancer and endpoint.
SEEDS = (2, 6, 7, 9, 11, 14, 15, 16, 20, 22, 25)


def record(plane: ControlPlane, folder: Path, pairs: list[Pair]) -> None:
    """Keep what kube-proxy.exe has told, which was found equal to ours."""
    cluster = pairs[0].hns.drawn.cluster
    target = FOLDER / f"kernelspace-{cluster.seed}"
    shutil.rmtree(target, ignore_errors=True)
    (target / "cluster").mkdir(parents=True)
    keep_cluster(plane, folder, target)
    (target / "config.json").write_text(json.dumps(cluster.config, indent=1) + "\n")
    version = binaries().name.removesuffix("-windows")
    (target / "kube-proxy").write_text(f"{version} {cluster.mode} {cluster.node}\n")
    for each in pairs:
        place = target / str(each.hns)
        place.mkdir()
        (place / "given").write_text(given(each.hns))
        (place / "facts.json").write_text(json.dumps(each.told, indent=1) + "\n")
        (place / "hns.json").write_text(dump(each.proxy.store.documents()))


def dump(made: Documents) -> str:
    """Documents, one a line, in an order of their own."""
    lists = [
        f'"{name}": [\n' + ",\n".join(sorted(json.dumps(each, sort_keys=True) for each in documents)) + "]"
        for name, documents in (("endpoints", made.endpoints), ("loadBalancers", made.balancers))
    ]
    return "{" + ",\n".join(lists) + "}\n"


def read(file: Path) -> Documents:
    """The documents of a golden, or of a bundle."""
    made = json.loads(file.read_text())
    balancers = [
        each | {"HostComputeEndpoints": sorted(each["HostComputeEndpoints"])} for each in made["loadBalancers"]
    ]
    return Documents(made["endpoints"], balancers)


def recorded() -> list[Path]:
    """The folders of all Windows nodes."""
    return sorted(path.parent for path in FOLDER.glob("kernelspace-*/*/hns.json"))
