# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Advisory locks on files; each goes with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from .files import open_regular


def lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; whether that went, where another process is not waited for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


class Lock:
    """A lock with a file of its own. Leaving the block of a `with` gives it back."""

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self.path = path
        self._mode = mode
        self._descriptor: int | None = None

    def take(self, *, wait: bool = False) -> bool:
        """Whether it is ours now."""
        if self._descriptor is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT, self._mode)
            if not lock(descriptor, wait=wait):
                os.close(descriptor)
                return False
            self._descriptor = descriptor
        return True

    def give_back(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()
