"""Where signers are pinned, nothing is applied that they did not release for this node."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.archive import archive
from agentless_kube_proxy.bundle.release import release_files, sign, write_release

from tests.lab.program import PROGRAMS, VERIFY
from tests.node import bundles
from tests.node.host import Host, Result, with_path
from tests.node.signing import allow, etc_of, new_key, release_of, sign_bundle

SETTINGS = "cluster shop\nnode n1\n"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    return {name: new_key(tmp_path / "keys", name) for name in ("alice", "bob", "mallory")}


@pytest.fixture(params=["dash", "busybox"])
def signed_host(request: pytest.FixtureRequest, new_host: Callable[..., Host], keys: dict[str, Path]) -> Host:
    """A host that takes what alice or bob released."""
    host = new_host("nft", request.param)
    allow(etc_of(host), keys["alice"], keys["bob"])
    return host


@pytest.fixture
def plain_host(new_host: Callable[..., Host], keys: dict[str, Path]) -> Host:
    host = new_host()
    allow(etc_of(host), keys["alice"], keys["bob"])
    return host


def refused(host: Host, bundle: Path, reason: str, code: int = 2) -> None:
    """Both verbs refuse, for this reason, and nothing happens."""
    before = host.rules()
    for verb in ("check", "apply"):
        result = host.akp(verb, bundle)
        assert (result.code, reason in result.json["error"]) == (code, True), result.stdout
    assert host.rules() == before


def test_a_released_bundle_is_applied(signed_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    release = sign_bundle(bundle, keys["alice"])
    assert signed_host.apply(bundle)["changed"] is True
    assert (signed_host.state / "counter").read_text() == f"{release.counter}\n"
    assert signed_host.apply(bundle)["changed"] is False


def test_without_the_program_that_verifies_nothing_is_taken(
    signed_host: Host, keys: dict[str, Path], tmp_path: Path
) -> None:
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"])
    broken = tmp_path / "akp-verify"
    half = VERIFY.read_text().partition("# Last, so that")[0]
    for text in (None, "exit 1\n", "kill -9 $$\n", "", half, "echo 5\n", "echo ok\n"):
        if text is not None:
            broken.write_text(text)
        for verb in ("check", "apply", "release"):
            result = signed_host.akp(verb, bundle, AKP_VERIFY=str(broken))
            assert (result.code, "akp-verify" in result.json["error"]) == (3, True), result.stdout
    assert not (signed_host.state / "record").exists()


def test_without_a_release_nothing_is_applied(signed_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    refused(signed_host, bundle, "unsigned")
    release = release_of(bundle)
    write_release(bundle, release.text(), [])
    refused(signed_host, bundle, "it has no signature")
    sign_bundle(bundle, keys["mallory"])
    refused(signed_host, bundle, "who is not in")


def test_a_changed_release_is_refused(signed_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    release = sign_bundle(bundle, keys["alice"])
    later = dataclasses.replace(release, expires=release.expires + 1)
    (bundle / "release").write_text(later.text())
    refused(signed_host, bundle, "does not fit the text")


def test_a_signature_for_something_else_is_refused(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    text = release_of(bundle).text()
    argv = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(keys["alice"])]
    signature = subprocess.run(argv, input=text, text=True, capture_output=True, check=True).stdout
    write_release(bundle, text, [signature])
    refused(plain_host, bundle, "does not fit the text")


def test_the_release_of_another_bundle_does_not_count(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    good = bundles.simple(tmp_path / "good")
    other = bundles.simple(tmp_path / "other", bundles.shop("10.6.6.6:666"))
    sign_bundle(other, keys["alice"], release=release_of(good))
    refused(plain_host, other, "does not name this bundle")


def test_what_is_for_another_node_or_cluster_is_refused(
    plain_host: Host, keys: dict[str, Path], tmp_path: Path
) -> None:
    foreign = bundles.write(tmp_path / "n2", {"iptables.rules": bundles.rules(bundles.shop())}, node="n2")
    sign_bundle(foreign, keys["alice"])
    refused(plain_host, foreign, 'the bundle is for node "n2", this is "n1"')
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"], release=release_of(bundle, cluster="staging"))
    refused(plain_host, bundle, 'cluster "staging", this node is of cluster "shop"')


def test_old_releases_never_count_again(signed_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    old, new = bundles.simple(tmp_path / "old", bundles.shop("10.244.1.9:8080")), bundles.simple(tmp_path / "new")
    first = sign_bundle(old, keys["alice"])
    sign_bundle(new, keys["alice"], release=release_of(new, after=first.counter))
    signed_host.apply(old)
    signed_host.apply(new)
    refused(signed_host, old, "release replayed")
    # Neither does one whose time is over; the state stays.
    sign_bundle(old, keys["alice"], release=release_of(old, valid_for=-5, after=first.counter + 1000))
    refused(signed_host, old, "release expired")
    # A cleanup does not make it forget.
    allow(etc_of(signed_host), keys["alice"], keys["bob"], settings=f"{SETTINGS}unsigned cleanup\n")
    assert signed_host.akp("cleanup").code == 0
    write_release(old, first.text(), [sign(first.text(), keys["alice"])])
    refused(signed_host, old, "release replayed")


def test_two_approvers_are_two_people(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    second = new_key(tmp_path / "second", "alice")
    allow(
        etc_of(plain_host),
        *(keys["alice"], keys["bob"], second),
        settings="# four eyes\ncluster shop\nnode n1\nsignatures 2\n",
    )
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"], second, keys["mallory"])
    refused(plain_host, bundle, "this node wants 2")
    sign_bundle(bundle, keys["alice"], keys["mallory"], keys["bob"])
    assert plain_host.apply(bundle)["changed"] is True


def test_a_revoked_key_counts_no_more(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"])
    (etc_of(plain_host) / "revoked_signers").write_text(keys["alice"].with_suffix(".pub").read_text())
    refused(plain_host, bundle, "may not count")


def test_going_back_and_restoring_need_no_new_release(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    one, two = bundles.simple(tmp_path / "one", bundles.shop("10.244.1.9:8080")), bundles.simple(tmp_path / "two")
    first = sign_bundle(one, keys["alice"])
    sign_bundle(two, keys["alice"], release=release_of(two, after=first.counter))
    plain_host.apply(one)
    rules = plain_host.rules()
    plain_host.apply(two)
    assert plain_host.akp("rollback").code == 0
    assert plain_host.rules() == rules
    plain_host.sh("nft flush ruleset")
    assert plain_host.akp("restore").code == 0
    assert plain_host.rules() == rules


def test_the_settings_are_read_strictly(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"])
    for settings, reason in {
        "cluster shop\nnode n1\ncolour red\n": "line 3: unknown setting colour, known are cluster node",
        "cluster shop\ncluster shop\n": "line 2: setting cluster appears twice",
        "cluster\n": "line 1: setting cluster has no value",
        "signatures none\n": "signatures is a number",
        "node n1\n": "does not say which cluster this node is of",
    }.items():
        allow(etc_of(plain_host), keys["alice"], settings=settings)
        refused(plain_host, bundle, reason)
    # What protects the host must not keep its rules from coming back.
    allow(etc_of(plain_host), keys["alice"])
    plain_host.apply(bundle)
    allow(etc_of(plain_host), keys["alice"], settings="colour red\n")
    assert plain_host.akp("restore").code == 0


def test_a_host_without_ssh_keygen_says_so(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"])
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh-keygen").write_text("#!/bin/sh\necho 'unknown option -- Y' >&2\nexit 1\n")
    (tools / "ssh-keygen").chmod(0o755)
    result = plain_host.akp("apply", bundle, PATH=f"{tools}:{plain_host.environment['PATH']}")
    assert (result.code, "OpenSSH 8.2" in result.json["error"]) == (3, True), result.stdout


def test_the_release_travels_with_a_push(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["alice"])
    result = pushed(plain_host, stream_of(bundle))
    assert result.code == 0, result.stdout
    assert plain_host.chains("KUBE-SVC")


def stream_of(bundle: Path, *more: tuple[str, bytes]) -> bytes:
    """What a carrier sends: the release, the manifest, the files."""
    listed = json.loads((bundle / "manifest.json").read_text())["files"]
    names = [*(each.name for each in release_files(bundle)), "manifest.json", *listed]
    return archive([*((name, (bundle / name).read_bytes()) for name in names), *more])


def pushed(host: Host, stream: bytes, *, limit: str = "unlimited") -> Result:
    """The answer to a bundle on stdin; no file may get larger than so many blocks of 512 bytes."""
    command = ["ip", "netns", "exec", host.name, "sh", "-c", f'ulimit -f {limit}; exec sh "$@"', "sh"]
    done = subprocess.run(
        [*command, str(PROGRAMS[host.mode]), "apply", "-"],
        env=with_path(host.environment),
        input=stream,
        capture_output=True,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_what_nobody_signed_is_not_unpacked(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    """Half a megabyte on the wire was 190 MB on the disk before any signature was looked at."""
    bundle = bundles.simple(tmp_path / "a")
    sign_bundle(bundle, keys["mallory"])
    bomb = stream_of(bundle, ("bomb", b"0" * 99 * 1000000 + b"\n"))
    assert len(bomb) < 1_000_000
    result = pushed(plain_host, bomb, limit="20000")
    assert (result.code, "who is not in" in result.json["error"]) == (2, True), result.stdout
    # Nor is what an honest manifest does not list.
    sign_bundle(bundle, keys["alice"])
    result = pushed(plain_host, stream_of(bundle, ("iptables-9.rules", b"*nat\nCOMMIT\n")))
    assert result.code == 2, result.stdout
    assert not plain_host.chains("KUBE")


def test_verbs_without_a_signature_do_what_the_settings_let_them(
    plain_host: Host, keys: dict[str, Path], tmp_path: Path
) -> None:
    one, two = bundles.simple(tmp_path / "one", bundles.shop("10.244.1.9:8080")), bundles.simple(tmp_path / "two")
    first = sign_bundle(one, keys["alice"])
    sign_bundle(two, keys["alice"], release=release_of(two, after=first.counter))
    plain_host.apply(one)
    plain_host.apply(two)
    before = plain_host.rules()

    def allowed(unsigned: str) -> None:
        allow(etc_of(plain_host), keys["alice"], settings=f"{SETTINGS}{unsigned}")

    result = plain_host.akp("cleanup")
    assert (result.code, "node.conf: unsigned cleanup" in result.json["error"]) == (2, True), result.stdout
    assert plain_host.akp("cleanup", "--dry-run").code == 0
    allowed("unsigned none\n")
    assert "node.conf: unsigned rollback" in plain_host.akp("rollback").json["error"]
    assert plain_host.rules() == before
    # By default a rollback is allowed, and cannot keep others away for a day.
    allowed("")
    result = plain_host.akp("rollback", "--confirm-within", "99999")
    assert result.code == 0, result.stdout
    assert result.json["confirmWithin"] == 600, result.stdout
    assert plain_host.akp("undo").code in (0, 2)
    allowed("unsigned rollback cleanup\n")
    assert plain_host.akp("cleanup").code == 0
    assert not plain_host.chains("KUBE")


def test_what_is_kept_has_to_be_signed_still(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    one, two = bundles.simple(tmp_path / "one", bundles.shop("10.244.1.9:8080")), bundles.simple(tmp_path / "two")
    first = sign_bundle(one, keys["bob"])
    sign_bundle(two, keys["alice"], release=release_of(two, after=first.counter))
    plain_host.apply(one)
    plain_host.apply(two)
    rules = plain_host.rules()
    (etc_of(plain_host) / "revoked_signers").write_text(keys["bob"].with_suffix(".pub").read_text())
    result = plain_host.akp("rollback")
    assert (result.code, "may not count" in result.json["error"]) == (2, True), result.stdout
    # Rules that are in force must come back all the same.
    (etc_of(plain_host) / "revoked_signers").write_text(keys["alice"].with_suffix(".pub").read_text())
    plain_host.sh("nft flush ruleset")
    result = plain_host.akp("restore")
    assert (result.code, "would not be taken any more" in str(result.json["warnings"])) == (0, True), result.stdout
    assert plain_host.rules() == rules


def test_the_program_is_replaced_by_a_signed_one_only(plain_host: Host, keys: dict[str, Path], tmp_path: Path) -> None:
    program = plain_host.directory / "sbin" / "akp-node"
    program.parent.mkdir()
    allow(etc_of(plain_host), keys["alice"], settings=f"{SETTINGS}program {program}\n")
    bundle = bundles.simple(tmp_path / "a")
    refused(plain_host, bundle, "unsigned")
    assert not program.exists()
    sign_bundle(bundle, keys["alice"])
    plain_host.apply(bundle)
    assert program.read_bytes() == (bundle / "akp-node").read_bytes()
    assert program.with_name("akp-leave").read_bytes() == (bundle / "akp-leave").read_bytes()
    assert program.stat().st_mode & 0o777 == 0o755
