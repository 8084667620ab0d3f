"""A working directory as runs leave it, and the page of it: the shop of examples/shop, on a day with some trouble."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from agentless_kube_proxy import ledger
from agentless_kube_proxy.bundle.compare import Change
from agentless_kube_proxy.bundle.manifest import SERVICES_FILE, bundle_digest
from agentless_kube_proxy.bundle.release import sign
from agentless_kube_proxy.bundle.write import write_bundle
from agentless_kube_proxy.choices import Choices
from agentless_kube_proxy.cluster.files import cluster_files, documents
from agentless_kube_proxy.cluster.objects import Reader
from agentless_kube_proxy.cluster.record import record_of
from agentless_kube_proxy.cluster.snapshot import Snapshot
from agentless_kube_proxy.engine import Engine
from agentless_kube_proxy.plan import history
from agentless_kube_proxy.plan.approval import plan_file, plan_text, write_plan
from agentless_kube_proxy.plan.metrics import Freshness
from agentless_kube_proxy.plan.report import plan_of, service_changes
from agentless_kube_proxy.report.collect import About, Report, collect
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json
from agentless_kube_proxy.tasks.notes import Note, Pushed

SHOP = Path(__file__).parents[2] / "examples" / "shop"
NODES = ("n1", "n2", "n3")
HOUR = 3600.0
Object = dict[str, Any]


def objects(folder: Path = SHOP) -> list[Object]:
    """What kubectl would print."""
    return [each for file in cluster_files(folder) for each in documents(file)]


def snapshot_of(found: list[Object]) -> Snapshot:
    """The same as facts."""
    reader = Reader()
    for each in found:
        reader.add(each)
    return reader.snapshot()


def choices(**settings: Any) -> Choices:
    """Those of the shop."""
    return Choices.of({"config": yaml.safe_load((SHOP / "kube-proxy.yaml").read_text(encoding="utf-8")), **settings})


def changed(found: list[Object]) -> list[Object]:
    """The shop of tomorrow: a Service less, one more, another range of sources, another endpoint."""
    kept = [each for each in found if _name(each) not in ("Service/admin", "EndpointSlice/admin-ipv4")]
    new: list[Object] = []
    for each in kept:
        if _name(each) == "Service/frontend":
            each = {**each, "spec": {**each["spec"], "loadBalancerSourceRanges": ["198.51.100.0/24"]}}
        if _name(each) == "EndpointSlice/orders-ipv4":
            endpoint = {
                "addresses": ["10.244.1.91"],
                "nodeName": "n1",
                "targetRef": {"kind": "Pod", "name": "orders-1"},
            }
            each = {**each, "endpoints": [endpoint]}
        new.append(each)
    orders = next(each for each in new if _name(each) == "Service/orders")
    spec = {**orders["spec"], "clusterIP": "10.96.10.8", "clusterIPs": ["10.96.10.8"], "type": "NodePort"}
    spec["ports"] = [{**spec["ports"][0], "nodePort": 30095}]
    return [*new, {**orders, "metadata": {**orders["metadata"], "name": "gifts"}, "spec": spec}]


def _name(each: Object) -> str:
    return f"{each['kind']}/{each['metadata']['name']}" if each.get("metadata") else str(each["kind"])


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A working directory, and what was in the cluster."""

    directory: WorkDirectory
    objects: list[Object]
    now: float
    allowed: Path

    def report(self, **about: Any) -> Report:
        """The page's content."""
        told = {"cluster": "production", "source": "the API server", "directory": self.directory, **about}
        return collect(snapshot_of(self.objects), choices(), {}, About(**told), self.now)


def fleet(folder: Path, now: float) -> Fleet:
    """Three nodes: one as intended, one whose rules were changed, one that is not reached; and a plan that waits."""
    directory = WorkDirectory(folder / "production").make()
    found = objects()
    record_of(found, "").write(directory.snapshot)
    engine = Engine(choices())
    engine.update(snapshot_of(found))
    generations = {name: engine.state(name).generation for name in NODES}
    with Freshness(directory, "production") as fresh:
        for name in NODES:
            fresh.confirmed(name, name, generations[name], now - {"n1": 40, "n2": 700, "n3": 3.2 * HOUR}[name])
        fresh.failed("n3", "n3", "unreachable: Connection timed out during banner exchange")
        for index in range(400):
            fresh.programmed(0.2 + (index * 37 % 100) ** 2 / 4000)
        fresh.ran(now - 48, now - 40, complete=False)
    (directory.path / history.FILE).unlink()
    moments = [history.Moment(now - 26 * HOUR, name, "current") for name in NODES]
    moments += [history.Moment(now - at * HOUR, node, state) for at, node, state in _DAY]
    history.add(directory.path / history.FILE, sorted(moments), now)
    drift = {"kind": "missing-rule", "family": "ipv4", "table": "nat", "chain": "KUBE-SVC-I5LIAMPLWKMBJ54B"}
    for name in NODES:
        status = {"state": "applied", "generation": generations[name], "mode": "iptables", "drift": 0}
        if name == "n2":
            status |= {"drift": 1, "differences": [{**drift, "service": "shop/cart:http"}]}
        write_json(directory.answer_file(name), {"host": name, "node": name, "facts": {}, "status": status})
    _ledger(directory, generations)
    allowed = _plan(directory, found, generations, folder)
    return Fleet(directory, found, now, allowed)


