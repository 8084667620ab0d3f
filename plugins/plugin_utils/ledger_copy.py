# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The ledger off the host: each entry goes to syslog or to a file elsewhere, as it is made, and is verified from there.

    append(ledger, fields, copy_to("syslog"))            # or the path of a file
    verify_copy(Path("/var/log/auth.log"), ledger)      # what was copied must still be in the ledger

A file gets the whole ledger, also what was written before there was a copy or while it could not be reached. Syslog
gets each entry in parts, as its lines may be no longer than a thousand characters; who collects it may lose some.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from .files import open_regular, sync_folder
from .ledger import START, BrokenLedger, Head, entry_of, lines, tail_of, unmerged

SYSLOG = "syslog"
TAG = "akp-ledger"
_SOCKET = "/dev/log"
_PRIORITY = 10 * 8 + 5  # authpriv, notice
_PART = 800
_MESSAGE = re.compile(rf"{TAG}(?:\[[0-9]+\])?: ([0-9a-f]{{8}}) ([0-9]{{1,18}}) ([0-9]{{1,9}})/([0-9]{{1,9}}) (.*)")

# Takes the ledger and the line of its new entry.
Copy: TypeAlias = Callable[[Path, bytes], None]


def copy_to(setting: str) -> Copy | None:
    """What copies entries; None if the setting is empty."""
    if not setting:
        return None
    if setting == SYSLOG:
        return _send
    target = Path(setting).expanduser()
    return lambda ledger, line: _add(target, ledger, line)


# ---- to a file


