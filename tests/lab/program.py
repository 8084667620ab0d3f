"""akp-node as a file, for what runs it without a bundle."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentless_kube_proxy.bundle.program import node_program

OUTPUT = Path(__file__).parents[1] / "output"


def _written() -> Path:
    """Test processes that start together write it at once: each reader sees a whole file."""
    OUTPUT.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=OUTPUT, prefix="akp-node.", delete=False) as file:
        file.write(node_program())
    Path(file.name).chmod(0o755)
    return Path(file.name).replace(OUTPUT / "akp-node")


PROGRAM = _written()
