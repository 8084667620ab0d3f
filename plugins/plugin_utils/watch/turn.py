# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whose turn it is to push: that of a watch, of a scheduled run, or of a run that follows a plan."""

from __future__ import annotations

from collections.abc import Callable

from ..locks import Lock
from ..plan.consent import Consent


class Turn:
    """The right to push, which others may have."""

    def __init__(self, lock: Lock, consent: Consent, say: Callable[..., None]) -> None:
        self._lock, self._consent, self._say = lock, consent, say
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
        if self._consent.under_way:
            return "a plan is being followed"
        return "" if self._lock.take() else f"{self._lock.path}: a scheduled run goes on"

    def returned(self) -> bool:
        """Whether others had it until now, and may have changed hosts; told once."""
        waited, self.waits = self.waits, False
        return waited

    def give_back(self) -> None:
        """Nothing is being pushed: others may."""
        self._lock.give_back()
