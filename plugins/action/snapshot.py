# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""agentless.kube_proxy.snapshot: the cluster, read completely or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.files import (
    UnreadableFile,
    cluster_files,
    documents,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.objects import Reader
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.record import (
    Record,
    configuration_of,
    peek,
    read_record,
    record_of,
    snapshot_of,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.configuration import from_cluster, read_kept
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.base import (
    API_VARIABLES,
    ControlAction,
    without_collection,
)
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.directory import Stopwatch
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.notes import CONTROL, SnapshotRead
from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.tasks.specs import spec


class ActionModule(ControlAction):
    """Reads the cluster and writes it down."""

    SPEC: ClassVar[dict[str, Any]] = spec("snapshot")
    VARIABLES: ClassVar[dict[str, str]] = {
        **API_VARIABLES,
        "cluster_dir": "kube_proxy_cluster_dir",
        "resource_version": "kube_proxy_resource_version",
        "digest": "kube_proxy_snapshot_digest",
        "timeout": "kube_proxy_api_timeout",
        "strict": "kube_proxy_strict",
        "config": "kube_proxy_config",
    }
    RULES: ClassVar[dict[str, Any]] = {
        "mutually_exclusive": [
            ("cluster_dir", "kubeconfig"),
            ("cluster_dir", "host"),
            ("cluster_dir", "resource_version"),
        ]
    }

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        """Read, compare with what was known, write."""
        watch = Stopwatch()
        directory = self.directory(options)
        dest = Path(options["dest"]).expanduser() if options["dest"] else directory.snapshot
        if options["lease"] and not self.check and not options["cluster_dir"]:
            without_collection(lambda: _refuse_beside_leader(options))
        configuration = from_cluster(options, read_kept(directory.config))
        record, problems = without_collection(lambda: _read(options, configuration))
        if options["strict"] and problems:
            shown = "\n".join(problems[:20])
            raise AnsibleActionFail(f"{len(problems)} parts of the cluster cannot be used, and strict is set:\n{shown}")
        digest = record.digest
        if options["digest"] and digest != options["digest"]:
            raise AnsibleActionFail(
                f"{record.source}: has the digest {digest}, but {options['digest']} was asked for: this is not the "
                "cluster that the other runs see. Read it once, for all of them"
            )
        changed = peek(dest) != digest
        triggered = _triggered(record, dest) if changed else []
        record.write(dest)
        times = watch.fields()
        directory.note(SnapshotRead(**times, problems=problems, source=record.source, triggered=triggered), CONTROL)
        return {
            "changed": changed,
            "path": str(dest),
            "digest": digest,
            "source": record.source,
            "counts": record.counts,
            "resource_version": record.resource_version,
            "resource_versions": record.resource_versions,
            "problems": problems,
            "seconds": round(times["ended"] - times["began"], 2),
        }


def _refuse_beside_leader(options: Mapping[str, Any]) -> None:
    """Fail if an akp watch leads: it gives nodes what the cluster says, and both would push to the same ones."""
    from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.access import Access
    from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.lease import LeaseObject

    lease = LeaseObject(Access.of(options), options["lease"], timeout=options["timeout"])
    try:
        leader = lease.leader()
    finally:
        lease.close()
    if leader:
        raise AnsibleActionFail(
            f"{leader} leads, by the Lease {lease.name}: akp watch there gives nodes what the cluster says. "
            "Nothing was changed. Stop it for the time of this run, or go on beside it with -e kube_proxy_lease="
        )


def _triggered(record: Record, before: Path) -> list[float]:
    """When the changes of endpoints began that are news; for the first snapshot of a cluster everything would be."""
    if not any(each.triggers for each in record.lists):
        return []
    try:
        return record.triggered_since(read_record(before))
    except UnreadableFile:
        return []


def _read(options: Mapping[str, Any], configuration: str) -> tuple[Record, list[str]]:
    """The cluster and, where they had to be looked at anyway, the objects that cannot be used."""
    if options["cluster_dir"]:
        return _from_files(Path(options["cluster_dir"]).expanduser())
    # Here and not above: reading files does not need it.
    from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.access import Access
    from ansible_collections.agentless.kube_proxy.plugins.plugin_utils.cluster.api import connect

    with connect(Access.of(options), timeout=options["timeout"]) as api:
        text = api.configuration_if(configuration)
        record = api.record_at(options["resource_version"]) if options["resource_version"] else api.record()
        record = dataclasses.replace(record, configuration=text)
    if not options["strict"]:
        return record, []
    return record, [str(problem) for problem in snapshot_of(record).problems]


def _from_files(path: Path) -> tuple[Record, list[str]]:
    reader = Reader()
    found = []
    for file in cluster_files(path):
        for document in documents(file):
            reader.add(document, str(file))
            found.append(document)
    record = dataclasses.replace(record_of(found, str(path)), configuration=configuration_of(found))
    return record, [str(problem) for problem in reader.snapshot().problems]
