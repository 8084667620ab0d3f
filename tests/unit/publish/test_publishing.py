"""A directory that nodes pull from: never half-written, and as still as the cluster is."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.bundle.release import NAMESPACE, Release, parse_release, split
from agentless_kube_proxy.choices import Choices, load_config
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.cluster.files import cluster_files, documents
from agentless_kube_proxy.cluster.record import record_of
from agentless_kube_proxy.ledger import entries
from agentless_kube_proxy.publish import store as publishing
from agentless_kube_proxy.publish.publishing import History, Inputs, Report, publish
from agentless_kube_proxy.publish.store import Publication, PublishRefused, Terms

SHOP = Path(__file__).parents[3] / "examples" / "shop"
NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "publisher"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file


class Shop:
    """The shop of the examples, and where it is published."""

    def __init__(self, directory: Path, key: Path) -> None:
        self.cluster, self.output, self.key = directory / "cluster", directory / "www", key
        self.history = directory / "history"
        shutil.copytree(SHOP, self.cluster)
        (self.cluster / "kube-proxy.yaml").rename(directory / "kube-proxy.yaml")
        self.config = directory / "kube-proxy.yaml"

    def publish(self, *options: str) -> int:
        arguments = ["publish", "--cluster", self.cluster, "--config", self.config, "--output", self.output]
        arguments += ["--cluster-name", "shop", "--key", self.key, "--history", self.history, *options]
        return main([str(each) for each in arguments])

    def move_endpoint(self, address: str) -> None:
        """One endpoint of the frontend has another address."""
        file = self.cluster / "frontend.yaml"
        file.write_text((SHOP / "frontend.yaml").read_text().replace("10.244.1.21", address))

    def release(self, node: str = "n1") -> Release:
        return parse_release(split((self.output / f"{node}.release").read_text())[0])

    def releases(self) -> dict[str, tuple[bytes, float]]:
        return {file.name: (file.read_bytes(), file.stat().st_mtime) for file in self.output.glob("*.release")}

    def whole(self) -> bool:
        """Everything that a release names is there, and is what it says."""
        for file in self.output.glob("*.release"):
            for each in parse_release(split(file.read_text())[0]).objects:
                data = (self.output / "objects" / each.sha256).read_bytes()
                assert (hashlib.sha256(data).hexdigest(), len(data)) == (each.sha256, each.size)
        return True


@pytest.fixture
def shop(tmp_path: Path, key: Path) -> Shop:
    return Shop(tmp_path, key)


def test_every_node_gets_a_signed_release_and_an_archive(shop: Shop, tmp_path: Path) -> None:
    assert shop.publish() == 0
    assert sorted(shop.releases()) == [f"{node}.release" for node in NODES]
    assert shop.whole()
    release = shop.release("n2")
    assert [each.node for each in release.bundles] == ["n2"]
    text = gzip.decompress((shop.output / "objects" / release.objects[0].sha256).read_bytes()).decode()
    assert text.startswith("== manifest.json ")
    manifest = text.partition("\n")[2].partition("== ")[0]
    assert hashlib.sha256(manifest.encode()).hexdigest() == release.bundles[0].digest == release.objects[0].digest
    assert "akp-node" not in text  # what applies it is installed: no signature lets a bundle bring its own
    signers = tmp_path / "signers"
    signers.write_text(f"publisher {shop.key.with_suffix('.pub').read_text()}")
    content, signatures = split((shop.output / "n2.release").read_text())
    (tmp_path / "sig").write_text(signatures[0])
    argv = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "publisher", "-n", NAMESPACE, "-s", tmp_path / "sig"]
    assert subprocess.run(argv, input=content, text=True, check=False).returncode == 0


def test_without_news_nothing_is_written(shop: Shop) -> None:
    shop.publish()
    before = shop.releases()
    assert shop.publish() == 0
    assert shop.releases() == before


def test_the_same_cluster_gives_the_same_archives(shop: Shop, tmp_path: Path, key: Path) -> None:
    shop.publish()
    other_dir = tmp_path / "other"
    other_dir.mkdir()
    other = Shop(other_dir, key)
    other.publish()
    assert sorted(p.name for p in (shop.output / "objects").iterdir()) == sorted(
        p.name for p in (other.output / "objects").iterdir()
    )


def test_a_change_comes_with_deltas_from_the_last_few_states(shop: Shop) -> None:
    shop.publish()
    generations = [shop.release().bundles[0].generation]
    for address in ("10.244.1.91", "10.244.1.92", "10.244.1.93", "10.244.1.94"):
        shop.move_endpoint(address)
        shop.publish()
        generations.append(shop.release().bundles[0].generation)
    release = shop.release()
    assert [each.base for each in release.deltas] == generations[-2:-5:-1]
    assert release.objects[1].size * 2 < release.objects[0].size
    shop.publish("--deltas", "0")
    assert shop.whole()


def test_a_history_that_was_meddled_with_gives_no_delta(shop: Shop) -> None:
    shop.publish()
    snapshot = shop.history / "1" / "snapshot.json"
    snapshot.write_text(snapshot.read_text().replace("10.244.1.11", "10.6.6.6"))
    shop.move_endpoint("10.244.1.91")
    assert shop.publish() == 0
    assert shop.release().deltas == ()


def test_two_changes_in_one_second_have_two_dates(shop: Shop) -> None:
    """Web servers tell versions of a file apart by the second."""
    shop.publish()
    first = int((shop.output / "n1.release").stat().st_mtime)
    shop.move_endpoint("10.244.1.91")
    shop.publish()
    assert int((shop.output / "n1.release").stat().st_mtime) > first


def test_a_release_is_renewed_when_half_of_its_time_is_over(shop: Shop) -> None:
    shop.publish("--valid-for", "1h")
    first = shop.release()
    shop.publish("--valid-for", "100m")
    assert shop.release() == first
    shop.publish("--valid-for", "3h")
    renewed = shop.release()
    assert renewed.counter > first.counter
    assert renewed.expires > first.expires + 3600
    assert (renewed.bundles, renewed.objects) == (first.bundles, first.objects)
    shop.publish("--valid-for", "3h", "--renew")
    assert shop.release().counter > renewed.counter


def test_objects_stay_for_a_while_after_the_last_release_that_named_them(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.publish()
    old = {each.sha256 for node in NODES for each in shop.release(node).objects}
    shop.move_endpoint("10.244.1.91")
    shop.publish()
    objects = shop.output / "objects"
    assert old <= {file.name for file in objects.iterdir()}
    now = time.time()
    monkeypatch.setattr(publishing.time, "time", lambda: now + 3599)
    shop.publish()
    assert old <= {file.name for file in objects.iterdir()}
    monkeypatch.setattr(publishing.time, "time", lambda: now + 3700)
    shop.publish()
    assert not old & {file.name for file in objects.iterdir()}
    assert shop.whole()


def test_a_node_that_the_cluster_lost_is_withdrawn(shop: Shop) -> None:
    shop.publish()
    nodes = shop.cluster / "nodes.yaml"
    documents = nodes.read_text().split("---\n")
    nodes.write_text("---\n".join(each for each in documents if "name: n3" not in each))
    assert shop.publish() == 0
    assert sorted(shop.releases()) == ["n1.release", "n2.release"]


def test_a_cluster_that_lost_its_services_is_not_published(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.publish()
    before = shop.releases()
    lose_services(shop)
    assert shop.publish() == 2
    assert "service ports would be removed, more than 50 %" in capsys.readouterr().err
    assert shop.releases() == before
    assert shop.publish("--max-removed", "100") == 0


def lose_services(shop: Shop) -> None:
    for file in shop.cluster.glob("*.yaml"):
        if file.name not in ("nodes.yaml", "kube-dns.yaml", "servicecidr.yaml"):
            file.unlink()


@pytest.mark.parametrize(
    "how", ["no deltas", "no history", "another engine", "one node at a time", "a history that no node was offered"]
)
def test_what_is_offered_now_is_what_counts_whatever_is_left_of_the_history(
    shop: Shop, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--deltas", "0") if how == "no deltas" else ()
    assert shop.publish(*options) == 0
    if how == "no history":
        shutil.rmtree(shop.history)
    elif how == "one node at a time":
        for step in range(4):
            shop.move_endpoint(f"10.244.1.{90 + step}")
            assert shop.publish("--node", "n1") == 0
    before = shop.releases()
    lose_services(shop)
    if how == "another engine":
        monkeypatch.setattr(History, "bases", lambda *_: iter(()))
    elif how == "a history that no node was offered":
        key, shop.key = shop.key, shop.key.with_name("nobody")
        assert shop.publish("--max-removed", "100") == 2
        shop.key = key
        assert sorted(each.name for each in shop.history.iterdir()) == ["1", "2"]
        dns = shop.cluster / "kube-dns.yaml"
        dns.write_text(dns.read_text().replace("10.244.1.", "10.244.9."))
    capsys.readouterr()
    assert shop.publish(*options, "--node", "n2") == 2
    assert "service ports would be removed, more than 50 %" in capsys.readouterr().err
    assert shop.releases() == before
    assert shop.publish(*options, "--max-removed", "100") == 0


def test_a_bundle_that_is_not_there_any_more_leaves_the_history_to_judge_by(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.publish()
    shutil.rmtree(shop.output / "objects")
    lose_services(shop)
    assert shop.publish() == 2
    assert "service ports would be removed, more than 50 %" in capsys.readouterr().err
    shutil.rmtree(shop.history)
    assert shop.publish() == 0, "there is nothing left to compare with"


def test_a_check_tells_what_the_run_will_and_leaves_everything_as_it_is(shop: Shop, tmp_path: Path) -> None:
    def publish_(*, check: bool, valid_for: float = 3600.0, config: str = "") -> Report:
        documents_ = [each for file in cluster_files(shop.cluster) for each in documents(file)]
        settings = {**load_config(str(shop.config)), **json.loads(config or "{}")}
        inputs = Inputs(record_of(documents_, "test"), Choices.of({"config": settings}))
        publication = Publication(shop.output, Terms("shop", (shop.key,), valid_for))
        return publish(publication, History(shop.history, 3), inputs, None, 50, check=check)

    def there() -> set[tuple[str, int]]:
        return {(str(each), each.stat().st_mtime_ns) for each in tmp_path.rglob("*")}

    def both(**options: Any) -> Report:
        before = there()
        told = publish_(check=True, **options)
        assert there() == before
        done = publish_(check=False, **options)
        assert [each[:3] for each in map(dataclasses.astuple, told.nodes)] == [
            each[:3] for each in map(dataclasses.astuple, done.nodes)
        ]
        assert (told.errors, told.withdrawn) == (done.errors, done.withdrawn)
        return done

    assert [each.action for each in both().nodes] == ["changed"] * 3
    assert [each.action for each in both().nodes] == ["unchanged"] * 3
    assert [each.action for each in both(valid_for=9000.0).nodes] == ["renewed"] * 3
    shop.move_endpoint("10.244.1.91")
    nodes = shop.cluster / "nodes.yaml"
    kept = [each for each in nodes.read_text().split("---\n") if "name: n3" not in each]
    nodes.write_text("---\n".join(kept))
    assert both().withdrawn == ("n3",)
    # Pods of a Node without a CIDR cannot be told apart there.
    nodes.write_text(nodes.read_text().replace("podCIDRs", "cidrsOfPods", 1))
    assert list(both(config='{"detectLocalMode": "NodeCIDR"}').errors) == ["n1"]
    lose_services(shop)
    before = there()
    with pytest.raises(PublishRefused, match="service ports would be removed, more than 50 %"):
        publish_(check=True)
    assert there() == before


def test_an_address_that_a_node_says_it_has_keeps_back_that_node_alone(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = {"externalIPs": ["192.0.2.77"], "clusterIP": "10.96.10.66", "ports": [{"port": 22}]}
    metadata = {"namespace": "shop", "name": "thief"}
    thief = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": claim}
    (shop.cluster / "thief.json").write_text(json.dumps(thief))
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"n2": {"addresses": [{"interface": "eth1", "address": "192.0.2.77"}]}}))
    assert shop.publish("--vips", "refuse", "--facts", str(facts)) == 1
    said = capsys.readouterr()
    assert "n2: not published: refused: " in said.err
    assert "192.0.2.77 is an address of an interface of the node n2" in said.err
    assert [line.split()[:2] for line in said.out.splitlines()[-2:]] == [["n1", "changed"], ["n3", "changed"]]
    assert shop.publish("--vips", "refuse") == 0


def test_a_publisher_that_dies_anywhere_leaves_a_whole_publication(shop: Shop) -> None:
    """Killed before and after every file that it puts in place."""
    shop.publish()
    real = publishing._replace
    steps = 0
    for step in range(100):
        shop.move_endpoint(f"10.244.1.{100 + step}")
        died = in_child(lambda step=step: dying(real, step, shop))
        assert shop.whole()
        if not died:
            break
        steps += 1
    assert steps > 12
    # What it left lying around goes with the next run, and nodes get what they shall have.
    assert shop.publish("--renew") == 0
    assert not [file for file in (shop.output / "objects").iterdir() if file.name.startswith(".")]


def dying(real: Callable[..., None], step: int, shop: Shop) -> None:
    count = 0

    def replace(file: Path, data: bytes, **options: float) -> None:
        nonlocal count
        if count == step:
            file.with_name(f".{file.name}.tmp").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(file, data, **options)
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    publishing._replace = replace
    shop.publish("--grace", "1s")


def in_child(work: Callable[[], None]) -> bool:
    """Run something in a process of its own; whether it was killed."""
    child = os.fork()
    if not child:
        with Path(os.devnull).open("w") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_one_publisher_at_a_time(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    with Publication(shop.output, Terms("shop", (shop.key,), 60)).locked():
        assert shop.publish() == 2
    assert "another process is publishing there" in capsys.readouterr().err


def test_what_cannot_be_done_is_said(shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert shop.publish("--history", str(shop.output / "history")) == 2
    assert "lies in the directory that is served" in capsys.readouterr().err
    assert shop.publish("--cluster-name", "two words") == 2
    assert "is no name for a cluster" in capsys.readouterr().err
    shop.key = tmp_path / "no-key"
    assert shop.publish() == 2
    assert "ssh-keygen could not sign" in capsys.readouterr().err
    assert shop.releases() == {}
    with pytest.raises(SystemExit):
        shop.publish("--valid-for", "tomorrow")
    assert "write e.g. 90s, 30m, 12h or 7d" in capsys.readouterr().err


def test_what_is_published_is_in_the_ledger(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> list[tuple[str, dict[str, tuple[str | None, str | None, str | None]]]]:
        found = list(entries(tmp_path / "ledger.jsonl"))
        assert {(each["action"], each["cluster"]) for each in found} == {("publish", "shop")}
        assert all(len(each["snapshot"]) == 64 and each["who"]["user"] for each in found)
        return [
            (each["result"], {n: (s["before"], s["after"], s.get("result")) for n, s in each["nodes"].items()})
            for each in found
        ]

    assert shop.publish() == 0
    first = {node: shop.release(node).bundles[0].generation for node in NODES}
    assert told() == [
        ("begun", {node: (None, first[node], None) for node in NODES}),
        ("ok", {node: (None, first[node], "changed") for node in NODES}),
    ]
    assert "entry 2, head " in capsys.readouterr().out
    assert shop.publish() == 0
    assert len(told()) == 2, "nothing is new"
    assert "ledger" not in capsys.readouterr().out
    assert shop.publish("--renew", "--node", "n1") == 0
    assert told()[-1] == ("ok", {"n1": (first["n1"], first["n1"], "renewed")})

    shop.move_endpoint("10.244.1.99")
    signer, shop.key = shop.key, tmp_path / "nobody"
    capsys.readouterr()
    assert shop.publish() == 2
    last = list(entries(tmp_path / "ledger.jsonl"))[-1]
    assert (
        f"ledger: {tmp_path / 'ledger.jsonl'}, entry {last['number']}, head {last['hash']}\n" == capsys.readouterr().out
    )
    assert told()[-1] == ("failed", {node: (first[node], first[node], "failed") for node in NODES})
    shop.key = signer
    text = (shop.cluster / "nodes.yaml").read_text()
    (shop.cluster / "nodes.yaml").write_text("---".join(each for each in text.split("---") if "name: n3" not in each))
    assert shop.publish() == 0
    second = {node: shop.release(node).bundles[0].generation for node in ("n1", "n2")}
    changed = {node: (first[node], second[node], "changed") for node in ("n1", "n2")}
    assert told()[-1] == ("ok", {**changed, "n3": (first["n3"], None, "withdrawn")})

    (tmp_path / "ledger.jsonl").write_text("{}\n")
    before = shop.releases()
    shop.move_endpoint("10.244.1.98")
    assert shop.publish() == 2
    assert "is no entry of a ledger" in capsys.readouterr().err
    assert shop.releases() == before, "without a ledger nothing is published"
