"""The programs of a node, as they are joined from their parts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.program import MODES, PARTS, node_program, part_program
from agentless_kube_proxy.cli import main

ROOT = Path(__file__).parents[3] / "plugins" / "plugin_utils" / "bundle" / "akp_node"
PROGRAMS = [*(node_program(mode) for mode in MODES), *(part_program(name) for name in PARTS)]


INCLUDE = re.compile(r"^# include tools/(\S+)\n", re.M)


def code(path: Path) -> str:
    """A part without the line for shellcheck."""
    text = path.read_text()
    return text.partition("\n")[2] if text.startswith("# shellcheck") else text


def test_every_part_is_there() -> None:
    assert [path.name[:3] for path in sorted((ROOT / "core").glob("*.sh"))][-1] == "90-"
    assert {path.name for path in (ROOT / "modes").glob("*.sh")} == {f"{mode}.sh" for mode in MODES}
    assert {path.name[3:] for path in (ROOT / "leave").glob("*.sh")} == {
        "cleanup.sh",
        *(f"{mode}.sh" for mode in MODES),
    }
    assert {f"{name}.sh" for name in PARTS} - {"leave.sh"} == {path.name for path in (ROOT / "parts").glob("*.sh")}
    assert not list(ROOT.glob("*.sh"))


def found_in(program: str, path: Path) -> int:
    """Where a part begins in a program; what it includes stands in its place."""
    pieces = [code(ROOT / "tools" / name) if odd % 2 else name for odd, name in enumerate(INCLUDE.split(code(path)))]
    assert all(piece in program for piece in pieces) or not any(
        len(piece) > 100 and piece in program for piece in pieces
    )
    return program.find(pieces[-1])


@pytest.mark.parametrize("mode", MODES)
def test_a_program_has_the_core_and_its_mode(mode: str) -> None:
    program = node_program(mode)
    places = {path.name: found_in(program, path) for path in (ROOT / "core").glob("*.sh")}
    assert min(places.values()) >= 0
    assert max(places, key=lambda name: places[name]).startswith("90-")
    modes = [path.stem for path in sorted((ROOT / "modes").glob("*.sh")) if found_in(program, path) >= 0]
    assert modes == sorted(MODES[mode])
    assert program.startswith("#!/bin/sh\n")
    assert "# shellcheck shell=" not in program
    assert "# include " not in program


def test_what_few_runs_need_is_a_program_of_its_own_that_is_known_by_its_digest() -> None:
    leave = part_program("leave")
    assert all(found_in(leave, path) >= 0 for path in (ROOT / "leave").glob("*.sh"))
    digest = hashlib.sha256(leave.encode()).hexdigest()
    assert all(f"\nLEAVE={digest} " in node_program(mode) for mode in MODES)


def test_every_awk_program_and_every_table_of_shapes_is_used_and_set_before() -> None:
    for path in (*ROOT.rglob("*.awk"), *ROOT.rglob("*.txt")):
        name = path.stem.replace("-", "_") + ("_awk" if path.suffix == ".awk" else "_shapes")
        users = [program for program in PROGRAMS if re.search(rf"^{name}='", program, re.M)]
        assert users, path
        assert "'" not in path.read_text(), path
        for program in users:
            assert program.count(f"{name}='{path.read_text()}'\n") == 1
            uses = [found.start() for found in re.finditer(rf"\$\{{?{name}\b", program)]
            assert program.index(f"\n{name}='") < min(uses)


def test_akp_program_prints_a_mode_or_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["program", "--mode", "ipvs"]) == 0
    assert capsys.readouterr().out == node_program("ipvs")
    assert main(["program", "--part", "pull"]) == 0
    assert capsys.readouterr().out == part_program("pull")
    with pytest.raises(SystemExit):
        main(["program"])
    assert "--mode --part is required" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'node' is not one of pull, health, metrics, verify, leave"):
        part_program("node")
