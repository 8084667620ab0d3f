"""akp-node.cs, the program of Windows nodes, on mono and a simulated Host Networking Service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.engine import Engine

from tests.conformance.windows.oracle import Store
from tests.conformance.windows.run import differences, documents
from tests.unit.build import document, endpoint, node, port, service, slice_of, snapshot

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "plugins/plugin_utils/bundle/akp_windows/akp-node.cs"
SIMULATOR = ROOT / "tests/conformance/windows/hns.c"
NETWORK: Object = {"ID": "11111111-1111-1111-1111-111111111111", "Name": "pods", "Type": "L2Bridge"}
POD = "10.244.1.5"
FOREIGN: Object = {
    "ID": "33333333-3333-3333-3333-333333333333",
    "HostComputeEndpoints": ["22222222-2222-2222-2222-222222222222"],
    "PortMappings": [{"Protocol": 6, "InternalPort": 9, "ExternalPort": 9}],
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, compiled as C# 5, and the library that it calls."""
    folder = tmp_path_factory.mktemp("mono")
    mcs = ["mcs", "-langversion:5", "-warnaserror", "-r:System.Web.Extensions.dll", f"-out:{folder}/akp-node.exe"]
    subprocess.run([*mcs, str(PROGRAM)], check=True)
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", f"{folder}/libcomputenetwork.so", str(SIMULATOR)], check=True)
    return folder


@dataclass
class Windows:
    """A node with one pod, and a load balancer that is not ours."""

    built: Path
    folder: Path
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.store = Store(self.folder / "store")
        pod = {
            "ID": "22222222-2222-2222-2222-222222222222",
            "HostComputeNetwork": NETWORK["ID"],
            "IpConfigurations": [{"IpAddress": POD}],
        }
        self.store.write("13.2", NETWORK, [pod])
        with self.store.file.open("a") as file:
            file.write(f"loadbalancer {json.dumps(FOREIGN, separators=(',', ':'))}\n")

    def akp(self, *words: str | Path, **env: str) -> tuple[int, Object]:
        own = {"LD_LIBRARY_PATH": str(self.built), "HNS_STORE": str(self.store.file)}
        environment = os.environ | own | {"AKP_STATE": str(self.folder / "state")} | env
        argv = ["mono", str(self.built / "akp-node.exe"), *map(str, words)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
        return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}

    def apply(self, bundle: Path) -> Object:
        code, answer = self.akp("apply", bundle)
        assert code == 0, answer
        return answer

    def differs_from(self, bundle: Path) -> list[str]:
        """What HNS has beyond the bundle and the foreign load balancer, or lacks."""
        endpoints, balancers = self.store.documents()
        others = [each for each in balancers if each["PortMappings"] != FOREIGN["PortMappings"]]
        assert len(others) == len(balancers) - 1, "the foreign load balancer is gone"
        return differences((endpoints, others), documents(json.loads((bundle / "hns.json").read_text())))


@pytest.fixture
def windows(built: Path, tmp_path: Path) -> Windows:
    return Windows(built, tmp_path / "node")


def bundle(folder: Path, *objects: Object) -> Path:
    made = node("w1")
    made["metadata"]["labels"]["kubernetes.io/os"] = "windows"
    settings = {"config": document(mode="kernelspace", winkernel={"networkName": "pods"})}
    engine = Engine(Choices.of(settings), preview=True)
    engine.update(snapshot(made, *objects))
    write_bundle(engine.state("w1"), folder)
    return folder


@pytest.fixture
def bundles(tmp_path: Path) -> tuple[Path, Path]:
    """Two bundles: one endpoint leaves and another comes, a Service goes and another comes."""
    here, there = endpoint(POD, node="w1"), endpoint("10.244.2.5", node="n2")
    web = service(type="NodePort", ports=[port(nodePort=30080)])
    other = service("other", clusterIP="10.96.7.8")
    new = service("new", clusterIP="10.96.7.9")
    first = bundle(tmp_path / "a", web, slice_of("web", here, there), other, slice_of("other", there))
    third = endpoint("10.244.3.5", node="n3")
    return first, bundle(tmp_path / "b", web, slice_of("web", here, third), new, slice_of("new", here))


