"""The programs of a node as files, for what runs them without a bundle."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentless_kube_proxy.bundle.program import LEAVE, MODES, PARTS, node_program, part_program

OUTPUT = Path(__file__).parents[1] / "output"


def _written(name: str, text: str) -> Path:
    """Test processes that start together write it at once: each reader sees a whole file."""
    place = OUTPUT / name
    if place.is_file() and place.read_text() == text:
        return place  # a kernel of its own sees it, and may not write here
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=place.parent, prefix=f"{place.name}.", delete=False) as file:
        file.write(text)
    Path(file.name).chmod(0o755)
    return Path(file.name).replace(place)


# akp-node of each mode, and the programs beside it.
PROGRAMS = {mode: _written(f"{mode}/akp-node", node_program(mode)) for mode in MODES}
PULL, HEALTH, METRICS, VERIFY, _ = (_written(f"akp-{name}", part_program(name)) for name in PARTS)
for _mode in MODES:
    _written(f"{_mode}/{LEAVE}", part_program("leave"))
# For what every mode's program does: facts, status, cleanup.
PROGRAM = PROGRAMS["iptables"]
