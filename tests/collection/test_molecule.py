"""The scenarios that users can copy, run as users run them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import unused_prefix

from .play import BIN, ROOT

pytestmark = pytest.mark.slow

SCENARIOS = sorted(path.parent.name for path in (ROOT / "extensions" / "molecule").glob("*/molecule.yml"))


def test_the_promised_scenarios_are_there() -> None:
    assert {"cleanup", "default", "drift", "plan"} <= set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "AKP_MOLECULE_LAB": unused_prefix(),
        "MOLECULE_EPHEMERAL_DIRECTORY": str(tmp_path),
        "NO_COLOR": "1",
        "ANSIBLE_COLLECTIONS_PATH": "/nonexistent",
    }
    done = subprocess.run(
        [str(BIN / "molecule"), "test", "--scenario-name", scenario],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
