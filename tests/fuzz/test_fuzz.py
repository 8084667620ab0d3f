"""Readers do not break: whatever they are given, they read it or say in words why not."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .mutate import Mutator
from .targets import TARGETS, Target, attempt

MINUTES = float(os.environ.get("AKP_FUZZ_MINUTES", "10"))


def kept(target: Target) -> list[Path]:
    """The inputs of the corpus: good ones, and those that once broke something."""
    found = sorted(target.corpus.iterdir())
    assert found, f"{target.corpus} is empty"
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_reads_what_is_right(name: str, tmp_path: Path) -> None:
    good = [file for file in kept(TARGETS[name]) if file.name.startswith("good")]
    assert good
    for file in good:
        assert attempt(TARGETS[name], file.read_bytes(), tmp_path) == "read", file


@pytest.mark.parametrize("name", TARGETS)
def test_what_once_broke_a_reader_does_so_no_more(name: str, tmp_path: Path) -> None:
    told = {file.name: attempt(TARGETS[name], file.read_bytes(), tmp_path) for file in kept(TARGETS[name])}
    assert told


def explored(target: Target, examples: int, seed: int) -> Counter[str]:
    """Mutate what the corpus holds; what breaks the reader is added to it, as small as hypothesis can make it.

    With the seed 0 the same inputs are made every time.
    """
    corpus = [file.read_bytes() for file in kept(target)]
    told: Counter[str] = Counter()
    broken: list[bytes] = []

    @settings(
        max_examples=examples,
        derandomize=not seed,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def explore(chance: random.Random) -> None:
        mutator = Mutator(random.Random(f"{seed} {chance.getrandbits(64)}"))
        content = mutator.mutated(chance.choice(corpus), chance.choice(corpus), target.suffix)
        with tempfile.TemporaryDirectory() as folder:
            try:
                told[attempt(target, content, Path(folder))] += 1
            except Exception:
                broken.append(content)
                raise

    try:
        explore()
    except Exception:
        smallest = min(broken, key=len, default=b"")
        finding = target.corpus / f"found-{hashlib.sha256(smallest).hexdigest()[:12]}{target.suffix}"
        finding.write_bytes(smallest)
        raise
    return told


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_are_read_or_refused(name: str) -> None:
    assert sum(explored(TARGETS[name], 40, 0).values()) >= 40


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 600)
def test_mutated_inputs_for_minutes() -> None:
    """AKP_FUZZ_MINUTES says how many."""
    deadline = time.monotonic() + 60 * MINUTES
    told = {name: Counter[str]() for name in TARGETS}
    rounds = 0
    while time.monotonic() < deadline:
        rounds += 1
        for name, target in TARGETS.items():
            told[name] += explored(target, 100, random.SystemRandom().getrandbits(32))
    for name, counts in told.items():
        print(f"{name}: {counts.total()} inputs, {dict(counts)}")
    # A snapshot that was changed is found by its digest, always.
    assert all(counts["read"] for name, counts in told.items() if name != "record"), told
