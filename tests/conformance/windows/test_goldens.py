"""What we write for a Windows node, and what akp-node.cs makes of it, equals what kube-proxy.exe told, as recorded."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import load
from agentless_kube_proxy.engine import Engine

from . import goldens, mono
from .draw import NETWORK_TYPES, VERSIONS
from .oracle import Documents, Store
from .run import differences

GOLDENS = goldens.recorded()
FIRST = [path for path in GOLDENS if path.name == "Overlay-15.5"]  # of each cluster


@functools.cache
def engine(cluster: Path) -> Engine:
    made = Engine(Choices.of({"config": str(cluster / "config.json")}), preview=True)
    made.update(load(cluster / "cluster"))
    return made


def written(golden: Path, folder: Path) -> Path:
    """The bundle that we make of a golden."""
    _version, _mode, node = (golden.parent / "kube-proxy").read_text().split()
    write_bundle(engine(golden.parent).state(node, json.loads((golden / "facts.json").read_text())), folder)
    return folder


def test_goldens_are_there() -> None:
    assert {path.name for path in GOLDENS} >= {f"{kind}-{version}" for kind in NETWORK_TYPES for version in VERSIONS}
    assert {path.parent.name for path in GOLDENS} == {f"kernelspace-{seed}" for seed in goldens.SEEDS}


def name_of(golden: Path) -> str:
    return f"{golden.parent.name}-{golden.name}"


@pytest.mark.parametrize("golden", GOLDENS, ids=name_of)
def test_recorded(golden: Path, tmp_path: Path) -> None:
    made = goldens.read(written(golden, tmp_path) / "hns.json")
    found = differences(goldens.read(golden / "hns.json"), made)
    assert not found, "\n".join(found)


def test_one_flag_one_port_or_one_address_is_a_difference() -> None:
    made = goldens.read(GOLDENS[0] / "hns.json")
    first, *rest = made.balancers
    changed = [
        first | {"Flags": first.get("Flags", 0) ^ 1},
        first | {"PortMappings": [first["PortMappings"][0] | {"InternalPort": 1}]},
        first | {"HostComputeEndpoints": first["HostComputeEndpoints"][1:]},
    ]
    assert differences(made, made) == []
    assert len(differences(made, Documents(made.endpoints[1:], made.balancers))) == 1
    assert len(differences(made, Documents(made.endpoints, [first, *made.balancers]))) == 1
    for each in changed:
        assert len(differences(made, Documents(made.endpoints, [each, *rest]))) == 2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mono.build(tmp_path_factory.mktemp("mono"))


@pytest.mark.parametrize("golden", FIRST, ids=name_of)
def test_recorded_and_applied(golden: Path, tmp_path: Path, built: Path) -> None:
    """The program tells the same facts of the recorded service, and makes it what kube-proxy.exe made of it."""
    store = Store(tmp_path / "store")
    store.file.write_text((golden / "given").read_text())
    store.given = frozenset(store.read()["endpoint"])
    node = mono.AkpNode(built, store.file, tmp_path / "state")
    assert node.facts()["hns"] == json.loads((golden / "facts.json").read_text())["hns"]
    node.apply(written(golden, tmp_path / "bundle"))
    found = differences(goldens.read(golden / "hns.json"), store.documents())
    assert not found, "\n".join(found)
