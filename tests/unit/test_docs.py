"""What the documentation points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agentless_kube_proxy.proxy import limits
from agentless_kube_proxy.proxy.budget import BUNDLE_BYTES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


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
