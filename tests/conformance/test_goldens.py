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
from agentless_kube_proxy.proxy.compat import DEFAULT_COMPAT

from tests.controlplane import netns

from . import goldens, kernel, portals, userspace
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
def rendered(golden: Path, compat: str = "") -> Path:
    """The bundle that we make of a golden's cluster; made once, gone with the process."""
    version, _, node = (golden / "kube-proxy").read_text().split()
    minor = compat or ".".join(version.removeprefix("v").split(".")[:2])
    out = tempfile.mkdtemp(prefix="akp-goldens-")
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    render = [str(AKP), "render", "--node", node, "--compat", minor, "--output", out]
    for option, name in (("--cluster", "cluster"), ("--config", "config.json"), ("--facts", "facts.json")):
        render += [option, str(golden / name)]
    subprocess.run(render, check=True)
    return Path(out) / node


def recorded(*modes: str) -> list[Path]:
    return [path for path in goldens.recorded() if path.name.partition("-")[0] in modes]


def test_goldens_are_there() -> None:
    assert {path.name.partition("-")[0] for path in goldens.recorded()} == {
        "iptables", "nftables", "ipvs", "userspace",
    }  # fmt: skip


@pytest.mark.parametrize("golden", recorded("iptables", "nftables"), ids=lambda path: path.name)
def test_recorded(golden: Path, namespace: str, tmp_path: Path) -> None:
    mode, bundle = golden.name.partition("-")[0], rendered(golden)
    untouched = goldens.pristine_sysctls(Namespace(namespace))
    netns.run(namespace, "env", f"AKP_STATE={tmp_path}/state", "sh", f"{bundle}/akp-node", "apply", f"{bundle}")
    ours = kernel.canonical(kernel.read(Namespace(namespace), mode), mode)
    found = kernel.differences(goldens.expected(golden, untouched), ours)
    assert not found, "\n".join(str(difference) for difference in found)


@pytest.mark.parametrize("golden", recorded("userspace"), ids=lambda path: path.name)
def test_recorded_userspace(golden: Path, namespace: str) -> None:
    """Of kube-proxy 1.25, in the one family that its node had; proxy ports are named by their service ports."""
    bundle, expected = rendered(golden, compat=DEFAULT_COMPAT), goldens.load((golden / "kernel.txt").read_text())
    (tool,) = {name.split()[0] for name in expected}
    rules = (bundle / f"{tool}.rules").read_text()
    found = kernel.differences(expected, portals.canonical(userspace.loaded(rules, tool, namespace), tool))
    assert not found, "\n".join(str(difference) for difference in found)


@pytest.mark.parametrize("golden", recorded("ipvs"), ids=lambda path: path.name)
def test_recorded_ipvs(golden: Path, namespace: str) -> None:
    """Sets and rules in this kernel; virtual servers, which it may not have, as the text that ipvsadm would print."""
    bundle = rendered(golden)
    sets, servers = (
        "".join(file.read_text() for file in sorted(bundle.glob(f"{tool}-*"))) for tool in ("ipset", "ipvs")
    )
    netns.run(namespace, "ipset", "restore", stdin=sets)
    texts = {"ipset.txt": netns.run(namespace, "ipset", "save"), "ipvs.txt": servers}
    virtual: list[str] = []  # rules that need ip_vs
    for tool in ("iptables", "ip6tables"):
        rules = (bundle / f"{tool}.rules").read_text().splitlines(keepends=True)
        virtual += [line.rstrip("\n") for line in rules if " -m ipvs " in line]
        netns.run(namespace, f"{tool}-restore", "--noflush", stdin="".join(r for r in rules if " -m ipvs " not in r))
        texts[f"{tool}.txt"] = netns.run(namespace, f"{tool}-save")
    ours = kernel.canonical(texts, "ipvs")
    addresses = (bundle / "ip.batch").read_text().split()
    ours["kube-ipvs0"] = tuple(sorted(word for word in addresses if "/" in word))

    real = goldens.load((golden / "kernel.txt").read_text())
    expected = sorted(line for lines in real.values() for line in lines if " -m ipvs " in line)
    plain = {
        name: tuple(line for line in lines if " -m ipvs " not in line) for name, lines in real.items() if name in ours
    }
    left_out = {"sysctls", "link", "ipvs-timeouts"}
    found = kernel.differences(plain, ours)
    assert not found, "\n".join(str(difference) for difference in found)
    assert sorted(virtual) == expected
    assert real.keys() - ours.keys() <= left_out | {name for name in real if _is_empty_table(real, name)}


def _is_empty_table(real: kernel.State, name: str) -> bool:
    """The legacy iptables of the recording kernel shows tables that nobody has used."""
    return name.startswith(("iptables ", "ip6tables ")) and real[name] == ("policy ACCEPT",)
