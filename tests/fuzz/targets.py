"""Everything that reads what others wrote, and the errors with which it may say that it cannot."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentless_kube_proxy import backends
from agentless_kube_proxy.backends import UnknownBackend
from agentless_kube_proxy.bundle.manifest import FILE, SERVICES_FILE
from agentless_kube_proxy.bundle.program import PROGRAM
from agentless_kube_proxy.bundle.release import InvalidRelease, parse_release, split
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cli.render import gathered_facts
from agentless_kube_proxy.cluster.files import UnreadableFile, documents, load
from agentless_kube_proxy.cluster.record import read_record, record_of, snapshot_of
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.explain.bundles import UnreadableBundle, bundles, compare_bundles
from agentless_kube_proxy.ledger import BrokenLedger, verify
from agentless_kube_proxy.proxy.config import InvalidConfig, ProxyConfig
from agentless_kube_proxy.proxy.facts import InvalidFacts, NodeFacts, UnusableNode, node_facts
from agentless_kube_proxy.proxy.view import ClusterView

from tests.unit.build import config, node, service, slice_of, snapshot

from . import hostile

CONFIGS = [config(mode=mode, clusterCIDR="10.244.0.0/16,fd00:10:244::/56") for mode in ("iptables", "nftables", "ipvs")]
SHOP = (service(), slice_of("web", "10.244.1.1"))


@dataclass(frozen=True)
class Target:
    """A reader of files, as the rest of the project calls it."""

    name: str
    suffix: str
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]  # those that its callers turn into words

    @property
    def corpus(self) -> Path:
        return Path(__file__).with_name("corpus") / self.name


def _render(read: Snapshot, configuration: ProxyConfig) -> None:
    """Whatever was read can be written down for every node, or the node is named that cannot have it."""
    for problem in read.problems:
        assert str(problem).isprintable()
    view, renderer = ClusterView(read, configuration), backends.renderer(configuration)
    for each in read.nodes:
        try:
            facts = node_facts(each)
            state = renderer.state(view.node_view(facts))
        except UnusableNode:
            continue
        for name, content in backends.files(state):
            assert content.isascii(), name


def _cluster(file: Path) -> None:
    read = load(file)
    for configuration in CONFIGS:
        _render(read, configuration)
    snapshot_of(record_of(documents(file), file.name))


def _configuration(file: Path) -> None:
    _render(snapshot(*SHOP, node()), Choices.of({"config": str(file)}).proxy)


def _facts(file: Path) -> None:
    (made,) = snapshot(node("n1", "172.18.0.11")).nodes
    for gathered in gathered_facts(file).values():
        facts: NodeFacts = node_facts(made, gathered)
        for configuration in CONFIGS:
            view = ClusterView(snapshot(*SHOP, node()), configuration).node_view(facts)
            dict(backends.files(backends.renderer(configuration).state(view)))


def _record(file: Path) -> None:
    _render(snapshot_of(read_record(file)), CONFIGS[0])


def _manifest(file: Path) -> None:
    """A bundle with this manifest, beside one that is whole."""
    other = _whole(file.parent / "other")
    (file.parent / "bundle").mkdir(exist_ok=True)
    file.replace(file.parent / "bundle" / FILE)
    (file.parent / "bundle" / SERVICES_FILE).write_bytes((other / SERVICES_FILE).read_bytes())
    found = bundles(file.parent / "bundle")
    for each in found.values():
        compare_bundles(other, each)
        compare_bundles(each, other)


def _services(file: Path) -> None:
    """A bundle with this table of services, beside one that is whole."""
    other, bundle = _whole(file.parent / "other"), _whole(file.parent / "bundle")
    file.replace(bundle / SERVICES_FILE)
    for change in (*compare_bundles(other, bundle), *compare_bundles(bundle, other)):
        assert change.title


def _whole(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in _shop_files().items():
        (directory / name).write_bytes(content)
    return directory


@cache
def _shop_files() -> dict[str, bytes]:
    """A bundle, but for the program in it."""
    view = ClusterView(snapshot(*SHOP, node()), CONFIGS[0]).node_view(NodeFacts("n1", node_ips=("172.18.0.11",)))
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(backends.renderer(CONFIGS[0]).state(view), Path(folder) / "n1")
        return {file.name: file.read_bytes() for file in (Path(folder) / "n1").iterdir() if file.name != PROGRAM}


def _release(file: Path) -> None:
    text, _signatures = split(file.read_bytes().decode("utf-8", "replace"))
    made = parse_release(text)
    # What can be read can be written, to the same end.
    assert parse_release(made.text()) == made


TARGETS = {
    target.name: target
    for target in (
        Target("cluster-yaml", ".yaml", _cluster, (UnreadableFile,)),
        Target("cluster-json", ".json", _cluster, (UnreadableFile,)),
        Target("configuration", ".yaml", _configuration, (UnreadableFile, InvalidConfig, UnknownBackend)),
        Target("facts", ".json", _facts, (UnreadableFile, InvalidFacts, UnusableNode)),
        Target("record", ".json", _record, (UnreadableFile,)),
        Target("manifest", ".json", _manifest, (UnreadableBundle,)),
        Target("services", ".jsonl", _services, (UnreadableBundle,)),
        Target("release", "", _release, (InvalidRelease,)),
        Target("answer", "", hostile.answer, hostile.ANSWER_ERRORS),
        Target("result", ".json", hostile.result, ()),
        Target("events", ".jsonl", hostile.events, ()),
        Target("list", ".json", hostile.listed, hostile.API_ERRORS),
        Target("ledger", "", verify, (BrokenLedger,)),
    )
}


def attempt(target: Target, content: bytes, folder: Path) -> str:
    """The name of the error with which it was refused, or "read"; any other error is a finding."""
    file = folder / f"input{target.suffix}"
    file.write_bytes(content)
    try:
        target.read(file)
    except target.errors as error:
        if not str(error):
            raise AssertionError("an error without words") from error
        return type(error).__name__
    return "read"
