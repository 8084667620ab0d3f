"""akp watch between a real API server and real nodes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.cluster.record import peek
from agentless_kube_proxy.ledger import entries

from tests.collection.play import BIN, ROOT, Run, playbook
from tests.collection.test_sync import RESTORE, sabotage
from tests.conftest import unused_prefix
from tests.controlplane import ApiError, ControlPlane, netns
from tests.lab import Lab
from tests.lab.program import PROGRAM

from .shop import shop_plane
from .watching import DEADLINE, Watcher, resident_megabytes, wire

ADDRESS = "192.168.79.7"
ALL = ["n1", "n2", "n3"]
Object = dict[str, Any]

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane that holds the shop."""
    with shop_plane("akpw", ADDRESS) as started:
        yield started


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(unused_prefix(), 3) as made:
        yield made


@pytest.fixture
def inventory(lab: Lab, tmp_path: Path) -> Path:
    for node in lab.nodes:
        node.run(["sh", str(PROGRAM), "cleanup"])
    return lab.inventory(tmp_path / "hosts.yml")


@pytest.fixture
def watcher(plane: ControlPlane, inventory: Path, tmp_path: Path) -> Iterator[Watcher]:
    """One that has given every node what it shall have."""
    with Watcher(plane, inventory, tmp_path / "watch", "--textfile", str(tmp_path)) as started:
        started.wait("settled")
        yield started


def service(name: str, **spec: Any) -> Object:
    meta = {"namespace": "shop", "name": name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"ports": [{"name": "http", "port": 80}], **spec},
    }


def slice_of(name: str, *endpoints: tuple[str, str]) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": [ip], "nodeName": node, "conditions": {"ready": True}} for ip, node in endpoints],
    }


def rules(lab: Lab, name: str) -> str:
    return lab.node(name).run(["iptables-save", "-t", "nat"]).stdout


def appended(lab: Lab, name: str) -> list[str]:
    """The rules alone, that of the generation among them."""
    return [line for line in rules(lab, name).splitlines() if line.startswith("-A")]


def sync(plane: ControlPlane, inventory: Path, work: Path, *arguments: str) -> Run:
    """By hand, beside the watch."""
    return playbook(
        "sync-services",
        inventory,
        work,
        *arguments,
        variables={
            "kube_proxy_cluster_dir": "",
            "kube_proxy_kubeconfig": str(plane.kubeconfig(work.parent / "fresh.kubeconfig", "akp")),
            "kube_proxy_config": str(work.parent / "watch" / "kube-proxy.yaml"),
            "kube_proxy_verify": True,
        },
        prefix=netns.command(plane.namespace, []),
        check=False,
    )


def assert_equal_to_a_fresh_render(plane: ControlPlane, inventory: Path, work: Path) -> None:
    """A sync from nothing but the API server would change nothing: every rule is compared."""
    run = sync(plane, inventory, work, "--check", "--diff")
    assert run.code == 0, run.output
    assert run.changed == dict.fromkeys(ALL, 0), run.output


