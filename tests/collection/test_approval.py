"""Plans, those who sign them, and what goes without: real keys, real nodes that verify them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.bundle.manifest import described
from agentless_kube_proxy.bundle.program import part_program

from tests.lab import Lab
from tests.lab.program import PROGRAM
from tests.node.signing import new_key

from .play import BIN, SHOP, Run, playbook
from .test_safety import entries, kernel
from .test_sync import ALL, RESTORE, edited_shop, sabotage

NAMES = ("alice", "bob", "mallory", "automation")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    return {name: new_key(tmp_path / "keys", name) for name in NAMES}


@pytest.fixture
def signers(nodes: Lab, keys: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    """Nodes that want two approvers, and the same list on the control host."""
    file = tmp_path / "allowed_signers"
    trusted = [keys[name] for name in NAMES if name != "mallory"]
    file.write_text("".join(f"{key.name} {key.with_suffix('.pub').read_text()}" for key in trusted))
    for node in nodes.nodes:
        conf = f"cluster shop\nnode {node.name}\nsignatures 2\n"
        node.run(["sh", "-c", "mkdir -p /etc/akp; cat >/etc/akp/allowed_signers"], input=file.read_text())
        node.run(["sh", "-c", "cat >/etc/akp/node.conf"], input=conf)
        node.run(["sh", "-c", "cat >/usr/local/sbin/akp-verify"], input=part_program("verify"))
    yield file
    for node in nodes.nodes:
        node.run(["rm", "-r", "/etc/akp", "/usr/local/sbin/akp-verify"])


def approve(plan: Path, key: Path) -> str:
    argv = [str(BIN / "akp"), "approve", str(plan), "--key", str(key), "--yes"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def endpoint_more(shop: Path) -> None:
    """Another pod of the catalog."""
    file = shop / "catalog.yaml"
    catalog = list(yaml.safe_load_all(file.read_text()))
    for obj in catalog:
        if obj["kind"] == "EndpointSlice" and obj["addressType"] == "IPv4":
            obj["endpoints"].append({"addresses": ["10.244.2.99"], "nodeName": "n2", "conditions": {"ready": True}})
    file.write_text(yaml.safe_dump_all(catalog))


def external_ip(shop: Path) -> Path:
    """The shop, and an address more for the catalog."""
    shutil.copytree(SHOP, shop)
    file = shop / "catalog.yaml"
    catalog = list(yaml.safe_load_all(file.read_text()))
    for obj in catalog:
        if obj["kind"] == "Service":
            obj["spec"]["externalIPs"] = ["192.0.2.77"]
    file.write_text(yaml.safe_dump_all(catalog))
    return shop


def following(run: Run) -> dict[str, Any]:
    """Variables to follow the plan that was made."""
    (told,) = [each.result for each in run.of("summary") if "plan" in each.result]
    return {"kube_proxy_plan": told["plan"], "kube_proxy_plan_digest": told["plan_digest"]}


def planned(run: Run) -> Path:
    (told,) = [each.result for each in run.of("summary") if "plan" in each.result]
    return Path(told["plan"])


def test_a_plan_needs_its_approvers_here_and_on_the_nodes(
    nodes: Lab, inventory: Path, tmp_path: Path, keys: dict[str, Path], signers: Path
) -> None:
    variables: dict[str, Any] = {
        "kube_proxy_cluster_name": "shop",
        "kube_proxy_approval": "frontends",
        "kube_proxy_allowed_signers": str(signers),
        "kube_proxy_signatures": 2,
        "kube_proxy_signing_key": str(keys["automation"]),
    }
    before = [kernel(node) for node in nodes.nodes]
    first = playbook("sync-services", inventory, tmp_path, variables=variables, check=False)
    assert "needs an approved plan (added kube-system/kube-dns:dns tcp IPv4" in first.output.replace(
        "dns udp", "dns tcp"
    )
    page = tmp_path / "plan.html"
    paged = {**variables, "kube_proxy_report": str(page)}
    plan = planned(playbook("plan_services", inventory, tmp_path, variables=paged))
    shown = approve(plan, keys["alice"])
    signed = hashlib.sha256(plan.with_name("plan.release").read_bytes()).hexdigest()
    assert f"SHA-256 of what is signed, plan.release: {signed}\n" in shown
    assert signed in page.read_text()
    assert "kube-system/kube-dns:dns" in page.read_text()
    assert shown.startswith("on n1, n2, n3:\n  + node: settings\n      + mode iptables\n")
    assert "\n  + kube-system/kube-dns:dns udp IPv4\n" in shown
    approve(plan, keys["mallory"])
    follow = {**variables, "kube_proxy_plan": str(plan)}
    refused = playbook("sync-services", inventory, tmp_path, variables=follow, check=False)
    assert "1 of 2 approvers have signed it (alice); it is signed with: akp approve" in refused.output
    # Whoever has the control host can lower its own bar, but not that of the nodes.
    lowered = {**follow, "kube_proxy_signatures": 1}
    refused = playbook("sync-services", inventory, tmp_path, variables=lowered, check=False)
    assert "the release has good signatures of 1 signers" in refused.output
    assert [kernel(node) for node in nodes.nodes] == before
    approve(plan, keys["bob"])
    done = playbook("sync-services", inventory, tmp_path, variables=follow)
    assert done.changed == dict.fromkeys(ALL, 1)
    last = entries(tmp_path)[-1]
    assert (sorted(last["approvers"]), last["plan"]) == (["alice", "bob"], json.loads(plan.read_text())["digest"])

    # From now on pods come and go by themselves; Services wait.
    shop = edited_shop(tmp_path / "shop")
    endpoint_more(shop)
    variables["kube_proxy_cluster_dir"] = str(shop)
    moved = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert moved.changed == dict.fromkeys(ALL, 1)
    assert "  Service/shop/new: is new, and waits for approval" in moved.summary
    assert "  Service/shop/metrics: is gone, and waits for approval" in moved.summary
    rules = kernel(nodes.node("n1"))
    assert "10.244.2.99:8080" in rules
    assert "shop/new" not in rules
    assert "shop/metrics" in rules
    again = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert again.changed == dict.fromkeys(ALL, 0)

    # The key of the control host is good for endpoints only, whatever the control host is told.
    careless = {**variables, "kube_proxy_approval": "none"}
    refused = playbook("sync-services", inventory, tmp_path, variables=careless, check=False)
    assert "signed by automation alone, which may change endpoints only" in refused.output
    assert [kernel(nodes.node("n1"))] == [rules]


def test_a_plan_that_was_changed_is_not_signed(inventory: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    plan = planned(playbook("plan_services", inventory, tmp_path))
    argv = [str(BIN / "akp"), "approve", str(plan), "--key", str(keys["alice"]), "--yes"]
    release = plan.with_name("plan.release")
    good = release.read_text()
    release.write_text(good.replace("bundle n1 ", "bundle n9 "))
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (done.returncode, "is not the release that the plan names" in done.stderr) == (2, True)
    release.write_text(good)
    plan.write_text(plan.read_text().replace("shop/frontend", "shop/backend"))
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (done.returncode, "was changed" in done.stderr) == (2, True)
    assert not list(plan.parent.glob("*.sig"))


def test_what_is_no_approval_is_told(inventory: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    plan = planned(playbook("plan_services", inventory, tmp_path))
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f"alice {keys['alice'].with_suffix('.pub').read_text()}")
    nobody = ("-e", f"kube_proxy_plan={plan}", "-e", f"kube_proxy_allowed_signers={allowed}")
    refused = playbook("sync-services", inventory, tmp_path, *nobody, "-e", "kube_proxy_signatures=0", check=False)
    assert (refused.code, "kube_proxy_signatures is 0: a plan needs one at least" in refused.output) == (2, True)
    missing = ("-e", f"kube_proxy_plan={tmp_path / 'nope.json'}", "-e", f"kube_proxy_plan_digest={'0' * 64}")
    refused = playbook("sync-services", inventory, tmp_path, *missing, check=False)
    assert (refused.code, f"{tmp_path / 'nope.json'}: there is no plan" in refused.output) == (2, True)
    approve(plan, keys["alice"])
    two = ("--limit", "n1,n2")
    few = planned(
        playbook("plan_services", inventory, tmp_path, *two, "-e", f"kube_proxy_plan_file={tmp_path}/few.json")
    )
    approve(few, keys["alice"])
    more = playbook("sync-services", inventory, tmp_path, *nobody, "-e", f"kube_proxy_plan={few}", check=False)
    assert more.changed == {"n1": 1, "n2": 1, "n3": 0}
    assert "  n3 failed: is not in the plan; make a new plan" in more.summary


def test_a_plan_is_followed_where_nodes_are_as_it_found_them(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    playbook("sync-services", inventory, tmp_path)
    more = {"kube_proxy_cluster_dir": str(external_ip(tmp_path / "more"))}
    plan = following(playbook("plan_services", inventory, tmp_path, variables=more))
    had = playbook("sync-services", inventory, tmp_path, "--check").of("bundle")
    old = next(had).result["generations"]["n2"]
    # n2 and n3 go on to something that nobody knew of when the plan was made.
    moved = {"kube_proxy_cluster_dir": str(edited_shop(tmp_path / "moved"))}
    went = playbook("sync-services", inventory, tmp_path, "--limit", "n2,n3", variables=moved)
    before = kernel(nodes.node("n2"))
    assert "shop/new" in before
    done = playbook("sync-services", inventory, tmp_path, variables=plan, check=False)
    assert done.code == 2
    new = went.node("n2")["generation"]
    why = f"has generation {new}, but the plan was made when it had generation {old}, and says"
    assert any(line.startswith(f"  n2 failed: {why}") for line in done.summary), done.summary
    assert kernel(nodes.node("n2")) == before
    assert done.changed == {"n1": 1, "n2": 0, "n3": 0}
    assert "192.0.2.77" in kernel(nodes.node("n1"))
    # n1 has what the plan wants, which is as good.
    again = playbook("sync-services", inventory, tmp_path, "--limit", "n1", variables=plan)
    assert again.changed == {"n1": 0}


def test_a_plan_tells_of_settings_beside_services(inventory: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    first = planned(playbook("plan_services", inventory, tmp_path))
    shown = approve(first, keys["alice"])
    assert "  + node: settings\n      + mode iptables\n" in shown
    assert "  + node: sysctls.conf\n      + net.ipv4.conf.all.route_localnet = 1\n" in shown
    playbook("sync-services", inventory, tmp_path)
    config = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())
    config |= {"iptables": {"masqueradeAll": True, "localhostNodePorts": False}}
    more = {"kube_proxy_cluster_dir": str(external_ip(tmp_path / "more")), "kube_proxy_config": config}
    more["kube_proxy_allow_mode_change"] = "true"
    shown = approve(planned(playbook("plan_services", inventory, tmp_path, variables=more)), keys["alice"])
    assert "      + iptables.masqueradeAll true\n" in shown
    assert "      - net.ipv4.conf.all.route_localnet = 1\n" in shown
    assert "+ externalIPs 192.0.2.77" in shown.replace("~ externalIPs (none) ->", "+ externalIPs")


LATE = """\
- hosts: nodes
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.import_role: {name: agentless.kube_proxy.sync, tasks_from: look.yml}
    - ansible.builtin.command: cp -rT {{ other }} {{ kube_proxy_dir }}/bundles/n2
      delegate_to: localhost
      become: false
      run_once: true
    - ansible.builtin.import_role: {name: agentless.kube_proxy.sync, tasks_from: batch.yml}
