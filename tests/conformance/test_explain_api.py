"""`akp explain`, `akp service` and `akp prove` ask a real API server, with the rights of a snapshot and no more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection.play import BIN, SHOP
from tests.controlplane import ControlPlane, netns

from .shop import shop_plane

pytestmark = pytest.mark.controlplane

ADDRESS = "192.168.66.1"
QUESTION = ["--node", "n1", "--from", "shop/cart-1", "--to", "shop/catalog:http"]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with shop_plane("akpxa", ADDRESS) as started:
        yield started


@pytest.fixture
def kubeconfig(plane: ControlPlane, tmp_path: Path) -> str:
    return str(plane.kubeconfig(tmp_path / "kubeconfig", "akp"))


def asked(plane: ControlPlane, *argv: str, code: int = 0) -> Any:
    """What a command prints beside the control plane, as JSON; what it complains about, if it fails."""
    argv = (str(BIN / "akp"), *argv, "--config", str(SHOP / "kube-proxy.yaml"), "--json")
    done = subprocess.run(netns.command(plane.namespace, argv), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def test_the_api_server_tells_what_files_tell(plane: ControlPlane, kubeconfig: str) -> None:
    for command in (["explain", *QUESTION], ["service", "shop/catalog", "--node", "n1"]):
        live = asked(plane, *command, "--kubeconfig", kubeconfig)
        assert live == asked(plane, *command, "--cluster", str(SHOP))


def test_a_cluster_is_proved(plane: ControlPlane, kubeconfig: str) -> None:
    told = asked(plane, "prove", "--kubeconfig", kubeconfig)
    assert {each["claim"]: each["holds"] for each in told["claims"]}["rules"]


def test_a_wrong_question_gets_the_nearest_right_one(plane: ControlPlane, kubeconfig: str) -> None:
    wrong = ["explain", *QUESTION[:-1], "shop/katalog:http", "--kubeconfig", kubeconfig]
    assert "did you mean shop/catalog" in asked(plane, *wrong, code=2)
