# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What there is to say of the API server, once in a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..cluster.watch import Watch

TROUBLE_SECONDS = 10.0


class ApiTrouble:
    """What was said of the API server."""

    def __init__(self, watch: Watch, say: Callable[..., None]) -> None:
        self._watch, self._say = watch, say
        self._due = 0.0
        self._trouble = ""
        self._malformed = 0

    def tell(self) -> None:
        """Say what changed."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TROUBLE_SECONDS
            trouble = self._watch.trouble
            if trouble:
                self._say("api", problem=trouble)
            elif self._trouble:
                self._say("api", what="answers again")
            self._trouble = trouble
        if self._watch.malformed != self._malformed:
            self._malformed = self._watch.malformed
            self._say("api", problem=f"{self._malformed} events that are none, the last: {self._watch.last_malformed}")