"""


def test_a_bundle_that_is_written_while_a_plan_is_followed_is_not_carried(
    nodes: Lab, inventory: Path, tmp_path: Path
) -> None:
    plan = following(playbook("plan_services", inventory, tmp_path))
    argv = [str(BIN / "akp"), "render", "--cluster", str(external_ip(tmp_path / "more")), "--node", "n2"]
    argv += ["--config", str(SHOP / "kube-proxy.yaml"), "--output", str(tmp_path / "other")]
    subprocess.run(argv, check=True, capture_output=True)
    (tmp_path / "late.yml").write_text(LATE)
    variables = {**plan, "other": str(tmp_path / "other" / "n2")}
    late = playbook(str(tmp_path / "late.yml"), inventory, tmp_path, variables=variables, check=False)
    assert late.recap["n2"]["failed"] == 1
    assert "akp/bundles/n2: holds another bundle than the plan that is followed has for n2: generation " in late.output
    assert "kube-dns" in kernel(nodes.node("n1"))
    assert "kube-dns" not in kernel(nodes.node("n2"))
    again = playbook("sync-services", inventory, tmp_path, variables=plan)
    assert again.changed == {"n1": 0, "n2": 1, "n3": 0}


@pytest.fixture
def approved_shop(inventory: Path, tmp_path: Path) -> dict[str, Any]:
    """Nodes that have the shop by a plan, and variables under which Services need one; one node after the other."""
    variables: dict[str, Any] = {"kube_proxy_approval": "frontends", "kube_proxy_batches": [1, 1, 1]}
    plan = following(playbook("plan_services", inventory, tmp_path, variables=variables))
    playbook("sync-services", inventory, tmp_path, variables={**variables, **plan})
    return variables


def served(nodes: Lab) -> list[tuple[bool, bool]]:
    """Of each node, whether it has the address that was planned, and the endpoint that came later."""
    found = [kernel(node) for node in nodes.nodes]
    return [("192.0.2.77" in each, "10.244.2.99:8080" in each) for each in found]


def test_a_plan_that_fails_on_the_first_node_stops_no_endpoints(
    nodes: Lab, inventory: Path, tmp_path: Path, approved_shop: dict[str, Any]
) -> None:
    shop = external_ip(tmp_path / "more")
    variables = {**approved_shop, "kube_proxy_cluster_dir": str(shop)}
    plan = following(playbook("plan_services", inventory, tmp_path, variables=variables))
    # Nobody answers there: n1 goes back, n2 and n3 are not touched.
    probe = {"kube_proxy_probes": [{"port": 9, "address": "127.0.0.1", "timeout": 1}]}
    failed = playbook("sync-services", inventory, tmp_path, variables={**variables, **plan, **probe}, check=False)
    assert "the node went back to generation" in failed.output
    assert (failed.code, served(nodes)) == (2, [(False, False)] * 3)
    assert "the plan is not carried out, not on n1, n2, n3: follow it again, or make a new one" in failed.summary
    endpoint_more(shop)
    moved = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert moved.changed == dict.fromkeys(ALL, 1)
    assert "  Service/shop/catalog: was changed, and waits for approval" in moved.summary
    assert served(nodes) == [(False, True)] * 3


def test_nodes_that_took_half_a_plan_keep_it_and_get_endpoints(
    nodes: Lab, inventory: Path, tmp_path: Path, approved_shop: dict[str, Any]
) -> None:
    shop = external_ip(tmp_path / "more")
    variables = {**approved_shop, "kube_proxy_cluster_dir": str(shop)}
    plan = following(playbook("plan_services", inventory, tmp_path, variables=variables))
    sabotage(nodes.node("n2"))
    failed = playbook("sync-services", inventory, tmp_path, variables={**variables, **plan}, check=False)
    nodes.node("n2").run(["rm", RESTORE])
    assert (failed.code, served(nodes)) == (2, [(True, False), (False, False), (False, False)])
    assert "the plan is not carried out, not on n2, n3: follow it again, or make a new one" in failed.summary
    endpoint_more(shop)
    moved = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert moved.changed == dict.fromkeys(ALL, 1)
    assert served(nodes) == [(True, True), (False, True), (False, True)]
    assert playbook("sync-services", inventory, tmp_path, variables=variables).changed == dict.fromkeys(ALL, 0)
    # A plan for the two that are there; the third was away then, and gets what it missed.
    two = ("--limit", "n1,n2")
    plan = following(playbook("plan_services", inventory, tmp_path, *two, variables=variables))
    done = playbook("sync-services", inventory, tmp_path, *two, variables={**variables, **plan})
    assert done.changed == {"n1": 0, "n2": 1}
    rest = playbook("sync-services", inventory, tmp_path, variables=variables)
    assert rest.changed == {"n1": 0, "n2": 0, "n3": 1}
    assert served(nodes) == [(True, True)] * 3


def test_check_mode_tells_what_would_be_done_and_a_plan_what_could_be(
    nodes: Lab, inventory: Path, tmp_path: Path, approved_shop: dict[str, Any]
) -> None:
    shop = external_ip(tmp_path / "more")
    variables = {**approved_shop, "kube_proxy_cluster_dir": str(shop)}
    check = ("--check", "--diff")
    held = playbook("sync-services", inventory, tmp_path, *check, variables=variables)
    assert held.changed == dict.fromkeys(ALL, 0)
    assert "192.0.2.77" not in held.output
    assert "  Service/shop/catalog: was changed, and waits for approval" in held.summary
    # As strings, as -e key=value gives them.
    everything = ("-e", "kube_proxy_approval=all", "-e", "kube_proxy_planning=false")
    refused = playbook("sync-services", inventory, tmp_path, *check, *everything, variables=variables, check=False)
    assert (refused.code, refused.summary[0]) == (2, "3 nodes: 0 would change, 0 unchanged, 3 failed")
    assert "needs an approved plan" in refused.output
    plan = playbook("plan_services", inventory, tmp_path, *everything[:2], variables=variables)
    assert plan.summary[0] == "3 nodes: 3 would change, 0 unchanged, 0 failed"
    assert "192.0.2.77" in plan.output
    # The word that plans are made with lets nobody do anything.
    word = {**variables, "kube_proxy_planning": True}
    assert playbook("sync-services", inventory, tmp_path, variables=word).changed == dict.fromkeys(ALL, 0)
    following_it = playbook("sync-services", inventory, tmp_path, *check, variables={**variables, **following(plan)})
    assert following_it.changed == dict.fromkeys(ALL, 1)
    assert served(nodes) == [(False, False)] * 3


def test_a_plan_that_is_refused_leaves_the_one_before_as_it_is(
    inventory: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    playbook("sync-services", inventory, tmp_path)
    more = {"kube_proxy_cluster_dir": str(external_ip(tmp_path / "more"))}
    plan = planned(playbook("plan_services", inventory, tmp_path, variables=more))
    approve(plan, keys["alice"])
    before = {each.name: each.read_bytes() for each in plan.parent.glob("plan*")}
    assert len(before) == 5
    fewer = tmp_path / "fewer"
    shutil.copytree(SHOP, fewer)
    for name in ("catalog", "frontend", "metrics"):
        (fewer / f"{name}.yaml").unlink()
    gone = {"kube_proxy_cluster_dir": str(fewer), "kube_proxy_max_removed_percent": 5}
    refused = playbook("plan_services", inventory, tmp_path, variables=gone, check=False)
    assert refused.code == 2
    assert refused.summary[-1] == "no plan was written"
    assert not [line for line in refused.summary if line.startswith(("plan:", "digest:", "it is signed with"))]
    assert {each.name: each.read_bytes() for each in plan.parent.glob("plan*")} == before


def test_an_approver_can_compute_the_bundles_that_a_release_names(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    plan = planned(playbook("plan_services", inventory, tmp_path))
    own = []
    for node in nodes.nodes:
        facts = tmp_path / f"{node.name}.json"
        facts.write_text(node.run(["sh", str(PROGRAM), "facts"]).stdout)
        argv = [str(BIN / "akp"), "render", "--cluster", str(plan.with_name("plan.snapshot.json")), "--node", node.name]
        argv += ["--config", str(SHOP / "kube-proxy.yaml"), "--facts", str(facts), "--output", str(tmp_path / "own")]
        subprocess.run(argv, check=True, capture_output=True)
        manifest = described(tmp_path / "own" / node.name)
        own.append(f"bundle {node.name} {manifest['generation']} {manifest['digest']}")
    head = ("akp-release ", "cluster ", "counter ", "expires ", "note ")
    lines = plan.with_name("plan.release").read_text().splitlines()
    assert [each for each in lines if not each.startswith(head)] == own
    argv = [str(BIN / "akp"), "diff", str(SHOP), str(plan.with_name("plan.snapshot.json"))]
    assert subprocess.run(argv, check=False).returncode == 0, "it is that cluster"
