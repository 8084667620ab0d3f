"""A local user of a node, without root, changes nothing of what the node program does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.program import PROGRAMS
from tests.node import bundles
from tests.node.host import Host
from tests.node.signing import allow, etc_of, new_key

OTHER = 65534  # nobody, in every Debian


@pytest.fixture(params=["dash", "busybox"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host whose files are not below /tmp, so that a test can put another /tmp in its place."""
    directory = Path(tempfile.mkdtemp(prefix="akp-", dir="/var/tmp"))
    host = Host(directory, "nft", request.param)
    yield host
    host.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("which", ["AKP_STATE", "AKP_RUN"])
def test_a_directory_of_another_user_decides_nothing(nft_host: Host, tmp_path: Path, which: str) -> None:
    bundle = bundles.simple(tmp_path / "a")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    result = nft_host.akp("apply", bundle, **{which: str(theirs)})
    assert result.code == 3
    assert "does not belong to root" in result.json["error"]
    assert (nft_host.chains(), list(theirs.iterdir())) == (set(), [])


def test_a_full_tmp_stops_nothing_and_what_lies_there_stays(elsewhere: Host) -> None:
    """The leftovers of an older program are links of another user: they are neither followed nor removed."""
    victim = elsewhere.directory / "victim"
    victim.mkdir()
    (victim / "file").write_text("keep me")
    bundle = bundles.simple(elsewhere.directory / "bundle")
    script = f"""
        mount -t tmpfs -o size=8k,mode=1777 none /tmp
        mkdir /tmp/akp-node.1 && ln -s {victim} /tmp/akp-node.1/old && ln -s {victim} /tmp/akp-node.2
        chown -h {OTHER} /tmp/akp-node.1 /tmp/akp-node.1/old /tmp/akp-node.2
        cat /dev/zero >/tmp/full 2>/dev/null || :
        before=$(ls -lR /tmp)
        "$@" || exit
        [ "$before" = "$(ls -lR /tmp)" ] || {{ echo /tmp has changed >&2; exit 99; }}
    """
    prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    applied = elsewhere.akp("apply", bundle, prefix=prefix, TMPDIR="/tmp")
    assert applied.code == 0, applied.stderr
    elsewhere.sh("$ipt -t nat -F; $ipt -t nat -X")
    assert elsewhere.akp("restore", prefix=prefix, TMPDIR="/tmp").code == 0
    assert "KUBE-SERVICES" in elsewhere.rules()
    assert (victim / "file").read_text() == "keep me"


@pytest.mark.parametrize("mode", PROGRAMS)
def test_a_path_that_came_through_sudo_does_not_count(nft_host: Host, tmp_path: Path, mode: str) -> None:
    bait = tmp_path / "bait"
    bait.mkdir()
    for tool in ("awk", "cat", "date", "id", "iptables", "ipvsadm", "mkdir", "nft", "sed", "sha256sum", "uname"):
        (bait / tool).write_text(f"#!/bin/sh\necho {tool} >>{tmp_path}/taken\n")
        (bait / tool).chmod(0o755)
    env = nft_host.environment | {"PATH": f"{bait}:{os.environ['PATH']}", "SUDO_UID": "1000"}
    argv = ["ip", "netns", "exec", nft_host.name, "dash", str(PROGRAMS[mode]), "status"]
    subprocess.run(argv, env=env, capture_output=True, check=False, timeout=60)
    assert not (tmp_path / "taken").exists()


def test_signers_that_a_dangling_link_names_are_pinned(new_host: Callable[..., Host], tmp_path: Path) -> None:
    """A host that lost the file of its signers takes nothing, rather than anything."""
    host = new_host()
    allow(etc_of(host), new_key(tmp_path / "keys", "ann"))
    (etc_of(host) / "allowed_signers").unlink()
    (etc_of(host) / "allowed_signers").symlink_to(tmp_path / "gone")
    result = host.akp("apply", bundles.simple(tmp_path / "a"))
    assert result.code in (2, 3), result.stdout
    assert host.chains() == set()
