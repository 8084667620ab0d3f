"""akp-node.cs, the program of Windows nodes, on mono and a simulated Host Networking Service."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

PROGRAM = Path(__file__).resolve().parents[3] / "plugins/plugin_utils/bundle/akp_windows/akp-node.cs"
SIMULATOR = Path(__file__).with_name("hns.c")


def build(folder: Path) -> Path:
    """A folder with the program, compiled as C# 5, and the libraries that it calls."""
    folder.mkdir(parents=True, exist_ok=True)
    mcs = ["mcs", "-langversion:5", "-warnaserror", "-r:System.Web.Extensions.dll", f"-out:{folder}/akp-node.exe"]
    subprocess.run([*mcs, str(PROGRAM)], check=True)
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", f"{folder}/libcomputenetwork.so", str(SIMULATOR)], check=True)
    (folder / "libvmcompute.so").symlink_to("libcomputenetwork.so")
    return folder


@dataclass(frozen=True)
class AkpNode:
    """The program on one node, with a state directory and the store of a service."""

    built: Path
    store: Path
    state: Path
    within: tuple[str, ...] = ()  # the words before a command that runs it in a namespace

    def run(self, *words: str | Path, **env: str) -> tuple[int, Object]:
        """Its exit code and its answer; a run that was killed has none."""
        own = {"LD_LIBRARY_PATH": str(self.built), "HNS_STORE": str(self.store), "AKP_STATE": str(self.state)}
        argv = [*self.within, "mono", str(self.built / "akp-node.exe"), *map(str, words)]
        done = subprocess.run(
            argv, env=os.environ | own | env, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}

    def facts(self) -> Object:
        """What it tells of a node whose pods are on the network "pods"."""
        code, answer = self.run("facts", "pods", "root")
        assert code == 0, answer
        return answer

    def apply(self, bundle: Path) -> Object:
        code, answer = self.run("apply", bundle)
        assert code == 0, answer
        return answer
