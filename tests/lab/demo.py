"""`make demo`: three nodes, a shop, and its Services by ansible-playbook. Fails if a packet goes astray."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import yaml
from rich.markup import escape
from rich.rule import Rule

from .demo_cluster import SHOP, Cluster, Manifests, api
from .lab import Lab
from .manifests import realise
from .prompt import ROOT, CommandError, Prompt, console, say_settings, step
from .record import LabError
from .traffic import Call, calls_of, show_calls, without

PLAYBOOKS = ROOT / "playbooks"
OUTPUT = ROOT / "tests" / "output"
LEAVING = "catalog-2"
# What a hurried operator might do to the Service catalog on a node.
EDITS = {
    "iptables": "iptables -t nat -I KUBE-SVC-ITBI3OHKD3FRXPDK -j RETURN",
    "nftables": "nft insert rule ip kube-proxy service-N3ITGKYC-shop/catalog/tcp/http return",
    "ipvs": "ipvsadm -d -t 10.96.10.4:80 -r 10.244.1.51:8080",
    "userspace": "iptables -t nat -I KUBE-PORTALS-CONTAINER -d 10.96.10.4 -j RETURN",
}
# The programs without which a mode has nothing to run on, and their packages in Debian.
NEEDS = {
    "iptables": {"iptables-restore": "iptables"},
    "nftables": {"nft": "nftables"},
    "ipvs": {"linux.uml": "user-mode-linux", "ipvsadm": "ipvsadm", "ipset": "ipset"},
    "userspace": {"haproxy": "haproxy", "nginx": "nginx"},
}
REMARKS = {
    "ipvs": "Each node has a user-mode kernel of its own, because the machine's kernel need not have ip_vs. Every "
    "system call there goes through another process, and a run of akp-node is many short processes: this takes about "
    "five minutes.",
    "userspace": "A proxy on the node answers: pods see the node's address, source ranges have no effect, and Services "
    "answer in the family of their first address alone, as with kube-proxy 1.25.",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--mode", choices=[*EDITS, "kernelspace"], default="iptables")
    parser.add_argument("--api", action="store_true", help="against a real API server, with akp watch")
    arguments = parser.parse_args()
    mode = arguments.mode
    try:
        with tempfile.TemporaryDirectory(prefix="akp-demo-") as work:
            return preview(Path(work)) if mode == "kernelspace" else demo(Path(work), mode, arguments.api)
    except (LabError, CommandError) as error:
        console.print(f"[bold red]The demo cannot go on:[/] {escape(str(error))}")
        return 1


def demo(work: Path, mode: str, with_api: bool) -> int:
    missing = [f"{name} (package {package})" for name, package in NEEDS[mode].items() if not shutil.which(name)]
    if missing:
        raise LabError(f"mode {mode} needs {', '.join(missing)}")
    if mode in REMARKS:
        console.print(REMARKS[mode])
    with step("Three nodes with sshd, a client outside, and a controller between them"):
        lab = Lab(f"demo-{os.getpid()}", 0 if mode == "ipvs" else 3, uml=3 if mode == "ipvs" else 0)
    with lab:
        with step("The pods of examples/shop, and one more to call from"):
            realise(lab, SHOP)
            lab.add_pod("client", "n1")
        with contextlib.ExitStack() as stack:
            cluster: Cluster = Manifests.of_shop(work / "cluster")
            if with_api:
                with step("A real API server with the Services of the shop"):
                    cluster = stack.enter_context(api(lab, work))
            write_inputs(lab, work, mode, cluster)
            began = time.monotonic()
            wrong = story(lab, work, mode, cluster)
            took = time.monotonic() - began
    for line in wrong:
        console.print(f"[bold red]Not as defined:[/] {escape(line)}")
    if not wrong:
        console.print(f"[bold green]Every packet went where the Services say.[/] {took:.0f} s; the lab is gone.")
    return 1 if wrong else 0


def write_inputs(lab: Lab, work: Path, mode: str, cluster: Cluster) -> None:
    """What an operator has: the cluster, the configuration of its kube-proxy, and an inventory that names both."""
    config = yaml.safe_load((SHOP / "kube-proxy.yaml").read_text())
    (work / "kube-proxy.yaml").write_text(yaml.safe_dump(config | {"mode": mode}, sort_keys=False))
    variables = {
        **cluster.variables,
        "kube_proxy_config": str(work / "kube-proxy.yaml"),
        "kube_proxy_dir": str(work / "akp"),
    }
    if mode == "ipvs":  # Kernels that are slow each need not wait for each other.
        variables["kube_proxy_batches"] = "100%"
    own = work / "inventory" / "group_vars"
    own.mkdir(parents=True)
    (own / "all.yml").write_text(yaml.safe_dump(variables, explicit_start=True, sort_keys=False))
    lab.inventory(work / "inventory" / "hosts.yml")


def story(lab: Lab, work: Path, mode: str, cluster: Cluster) -> list[str]:
    """Runs every command that an operator needs, and returns what is not as defined."""
    inventory, prompt = work / "inventory", Prompt(cluster.control_host)
    calls = calls_of(lab, mode)
    catalog = [call for call in calls if call.to.startswith("catalog")]
    say_settings()
    prompt.type_in("cat", inventory / "group_vars" / "all.yml")

    chapter("A first run: each node gets its rules")
    play(prompt, "sync-services.yml", inventory)
    wrong = show_calls(lab, calls)
    good = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    change = by_plan if isinstance(cluster, Manifests) else by_watch
    wrong += change(lab, prompt, inventory, cluster, catalog)

    chapter("A rule of n2 is edited by hand, and found: verify_services fails, as it should")
    prompt.type_in("ansible", "n2", "-i", inventory, "-m", "ansible.builtin.raw", "-a", EDITS[mode])
    play(prompt, "verify_services.yml", inventory, expect=2)

    chapter(f"Rollback: nodes have the rules of the first run again, so {LEAVING} answers, and the edit is gone")
    play(prompt, "rollback_services.yml", inventory, "-e", f"kube_proxy_rollback_time={good}")
    play(prompt, "verify_services.yml", inventory)
    wrong += show_calls(lab, catalog)

    chapter("Where does a packet go by what the cluster says now, and why?")
    prompt.type_in(
        "akp", "explain", "--dir", work / "akp", "--node", "n1", "--from", "shop/cart-1", "--to", "shop/catalog:http"
    )

    chapter("All of it as one page, to be opened in a browser")
    OUTPUT.mkdir(exist_ok=True)
    page = OUTPUT / f"demo-{mode}.html"
    prompt.type_in("akp", "report", "--dir", work / "akp", "-o", page)
    console.print(f"The page: {page}\n", soft_wrap=True)
    return wrong


def by_plan(lab: Lab, prompt: Prompt, inventory: Path, cluster: Cluster, catalog: list[Call]) -> list[str]:
    """A pod leaves, and an operator carries that out after a look."""
    chapter(f"The pod {LEAVING} leaves its Service: what would change?")
    cluster.remove(LEAVING)
    play(prompt, "sync-services.yml", inventory, "--check", "--diff")
    wrong = unmoved(lab, catalog)

    chapter("A second run: traffic moves")
    play(prompt, "sync-services.yml", inventory)
    return wrong + show_calls(lab, [without(call, LEAVING) for call in catalog])


def by_watch(lab: Lab, prompt: Prompt, inventory: Path, cluster: Cluster, catalog: list[Call]) -> list[str]:
    """A pod leaves, and a process on the control host carries that out at once."""
    chapter(f"akp watch follows the API server. The pod {LEAVING} leaves its Service: traffic moves")
    with prompt.leave_running("akp", "watch", "-i", inventory) as watch:
        watch.show_until("up to date")
        cluster.remove(LEAVING)
        watch.show_until("shop/catalog-ipv4", "shop/catalog-ipv6")
    return show_calls(lab, [without(call, LEAVING) for call in catalog])


def preview(work: Path) -> int:
    """What a node of Windows would be given: there is no Windows here to apply it."""
    console.print(
        "kernelspace is the mode of Windows nodes, and a preview, never run on Windows: the lab has none, so no node "
        "is changed and no packet sent. n3 becomes a Windows node of the shop, and akp renders what it would be given."
    )
    cluster, bundles = work / "cluster", work / "bundles"
    shutil.copytree(SHOP, cluster, ignore=shutil.ignore_patterns("kube-proxy.yaml"))
    nodes = list(yaml.safe_load_all((SHOP / "nodes.yaml").read_text()))
    for node in nodes:
        if node["metadata"]["name"] == "n3":
            node["metadata"].setdefault("labels", {})["kubernetes.io/os"] = "windows"
    (cluster / "nodes.yaml").write_text(yaml.safe_dump_all(nodes, sort_keys=False))
    config = SHOP / "kube-proxy.yaml"
    prompt = Prompt()
    prompt.type_in("akp", "render", "--cluster", cluster, "--config", config, "--node", "n3", "--output", bundles)
    prompt.type_in("cut", "-c", "-200", bundles / "n3" / "hns.json")
    return 0


def chapter(title: str) -> None:
    console.print(Rule(title))


def play(prompt: Prompt, name: str, inventory: Path, *options: str, expect: int = 0) -> None:
    prompt.type_in("ansible-playbook", PLAYBOOKS / name, "-i", inventory, *options, expect=expect)


def unmoved(lab: Lab, calls: list[Call]) -> list[str]:
    """A check changes nothing: the same pods answer as before."""
    return [f"--check moved {call.to}" for call in calls if not call.allows(lab, set(call.make()))]


if __name__ == "__main__":
    sys.exit(main())
