# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The ledger: what was done to which node, one JSON object a line, each sealed with the one before.

An entry ends with its hash, which covers its text and the hash of its predecessor. An entry that is edited, removed
or moved breaks the chain there. A ledger that is cut short or written anew has another head than the one that was noted
elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import UserError
from .files import open_regular, sync_folder
from .locks import lock

FILE = "ledger.jsonl"
MERGED = "merged"  # the key of a line of another ledger
START = "0" * 64  # what the first entry has in place of a predecessor
_HASH_LENGTH = len(',"hash":""}') + 64
_LONGEST = 64 * 1024 * 1024
_REMEDY = (
    "Nothing is added to a ledger that is not whole, and nothing is done without one. Move the file away and keep it "
    "to find out what happened, and the next run begins a new one; or put a copy in its place that `akp "
    "ledger verify` finds intact"
)


class BrokenLedger(UserError):
    """A ledger that is not what was written; the message names file, line and what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The last entry: who knows it can tell whether the ledger was cut."""

    number: int = 0
    hash: str = START

    def told(self, file: object) -> str:
        """For the log of a run, from where akp ledger verify is given it."""
        return f"ledger: {file}, entry {self.number}, head {self.hash}"


def append(file: Path, fields: Mapping[str, Any], copy: Callable[[Path, bytes], None] | None = None) -> Head:
    """Add an entry; when this returns, it is on the disk, and where copies go."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_regular(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=True)
    with os.fdopen(descriptor, "r+b") as stream:
        lock(stream.fileno())
        head, torn = tail_of(stream, file)
        entry: dict[str, Any] = {
            "number": head.number + 1,
            "previous": head.hash,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **fields,
        }
        if torn:
            # Its writer died in the middle, before it reported the entry; the reader is told that it was there.
            entry["torn"] = torn
        line = seal(entry)
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())
        if head.number == 0:
            sync_folder(file.parent)
        # Before others write the next one: copies are in the same order.
        if copy is not None:
            copy(file, line)
    return Head(head.number + 1, _hash_of(line))


def seal(entry: Mapping[str, Any]) -> bytes:
    """The line of an entry: its text, and the hash of that as the last member."""
    body = json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode()
    return body[:-1] + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def _hash_of(line: bytes) -> str:
    """The hash that a line carries."""
    return line.rstrip(b"\n")[-66:-2].decode("ascii", "replace")


def tail_of(stream: IO[bytes], file: Path) -> tuple[Head, int]:
    """The last entry, and how many bytes of a torn line were cut off behind it. A whole one gets the end it lacks."""
    end = stream.seek(0, os.SEEK_END)
    if end == 0:
        return Head(), 0
    size, data = 4096, b""
    while True:
        start = max(0, end - size)
        stream.seek(start)
        data = stream.read(end - start)
        whole = data.rfind(b"\n") + 1  # everything behind it is torn
        before = data.rfind(b"\n", 0, whole - 1) + 1 if whole else 0
        if start == 0 or before or size > _LONGEST:
            break
        size *= 4
    line, rest = data[before:whole], data[whole:]
    if rest and _is_entry(rest):
        stream.write(b"\n")
        line, rest = rest, b""
    if rest:
        stream.truncate(end - len(rest))
    if not line:
        return Head(), len(rest)
    try:
        entry = entry_of(line, f"{file}: its last line")
    except BrokenLedger as error:
        raise BrokenLedger(f"{error}. {_REMEDY}") from None
    return Head(entry["number"], _hash_of(line)), len(rest)


def entry_of(line: bytes, where: str) -> dict[str, Any]:
    """An entry whose text has the hash that it carries."""
    text = line.rstrip(b"\n")
    body = text[:-_HASH_LENGTH] + b"}"
    if text[-_HASH_LENGTH:-66] != b',"hash":"' or text[-2:] != b'"}':
        raise BrokenLedger(f"{where} is no entry of a ledger")
    if hashlib.sha256(body).hexdigest() != _hash_of(line):
        raise BrokenLedger(f"{where} was changed: its text does not have the hash that it carries")
    try:
        entry = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise BrokenLedger(f"{where} is no JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("number"), int):
        raise BrokenLedger(f"{where} is no entry of a ledger")
    return entry


def unmerged(entry: dict[str, Any], where: str = "") -> Iterator[dict[str, Any]]:
    """An entry, and the entry of another ledger that it holds, if it does; the innermost comes last."""
    yield entry
    if MERGED in entry:
        where = f"{where}: what was merged there"
        yield from unmerged(entry_of(str(entry[MERGED]).encode(), where), where)


def _is_entry(line: bytes) -> bool:
    try:
        entry_of(line, "")
    except BrokenLedger:
        return False
    return True


def entries(file: Path) -> Iterator[dict[str, Any]]:
    """The entries in order, each checked against the one before."""
    for _line, entry in lines(file):
        yield entry


def lines(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The entries, each with the line that it is."""
    head = Head()
    with os.fdopen(open_regular(file, os.O_RDONLY, follow=True), "rb") as stream:
        for index, line in enumerate(stream, 1):
            where = f"{file}: line {index}"
            if not line.endswith(b"\n") and not _is_entry(line):
                raise BrokenLedger(
                    f"{where} has no end: the run that wrote it was stopped, and the next run will say so"
                )
            entry = entry_of(line, where)
            if entry["number"] != head.number + 1:
                raise BrokenLedger(f"{where} is entry {entry['number']}, but entry {head.number + 1} belongs here")
            if entry.get("previous") != head.hash:
                raise BrokenLedger(f"{where} does not follow the line before it: its predecessor was another")
            list(unmerged(entry, where))
            head = Head(entry["number"], entry["hash"])
            yield line.rstrip(b"\n"), entry


def verify(file: Path, known: str = "") -> Head:
    """The head of an intact ledger. With the head of an earlier day, that entry must still be in it."""
    head, found = Head(), not known
    for entry in entries(file):
        head = Head(entry["number"], entry["hash"])
        found = found or known in [each["hash"] for each in unmerged(entry)]
    if not found:
        raise BrokenLedger(
            f"{file}: holds no entry with the hash {known}: its end was cut off, or all of it was written anew"
        )
    return head
