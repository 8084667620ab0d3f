"""Signers for the tests of this folder, and hosts that ask for their signatures."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

from agentless_kube_proxy.bundle.release import DeltaEntry, Entry, Release, new_release, sign, write_release

from tests.node.host import Host

CLUSTER = "shop"


def new_key(directory: Path, name: str) -> Path:
    """An SSH key of somebody."""
    directory.mkdir(exist_ok=True)
    key = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", key], check=True)
    return key


def allow(etc: Path, *keys: Path, settings: str = f"cluster {CLUSTER}\nnode n1\n") -> None:
    """Pin signers and settings; a key's file name is who it belongs to."""
    etc.mkdir(exist_ok=True)
    signers = "".join(f"{key.name} {key.with_suffix('.pub').read_text()}" for key in keys)
    (etc / "allowed_signers").write_text(signers)
    (etc / "node.conf").write_text(settings)


def release_of(*bundles: Path, cluster: str = CLUSTER, valid_for: float = 3600, after: int = 0) -> Release:
    """A release that names bundles and deltas."""
    entries: list[Entry] = []
    deltas: list[DeltaEntry] = []
    for bundle in bundles:
        text = (bundle / "manifest.json").read_bytes()
        m, digest = json.loads(text), hashlib.sha256(text).hexdigest()
        if m["kind"] == "Bundle":
            entries.append(Entry(m["node"], m["generation"], digest))
        else:
            deltas.append(DeltaEntry(m["node"], m["base"], m["generation"], digest))
    return new_release(cluster, valid_for, entries, deltas, after=after)


def sign_bundle(bundle: Path, *keys: Path, release: Release | None = None) -> Release:
    """Put a signed release beside a bundle's manifest."""
    release = release or release_of(bundle)
    text = release.text()
    write_release(bundle, text, [sign(text, key) for key in keys])
    return release


def etc_of(host: Host) -> Path:
    """The directory that is /etc/akp to the host."""
    return host.directory / "etc"
