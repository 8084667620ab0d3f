# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whose turn it is to push: that of this watch, of one on another host, of a scheduled run, or of one with a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..locks import Lock
from ..plan.consent import Consent


class Leadership(Protocol):
    """Whether this host leads: election.Election."""

    @property
    def problem(self) -> str:
        """Why it does not; empty if it does."""


class Turn:
    """The right to push, which others may have."""

    def __init__(self, lock: Lock, consent: Consent, election: Leadership | None, say: Callable[..., None]) -> None:
        self._lock, self._consent, self._election, self._say = lock, consent, election, say
        self._leads: bool | None = None  # what was said of that
        self.waits = False  # others have it

    def take(self) -> bool:
        """Whether it is ours now. The first time after others had it, `returned` tells so."""
        problem = self._problem()
        if problem:
            if not self.waits:
                self._say("waiting", problem=problem)
            self.waits = True
        return not problem

    def _problem(self) -> str:
        if self._election is not None and (problem := self._election.problem):
            return problem
        if self._consent.under_way:
            return "a plan is being followed"
        return "" if self._lock.take() else f"{self._lock.path}: a scheduled run goes on"

    def returned(self) -> bool:
        """Whether others had it until now, and may have changed hosts; told once."""
        waited, self.waits = self.waits, False
        return waited

    def tell(self) -> bool:
        """Say that this host leads from now on, or does not any more; True if it has just lost the lead."""
        if self._election is None:
            return False
        problem = self._election.problem
        led, self._leads = self._leads, not problem
        if led != self._leads:
            self._say("follows" if problem else "leads", problem=problem)
        return bool(led and problem)

    def give_back(self) -> None:
        """Nothing is being pushed: others may."""
        self._lock.give_back()
