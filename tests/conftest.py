"""Fixtures for all tests."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

numbers = itertools.count(1)

# A merge is judged by the same examples every time; AKP_DRAW=1 draws new ones. A busy machine is no failure.
settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="AKP_DRAW" not in os.environ,
)
settings.load_profile("suite")


def unused_prefix() -> str:
    """A lab name that no other test process on this machine uses."""
    return f"test-{os.getpid()}-{next(numbers)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a worker has a whole file, and the last one should not be the longest."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Makes labs that are removed after the test: make_lab(nodes=2, iptables="legacy")."""
    labs: list[Lab] = []

    def make(nodes: int = 3, *, uml: int = 0, iptables: str = "") -> Lab:
        labs.append(Lab(unused_prefix(), nodes, uml=uml, iptables=iptables))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """A fresh lab of three nodes."""
    return make_lab()


@pytest.fixture(scope="session")
def uml_lab() -> Iterator[Lab]:
    """A lab for all tests of a run: n1 and n2 are usual nodes, n3 has a kernel of its own, which is slow to boot."""
    with Lab(unused_prefix(), 2, uml=1) as lab:
        yield lab
