"""Recorded states: a cluster, a configuration, a node's facts, and what a real kube-proxy then had in the kernel.

They let every test run compare against kube-proxy without Go, in seconds. What is stored is the canonical form, so
that recording again changes nothing unless kube-proxy or the cluster did.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import kernel
from .draw import Cluster
from .side import Namespace, Side

if TYPE_CHECKING:
    from tests.controlplane import ControlPlane

    from .twin import Twin

FOLDER = Path(__file__).with_name("goldens")
# Small clusters that between them exercise most of what the report lists.
SEEDS = {
    "iptables": (279, 11, 89, 238, 265, 131, 183, 78),
    "nftables": (73, 97, 2, 273, 10, 292, 282, 179),
    "ipvs": (58, 112, 185, 87),
    "userspace": (1, 2, 3, 5, 9),
}
# Set by the API server at each creation. Only one of them is read, where Services claim the same, and here none do.
VOLATILE = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation")


def record(folder: Path, twin: Twin, cluster: Cluster) -> Path:
    """Keep what kube-proxy has programmed in the twin's namespace, which was found equal to ours."""
    target = folder / f"{cluster.mode}-{cluster.seed}"
    shutil.rmtree(target, ignore_errors=True)
    (target / "cluster").mkdir(parents=True)
    keep_cluster(twin.plane, twin.folder, target)
    for name in ("config.json", "facts.json"):
        content = json.loads((twin.folder / name).read_text())
        (target / name).write_text(json.dumps(content, indent=1) + "\n")
    state = kernel.canonical(kernel.read(twin.real, cluster.mode), cluster.mode)
    untouched = pristine_sysctls(Namespace(twin.plane.namespace))
    state["sysctls"] = tuple(line for line in state["sysctls"] if line not in untouched)
    (target / "kernel.txt").write_text(dump(state))
    (target / "kube-proxy").write_text(f"{twin.version} {cluster.mode} {cluster.node}\n")
    return target


def keep_cluster(plane: ControlPlane, folder: Path, target: Path) -> None:
    """The cluster as the API server has it, without what is another at each creation."""
    for file in sorted(plane.export(folder / "cluster").glob("*.json")):
        content = _steady(json.loads(file.read_text()))
        (target / "cluster" / file.name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def pristine_sysctls(side: Side) -> tuple[str, ...]:
    """Settings of a namespace that no proxy has touched; kernels differ in these, so goldens hold only the others."""
    return kernel.canonical({"sysctls.txt": kernel.read_sysctls(side)}, "")["sysctls"]


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k not in VOLATILE}
    if isinstance(value, list):
        return [_steady(item) for item in value]
    return value


def dump(state: kernel.State) -> str:
    return "\n\n".join("\n".join([f"[{name}]", *state[name]]) for name in sorted(state)) + "\n"


def load(text: str) -> kernel.State:
    state: kernel.State = {}
    for part in text.rstrip("\n").split("\n\n"):
        name, *lines = part.split("\n")
        state[name[1:-1]] = tuple(lines)
    return state


def expected(golden: Path, untouched: Sequence[str]) -> kernel.State:
    """What a golden says, completed by the settings that kube-proxy leaves alone."""
    state = load((golden / "kernel.txt").read_text())
    told = {line.split()[0] for line in state["sysctls"]}
    rest = [line for line in untouched if line.split()[0] not in told]
    return {**state, "sysctls": tuple(sorted([*state["sysctls"], *rest]))}


def recorded() -> list[Path]:
    return sorted(path.parent for path in FOLDER.glob("*/kernel.txt"))
