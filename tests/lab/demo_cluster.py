"""The cluster of the demo, as an operator has it: a folder of manifests, or an API server."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import yaml

from .manifests import objects
from .prompt import ROOT
from .record import LabError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.controlplane import ControlPlane

    from .lab import Lab

SHOP = ROOT / "examples" / "shop"


class Cluster(Protocol):
    """What the story needs of it: how runs read it, where they run, and that a pod can leave its Service."""

    @property
    def variables(self) -> dict[str, str]: ...

    @property
    def control_host(self) -> list[str]: ...

    def remove(self, pod: str) -> None: ...


@dataclass(frozen=True)
class Manifests:
    folder: Path

    @classmethod
    def of_shop(cls, folder: Path) -> Manifests:
        shutil.copytree(SHOP, folder, ignore=shutil.ignore_patterns("kube-proxy.yaml"))
        return cls(folder)

    @property
    def variables(self) -> dict[str, str]:
        return {"kube_proxy_cluster_dir": str(self.folder)}

    @property
    def control_host(self) -> list[str]:
        return []

    def remove(self, pod: str) -> None:
        """What the control plane does when a pod goes: its endpoint leaves all slices."""
        for manifest in self.folder.glob("*.yaml"):
            documents = list(yaml.safe_load_all(manifest.read_text()))
            for document in documents:
                if document["kind"] == "EndpointSlice":
                    document["endpoints"] = without(document["endpoints"], pod)
            manifest.write_text(yaml.safe_dump_all(documents, sort_keys=False))


@dataclass(frozen=True)
class Api:
    plane: ControlPlane
    kubeconfig: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"kube_proxy_kubeconfig": str(self.kubeconfig)}

    @property
    def control_host(self) -> list[str]:
        """The command that starts others where they reach the API server."""
        return ["ip", "netns", "exec", self.plane.namespace]

    def remove(self, pod: str) -> None:
        for each in self.plane.client.list_all("EndpointSlice"):
            endpoints = each["endpoints"] or []  # The API server gives null for none.
            left = without(endpoints, pod)
            if left != endpoints:
                self.plane.client.patch(each, {"endpoints": left})


def without(endpoints: list[dict[str, dict[str, str]]], pod: str) -> list[dict[str, dict[str, str]]]:
    return [one for one in endpoints if one.get("targetRef", {}).get("name") != pod]


@contextmanager
def api(lab: Lab, work: Path) -> Iterator[Api]:
    """A real API server with the objects of the shop, if one was compiled."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "akp" / "controlplane"
    if not [*home.glob("v1.37.*/kube-apiserver")]:
        raise LabError("--api needs an API server, and none is compiled yet: `make controlplane` takes some minutes")
    from tests.controlplane.kubeadm import plane_of

    with plane_of(lab) as plane:
        plane.load(obj for obj in objects(SHOP) if obj["kind"] in ("Node", "Service", "EndpointSlice"))
        yield Api(plane, plane.kubeconfig(work / "kubeconfig", "akp"))