def _add(target: Path, ledger: Path, line: bytes) -> None:
    """Add an entry to the copy, and those before it that the copy does not have."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(open_regular(target, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=True), "r+b") as stream:
        has, _torn = tail_of(stream, target)
        entry = entry_of(line, str(ledger))
        new = has == Head() and entry["previous"] == START
        wanted = [line] if new or has.hash == entry["previous"] else _after(ledger, has, target)
        stream.writelines(wanted)
        stream.flush()
        os.fsync(stream.fileno())
    if has == Head():
        sync_folder(target.parent)


def _after(ledger: Path, has: Head, target: Path) -> list[bytes]:
    """The lines of the ledger that follow what the copy has."""
    known = list(lines(ledger))
    hashes = [entry["hash"] for _line, entry in known]
    # A new ledger, after the one before was moved away, follows that one in the copy.
    if has != Head() and has.hash not in hashes and len(known) > 1:
        raise BrokenLedger(
            f"{target}: ends with an entry that {ledger} does not have: it is the copy of another ledger, or one of "
            "them was changed. Compare them, move the copy away, and the next run copies the whole ledger"
        )
    start = hashes.index(has.hash) + 1 if has.hash in hashes else 0
    return [line + b"\n" for line, _entry in known[start:]]


# ---- to syslog


def _send(ledger: Path, line: bytes) -> None:
    text = line.decode("ascii").rstrip("\n")
    number = entry_of(line, str(ledger))["number"]
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    name = hashlib.sha256(str(ledger.absolute()).encode()).hexdigest()[:8]
    with _connected() as link:
        for index, part in enumerate(parts, 1):
            message = f"<{_PRIORITY}>{TAG}[{os.getpid()}]: {name} {number} {index}/{len(parts)} {part}"
            # A stream has no messages: there a null byte ends one.
            link.sendall(message.encode() + (b"\0" if link.type == socket.SOCK_STREAM else b""))


@contextlib.contextmanager
def _connected() -> Iterator[socket.socket]:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as link:
            link.settimeout(10.0)
            try:
                link.connect(_SOCKET)
            except OSError as error:
                if kind == socket.SOCK_STREAM:
                    raise OSError(
                        error.errno, f"the ledger cannot be copied to syslog: {error.strerror}", _SOCKET
                    ) from None
                continue
            yield link
            return


# ---- back again


@dataclasses.dataclass(slots=True)
class Chain:
    """Entries of one ledger, in their order; some may be missing."""

    name: str
    entries: dict[int, str] = dataclasses.field(default_factory=dict)  # number -> hash
    missing: list[str] = dataclasses.field(default_factory=list)

    @property
    def head(self) -> Head:
        """The last of them."""
        return Head(*next(reversed(self.entries.items()))) if self.entries else Head()

    def add(self, entry: dict[str, Any], where: str) -> None:
        """The next entry; BrokenLedger if it does not follow."""
        head, number = self.head, entry["number"]
        if self.entries.get(number) == entry["hash"]:
            return  # said twice, as collectors of syslog do
        if number <= head.number:
            raise BrokenLedger(f"{where} is entry {number} once more, and another one")
        if number == head.number + 1 and entry.get("previous") != head.hash:
            raise BrokenLedger(f"{where} does not follow the entry before it: its predecessor was another")
        if number > head.number + 1:
            self.missing.append(f"{head.number + 1}" + (f" to {number - 1}" if number > head.number + 2 else ""))
        self.entries[number] = entry["hash"]


def chains(copy: Path) -> list[Chain]:
    """The ledgers that a copy holds: a file of entries, or a log that has them in parts among other lines."""
    found: list[Chain] = []
    current: dict[str, Chain] = {}
    for name, line, where in _entries(copy):
        entry = entry_of(line, where)
        chain = current.get(name)
        if chain is None or (entry["number"] == 1 and chain.entries.get(1) != entry["hash"]):
            chain = current[name] = Chain(name)
            found.append(chain)
        chain.add(entry, where)
    return found


def _entries(copy: Path) -> Iterator[tuple[str, bytes, str]]:
    """Ledger, line and place of each entry."""
    parts: dict[str, list[str]] = {}
    with os.fdopen(open_regular(copy, os.O_RDONLY, follow=True), "rb") as stream:
        for index, line in enumerate(stream, 1):
            where = f"{copy}: line {index}"
            if line.startswith(b"{"):
                yield "", line, where
                continue
            found = _MESSAGE.search(line.decode("utf-8", "replace").rstrip("\n"))
            if found is None:
                continue
            name, number, part, of, text = found.groups()
            collected = parts.setdefault(name, [])
            if part == "1":
                collected.clear()
            collected.append(text)
            if part == of and len(collected) == int(of):
                yield name, "".join(collected).encode(), f"{where}, entry {number}"


def verify_copy(copy: Path, ledger: Path | None = None) -> list[str]:
    """What a copy holds, in words; BrokenLedger if it is broken, or the ledger does not have what was copied."""
    found = chains(copy)
    if not found:
        raise BrokenLedger(f"{copy}: holds no entry of a ledger")
    if ledger is None:
        for chain in found:
            if chain.missing:
                raise BrokenLedger(f"{copy}: entries are missing{_of(chain)}: {', '.join(chain.missing)}")
        return [f"{len(chain.entries)} entries{_of(chain)}, head {chain.head.hash}" for chain in found]
    known, merged = dict[int, str](), set[str]()
    for _line, entry in lines(ledger):
        known[entry["number"]] = entry["hash"]
        merged.update(str(each["hash"]) for each in list(unmerged(entry))[1:])
    same = [chain for chain in found if set(chain.entries.values()) & (merged | set(known.values()))]
    if not same:
        raise BrokenLedger(f"{ledger}: has no entry of those in {copy}: all of it was written anew")
    for chain in same:
        for number, its_hash in chain.entries.items():
            if known.get(number) != its_hash and its_hash not in merged:
                what = "was changed" if number in known else "is gone"
                raise BrokenLedger(f"{ledger}: entry {number} {what}: {copy} has it with the hash {its_hash}")
    told = [f"{len(chain.entries)} entries{_of(chain)} are in {ledger}" for chain in same]
    return told + [f"not copied{_of(chain)}: {', '.join(chain.missing)}" for chain in same if chain.missing]


def _of(chain: Chain) -> str:
    return f" of ledger {chain.name}" if chain.name else ""
