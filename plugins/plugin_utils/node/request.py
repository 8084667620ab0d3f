# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a task of the module `node` asks for, and how long that may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ..carry.protocol import Way
from ..carry.time_limit import probe_seconds
from .errors import NotDone

# Seconds for the confirmation of what an earlier run left unconfirmed, where changes are otherwise made for good.
TERM = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """The options of the module that say what to do; those that say where are in `Way`."""

    state: str
    verify: bool  # compare the kernel with what was applied
    bundle: str | None  # a directory other than the one of the work directory
    delta: str | None  # a file: give the node this delta, without a question before
    snapshot: bool  # give the node a whole bundle in place of its deltas, and leave the kernel alone
    generation: str | None  # to go back to; with `confirmed`, the one before the change
    time: str | None  # go back to what the node had at this time
    max_removed_percent: int
    token: str | None  # of the change that `confirmed` confirms
    confirm: bool  # whether this task confirms, or a later one
    confirm_within: int  # seconds; 0: changes need no confirmation
    probes: Sequence[Mapping[str, Any]]
    install: bool
    task_timeout: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """From the options of a task."""
        return cls(**{each.name: options[each.name] for each in dataclasses.fields(cls)})

    @property
    def seconds(self) -> float:
        """For the whole task: those of the node, and those that waiting for a confirmation may take."""
        if self.state not in ("applied", "confirmed", "rolled_back"):
            return float(self.task_timeout)
        return float(self.task_timeout + max(self.confirm_within, TERM) + probe_seconds(self.probes))


def check_numbers(request: Request, way: Way) -> None:
    """NotDone if an option is out of its range; types are checked already."""
    if way.keep < 0:
        raise NotDone(f"kube_proxy_keep: {way.keep} is no number of bundles, nor 0")
    if request.task_timeout < 1:
        raise NotDone(f"kube_proxy_task_timeout: {request.task_timeout} is no number of seconds")


def way_of(options: Mapping[str, Any]) -> Way:
    """How the program is run on the host."""
    return Way(
        restricted=options["command"] or "",
        installed=options["install_path"],
        state_dir=options["state_dir"],
        only_installed=options["install"],
        keep=options["keep"],
    )
