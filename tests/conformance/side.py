"""Where one of the twins lives: a network namespace, of this machine's kernel or of another one."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Network:
    """What a node is to be linked to."""

    addresses: Sequence[str]  # the node's own
    others: Sequence[str]  # of the other nodes
    pods: Sequence[str]  # CIDRs of the node's pods
    interface: str  # on which a pod comes in


@dataclass
class Side(ABC):
    name: str
    pause: ClassVar[float] = 0.05  # between two looks at what kube-proxy has done

    @abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv there."""

    @abstractmethod
    def build(self, network: Network) -> None:
        """A virgin node."""

    @abstractmethod
    def remove(self) -> None:
        """Nothing of the node is left."""

    def run(self, *argv: str, stdin: str | None = None, check: bool = True) -> str:
        """Run a command there and return what it printed; a failure carries its stderr."""
        done = subprocess.run(self.command(argv), input=stdin, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} in {self.name} exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout


@dataclass
class Namespace(Side):
    """A namespace that somebody else makes and removes."""

    def command(self, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *argv]

    def build(self, network: Network) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError
