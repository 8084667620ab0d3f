# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Releases: which bundles signers let which nodes apply, as a text that a shell can read, and its signatures.

A release travels beside the manifest as `release`, `release.sig`, `release.1.sig`, …, or as one file, the text with the
signatures after it, which can be replaced in one step.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import UserError
from ..files import write_atomic

NAMESPACE = "akp-release"
FILE = "release"
_HEAD = "akp-release 1"
_BEGIN = "-----BEGIN SSH SIGNATURE-----"
_END = "-----END SSH SIGNATURE-----"
_MAX_SIGNATURES = 99  # as many as the node program looks at
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HEX = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,15}")


class InvalidRelease(UserError):
    """A text that is no release, or values that make none; the message says which."""


class SigningFailed(UserError):
    """ssh-keygen did not sign; the message has its words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A full bundle that a node may apply."""

    node: str
    generation: str
    digest: str  # of the manifest


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaEntry:
    """A delta that a node may apply where it has the base."""

    node: str
    base: str
    generation: str
    digest: str  # of the manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """The archive in which a bundle or a delta is published."""

    digest: str  # of the manifest
    sha256: str  # of the archive
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """What signers put their names under."""

    cluster: str
    counter: int  # milliseconds since the epoch when it was made; a node never goes back
    expires: int  # seconds since the epoch
    bundles: tuple[Entry, ...]
    deltas: tuple[DeltaEntry, ...] = ()
    objects: tuple[Object, ...] = ()
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The text that is signed."""
        lines = [_HEAD, f"cluster {self.cluster}", f"counter {self.counter}", f"expires {self.expires}"]
        lines += [f"note {note}" for note in self.notes]
        lines += [f"bundle {each.node} {each.generation} {each.digest}" for each in self.bundles]
        lines += [f"delta {each.node} {each.base} {each.generation} {each.digest}" for each in self.deltas]
        lines += [f"object {each.digest} {each.sha256} {each.size}" for each in self.objects]
        text = "".join(f"{line}\n" for line in lines)
        if parse_release(text) != self:
            raise InvalidRelease("the values of this release cannot be written down")
        return text


def check_cluster(name: str) -> None:
    """Whether releases can be of a cluster of this name."""
    if not _NAME.fullmatch(name):
        raise InvalidRelease(f"{name!r} is no name for a cluster: letters, digits, dots, dashes and underscores are")


def new_release(
    cluster: str,
    valid_for: float,
    bundles: Iterable[Entry],
    deltas: Iterable[DeltaEntry] = (),
    objects: Iterable[Object] = (),
    notes: Iterable[str] = (),
    *,
    after: int = 0,
) -> Release:
    """A release made now, good for so many seconds; its counter is higher than that of the one before."""
    now = time.time()
    return Release(
        cluster=cluster,
        counter=max(int(now * 1000), after + 1),
        expires=int(now + valid_for),
        bundles=tuple(bundles),
        deltas=tuple(deltas),
        objects=tuple(objects),
        notes=tuple(notes),
    )


def parse_release(text: str) -> Release:
    """The release of a text."""
    lines = text.split("\n")
    if lines[0] != _HEAD:
        raise InvalidRelease(f"line 1: is not {_HEAD!r}")
    if lines.pop() != "":
        raise InvalidRelease("the last line has no end: it was cut short")
    head: dict[str, str] = {}
    bundles: list[Entry] = []
    deltas: list[DeltaEntry] = []
    objects: list[Object] = []
    notes: list[str] = []
    for number, line in enumerate(lines[1:], 2):
        word, *rest = line.split(" ")
        if word in ("cluster", "counter", "expires") and len(rest) == 1 and word not in head:
            pattern = _NAME if word == "cluster" else _NUMBER
            if not pattern.fullmatch(rest[0]):
                raise InvalidRelease(f"line {number}: {rest[0]!r} is no {word}")
            head[word] = rest[0]
        elif word == "bundle" and len(rest) == 3 and _plain(rest[0], *rest[1:]):
            bundles.append(Entry(*rest))
        elif word == "delta" and len(rest) == 4 and _plain(rest[0], *rest[1:]):
            deltas.append(DeltaEntry(*rest))
        elif word == "object" and len(rest) == 3 and _plain("x", *rest[:2]) and _NUMBER.fullmatch(rest[2]):
            objects.append(Object(rest[0], rest[1], int(rest[2])))
        elif word == "note" and rest:
            notes.append(" ".join(rest))
        else:
            raise InvalidRelease(f"line {number}: is not a line of a release: {line[:100]}")
    missing = [name for name in ("cluster", "counter", "expires") if name not in head]
    if missing:
        raise InvalidRelease(f"it does not say {', '.join(missing)}")
    return Release(
        cluster=head["cluster"],
        counter=int(head["counter"]),
        expires=int(head["expires"]),
        bundles=tuple(bundles),
        deltas=tuple(deltas),
        objects=tuple(objects),
        notes=tuple(notes),
    )


def _plain(name: str, *digests: str) -> bool:
    return bool(_NAME.fullmatch(name)) and all(_HEX.fullmatch(each) for each in digests)


def sign(text: str, key: Path) -> str:
    """A signature of the text by an SSH key: a private key, or a public one whose private part an agent holds."""
    try:
        done = subprocess.run(
            ["ssh-keygen", "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key)],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise SigningFailed("missing tool: ssh-keygen (package openssh-client)") from None
    if done.returncode or _BEGIN not in done.stdout:
        raise SigningFailed(f"{key}: ssh-keygen could not sign: {done.stderr.strip() or 'no signature came out'}")
    return done.stdout


def join(text: str, signatures: Sequence[str]) -> str:
    """Text and signatures as one file."""
    return text + "".join(signatures)


def split(content: str) -> tuple[str, list[str]]:
    """Text and signatures out of one file."""
    text, *rest = content.split(f"{_BEGIN}\n")
    signatures = [f"{_BEGIN}\n{each}" for each in rest]
    if any(not each.endswith(f"{_END}\n") for each in signatures):
        raise InvalidRelease("a signature was cut short")
    return text, signatures


def signature_names(count: int) -> list[str]:
    """Names of the files of so many signatures."""
    if count > _MAX_SIGNATURES:
        raise InvalidRelease(f"{count} signatures are more than the {_MAX_SIGNATURES} that a node looks at")
    return [f"{FILE}.{number}.sig" if number else f"{FILE}.sig" for number in range(count)]


def write_release(directory: Path, text: str, signatures: Sequence[str]) -> None:
    """Put a release beside a manifest; an earlier one goes."""
    for old in release_files(directory):
        old.unlink()
    for name, signature in zip(signature_names(len(signatures)), signatures, strict=True):
        write_atomic(directory / name, signature, 0o644)
    write_atomic(directory / FILE, text, 0o644)


def release_files(directory: Path) -> list[Path]:
    """The files of the release beside a manifest, if there is one."""
    candidates = [directory / FILE, *sorted(directory.glob(f"{FILE}*.sig"))]
    return [each for each in candidates if each.is_file()]
