"""Releases as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.release import (
    DeltaEntry,
    Entry,
    InvalidRelease,
    Object,
    Release,
    SigningFailed,
    join,
    new_release,
    parse_release,
    release_files,
    sign,
    signature_names,
    split,
    write_release,
)

A, B, C = "a" * 64, "b" * 64, "c" * 64
RELEASE = Release(
    cluster="shop",
    counter=1_763_000_000_000,
    expires=1_763_100_000,
    bundles=(Entry("n1", B, C),),
    deltas=(DeltaEntry("n1", A, B, C),),
    objects=(Object(C, A, 12345),),
    notes=("change 4711, by alice",),
)
TEXT = f"""\
akp-release 1
cluster shop
counter 1763000000000
expires 1763100000
note change 4711, by alice
bundle n1 {B} {C}
delta n1 {A} {B} {C}
object {C} {A} 12345
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "alice"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file


def test_a_release_is_a_text_that_reads_back() -> None:
    assert RELEASE.text() == TEXT
    assert parse_release(TEXT) == RELEASE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("akp-release 2\n", "line 1"),
        (TEXT[:-1], "cut short"),
        ("akp-release 1\ncluster shop\n", "does not say counter, expires"),
        (TEXT.replace("cluster shop", "cluster ../shop"), "'../shop' is no cluster"),
        (TEXT.replace("counter 1763000000000", "counter 1.5"), "is no counter"),
        (TEXT + "cluster other\n", "line 9"),
        (TEXT + f"bundle n1 {A}\n", "line 9"),
        (TEXT + f"bundle $(reboot) {A} {B}\n", "line 9"),
        (TEXT + "run reboot\n", "is not a line of a release: run reboot"),
    ],
)
def test_what_is_no_release_is_named(text: str, reason: str) -> None:
    with pytest.raises(InvalidRelease) as error:
        parse_release(text)
    assert reason in str(error.value)


def test_values_that_no_line_can_hold_make_no_release() -> None:
    with pytest.raises(InvalidRelease):
        new_release("shop", 60, [], notes=["two\nlines"]).text()


def test_counters_only_grow() -> None:
    first = new_release("shop", 60, [])
    assert new_release("shop", 60, [], after=first.counter + 10**6).counter == first.counter + 10**6 + 1
    assert first.expires * 1000 > first.counter


def test_text_and_signatures_share_a_file(key: Path, tmp_path: Path) -> None:
    signatures = [sign(TEXT, key), sign(TEXT, key)]
    assert split(join(TEXT, signatures)) == (TEXT, signatures)
    assert split(TEXT) == (TEXT, [])
    with pytest.raises(InvalidRelease, match="cut short"):
        split(join(TEXT, signatures)[:-10])
    write_release(tmp_path, TEXT, signatures)
    assert [file.name for file in release_files(tmp_path)] == ["release", "release.1.sig", "release.sig"]
    write_release(tmp_path, TEXT, signatures[:1])
    assert [file.name for file in release_files(tmp_path)] == ["release", "release.sig"]
    assert signature_names(3) == ["release.sig", "release.1.sig", "release.2.sig"]


def test_a_key_that_cannot_sign_is_named(tmp_path: Path) -> None:
    with pytest.raises(SigningFailed, match=r"missing\.key"):
        sign(TEXT, tmp_path / "missing.key")