_DAY = (
    (7.5, "n3", "failed"),
    (6, "n3", "current"),
    (3.2, "n3", "unreached"),
    (14, "n2", "old"),
    (13.4, "n2", "current"),
    (9, "n2", "drift"),
    (8.4, "n2", "current"),
    (0.2, "n2", "drift"),
)


def _ledger(directory: WorkDirectory, generations: Mapping[str, str]) -> None:
    first = {name: {"before": None, "after": generations[name], "node": name} for name in NODES}
    shared = {"cluster": "production", "who": {"user": "deploy", "host": "control", "name": "bob"}}
    begun = {**shared, "run": "4711-1", "action": "sync", "result": "begun", "plan": "ab" * 32, "approvers": ["alice"]}
    ledger.append(directory.ledger, {**begun, "reason": "shop goes live", "nodes": first})
    for name in ("n1", "n2"):
        entry = {**begun, "result": "ok", "nodes": {name: first[name]}}
        ledger.append(directory.ledger, entry)
    failed = {"before": None, "error": 'the probe "cluster DNS" failed; the node went back by itself', "node": "n3"}
    ledger.append(directory.ledger, {**begun, "result": "failed", "nodes": {"n3": failed}})
    again = {**shared, "run": "4802-7", "action": "sync", "who": {"user": "akp", "host": "control"}}
    ledger.append(directory.ledger, {**again, "result": "ok", "nodes": {"n3": first["n3"]}})
    healed = {"before": generations["n2"], "after": generations["n2"], "node": "n2"}
    ledger.append(
        directory.ledger, {**shared, "run": "4910-3", "action": "heal", "result": "ok", "nodes": {"n2": healed}}
    )


def _plan(directory: WorkDirectory, found: list[Object], generations: Mapping[str, str], folder: Path) -> Path:
    """A plan for the shop of tomorrow, with a signature of alice; the file of those who may sign."""
    later = folder / "later.json"
    record_of(changed(found), "").write(later)
    engines = []
    for each in (found, changed(found)):
        engine = Engine(choices())
        engine.update(snapshot_of(each))
        engines.append(engine)
    notes: list[tuple[str, Note]] = []
    for name in NODES:
        bundles = [folder / f"{index}" / name for index in range(2)]
        states = [engine.state(name) for engine in engines]
        for state, bundle in zip(states, bundles, strict=True):
            write_bundle(state, bundle)
        before, after = ((bundle / SERVICES_FILE).read_text(encoding="utf-8").splitlines() for bundle in bundles)
        changes: list[Change] = service_changes(before, after)
        pushed = Pushed(
            0, 0, changed=True, node=name, previous=generations[name], generation=states[1].generation,
            digest=bundle_digest(bundles[1]), changes=changes,
        )  # fmt: skip
        notes.append((name, pushed))
    content = plan_of(notes, "c" * 64)
    write_plan(directory.plan, content, later, "production", plan_text(content))
    key = folder / "alice"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "alice", "-f", key], check=True)
    release = plan_file(directory.plan, "release")
    release.with_name("plan.release.alice.sig").write_text(sign(release.read_text(encoding="utf-8"), key))
    allowed = folder / "allowed_signers"
    allowed.write_text(f'alice namespaces="akp-release" {(folder / "alice.pub").read_text(encoding="utf-8")}')
    return allowed


def services(count: int, nodes: int = 100) -> Iterator[Object]:
    """A large cluster: ten endpoints of a Service on ten nodes, every tenth Service with policy Local."""
    for number in range(nodes):
        labels = {"topology.kubernetes.io/zone": f"zone-{'abc'[number % 3]}"}
        addresses = [{"type": "InternalIP", "address": f"192.168.{number // 250}.{number % 250 + 1}"}]
        spec: Object = {"podCIDRs": [f"10.{128 + number // 200}.{number % 200}.0/24"]}
        yield {
            "kind": "Node",
            "metadata": {"name": f"node-{number}", "labels": labels},
            "spec": spec,
            "status": {"addresses": addresses},
        }
    for number in range(count):
        ip, name, namespace = f"10.96.{number // 250}.{number % 250 + 1}", f"svc-{number}", f"ns-{number % 40}"
        ports: list[Object] = [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}]
        spec = {"type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ports": ports}
        if number % 10 == 0 and number < 20_000:
            ports[0]["nodePort"] = 30000 + number // 10
            spec |= {"type": "NodePort", "externalTrafficPolicy": "Local"}
        yield {"kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        labels = {"kubernetes.io/service-name": name}
        ends = [
            {
                "addresses": [f"10.{128 + place // 200}.{place % 200}.{number % 250 + 1}"],
                "conditions": {"ready": index != 4 or number % 7 > 0},
                "nodeName": f"node-{place}",
                "targetRef": {"kind": "Pod", "name": f"{name}-{index}"},
            }
            for index in range(5)
            for place in [(number + 13 * index) % nodes]
        ]
        yield {
            "kind": "EndpointSlice", "metadata": {"name": f"{name}-x", "namespace": namespace, "labels": labels},
            "addressType": "IPv4", "ports": [{"name": "http", "protocol": "TCP", "port": 8080}], "endpoints": ends,
        }  # fmt: skip
