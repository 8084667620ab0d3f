# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One task for one host: questions to its node program, and what is known of the host here."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..bundle.program import MODES
from ..carry.answers import Answer, parse_answer
from ..carry.direct import remember
from ..carry.protocol import Command, Way
from ..plan.held import Held, replayed
from ..tasks.directory import WorkDirectory
from .errors import AsBefore, NotDone
from .request import Request


class Connection(Protocol):
    """The way of a task to its host. It raises Unreachable, or NotDone."""

    def run_command(self, command: Command, *, restricted: bool) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""

    def renew(self) -> None:
        """Close what is open: a connection from before a change proves nothing, as the kernel knows it."""

    def control_port(self) -> int:
        """The port by which the control host comes in, which no Service gets there; 0 if there are no ports."""

    def address(self) -> str:
        """Where the node is, for probes."""


@dataclasses.dataclass(slots=True)
class Visit:
    """A host, what is wanted of it, and what became of it so far."""

    host: str
    name: str  # of the node
    request: Request
    way: Way
    work: WorkDirectory
    ledger: Path
    connection: Connection
    hosts: Container[str]  # of the inventory
    check: bool  # change nothing
    diff: bool  # tell what changes in words
    tried: bool = False  # something was sent that may have changed the node
    carried: bool = False  # the program had to travel
    told: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)  # all changes, for the note

    @property
    def known(self) -> dict[str, Any]:
        """What the host answered last; empty if it never did."""
        return self.work.answer(self.host) or {}

    @property
    def status(self) -> dict[str, Any]:
        """The status in that answer."""
        return self.known.get("status") or {}

    def ask(self, arguments: Sequence[str]) -> Answer:
        """Ask the program that the node has; if it has none of ours, the program travels with the question."""
        return self._with_program(self.answer(self.way.ask(arguments)), arguments)

    def _with_program(self, answer: Answer, arguments: Sequence[str]) -> Answer:
        if not answer.needs_program:
            return answer
        self.carried = True
        return self.answer(self.carrying.carry(arguments))

    @property
    def carrying(self) -> Way:
        """The program that travels is that of the mode which the node was found with."""
        mode = self.status.get("mode")
        return dataclasses.replace(self.way, mode=mode) if mode in MODES else self.way

    def exchange(self, command: Command) -> Answer:
        """What the node answers, refusals included."""
        return parse_answer(*self.connection.run_command(command, restricted=bool(self.way.restricted)))

    def answer(self, command: Command) -> Answer:
        """What the node answers; NotDone if it refuses."""
        answer = self.exchange(command)
        if not answer.ok and not answer.needs_program:
            raise AsBefore(answer.error) if answer.as_before else NotDone(answer.error)
        return answer

    def held(self, generation: str | None) -> list[str]:
        """The Services of what the node holds, as lines: kept here, or as it prints them."""
        if generation is None:
            return []
        held = Held(self.work.held)
        known = held.lines(self.host, generation)
        if known is None:
            answer = self.ask(["show"])
            known = replayed(answer.lines)
            held.keep(self.host, str(answer.required("generation")), known)
        return known

    def remember(self, answer: Answer) -> None:
        """Write down what the node has now, so that another task of this run need not ask again."""
        if not self.check:
            stays = not answer.result.get("confirm") or self.request.confirm
            remember(self.work, self.host, answer, recorded=stays)

    def unchanged(self, generation: str) -> dict[str, Any]:
        """The result of a task that found what it was to make."""
        return {"changed": False, "node": self.name, "generation": generation, "previous": generation}

    def generations(self, *, same: bool) -> Mapping[str, Any]:
        """Before and after a failure, for the ledger; only those that are known."""
        if self.request.state == "confirmed":
            before = self.request.generation
        else:
            answered = self.work.answer(self.host)
            if answered is None:
                return {}
            before = (answered.get("status") or {}).get("generation")
        return {"before": before, **({"after": before} if same else {})}
