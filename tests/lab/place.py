"""Places from which a lab serves and calls: the controller, nodes, pods and the client outside."""

from __future__ import annotations

import json
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .record import LabError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

Outcome = Literal["answered", "refused", "timeout", "unreachable"]


@dataclass(frozen=True)
class Reply:
    """What became of a call: who answered and which source address it saw, or why nobody did."""

    who: str = ""
    source: str = ""
    outcome: Outcome = "answered"
    port: int = field(default=0, compare=False)
    """The source port seen."""

    def __str__(self) -> str:
        return f"{self.who} saw {self.source}" if self.who else self.outcome


REFUSED = Reply(outcome="refused")
TIMEOUT = Reply(outcome="timeout")
UNREACHABLE = Reply(outcome="unreachable")


@dataclass(frozen=True)
class Place:
    """A network namespace of the lab and the addresses that its servers use."""

    name: str
    netns: str
    addresses: tuple[str, ...]
    agent: Path

    def call(
        self, proto: str, address: str, port: int, *, timeout: float = 1.0, source: str = "", source_port: int = 0
    ) -> Reply:
        """Asks once who serves this address and port."""
        return self.calls(proto, address, port, 1, timeout=timeout, source=source, source_port=source_port)[0]

    def calls(
        self,
        proto: str,
        address: str,
        port: int,
        count: int,
        *,
        timeout: float = 1.0,
        source: str = "",
        source_port: int = 0,
    ) -> list[Reply]:
        """Asks `count` times, each time on a new connection."""
        question = self._question(proto, address, port, timeout, source, source_port)
        return [Reply(**reply) for reply in ask(self.agent, do="call", count=count, parallel=16, **question)]

    def spread(self, proto: str, address: str, port: int, count: int = 60) -> Counter[str]:
        """How often each server answered; calls without an answer count under their outcome."""
        return Counter(reply.who or reply.outcome for reply in self.calls(proto, address, port, count))

    def open(
        self, proto: str, address: str, port: int, *, timeout: float = 1.0, source: str = "", source_port: int = 0
    ) -> Connection:
        """A connection that stays, to be asked again and again."""
        opened = ask(self.agent, do="open", **self._question(proto, address, port, timeout, source, source_port))
        if "connection" not in opened:
            raise LabError(f"{self.name} cannot connect to {address} port {port}/{proto}: {opened['outcome']}")
        return Connection(self.agent, opened["connection"])

    def serve(self, proto: str, port: int, name: str = "") -> Server:
        """Answers on all addresses of this place until it is closed."""
        numbers = ask(
            self.agent,
            do="serve",
            netns=self.netns,
            proto=proto,
            addresses=self.addresses,
            port=port,
            name=name or self.name,
        )
        return Server(self.agent, tuple(numbers))

    def _question(
        self, proto: str, address: str, port: int, timeout: float, source: str, source_port: int
    ) -> dict[str, Any]:
        return {
            "netns": self.netns,
            "proto": proto,
            "address": address,
            "port": port,
            "timeout": timeout,
            "source": source,
            "source_port": source_port,
        }


@dataclass(frozen=True)
class Server:
    agent: Path
    numbers: tuple[int, ...]

    def close(self, *, drop: bool = True) -> None:
        """Stops listening, and cuts connections that are open unless drop is false."""
        ask(self.agent, do="unserve", servers=self.numbers, drop=drop)


@dataclass(frozen=True)
class Connection:
    agent: Path
    number: int

    def ask(self, timeout: float = 1.0) -> Reply:
        return Reply(**ask(self.agent, do="ask", connection=self.number, timeout=timeout))

    def close(self) -> None:
        ask(self.agent, do="close", connection=self.number)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask(agent: Path, **request: Any) -> Any:
    """One request to the lab's agent, and its answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(agent))
        sock.sendall(json.dumps(request).encode() + b"\n")
        with sock.makefile("rb") as stream:
            answer = json.loads(stream.read())
    if "error" in answer:
        raise LabError(f"{request['do']}: {answer['error']}")
    return answer["result"]
