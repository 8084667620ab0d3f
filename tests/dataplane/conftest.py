"""One lab for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import unused_prefix
from tests.lab import Lab

from .cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes and their pods; nothing applied yet."""
    # Nodes share only /tmp with the machine.
    directory = Path(tempfile.mkdtemp(prefix="akp-dataplane-", dir="/tmp"))
    with Lab(unused_prefix(), 3) as lab:
        yield Cluster(lab, directory)
    shutil.rmtree(directory)
