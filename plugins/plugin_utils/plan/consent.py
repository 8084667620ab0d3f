# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What may be pushed as the cluster changes, without an approved plan, and in whose name.

With kube_proxy_approval=frontends, Services are those of the last plan that was carried out, endpoints those of now. A
plan that is being followed is waited for; hosts that took one which stopped half way keep its Services. Where nodes
want signatures, what is pushed is signed with kube_proxy_signing_key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle.manifest import described
from ..bundle.release import FILE, DeltaEntry, Entry, new_release, sign, signature_names, write_release
from ..cluster.record import read_record, snapshot_of
from ..cluster.snapshot import Service, Snapshot
from ..errors import UserError
from ..tasks.directory import WorkDirectory
from .progress import Following, followed_now
from .report import plan_snapshot

# What is signed for one push need not be good for long.
_SIGNED_SECONDS = 3600


class NoConsent(UserError):
    """The settings leave nothing that could be pushed without a plan."""


class Consent:
    """What needs no approval."""

    def __init__(self, directory: WorkDirectory, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        self._approved = directory.approved
        self._policy = str(settings.get("approval") or "none")
        self._cluster = str(settings.get("cluster_name") or "default")
        key = settings.get("signing_key")
        self._key = Path(str(key)).expanduser() if key else None
        self._stamps = (0, 0)
        self._services: tuple[Service, ...] = ()
        self._plan: Following | None = None
        self._planned: tuple[Service, ...] = ()
        if self._policy == "all":
            raise NoConsent(
                "kube_proxy_approval is all: every change needs an approved plan, so nothing is pushed here"
            )
        if self._policy == "frontends" and not self._approved.exists():
            raise NoConsent(
                f"kube_proxy_approval is frontends, and {self._approved} is not there: run plan_services, have the "
                "plan approved and follow it with sync_services first; endpoints are then pushed from here"
            )

    @property
    def renewed(self) -> bool:
        """Whether a plan was begun or carried out since `allowed` was called."""
        return self._policy == "frontends" and self._now() != self._stamps

    def _now(self) -> tuple[int, int]:
        try:
            begun = self._directory.following.stat().st_mtime_ns
        except FileNotFoundError:
            begun = 0
        return self._approved.stat().st_mtime_ns, begun

    @property
    def under_way(self) -> bool:
        """Whether a plan is being followed: its hosts are for that run alone."""
        plan = followed_now(self._directory)
        return plan is not None and plan.goes_on

    def allowed(self, snapshot: Snapshot) -> tuple[Snapshot, tuple[str, ...]]:
        """The cluster as far as it may be pushed, and what waits for approval."""
        if self._policy != "frontends":
            return snapshot, ()
        stamps = self._now()
        if stamps != self._stamps:
            self._services, self._stamps = snapshot_of(read_record(self._approved)).services, stamps
            self._plan = followed_now(self._directory)
            cluster = plan_snapshot(self._directory.following)
            self._planned = snapshot_of(read_record(cluster)).services if self._plan else ()
        then = {(each.namespace, each.name): each for each in self._services}
        now = {(each.namespace, each.name): each for each in snapshot.services}
        differing = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
        waiting = tuple(f"Service/{namespace}/{name} waits for approval" for namespace, name in differing)
        return dataclasses.replace(snapshot, services=self._services), waiting

    def ahead(self, snapshot: Snapshot) -> Snapshot | None:
        """The cluster for hosts that took a plan which others do not have, if there is one; as of `allowed`."""
        return dataclasses.replace(snapshot, services=self._planned) if self._plan else None

    def took_plan(self, host: str, frontends: str) -> bool:
        """Whether a host with these frontends is one of those."""
        return self._plan is not None and self._plan.took(host, frontends)

    def signed(self, entry: Entry | DeltaEntry) -> list[tuple[str, bytes]]:
        """The files that go with a bundle or delta to a node that wants signatures."""
        if self._key is None:
            return []
        bundles = [entry] if isinstance(entry, Entry) else []
        deltas = [entry] if isinstance(entry, DeltaEntry) else []
        text = new_release(self._cluster, _SIGNED_SECONDS, bundles, deltas).text()
        return [(FILE, text.encode()), (signature_names(1)[0], sign(text, self._key).encode())]

    def lay_down(self, directory: Path) -> None:
        """Put the signature beside a bundle."""
        if self._key is not None:
            manifest = described(directory)
            files = self.signed(Entry(manifest["node"], manifest["generation"], manifest["digest"]))
            write_release(directory, files[0][1].decode(), [files[1][1].decode()])
