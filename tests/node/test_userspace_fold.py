"""Deltas in the file of HAProxy: what comes out is the file of a whole bundle, and many endpoints take little time."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.program import node_program

from .guarding import AWKS, HERE

MANY, SECONDS = 5_000, 5.0
_PARTS = re.compile(r"^userspace_fold_awk='.*?^'\n|^haproxy_fold\(\) \{\n.*?^\}\n", re.M | re.S)

Servers = dict[str, list[str]]


def text(blocks: Servers) -> str:
    """A file of HAProxy, as a whole bundle has it."""
    lines = ["defaults", "    mode tcp"]
    for name, endpoints in blocks.items():
        lines += [f"listen {name}", "    bind :20000"]
        lines += [f"    server {each.replace('[', '').replace(']', '')} {each}" for each in sorted(endpoints)]
    return "".join(f"{line}\n" for line in lines)


def folded(place: Path, awk: str, file: str, *diffs: list[str]) -> str:
    """The file with the diffs in it, by the node program's own function."""
    (place / "bin").mkdir()
    (place / "bin/awk").symlink_to(str(shutil.which(awk)))
    (place / "old").write_text(file)
    for number, lines in enumerate(diffs):
        (place / f"diff-{number}").write_text("".join(f"{line}\n" for line in lines))
    names = " ".join(str(place / f"diff-{number}") for number in range(len(diffs)))
    parts = _PARTS.findall(node_program("userspace"))
    assert len(parts) == 2
    script = f"work={place}\nroom() {{ :; }}\n{''.join(parts)}haproxy_fold '{names}' {place}/old {place}/new\n"
    shell = ["busybox", "ash"] if AWKS[awk] == "busybox" else ["dash"]
    env = os.environ | {"LC_ALL": "C", "PATH": f"{place}/bin:{os.environ['PATH']}"}
    subprocess.run([*shell, "-euc", script], env=env, check=True)
    return (place / "new").read_text()


@pytest.mark.parametrize("awk", HERE)
def test_servers_come_and_go_in_the_order_of_a_whole_bundle(awk: str, tmp_path: Path) -> None:
    had: Servers = {
        "a": ["10.0.0.10:80", "10.0.0.1:80", "10.0.0.9:80"],
        "b": [],
        "c": ["[fd00::1]:80", "[fd00::a]:80"],
        "d": ["10.0.0.1:80"],
    }
    first = ["-a 10.0.0.1:80", "+a 10.0.0.1:8080", "+a 10.0.0.2:80", "+b 10.0.0.7:80", "+c [fd00::2]:80"]
    second = [
        "-a 10.0.0.2:80",
        "+a 10.0.0.1:80",
        "+a 9.0.0.1:80",
        "-c [fd00::a]:80",
        "+b 10.0.0.3:80",
        "+c [fd00::]:80",
    ]
    has: Servers = {
        "a": [*had["a"], "10.0.0.1:8080", "9.0.0.1:80"],
        "b": ["10.0.0.7:80", "10.0.0.3:80"],
        "c": ["[fd00::1]:80", "[fd00::2]:80", "[fd00::]:80"],
        "d": had["d"],
    }
    assert folded(tmp_path, awk, text(had), first, second) == text(has)


@pytest.mark.parametrize("awk", HERE)
def test_thousands_of_endpoints_that_are_replaced_take_little_time(awk: str, tmp_path: Path) -> None:
    had, has = ([f"10.{net}.{i // 250}.{i % 250}:80" for i in range(MANY)] for net in (1, 0))
    diff = [f"-web {each}" for each in had] + [f"+web {each}" for each in has]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = folded(tmp_path, awk, text({"web": had}), diff)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found == text({"web": has})
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
