"""The programs of a node, as they are joined from their parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.program import MODES, PARTS, node_program, part_program
from agentless_kube_proxy.cli import main

ROOT = Path(__file__).parents[3] / "plugins" / "plugin_utils" / "bundle" / "akp_node"
PROGRAMS = [*(node_program(mode) for mode in MODES), *(part_program(name) for name in PARTS)]


def code(path: Path) -> str:
    """A part without the line for shellcheck."""
    text = path.read_text()
    return text.partition("\n")[2] if text.startswith("# shellcheck") else text


def test_every_part_is_there() -> None:
    assert [path.name[:3] for path in sorted((ROOT / "core").glob("*.sh"))][-1] == "90-"
    assert {path.name for path in (ROOT / "modes").glob("*.sh")} == {f"{mode}.sh" for mode in MODES}
    assert {path.name for path in (ROOT / "leave").glob("*.sh")} == {f"{mode}.sh" for mode in MODES}
    assert {f"{name}.sh" for name in PARTS} == {path.name for path in (ROOT / "parts").glob("*.sh")}
    assert not list(ROOT.glob("*.sh"))


@pytest.mark.parametrize("mode", MODES)
def test_a_program_has_the_core_all_ways_to_leave_and_its_mode(mode: str) -> None:
    program = node_program(mode)
    parts = [*(ROOT / "core").glob("*.sh"), *(ROOT / "leave").glob("*.sh")]
    places = {path.name: program.find(code(path)) for path in parts}
    assert min(places.values()) >= 0
    assert max(places, key=lambda name: places[name]).startswith("90-")
    modes = [path.stem for path in sorted((ROOT / "modes").glob("*.sh")) if code(path) in program]
    assert modes == sorted(MODES[mode])
    assert program.startswith("#!/bin/sh\n")
    assert "# shellcheck shell=" not in program


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
    with pytest.raises(ValueError, match="'node' is not one of pull, health, metrics, verify"):
        part_program("node")
