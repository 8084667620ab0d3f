"""Sockets and commands inside a network namespace, without leaving the calling process."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def path(namespace: str) -> Path:
    return Path("/run/netns") / namespace


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Sockets opened by this thread inside the block belong to the namespace, and go on belonging to it afterwards."""
    home = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        _setns(path(namespace))
        try:
            yield
        finally:
            if _libc.setns(home, CLONE_NEWNET) != 0:
                # Going on in the wrong namespace could change the wrong machine.
                os.abort()
    finally:
        os.close(home)


def _setns(target: Path) -> None:
    fd = os.open(target, os.O_RDONLY)
    try:
        if _libc.setns(fd, CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(target))
    finally:
        os.close(fd)


def connect(namespace: str, address: str, port: int, timeout: float = 10.0) -> socket.socket:
    with entered(namespace):
        return socket.create_connection((address, port), timeout=timeout)


def command(namespace: str, argv: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", namespace, *argv]


def run(namespace: str, *argv: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a command in the namespace and return what it printed; a failure carries its stderr."""
    done = subprocess.run(command(namespace, argv), input=stdin, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} in {namespace} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(*argv: str) -> str:
    done = subprocess.run(["ip", *argv], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(argv)} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def exists(namespace: str) -> bool:
    return path(namespace).exists()


def add(namespace: str) -> None:
    ip("netns", "add", namespace)
    ip("-n", namespace, "link", "set", "lo", "up")


def delete(namespace: str) -> None:
    if exists(namespace):
        ip("netns", "del", namespace)
