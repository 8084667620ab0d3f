"""Fixtures for all tests."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest

from tests.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

numbers = itertools.count(1)


def unused_prefix() -> str:
    """A lab name that no other test process on this machine uses."""
    return f"test-{os.getpid()}-{next(numbers)}"


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Makes labs that are removed after the test: make_lab(nodes=2, iptables="legacy")."""
    labs: list[Lab] = []

    def make(nodes: int = 3, *, iptables: str = "") -> Lab:
        labs.append(Lab(unused_prefix(), nodes, iptables=iptables))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """A fresh lab of three nodes."""
    return make_lab()
