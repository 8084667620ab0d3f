"""Our rules in a real kernel equal what a real kube-proxy programmed for the same cluster, as recorded."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane import netns

from . import goldens, kernel
from .side import Namespace

AKP = Path(sys.executable).with_name("akp")
numbers = itertools.count(1)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"akpg{os.getpid()}-{next(numbers)}"
    netns.add(name)
    yield name
    netns.delete(name)


@functools.cache
def rendered(golden: Path) -> Path:
    """The bundle that we make of a golden's cluster; made once, gone with the process."""
    version, _, node = (golden / "kube-proxy").read_text().split()
    minor = ".".join(version.removeprefix("v").split(".")[:2])
    out = tempfile.mkdtemp(prefix="akp-goldens-")
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    render = [str(AKP), "render", "--node", node, "--compat", minor, "--output", out]
    for option, name in (("--cluster", "cluster"), ("--config", "config.json"), ("--facts", "facts.json")):
        render += [option, str(golden / name)]
    subprocess.run(render, check=True)
    return Path(out) / node


def test_goldens_are_there() -> None:
    modes = {path.name.partition("-")[0] for path in goldens.recorded()}
    assert {"iptables", "nftables"} <= modes


@pytest.mark.parametrize("golden", goldens.recorded(), ids=lambda path: path.name)
def test_recorded(golden: Path, namespace: str, tmp_path: Path) -> None:
    mode, bundle = golden.name.partition("-")[0], rendered(golden)
    untouched = goldens.pristine_sysctls(Namespace(namespace))
    netns.run(namespace, "env", f"AKP_STATE={tmp_path}/state", "sh", f"{bundle}/akp-node", "apply", f"{bundle}")
    ours = kernel.canonical(kernel.read(Namespace(namespace), mode), mode)
    found = kernel.differences(goldens.expected(golden, untouched), ours)
    assert not found, "\n".join(str(difference) for difference in found)