def test_changes_arrive_at_the_nodes_that_they_concern_and_at_no_other(
    plane: ControlPlane, lab: Lab, inventory: Path, watcher: Watcher, tmp_path: Path
) -> None:
    client = plane.client
    here = slice_of("inside", ("10.244.2.77", "n2"))
    client.create(service("inside", internalTrafficPolicy="Local"))
    client.create(here)
    for made in (" Service shop/inside", " EndpointSlice shop/inside"):
        watcher.wait("change", 0, lambda event, made=made: made in f" {event['what']}")  # type: ignore[misc]
    place = watcher.place
    # Noise first: what is written before is seen before.
    client.patch(here, {"metadata": {"annotations": {"note": "nobody cares"}}})
    client.patch({"kind": "Node", "metadata": {"name": "n3"}}, {"metadata": {"labels": {"disk": "ssd"}}})
    endpoints = slice_of("inside", ("10.244.1.77", "n1"), ("10.244.2.77", "n2"))["endpoints"]
    stamp = {"endpoints.kubernetes.io/last-change-trigger-time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    client.patch(here, {"endpoints": endpoints, "metadata": {"annotations": stamp}})
    told = watcher.wait("change", place)
    assert told["hosts"] == 1
    assert [(each["host"], each["how"]) for each in watcher.events("pushed", place)] == [("n1", "delta")]
    assert "10.244.1.77:8080" in rules(lab, "n1")
    assert "10.244.1.77:8080" not in rules(lab, "n2")
    place = watcher.place
    client.delete(here)
    client.delete(service("inside"))
    watcher.wait("change", place, lambda event: "Service shop/inside" in event["what"])
    assert watcher.stop() == 0
    assert_equal_to_a_fresh_render(plane, inventory, tmp_path / "fresh")
    snapshots = [each.get("snapshot") for each in entries(watcher.work / "akp" / "ledger.jsonl")]
    assert None not in snapshots, "an entry that does not say what cluster it is about"
    assert snapshots[-1] == peek(tmp_path / "fresh" / "akp" / "snapshot.json"), "as a sync has it"
    metrics = (tmp_path / "akp_default.prom").read_text()
    for name in ALL:
        assert f'akp_node_confirmed_timestamp_seconds{{cluster="default",node="{name}"}}' in metrics
    assert 'kubeproxy_network_programming_duration_seconds_count{cluster="default"} 1' in metrics


def test_endpoints_go_over_the_connection_that_is_open_and_over_a_new_one_if_it_is_not(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    ssh, started = tmp_path / "ssh", tmp_path / "ssh.log"
    ssh.write_text(f'#!/bin/sh\necho "$$" >>{started}\nexec {lab.state}/ssh "$@"\n')
    ssh.chmod(0o755)
    inventory.write_text(inventory.read_text().replace(f"{lab.state}/ssh\n", f"{ssh}\n"))
    work, client, path = tmp_path / "watch", plane.client, slice_of("path", ("10.244.2.77", "n2"))
    # No question comes in between.
    config = yaml.safe_load(Watcher.config(tmp_path / "kube-proxy.yaml").read_text())
    (tmp_path / "kube-proxy.yaml").write_text(yaml.safe_dump({**config, "iptables": {"syncPeriod": "10m"}}))
    objects = [service("path"), path]
    client.parallel(client.create, objects)
    try:
        with Watcher(plane, inventory, work, "--config", str(tmp_path / "kube-proxy.yaml")) as watcher:
            watcher.wait("settled")
            counts = []
            for host in ("10.244.1.77", "10.244.1.78", "10.244.1.79"):
                if host.endswith("79"):
                    for control in (lab.state / "cp").iterdir():
                        control.unlink()
                before, place = started.read_text().count("\n"), watcher.place
                client.patch(path, {"endpoints": slice_of("path", (host, "n1"))["endpoints"]})
                watcher.wait("change", place, lambda event: event["hosts"] == 3)
                counts.append(started.read_text().count("\n") - before)
                assert {each["how"] for each in watcher.events("pushed", place)} == {"delta"}
                assert all(f"{host}:8080" in rules(lab, name) for name in ALL)
            assert counts[:2] == [0, 0]
            assert counts[2] >= 3
            assert watcher.stop() == 0
    finally:
        client.parallel(client.delete, objects)
    made = [each for each in entries(work / "akp" / "ledger.jsonl") if each["action"] == "sync"]
    assert sorted(name for each in made[-9:] for name in each["nodes"]) == sorted(ALL * 3)
    assert all(each["result"] == "ok" and each["snapshot"] for each in made[-9:])


def test_drift_is_found_and_a_node_without_its_base_gets_the_whole_bundle(
    plane: ControlPlane, lab: Lab, inventory: Path, watcher: Watcher, tmp_path: Path
) -> None:
    # On a busy machine, a look may find what was done before the change comes.
    place = watcher.place
    lab.node("n2").run(["iptables", "-t", "nat", "-F", "KUBE-SERVICES"])
    lab.node("n3").run(["sh", str(PROGRAM), "cleanup"])
    plane.client.create(service("later"))
    try:
        watcher.wait("change", place)
        watcher.wait("pushed", place, lambda event: event["host"] == "n3" and event["how"] == "bundle")
        # A delta on top of what was emptied is taken; the next look finds it.
        watcher.wait("drift", place, lambda event: event["host"] == "n2")
        watcher.wait("pushed", place, lambda event: event["host"] == "n2" and event["how"] == "bundle")
        assert watcher.stop() == 0
        assert_equal_to_a_fresh_render(plane, inventory, tmp_path / "fresh")
    finally:
        plane.client.delete(service("later"))


def test_one_at_a_time_and_a_scheduled_run_is_waited_for(plane: ControlPlane, watcher: Watcher) -> None:
    second = watcher.start()
    assert second.wait(DEADLINE) == 2
    assert "another akp watch follows this cluster" in watcher.log.read_text()
    place = watcher.place
    with (watcher.work / "akp" / "schedule" / "lock").open("ab") as scheduled:
        fcntl.flock(scheduled, fcntl.LOCK_EX)
        plane.client.create(service("meanwhile"))
        try:
            watcher.wait("waiting", place)
            assert watcher.events("pushed", place) == []
        finally:
            plane.client.delete(service("meanwhile"))
        plane.client.create(service("afterwards"))
    try:
        watcher.wait("change", place, lambda event: "afterwards" in event["what"] and event["hosts"] == 3)
        assert watcher.stop() == 0
    finally:
        plane.client.delete(service("afterwards"))


def test_ended_in_the_middle_of_a_push_it_leaves_every_node_whole(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    """The first push of all is the longest; each node then has all of its rules or none."""
    with Watcher(plane, inventory, tmp_path / "watch") as started:
        started.wait("watching")
        time.sleep(random.uniform(0, 1.5))
        assert started.stop() == 0
    for node in lab.nodes:
        status = json.loads(node.run(["sh", str(PROGRAM), "status"]).stdout.splitlines()[-1])
        assert status["state"] in ("applied", "absent"), status
    with Watcher(plane, inventory, tmp_path / "again") as started:
        started.wait("settled")
        assert started.stop() == 0
    assert_equal_to_a_fresh_render(plane, inventory, tmp_path / "fresh")


def test_the_vault_and_the_limit_of_the_user_hold(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    folder, password, work = tmp_path / "inventory", tmp_path / "password", tmp_path / "watch"
    (folder / "group_vars").mkdir(parents=True)
    inventory.rename(folder / "hosts.yml")
    password.write_text("secret\n")
    secret = folder / "group_vars" / "nodes.yml"
    secret.write_text(f"kube_proxy_kubeconfig: {work}/kubeconfig\n")
    vault = ["--vault-password-file", str(password)]
    subprocess.run([str(BIN / "ansible-vault"), "encrypt", *vault, str(secret)], check=True, capture_output=True)
    with Watcher(plane, folder, work, *vault, "--limit", "n1,n3", kubeconfig=False) as started:
        assert started.wait("settled")["hosts"] == 2
        assert started.stop() == 0
    assert [name for name in ALL if "KUBE-SERVICES" in rules(lab, name)] == ["n1", "n3"]


def recorded_ports(lab: Lab, name: str) -> int:
    """How many service ports a node has, as it recorded them."""
    return int(lab.node(name).run(["sed", "-n", "s/^ports=//p", "/var/lib/akp/record"]).stdout)


def test_most_services_gone_is_not_followed_before_somebody_says_so(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    folder, work = tmp_path / "inventory", tmp_path / "watch"
    (folder / "group_vars").mkdir(parents=True)
    inventory.rename(folder / "hosts.yml")
    many = [service(f"soak-{i}") for i in range(60)]
    plane.client.parallel(plane.client.create, many)
    with Watcher(plane, folder, work) as started:
        started.wait("settled")
        assert started.stop() == 0
    before, with_all = [appended(lab, name) for name in ALL], recorded_ports(lab, "n1")
    plane.client.parallel(plane.client.delete, many)
    place = len(Watcher.said(work))
    with Watcher(plane, folder, work) as started:
        problem = started.wait("refused", place)["problem"]
        assert "on n1, n2, n3, 60 of" in problem
        assert "shop/soak-0:http tcp IPv4" in problem
        assert "kube_proxy_max_removed_percent=100" in problem
        # Asked they are, in case that somebody else changes them.
        answers = [(work / "akp" / "nodes" / f"{name}.json") for name in ALL]
        stamps = [each.stat().st_mtime_ns for each in answers]
        deadline = time.monotonic() + DEADLINE
        while any(each.stat().st_mtime_ns == stamp for each, stamp in zip(answers, stamps, strict=True)):
            assert time.monotonic() < deadline, started.log.read_text()
            time.sleep(0.1)
        assert started.events("pushed", place) == []
        assert [appended(lab, name) for name in ALL] == before

        plane.client.parallel(plane.client.create, many)
        started.wait("allowed", place)
        started.wait("change", place, lambda event: event["hosts"] == 3)

        place = started.place
        plane.client.parallel(plane.client.delete, many)
        started.wait("refused", place)
        place = started.place
        (folder / "group_vars" / "nodes.yml").write_text("kube_proxy_max_removed_percent: 100\n")
        started.process.send_signal(signal.SIGHUP)
        started.wait("allowed", place)
        # Some of them went before they were too many, so the next change that is told need not be the last one.
        deadline = time.monotonic() + DEADLINE
        while any(recorded_ports(lab, name) != with_all - len(many) for name in ALL):
            assert time.monotonic() < deadline, started.log.read_text()
            time.sleep(0.1)
        assert started.stop() == 0
        assert {each["host"] for each in started.events("pushed", place)} == set(ALL)
    assert_equal_to_a_fresh_render(plane, folder, tmp_path / "fresh")


@pytest.fixture
def lease(plane: ControlPlane) -> Iterator[str]:
    """The Lease of examples/access, with the rights on it for the user of these tests."""
    made = list(yaml.safe_load_all((ROOT / "examples" / "access" / "lease.yaml").read_text()))
    for each in made:
        if "subjects" in each:
            each["subjects"] = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "akp"}]
        plane.client.create(each)
    yield "kube-system/akp-watch"
    for each in made:
        plane.client.delete(each)


def test_the_leader_is_killed_under_load_and_the_other_host_loses_no_change(
    plane: ControlPlane, lab: Lab, inventory: Path, lease: str, tmp_path: Path
) -> None:
    draw, names = random.Random(1), [f"load-{i}" for i in range(10)]
    made = [*map(service, names), *(slice_of(name, ("10.244.1.20", "n1")) for name in names)]
    plane.client.parallel(plane.client.create, made)
    stopped, written = threading.Event(), 0

    def load() -> None:
        nonlocal written
        while not stopped.wait(0.05):
            obj = _endpoints(draw, draw.choice(names))
            plane.client.patch(obj, {"endpoints": obj["endpoints"]})
            written += 1

    writer = threading.Thread(target=load)
    with contextlib.ExitStack() as running:
        first = running.enter_context(Watcher(plane, inventory, tmp_path / "watch", "--lease", lease))
        first.wait("leads")
        second = running.enter_context(Watcher(plane, inventory, tmp_path / "second", "--lease", lease))
        second.wait("follows")
        for each in (first, second):
            each.wait("settled")
        writer.start()
        first.wait("pushed", first.place)
        assert second.events("pushed") == []
        beside = sync(plane, inventory, tmp_path / "beside", "-e", f"kube_proxy_lease={lease}")
        assert beside.code == 2
        assert " leads, by the Lease kube-system/akp-watch: " in " ".join(beside.output.split())
        killed, place = time.monotonic(), second.place
        first.process.kill()
        second.wait("leads", place)
        leads = time.monotonic() - killed
        second.wait("pushed", place)
        pushes, before = time.monotonic() - killed, written
        time.sleep(3)
        stopped.set()
        writer.join()
        print(
            f"{written} changes, {before} until the next push: leads after {leads:.1f} s, pushes after {pushes:.1f} s"
        )
        for name in names:
            plane.client.patch(slice_of(name), {"endpoints": slice_of(name, ("10.244.1.99", "n1"))["endpoints"]})
        deadline = time.monotonic() + DEADLINE
        while not all(rules(lab, name).count("--to-destination 10.244.1.99:8080") == len(names) for name in ALL):
            assert time.monotonic() < deadline, second.log.read_text()[-5000:]
            time.sleep(0.2)
        # Given back, the Lease is there for the next one at once.
        assert second.stop() == 0
        assert [each["spec"].get("holderIdentity") for each in _leases(plane)] == [None]
    assert pushes < 15
    assert_equal_to_a_fresh_render(plane, inventory, tmp_path / "fresh")
    plane.client.parallel(plane.client.delete, made)


def _leases(plane: ControlPlane) -> list[Object]:
    return [each for each in plane.client.list_all("Lease") if each["metadata"]["name"] == "akp-watch"]


@pytest.mark.soak
def test_two_hundred_changes_with_cuts_a_restart_and_a_node_that_is_away(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    seed = int(os.environ.get("AKP_SEED", random.randrange(1 << 32)))
    total = int(os.environ.get("AKP_CHANGES", "200"))
    print(f"AKP_SEED={seed} AKP_CHANGES={total}")
    draw = random.Random(seed)
    with wire(plane, 7443) as cable, Watcher(plane, inventory, tmp_path / "watch", port=7443) as watcher:
        watcher.wait("settled")
        alive: dict[str, int] = {}
        for step in range(total):
            if step % (total // 8) == total // 20:
                assert cable.cut()
            if step == total * 6 // 20:
                lab.sh("ip link set n2 down")
            if step == total * 11 // 20:
                plane.restart()
            if step == total * 14 // 20:
                watcher.wait("failed", 0, lambda event: event["host"] == "n2")
                lab.sh("ip link set n2 up")
            _change(plane, draw, alive)
            time.sleep(draw.expovariate(8))
        plane.client.create(service("last"))
        plane.client.create(slice_of("last", ("10.244.1.99", "n1")))
        deadline = time.monotonic() + DEADLINE
        while not all("10.244.1.99:8080" in rules(lab, name) for name in ALL):
            assert time.monotonic() < deadline, watcher.log.read_text()
            time.sleep(0.5)
        assert watcher.stop() == 0
        pushed = watcher.events("pushed")
    assert_equal_to_a_fresh_render(plane, inventory, tmp_path / "fresh")
    for host in ALL:
        generations = [each["generation"] for each in pushed if each["host"] == host]
        assert len(generations) > 1
        assert all(one != other for one, other in itertools.pairwise(generations)), "pushed twice"
    assert all(each["changed"] for each in pushed)


@pytest.mark.soak
def test_fifty_changes_a_second_break_no_connection_and_fill_no_memory(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    seconds = float(os.environ.get("AKP_LOAD_SECONDS", "60"))
    pods = [lab.add_pod(f"steady-{i}", name, serve=[("tcp", 8080)]) for i, name in enumerate(("n2", "n3"))]
    plane.client.create(service("steady"))
    plane.client.create(slice_of("steady", *((pod.addresses[0], pod.node.name) for pod in pods)))
    vip = next(
        obj["spec"]["clusterIP"] for obj in plane.client.list_all("Service") if obj["metadata"]["name"] == "steady"
    )
    names = [f"soak-{i}" for i in range(40)]
    for name in names:
        plane.client.create(service(name))
        plane.client.create(slice_of(name, ("10.244.1.20", "n1")))
    with Watcher(plane, inventory, tmp_path / "watch") as watcher:
        watcher.wait("settled")
        connections = [lab.node("n1").open("tcp", vip, 80) for _ in range(500)]
        try:
            answered = [each.ask().who for each in connections]
            assert set(answered) == {pod.name for pod in pods}
            before = peak = resident_megabytes(watcher.process)
            draw, began, written = random.Random(1), time.monotonic(), 0
            look = began
            while written < 50 * seconds:
                late = min(int((time.monotonic() - began) * 50), int(50 * seconds)) - written
                changes = [_endpoints(draw, draw.choice(names)) for _ in range(max(late, 0))]
                plane.client.parallel(lambda obj: plane.client.patch(obj, {"endpoints": obj["endpoints"]}), changes)
                written += len(changes)
                if time.monotonic() >= look:
                    peak, look = max(peak, resident_megabytes(watcher.process)), time.monotonic() + 1
                time.sleep(0.02)
            took = time.monotonic() - began
            for name in names:
                plane.client.patch(slice_of(name), {"endpoints": slice_of(name, ("10.244.1.99", "n1"))["endpoints"]})
            deadline = time.monotonic() + DEADLINE
            while not all(rules(lab, name).count("--to-destination 10.244.1.99:8080") == len(names) for name in ALL):
                assert time.monotonic() < deadline, watcher.log.read_text()[-5000:]
                time.sleep(0.5)
            grown = resident_megabytes(watcher.process) - before
            kept = [each.ask(timeout=5).who for each in connections]
        finally:
            for each in connections:
                each.close()
        assert watcher.stop() == 0
        pushes = len(watcher.events("pushed"))
    alive = sum(now == then for now, then in zip(kept, answered, strict=True))
    print(
        f"{written} changes in {took:.1f} s, {written / took:.1f} a second; {pushes} pushes to 3 nodes; memory "
        f"{before:.0f} MiB before, {peak:.0f} MiB at most, {grown:+.0f} MiB after; {alive} of {len(answered)} "
        "connections kept"
    )
    assert kept == answered, "a connection broke"
    assert took < 1.1 * seconds, "the changes came more slowly than 50 a second, which proves nothing about 50"
    assert pushes < written, "changes were not put together"
    assert grown < 64
    assert_equal_to_a_fresh_render(plane, inventory, tmp_path / "fresh")


def _endpoints(draw: random.Random, name: str) -> Object:
    return slice_of(name, *((f"10.244.{draw.randrange(1, 4)}.{draw.randrange(20, 90)}", "n1") for _ in range(3)))


def _change(plane: ControlPlane, draw: random.Random, alive: dict[str, int]) -> None:
    """Something that happens in clusters: Services and endpoints come, go and change; much of it is noise."""
    client = plane.client
    name = f"soak-{draw.randrange(12)}"
    addresses = [(f"10.244.{draw.randrange(1, 4)}.{draw.randrange(20, 250)}", draw.choice(ALL)) for _ in range(3)]
    if name not in alive:
        policy = draw.choice(["Cluster", "Local"])
        client.create(service(name, internalTrafficPolicy=policy))
        client.create(slice_of(name, *addresses))
        alive[name] = 1
        return
    what = draw.choice(["endpoints", "endpoints", "port", "noise", "gone", "affinity"])
    try:
        if what == "gone":
            client.delete(slice_of(name))
            client.delete(service(name))
            del alive[name]
        elif what == "endpoints":
            client.patch(slice_of(name), {"endpoints": slice_of(name, *addresses)["endpoints"]})
        elif what == "port":
            client.patch(service(name), {"spec": {"ports": [{"name": "http", "port": draw.randrange(80, 90)}]}})
        elif what == "affinity":
            client.patch(service(name), {"spec": {"sessionAffinity": draw.choice(["None", "ClientIP"])}})
        else:
            client.patch(service(name), {"metadata": {"annotations": {"note": str(draw.random())}}})
    except ApiError as error:
        # Just after the restart of the API server.
        if error.status < 500 and error.status != 409:
            raise


@pytest.fixture(autouse=True)
def no_leftovers(plane: ControlPlane) -> Iterator[None]:
    """What a test made in the cluster is gone after it."""
    yield
    for kind in ("EndpointSlice", "Service"):
        for obj in plane.client.list_all(kind):
            if obj["metadata"]["name"].startswith(("soak-", "last", "inside", "steady")):
                plane.client.delete(obj)


def test_a_plan_is_waited_for_and_one_that_stopped_half_way_is_not_completed(
    plane: ControlPlane, lab: Lab, inventory: Path, tmp_path: Path
) -> None:
    work, client = tmp_path / "watch", plane.client
    moving = slice_of("moving", ("10.244.2.61", "n2"))
    client.create(service("moving"))
    client.create(moving)
    work.mkdir()
    variables: Object = {
        "kube_proxy_dir": str(work / "akp"),
        "kube_proxy_cluster_dir": "",
        "kube_proxy_kubeconfig": str(plane.kubeconfig(tmp_path / "akp.kubeconfig", "akp")),
        "kube_proxy_config": str(Watcher.config(work / "kube-proxy.yaml")),
        "kube_proxy_batches": [1, 1, 1],
        "kube_proxy_approval": "frontends",
    }

    def run(name: str, *, check: bool = True, **more: Any) -> Run:
        chosen = {**variables, **more}
        inside = netns.command(plane.namespace, [])
        return playbook(name, inventory, tmp_path / "runs", variables=chosen, prefix=inside, check=check)

    def planned() -> Object:
        told = next(run("plan_services").of("summary")).result
        return {"kube_proxy_plan": told["plan"], "kube_proxy_plan_digest": told["plan_digest"]}

    def serving(text: str) -> list[bool]:
        return [text in lab.node(name).run(["iptables-save"]).stdout for name in ALL]

    try:
        run("sync-services", **planned())
        with Watcher(plane, inventory, work, "-e", "kube_proxy_approval=frontends") as started:
            started.wait("settled")
            client.create(service("planned"))
            started.wait("warning", 0, lambda event: "shop/planned waits for approval" in event["problem"])
            plan = planned()

            # Longer than it takes to ask every node: the first one has it for so long, and goes back.
            place = started.place
            probe = {"port": 9, "address": "127.0.0.1", "timeout": 12}
            failed = run("sync-services", check=False, **plan, kube_proxy_probes=[probe])
            assert "the node went back to generation" in failed.output
            assert started.events("pushed", place) == []
            assert serving("shop/planned") == [False] * 3

            sabotage(lab.node("n2"))
            run("sync-services", check=False, **plan)
            lab.node("n2").run(["rm", RESTORE])
            assert serving("shop/planned") == [True, False, False]
            place = started.place
            endpoints = slice_of("moving", ("10.244.2.61", "n2"), ("10.244.1.62", "n1"))["endpoints"]
            client.patch(moving, {"endpoints": endpoints})
            started.wait("change", place, lambda event: "EndpointSlice" in event["what"] and event["hosts"] == 3)
            assert serving("10.244.1.62:8080") == [True] * 3
            assert serving("shop/planned") == [True, False, False]

            run("sync-services", **planned())
            place = started.place
            client.patch(moving, {"endpoints": slice_of("moving", ("10.244.1.62", "n1"))["endpoints"]})
            started.wait("change", place, lambda event: "EndpointSlice" in event["what"] and event["hosts"] == 3)
            assert serving("10.244.2.61:8080") == [False] * 3
            assert serving("shop/planned") == [True] * 3
            assert started.stop() == 0
    finally:
        for each in (moving, service("moving"), service("planned")):
            with contextlib.suppress(ApiError):
                client.delete(each)
