# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The programs of a node: one file each there, and here their parts in the directory akp_node.

A program for awk and a table of allowed lines are files of their own here, and shell variables in a program: each
stands before the first part that uses it. A line "# include tools/NAME.sh" in a part stands for a text that several
programs have.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

PROGRAM = "akp-node"
WINDOWS_PROGRAM, WINDOWS_STARTER, WINDOWS_BOOT = "akp-node.cs", "akp-node.ps1", "akp-boot.ps1"
LEAVE = "akp-leave"  # a part of the program that few runs need; it lies beside it
# What a node of a mode needs beside the core; ipvs and userspace mode have iptables rules as well.
MODES = {
    "iptables": ("iptables",),
    "nftables": ("nftables",),
    "ipvs": ("iptables", "ipvs"),
    "userspace": ("iptables", "userspace"),
}
PARTS = ("pull", "health", "metrics", "verify", "leave")

# What a part names and a mode has no use for: their rules have shapes of their own.
_UNUSED = {"ipvs": ("iptables_shapes",), "userspace": ("iptables_shapes",)}

_HAS = ("addresses_awk",)  # what akp-leave finds in the program that reads it
_MAIN = "90-"  # parts of the core from here on come last
_INCLUDE = re.compile(r"^# include tools/(\S+)\n", re.M)


@cache
def node_program(mode: str) -> str:
    """The text of akp-node for nodes of a mode."""
    core, modes = _files("core", ".sh"), _files("modes", ".sh")
    texts = [text for name, text in core.items() if name < _MAIN]
    texts += [modes[f"{name}.sh"] for name in MODES[mode] if f"{name}.sh" in modes]
    texts += [text for name, text in core.items() if name >= _MAIN]
    digest = hashlib.sha256(part_program("leave").encode()).hexdigest()
    head = (
        f"MODES={mode}    # the bundles that this program takes\nLEAVE={digest}    # of the akp-leave that it reads\n"
    )
    return _joined(texts, head, _UNUSED.get(mode, ()))


def programs(mode: str) -> list[tuple[str, str]]:
    """Names and texts of the programs that a bundle of a mode brings along."""
    return (
        list(_windows().items())
        if mode == "kernelspace"
        else [(LEAVE, part_program("leave")), (PROGRAM, node_program(mode))]
    )


@cache
def _windows() -> dict[str, str]:
    """The program of Windows nodes, and the lines of PowerShell that start it, now and at boot."""
    directory = resources.files(__package__).joinpath("akp_windows")
    names = (WINDOWS_BOOT, WINDOWS_PROGRAM, WINDOWS_STARTER)
    return {name: directory.joinpath(name).read_text(encoding="utf-8") for name in names}


@cache
def part_program(name: str) -> str:
    """The text of a program of its own, e.g. akp-pull."""
    if name not in PARTS:
        raise ValueError(f"{name!r} is not one of {', '.join(PARTS)}")
    if name == "leave":
        return _joined([*_files("leave", ".sh").values()], unused=_HAS)
    return _joined([_files("parts", ".sh")[f"{name}.sh"]])


def _joined(parts: list[str], head: str = "", unused: tuple[str, ...] = ()) -> str:
    """Parts as one program, each variable before the part that uses it first."""
    written = ["#!/bin/sh\n", head]
    left = {name: text for name, text in _variables() if name not in unused}
    for part in parts:
        for text in _INCLUDE.split(_code(part)):
            text = _code(_files("tools", ".sh").get(text, text))
            used = [name for name in left if re.search(rf"\$\{{?{name}\b", text)]
            written += [f"{name}={_quoted(left.pop(name))}\n" for name in used]
            written.append(text)
    return "".join(written)


def _code(part: str) -> str:
    """A part without the line for shellcheck, which knows a part alone and not what the others set and use."""
    return part.partition("\n")[2] if part.startswith("# shellcheck shell=sh ") else part


def _quoted(text: str) -> str:
    """A text for the shell."""
    escaped = text.replace("'", r"'\''")
    return f"'{escaped}'"


def _variables() -> Iterator[tuple[str, str]]:
    """Names and values of the shell variables that programs are made with."""
    for folder in ("core", "tools", "leave", "modes", "parts"):
        for name, text in _files(folder, ".awk").items():
            yield _variable(name, "_awk"), text
    for name, text in _files("shapes", ".txt").items():
        yield _variable(name, "_shapes"), text


def _variable(file: str, suffix: str) -> str:
    return file.rpartition(".")[0].replace("-", "_") + suffix


@cache
def _files(folder: str, ending: str) -> dict[str, str]:
    """Name -> text of the files of a folder, in the order of their names."""
    found: dict[str, Traversable] = {}
    directory = resources.files(__package__).joinpath("akp_node").joinpath(folder)
    if directory.is_dir():
        found = {each.name: each for each in directory.iterdir() if each.name.endswith(ending)}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}
