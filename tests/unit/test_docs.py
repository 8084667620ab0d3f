"""What the documentation points at is there."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from agentless_kube_proxy.cli import parser
from agentless_kube_proxy.proxy import limits
from agentless_kube_proxy.proxy.budget import BUNDLE_BYTES

from tests.pages import PAGES, ROOT, blocks


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    for link in links:
        target, _hash, heading = link.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings], (
                link
            )


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    pages = [page.relative_to(docs).as_posix() for page in docs.rglob("*.md") if page != docs / "README.md"]
    assert [page for page in pages if f"]({page})" not in index] == []


def test_no_fault_of_the_table_left_a_half_state_or_lost_a_service_or_did_not_heal() -> None:
    """The promises of the page, held against the run that it shows."""
    (row,) = re.findall(r"^\| \*\*all\*\* \|.*$", (ROOT / "docs" / "reliability.md").read_text(), re.M)
    _fault, _mode, injected, half, lost, unhealed, _seconds = (cell.strip() for cell in row.strip("|").split("|"))
    assert int(injected) >= 300
    assert (half, lost, unhealed) == ("0", "0", "0")


def test_the_limits_are_those_of_the_engine() -> None:
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([0-9][0-9,-]*[0-9])", (ROOT / "docs" / "safety.md").read_text(), re.M))
    first, last = limits.HEALTH_CHECK_PORTS
    assert {what.split(":")[0]: number for what, number in rows.items() if "Service" in what or "port" in what} == {
        "endpoints of one port, in one family": f"{limits.ENDPOINTS_PER_PORT:,}",
        "entries of one Service in one family": f"{limits.ENTRIES_PER_SERVICE:,}",
        "external and load balancer IPs of one Service": f"{limits.ADDRESSES_PER_SERVICE:,}",
        "source ranges of one Service": f"{limits.SOURCE_RANGES_PER_SERVICE:,}",
        "health check port": f"{first}-{last}",
        "all Services together, by an estimate": f"{BUNDLE_BYTES // 1_000_000}",
    }


# Page -> how many of its blocks tests run, from its beginning, and the test.
RUN = {
    "docs/tutorial.md": (99, "tests/conformance/test_tutorial.py"),
    "docs/approval.md": (1, "tests/collection/test_docs_commands.py"),
    "docs/explain.md": (2, "tests/unit/test_docs.py"),
    "examples/pipeline/README.md": (1, "tests/collection/test_pipeline.py"),
}
VARIABLES = {
    name
    for file in ROOT.glob("roles/*/meta/argument_specs.yml")
    for name in yaml.safe_load(file.read_text())["argument_specs"]["main"]["options"]
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_every_command_is_run_by_a_test_or_marked_as_an_illustration(page: Path) -> None:
    count, test = RUN.get(name_of(page), (0, ""))
    left = [block.commands for block in blocks(page)[count:] if not block.illustration]
    assert left == []
    assert page.name in (ROOT / test).read_text() if test else True


def typed() -> list[tuple[str, list[str]]]:
    """Every command of akp and ansible-playbook on every page, as words."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            for command in block.commands:
                for words in re.split(r"\s[|&]|;\s", command.replace("\\\n", " ")):
                    with contextlib.suppress(ValueError):
                        found.append((f"{name_of(page)}: {words.strip()}", shlex.split(words, comments=True)))
    return [(where, words) for where, words in found if words[:1] in (["akp"], ["ansible-playbook"])]


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in typed()])
def test_every_command_that_is_printed_is_complete(words: list[str]) -> None:
    """Also those of illustrations: options exist, required ones are there, and playbooks and variables are ours."""
    program, *arguments = words
    assert "…" not in words
    if program == "akp":
        # What follows a redirection is the shell's; the options of watch and status are Ansible's.
        own = [word for word in arguments if not word.startswith(">")]
        parser(own[0]).parse_args(own[:1] if own[0] in ("watch", "status") else own)
        return
    playbook = arguments[0].removeprefix("agentless.kube_proxy.").removeprefix("playbooks/").removesuffix(".yml")
    assert (ROOT / "playbooks" / f"{playbook}.yml").is_file()
    assert "-i" in arguments or playbook == "snapshot_services", "an inventory"
    given = [arguments[number + 1] for number, word in enumerate(arguments) if word == "-e"]
    names = {re.split("[=:]", each.strip("{ "))[0].strip('"') for each in given}
    assert names <= VARIABLES


@pytest.mark.parametrize("command", [each for block in blocks(ROOT / "docs/explain.md") for each in block.commands])
def test_the_commands_of_the_page_explain_work_as_they_stand(command: str, tmp_path: Path) -> None:
    shop = ROOT / "examples" / "shop"
    shutil.copytree(shop, tmp_path / "cluster", ignore=shutil.ignore_patterns("kube-proxy.yaml"))
    (tmp_path / "kube-proxy.yaml").symlink_to(shop / "kube-proxy.yaml")
    akp = str(Path(sys.executable).with_name("akp"))
    if "--bundle" in command:
        render = [
            akp,
            "render",
            "--cluster",
            "cluster",
            "--config",
            "kube-proxy.yaml",
            "--all-nodes",
            "--output",
            "bundles",
        ]
        subprocess.run(render, cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run([akp, *shlex.split(command, comments=True)[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Links(HTMLParser):
    """Where a page of the site leads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.mark.slow
def test_the_site_has_every_page_and_no_link_that_leads_nowhere() -> None:
    subprocess.run([sys.executable, str(ROOT / ".ci" / "docs")], check=True, capture_output=True)
    site = ROOT / "build" / "site"
    pages = {file: Links(file.read_text()) for file in site.rglob("*.html")}
    for kind, folder in (("module", "plugins/modules"), ("role", "roles")):
        for each in (ROOT / folder).iterdir():
            if each.stem not in ("__init__", "__pycache__"):
                assert site / "reference" / f"{each.stem}_{kind}.html" in pages
    playbooks = pages[site / "reference" / "playbooks.html"].anchors
    assert {file.stem for file in (ROOT / "playbooks").glob("*_*.yml")} <= playbooks
    for file, page in pages.items():
        for link in page.links:
            target, _hash, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            other = (file.parent / target).resolve() if target else file
            assert other.is_file(), f"{file}: {link}"
            assert not anchor or anchor in pages[other].anchors, f"{file}: {link}"
