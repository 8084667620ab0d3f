# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a push puts on disk, and the arguments that the node action gets for it."""

from __future__ import annotations

from typing import Any

from ..backends.state import Delta, State, delta
from ..bundle.archive import archive
from ..bundle.release import DeltaEntry
from ..bundle.write import delta_parts, only_endpoints, sealed, write_bundle
from ..files import write_atomic
from ..plan.consent import Consent
from ..tasks.directory import WorkDirectory
from .machine import Host
from .vocabulary import How, Push


class Parcels:
    """Pushes, as files in the working directory; signed where nodes want that."""

    def __init__(self, directory: WorkDirectory, consent: Consent) -> None:
        self._directory, self._consent = directory, consent
        self.confirm_endpoints: set[str] = set()  # hosts that confirm changes of endpoints as well

    def make(self, host: Host, push: Push) -> tuple[Push, dict[str, Any]]:
        """The push, which is a whole bundle where a delta will not do, and the arguments for it."""
        arguments: dict[str, Any] = {"state": "applied", "confirm": False}
        change = delta(push.base, push.state) if push.base is not None else None
        if change is not None and not change.needs_full:
            return push, arguments | self._delta(host, change, push.state)
        if push.how is How.DELTA:
            push = Push(How.BUNDLE, push.state)
        folder = self._directory.bundles / host.node
        write_bundle(push.state, folder)
        self._consent.lay_down(folder)
        return push, {**arguments, "snapshot": push.how is How.SNAPSHOT}

    def _delta(self, host: Host, change: Delta, wanted: State) -> dict[str, Any]:
        file = self._directory.path / "deltas" / host.node
        file.parent.mkdir(mode=0o700, exist_ok=True)
        digest, files = sealed(delta_parts(change, wanted))
        signed = self._consent.signed(DeltaEntry(wanted.node, change.base, change.generation, digest))
        # To replace a file waits for the disk; to make one does not, and the last delta is read already.
        file.unlink(missing_ok=True)
        write_atomic(file, archive([*signed, *files]))
        # A change of endpoints cannot cut the control host off.
        harmless = host.name not in self.confirm_endpoints and only_endpoints(name for name, _data in files)
        return {"delta": str(file), **({"confirm_within": 0} if harmless else {})}