def test_what_is_applied_is_what_the_bundle_says_and_nothing_of_others_changes(
    windows: Windows, bundles: tuple[Path, Path]
) -> None:
    first, second = bundles
    assert windows.akp("check", first)[1]["changed"] is True
    assert windows.store.documents()[0] == {}
    assert windows.apply(first)["changed"] is True
    assert windows.differs_from(first) == []
    assert windows.apply(first)["changed"] is False
    assert windows.akp("status")[1]["state"] == "applied"
    assert windows.apply(second)["changed"] is True
    assert windows.differs_from(second) == []


def test_rollback_restore_and_cleanup(windows: Windows, bundles: tuple[Path, Path]) -> None:
    first = bundles[0]
    for each in bundles:
        windows.apply(each)
    assert windows.akp("rollback")[0] == 0
    assert windows.differs_from(first) == []
    windows.store.file.write_text(
        "".join(line for line in windows.store.file.read_text().splitlines(keepends=True)[:4])
    )
    assert windows.akp("status")[1]["state"] == "differs"
    assert windows.akp("restore")[0] == 0
    assert windows.differs_from(first) == []
    assert windows.akp("cleanup")[0] == 0
    assert windows.store.documents()[0] == {}
    assert len(windows.store.documents()[1]) == 1
    assert windows.akp("status")[1]["state"] == "none"
    assert windows.akp("rollback")[0] == 2


def test_a_run_that_is_killed_at_any_call_is_completed_by_the_next(
    built: Path, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = bundles
    base = Windows(built, tmp_path / "base")
    base.apply(first)
    killed = 0
    for number, each in zip(count(1), copies(base, tmp_path), strict=False):
        code, _answer = each.akp("apply", second, HNS_DIE_AFTER=str(number))
        if code == 0:
            break
        assert code == 137
        killed += 1
        each.apply(second)
        assert each.differs_from(second) == [], number
        assert each.apply(second)["changed"] is False
    assert killed >= 10


def copies(base: Windows, folder: Path) -> Iterator[Windows]:
    """As many nodes in the state of one as are asked for."""
    for number in count(1):
        made = Windows(base.built, folder / f"copy{number}")
        shutil.copy(base.store.file, made.store.file)
        shutil.copytree(base.folder / "state", made.folder / "state")
        yield made


def test_a_byte_that_was_changed_is_refused(windows: Windows, bundles: tuple[Path, Path]) -> None:
    file = bundles[0] / "hns.json"
    file.write_text(file.read_text().replace("10.244.2.5", "10.244.2.6", 1))
    code, answer = windows.akp("apply", bundles[0])
    assert (code, "not what manifest.json says" in answer["error"]) == (2, True)
    assert windows.store.documents()[0] == {}


def test_a_pod_that_has_no_endpoint_yet_is_named(windows: Windows, tmp_path: Path) -> None:
    made = bundle(tmp_path / "c", service(), slice_of("web", endpoint("10.244.1.9", node="w1")))
    code, answer = windows.akp("apply", made)
    assert (code, "HNS has no endpoint 10.244.1.9" in answer["error"]) == (3, True)


def test_a_network_that_is_not_there_is_named(windows: Windows, bundles: tuple[Path, Path]) -> None:
    windows.store.file.write_text("version 13.2\n")
    code, answer = windows.akp("apply", bundles[0])
    assert (code, "HNS has no network pods" in answer["error"]) == (3, True)


def test_a_wrong_command_line_is_explained(windows: Windows) -> None:
    assert windows.akp("apply")[0] == 2
    assert windows.akp("fly")[0] == 2
