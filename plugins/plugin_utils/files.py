# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Files that are replaced in one step, also in a directory that another user may write.

    write_atomic(path, data, 0o644)            # there is the old file or the whole new one, whatever happens
    write_directory(path, [(name, data, mode)])     # the same for a directory of files
    open_regular(path, os.O_RDWR | os.O_CREAT)  # a descriptor of a regular file: no pipe, no device, no link

What is written is made under a random name that did not exist, in a directory that stays open: a link or a pipe that
waits under a name is neither followed nor opened, and modes are set on what is open, never by name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# What a writer that was killed leaves begins with a dot and ends in this.
SUFFIX = ".tmp"
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def write_atomic(
    path: Path,
    data: bytes | str | Iterable[str],
    mode: int = 0o600,
    *,
    durable: bool = False,
    newer_than: float = 0.0,
) -> None:
    """Replace a file in one step.

    A durable one is on the disk before it has its name; the directory is the caller's to sync. With `newer_than`, its
    time is at least a second after that one.
    """
    with _opened(path.parent) as folder:
        name = _fill(folder, path.name, data, mode, durable=durable, newer_than=newer_than)
        try:
            os.rename(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:
            _discard(folder, name)
            raise _named(error, path) from error


def _fill(
    folder: int, wanted: str, data: bytes | str | Iterable[str], mode: int, *, durable: bool, newer_than: float
) -> str:
    """A new file of a name that only its maker knows; it is gone again if it cannot be filled."""
    name = _random(wanted)
    descriptor = os.open(name, os.O_WRONLY | _NEW, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            parts = [data] if isinstance(data, bytes | str) else data
            for part in parts:
                stream.write(part.encode() if isinstance(part, str) else part)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if newer_than:
                moment = max(time.time(), int(newer_than) + 1.0)
                os.utime(stream.fileno(), (moment, moment))
            if durable:
                os.fsync(stream.fileno())
    except BaseException:
        _discard(folder, name)
        raise
    return name


def write_directory(path: Path, files: Iterable[tuple[str, bytes, int]], mode: int = 0o755) -> None:
    """Replace a directory, and all that it held, by these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path.parent) as folder:
        name, old = _random(path.name), _random(path.name)
        os.mkdir(name, 0o700, dir_fd=folder)
        try:
            with _opened(Path(name), folder, os.O_NOFOLLOW) as new:
                for each, data, its_mode in files:
                    with os.fdopen(os.open(each, os.O_WRONLY | _NEW, 0o600, dir_fd=new), "wb") as stream:
                        stream.write(data)
                        os.fchmod(stream.fileno(), its_mode)
                os.fchmod(new, mode)
            with contextlib.suppress(FileNotFoundError):
                os.rename(path.name, old, src_dir_fd=folder, dst_dir_fd=folder)
            os.rename(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            _remove_tree(folder, name)
            raise
        _remove_tree(folder, old)


def open_regular(path: Path, flags: int, mode: int = 0o600, *, follow: bool = False) -> int:
    """A descriptor of a regular file; OSError for a pipe, a device or, unless it may be followed, a link."""
    flags |= 0 if follow else os.O_NOFOLLOW
    # A pipe would otherwise block until something writes to it, and a terminal could become ours.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return descriptor


def make_directory(path: Path, mode: int) -> None:
    """A directory that is there with this mode, whatever the umask is."""
    path.mkdir(parents=True, exist_ok=True)
    with _opened(path) as folder:
        os.fchmod(folder, mode)


def check_owned(path: Path) -> None:
    """PermissionError if another user could change what is in a directory, or put another in its place."""
    ours = {0, os.geteuid(), *_unmapped()}
    real, path = path.resolve(), path.absolute()
    for each in dict.fromkeys((real, *real.parents, *path.parents)):
        found = each.stat()
        if found.st_uid not in (ours if each != real else {0, os.geteuid()}):
            what = f"{each} belongs to user {found.st_uid}, who could change it"
            raise _unsafe(path, what, f"chown {os.geteuid()} {each}")
        # In a directory with the sticky bit, such as /tmp, others cannot rename what is ours.
        others = stat.S_IWOTH | stat.S_IWGRP if each == real else 0 if found.st_mode & stat.S_ISVTX else stat.S_IWOTH
        if found.st_mode & others:
            raise _unsafe(path, f"others than its owner may write to {each}", f"chmod go-w {each}")


def _unmapped() -> set[int]:
    """Who owns, in a user namespace such as that of a container, what is of no user in it, as root outside."""
    with contextlib.suppress(OSError):
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", "4294967295"]:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))}
    return set()


def _unsafe(path: Path, what: str, how: str) -> PermissionError:
    told = f"is not safe: {what}, and so decide what nodes get; mend that ({how}) or choose another directory"
    return PermissionError(errno.EPERM, told, str(path))


def sync_folder(path: Path) -> None:
    """Names that were given in a directory survive a power cut."""
    with _opened(path) as folder:
        os.fsync(folder)


@contextlib.contextmanager
def _opened(path: Path, folder: int | None = None, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER | flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _random(name: str) -> str:
    # Names of files end at 255 bytes.
    import secrets  # commands that write nothing start without it

    return f".{name[:100]}.{secrets.token_hex(8)}{SUFFIX}"


def _discard(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _remove_tree(folder: int, name: str) -> None:
    """What was in the place of a directory need not have been one."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def _named(error: BaseException, path: Path) -> BaseException:
    """The error with the name that the caller knows."""
    return OSError(error.errno, error.strerror, str(path)) if isinstance(error, OSError) else error
