"""What an auditor has to read: how long the programs are, and how they are made."""

from __future__ import annotations

import re

import pytest
from agentless_kube_proxy.bundle.program import MODES, PARTS, node_program, part_program

from tests.lab.program import OUTPUT

# The aim is 2,200 lines and 100 kB for each mode. These only ever go down.
LIMITS = {
    "iptables": (2_420, 119_400),
    "nftables": (2_355, 116_600),
    "ipvs": (2_932, 147_300),
    "userspace": (2_914, 140_000),
}
PART_LINES = {"leave": 601}
FUNCTION_LINES, AWK_LINES = 60, 80

_FUNCTION = re.compile(r"^(\w+)\(\) \{\n(.*?)^\}\n", re.M | re.S)
_QUOTED = re.compile(r"^\w+_(?:awk|shapes)='.*?^'\n", re.M | re.S)
_AWK = re.compile(r"^(\w+_awk)='\n?(.*?)^'\n", re.M | re.S)


@pytest.mark.parametrize("mode", MODES)
def test_a_node_of_one_mode_carries_little(mode: str) -> None:
    text = node_program(mode)
    lines, size = LIMITS[mode]
    assert text.count("\n") <= lines
    assert len(text.encode()) <= size


@pytest.mark.parametrize("part", PARTS)
def test_the_programs_beside_it_are_short(part: str) -> None:
    assert part_program(part).count("\n") <= PART_LINES.get(part, 350)


@pytest.mark.parametrize("text", [*map(node_program, MODES), *map(part_program, PARTS)])
def test_functions_and_awk_programs_are_a_page_at_most(text: str) -> None:
    functions = {name: body.count("\n") + 2 for name, body in _FUNCTION.findall(text)}
    assert functions
    assert {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES} == {}
    assert {name: body.count("\n") for name, body in _AWK.findall(text) if body.count("\n") > AWK_LINES} == {}


@pytest.mark.parametrize("mode", MODES)
def test_what_a_function_assigns_is_local_or_in_the_tables_of_globals(mode: str) -> None:
    program = node_program(mode) + part_program("leave")
    text = re.sub(r"^\s*#.*\n", "", _QUOTED.sub("", program).replace("\\\n", " "), flags=re.M)
    top = _FUNCTION.sub("", text)
    known = set(re.findall(r"(?:^|(?<=\s))([A-Za-z_]\w*)=", top))
    loose = {}
    for name, body in _FUNCTION.findall(text):
        local = set(re.findall(r"\w+", " ".join(re.findall(r"^\s*local (.*)$", body, re.M))))
        assigned = set(re.findall(r"^\s*([a-z_]\w*)=", body, re.M))
        if missing := assigned - local - known:
            loose[name] = missing
    assert loose == {}


def test_the_programs_are_written_for_tests() -> None:
    assert (OUTPUT / "iptables" / "akp-node").is_file()
