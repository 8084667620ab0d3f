"""Variables as people type them: what -e key=value gives are words, and "false" and "50" mean what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentless_kube_proxy.ledger import entries

from tests.lab import Lab

from .control import ControlHost, control_host
from .play import ROOT, SHOP, Run, playbook
from .test_rival import kube_proxy

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())


CONDITIONS = {"when", "that", "failed_when", "changed_when", "until"}


def expressions(file: Path) -> Iterator[str]:
    """What Jinja evaluates in a file of a role."""
    text = file.read_text()
    yield from (part for parts in re.findall(r"\{\{(.*?)\}\}|\{%(.*?)%\}", text, re.S) for part in parts)
    if file.suffix == ".yml":
        yield from conditions(yaml.safe_load(text))


def conditions(content: Any) -> Iterator[str]:
    if isinstance(content, list):
        for each in content:
            yield from conditions(each)
    elif isinstance(content, dict):
        for key, value in content.items():
            if key in CONDITIONS:
                yield from map(str, value if isinstance(value, list) else [value])
            else:
                yield from conditions(value)


def kind_of(option: dict[str, Any]) -> str:
    """The type of a variable; what may be anything is a list if its default or its description says so."""
    told = str(option["description"])
    # A text with lines is taken as such, not for words.
    listed = "as text" not in told and (isinstance(option.get("default"), list) or "A list of" in told)
    return "list" if option["type"] == "raw" and listed else str(option["type"])


def variables(role: str, *kinds: str) -> dict[str, str]:
    """The variables of a role that are of these kinds."""
    file = ROOT / "roles" / role / "meta" / "argument_specs.yml"
    options = yaml.safe_load(file.read_text())["argument_specs"]["main"]["options"]
    return {name: kind_of(each) for name, each in options.items() if kind_of(each) in kinds}


def uses(files: Iterable[Path], found: dict[str, str]) -> Iterator[tuple[Path, str, str, str]]:
    """Where files evaluate these variables: file, expression, variable, kind."""
    for file in sorted(files):
        for text in expressions(file):
            yield from ((file, text, name, kind) for name, kind in found.items() if re.search(rf"\b{name}\b", text))


def role_uses(role: str, *kinds: str) -> Iterator[tuple[Path, str, str, str]]:
    """Where a role evaluates its variables of these kinds."""
    folder = ROOT / "roles" / role
    files = [each for part in ("tasks", "handlers", "vars", "templates") for each in folder.glob(f"{part}/*")]
    return uses(files, variables(role, *kinds))


def playbook_uses(*kinds: str) -> Iterator[tuple[Path, str, str, str]]:
    """Where playbooks evaluate variables of these kinds, which may be those of any role."""
    found = {name: kind for role in ROLES for name, kind in variables(role, *kinds).items()}
    return uses((ROOT / "playbooks").glob("*.yml"), found)


def made_list(text: str, name: str) -> bool:
    """Whether a variable is made a list everywhere in an expression."""
    taken = re.sub(rf"{name}( \| default\([^)]*\))? \| agentless\.kube_proxy\.as_(list|batches)\('{name}'\)", "", text)
    return name not in taken


@pytest.mark.parametrize("role", ROLES)
def test_numbers_and_truths_are_made_such_wherever_they_are_used(role: str) -> None:
    for file, text, name, kind in role_uses(role, "int", "bool"):
        for use in re.finditer(rf"\b{name}\b(?! \| {kind}\b)", text):
            # Where it becomes part of a text, any text will do.
            joined = text[: use.start()].endswith("~ ")
            assert joined or text.strip() == name, f"{file}: {name} without | {kind}"


# Other roles give `starter` its variables; no operator types them.
@pytest.mark.parametrize("role", [role for role in ROLES if role != "starter"])
def test_lists_are_made_such_wherever_they_are_used(role: str) -> None:
    for file, text, name, _kind in role_uses(role, "list"):
        assert made_list(text, name), f"{file}: {name} without as_list"


def test_playbooks_make_lists_such_too() -> None:
    found = list(playbook_uses("list"))
    assert "kube_proxy_batches" in {name for _, _, name, _ in found}
    for file, text, name, _kind in found:
        assert made_list(text, name), f"{file}: {name} without as_list or as_batches"


def test_actions_take_lists_as_options_or_make_them_such() -> None:
    lists = {name for role in ROLES for name in variables(role, "list")}
    assert {"kube_proxy_batches", "kube_proxy_external_ip_cidrs"} <= lists
    for file in sorted((ROOT / "plugins" / "action").glob("*.py")):
        text = file.read_text()
        for name in lists & set(re.findall(r"""task_vars(?:\.get\(|\[)["'](\w+)""", text)):
            assert re.search(rf"""as_(list|batches)\([^()]*, "{name}"\)""", text), f"{file}: {name}"


def typed(name: str, inventory: Path, work: Path, *words: str, **options: Any) -> Run:
    return playbook(name, inventory, work, *(part for word in words for part in ("-e", word)), **options)


def test_a_node_is_prepared_as_the_words_say(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    node = nodes.node("n1")
    with kube_proxy(node):
        words = ("kube_proxy_manage_packages=false", "kube_proxy_hosts=n1")
        refused = typed("prepare_nodes", inventory, tmp_path, *words, "kube_proxy_allow_running=false", check=False)
        assert "kube-proxy runs on n1" in " ".join(refused.output.split())
        typed("prepare_nodes", inventory, tmp_path, *words, "kube_proxy_allow_running=true")
        config = tmp_path / "kube-proxy.yaml"
        config.write_text(
            "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration, mode: nftables}"
        )
        typed(
            "prepare_nodes",
            inventory,
            tmp_path,
            *words,
            "kube_proxy_allow_running=true",
            f"kube_proxy_config={config}",
        )
        _comment, *modules = node.run(["cat", "/etc/modules-load.d/kube-proxy.conf"]).stdout.splitlines()
        assert modules == ["nf_conntrack", "nf_tables"]


def test_what_runs_at_boot_is_what_the_words_say(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    node = nodes.node("n1")

    def cron(*words: str) -> list[str]:
        typed("boot_services", inventory, tmp_path, "kube_proxy_hosts=n1", *words)
        lines = node.run(["cat", "/etc/cron.d/akp-restore"]).stdout.splitlines()
        return [line.split(" root ")[0] for line in lines if " root " in line]

    try:
        assert cron("kube_proxy_boot_check_minutes=0") == ["@reboot"]
        assert cron("kube_proxy_boot_check_minutes=1") == ["@reboot", "* * * * *"]
        assert cron("kube_proxy_boot_check_minutes=60") == ["@reboot", "0 * * * *"]
        assert node.run(["ls", "/usr/local/sbin"]).stdout.split() == ["akp-leave", "akp-node"]
    finally:
        words = ("kube_proxy_hosts=n1", "kube_proxy_boot_state=absent", "kube_proxy_install=false")
        typed("boot_services", inventory, tmp_path, *words)
    assert node.run(["ls", "/usr/local/sbin"]).stdout == "", "nobody else needs the program"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ControlHost]:
    with control_host(tmp_path / "control") as made:
        yield made


def test_a_schedule_is_what_the_words_say(host: ControlHost, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("n1:\n")

    def script(*words: str, **options: Any) -> str:
        own = ("kube_proxy_dir=", "kube_proxy_schedule_with=cron")
        how: dict[str, Any] = {"environment": host.environment, "prefix": host.command([]), **options}
        run = typed("schedule_services", inventory, host.home / "play", *own, *words, **how)
        return run.output if run.code else (host.home / ".akp" / "default" / "schedule" / "run").read_text()

    text = script("kube_proxy_schedule_minutes=60", "kube_proxy_schedule_jitter=9", "kube_proxy_schedule_log_keep=0")
    assert "$1 % 10 }" in text
    assert "rm log\n" in text
    assert "0 * * * * " in host.run("crontab", "-l")
    assert "sleep" not in script("kube_proxy_schedule_minutes=10", "kube_proxy_schedule_jitter=0")
    text = script("kube_proxy_schedule_arguments=--limit,n1", "kube_proxy_schedule_inventory=/a/hosts.yml")
    assert "  --limit \\\n  n1 \\\n" in text
    assert text.count("--inventory ") == text.count("--inventory /a/hosts.yml ") == 1
    wrong = " ".join(script("kube_proxy_schedule_inventory=n1,", check=False).split())
    assert "kube_proxy_schedule_inventory: 'n1,' is neither a list nor words with commas between" in wrong
    assert """-e '{"kube_proxy_schedule_inventory": ["n1,"]}'""" in wrong
    long = script("kube_proxy_schedule_minutes=10", "kube_proxy_schedule_jitter=1000", check=False)
    assert "is 1000 seconds, which is not less than the 10 minutes" in " ".join(long.split())


def test_a_run_takes_numbers_and_truths_as_words(nodes: Lab, inventory: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(SHOP / "nodes.yaml", empty)
    words = (
        "kube_proxy_confirm_within=20",
        "kube_proxy_verify=false",
        "kube_proxy_install=false",
        "kube_proxy_batches=2",
    )
    first = typed("sync-services", inventory, tmp_path, *words, "kube_proxy_batches=1,100%")
    assert first.output.count("PLAY [Give each node its rules]") == 2
    lost = (f"kube_proxy_cluster_dir={empty}", "kube_proxy_max_unhealthy_percent=50")
    refused = typed(
        "sync-services", inventory, tmp_path, *words, *lost, "kube_proxy_max_removed_percent=50", check=False
    )
    assert "more than 50 %" in " ".join(refused.output.split())
    meant = typed("sync-services", inventory, tmp_path, *words, *lost, "kube_proxy_max_removed_percent=100")
    assert meant.changed == dict.fromkeys(("n1", "n2", "n3"), 1)
    cleaned = typed("cleanup_services", inventory, tmp_path, "kube_proxy_batches=1,100%")
    assert cleaned.changed == dict.fromkeys(("n1", "n2", "n3"), 1)
    assert cleaned.output.count("PLAY [Clean up Services]") == 2
    for name in ("sync-services", "cleanup_services"):
        none = " ".join(typed(name, inventory, tmp_path, "kube_proxy_batches=1,ten", check=False).output.split())
        assert "kube_proxy_batches: 'ten' is neither a number of nodes nor a percentage of them" in none
        assert "Unexpected Exception" not in none
    wrong = typed("sync-services", inventory, tmp_path, "kube_proxy_keep=-1", check=False)
    assert "  n1 failed: kube_proxy_keep: -1 is no number of bundles, nor 0" in wrong.summary
    assert nodes.node("n1").run(["ls", "/usr/local/sbin"]).stdout == ""


def test_a_publication_is_signed_with_the_keys_that_the_words_name_and_tells_its_entry_also_when_it_fails(
    tmp_path: Path,
) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("n1:\n")
    for name in ("a", "b"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    work = tmp_path / "work"
    where = f"kube_proxy_publish_path={tmp_path / 'www'}"
    ledger = work / "akp" / "ledger.jsonl"

    def published(keys: str, **options: Any) -> Run:
        words = ("-e", where, "-e", f"kube_proxy_publish_keys='{keys}'")
        run = playbook("publish_services", inventory, work, *words, **options)
        last = list(entries(ledger))[-1]
        assert f"ledger: {ledger}, entry {last['number']}, head {last['hash']}" in run.output
        return run

    published(f"{tmp_path / 'a'}, {tmp_path / 'b'}")
    assert (tmp_path / "www" / "n1.release").read_text().count("-----BEGIN SSH SIGNATURE-----") == 2
    failed = published(str(tmp_path / "nobody"), variables={"kube_proxy_publish_renew": True}, check=False)
    assert "ssh-keygen could not sign" in failed.output
    assert next(failed.of("publish")).result["ledger"].startswith(f"ledger: {ledger}, entry 4")
