"""Somebody who publishes a cluster from files, with a key of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from agentless_kube_proxy.bundle.release import Release, parse_release, split
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import cluster_files, documents
from agentless_kube_proxy.cluster.record import record_of
from agentless_kube_proxy.publish.publishing import History, Inputs, Report, publish
from agentless_kube_proxy.publish.store import Publication, Terms

from .node import run

CLUSTER = "shop"


class Publisher:
    """Publishes the manifests of a directory, a configuration among them, into `www`."""

    def __init__(self, directory: Path, www: Path, cluster: str = CLUSTER) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.www, self.cluster = directory, www, cluster
        self.key = directory / "publisher"
        if not self.key.exists():
            run("ssh-keygen", ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "publisher", "-f", str(self.key)])

    @property
    def allowed_signers(self) -> str:
        """What nodes pin."""
        return f"publisher {self.key.with_suffix('.pub').read_text()}"

    def publish(
        self, source: Path, *, config: Path | None = None, valid_for: float = 86400, keys: Sequence[Path] = ()
    ) -> Report:
        """Offer the nodes of this cluster what they shall have."""
        config = config or source / "kube-proxy.yaml"
        files = (file for file in cluster_files(source) if file != config)
        record = record_of((each for file in files for each in documents(file)), str(source))
        inputs = Inputs(record, Choices.of({"config": str(config)}))
        publication = Publication(self.www, Terms(self.cluster, tuple(keys) or (self.key,), valid_for))
        return publish(publication, History(self.directory / "history", 3), inputs)

    def release(self, node: str) -> Release:
        """What is published for a node."""
        return parse_release(split((self.www / f"{node}.release").read_text())[0])

    def sign(self, text: str) -> str:
        """A signature by hand."""
        argv = ["ssh-keygen", "-q", "-Y", "sign", "-n", "akp-release", "-f", str(self.key)]
        return subprocess.run(argv, input=text, text=True, capture_output=True, check=True).stdout
