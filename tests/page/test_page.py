"""The page, looked at in a browser: what it shows, to whom, and what it must not do."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.cli import main
from agentless_kube_proxy.report.collect import About, collect
from agentless_kube_proxy.report.page import plan_page, report_page
from agentless_kube_proxy.tasks.directory import WorkDirectory, write_json

from .browser import Browser, browser
from .fleet import SHOP, Fleet, Object, choices, fleet, objects, services, snapshot_of

IMAGES = Path(__file__).parents[2] / "docs" / "images"
VIEWS = (
    "overview",
    "services",
    "service/shop/checkout",
    "service/shop/orders",
    "service/shop/frontend",
    "nodes",
    "plan",
    "ledger",
    "freshness",
)
LOW = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))  # pages tell paths below it without the name of the account
        yield fleet(folder / ".akp", time.time())


@pytest.fixture(scope="module")
def page(troubled: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(report_page(troubled.report(allowed_signers=troubled.allowed)), encoding="utf-8")
    return file


def shop_page(folder: Path, found: list[Object], **about: Any) -> Path:
    file = folder / "page.html"
    told = About(**{"cluster": "shop", "source": "files", **about})
    file.write_text(report_page(collect(snapshot_of(found), choices(), {}, told)), encoding="utf-8")
    return file


def text(chrome: Browser, selector: str) -> str:
    return " ".join(str(chrome.evaluate(f"document.querySelector({selector!r}).innerText")).split())


def texts(chrome: Browser, selector: str) -> list[str]:
    return list(chrome.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)"))


def kept(name: str, picture: bytes, tmp_path: Path) -> None:
    """A picture is one if it shows something; with AKP_WRITE_DOCS=1 the docs get it."""
    assert picture.startswith(b"\x89PNG")
    assert 5_000 < len(picture) < 300_000, (name, len(picture))
    folder = IMAGES if os.environ.get("AKP_WRITE_DOCS") else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.png").write_bytes(picture)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (420, False), (420, True)])
def test_every_view_is_quiet_readable_and_no_wider_than_the_window(
    chrome: Browser, page: Path, width: int, dark: bool
) -> None:
    chrome.open(page, width=width, dark=dark)
    for view in VIEWS:
        chrome.go(view)
        assert chrome.evaluate("document.querySelector('section.on').id") == view.partition("/")[0]
        assert chrome.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
        assert chrome.evaluate(LOW) == [], view
    assert chrome.complaints() == []
    assert [url.partition("#")[0] for url in chrome.requests()] == [page.as_uri()]


def test_the_overview_says_first_what_is_wrong(chrome: Browser, page: Path, tmp_path: Path) -> None:
    chrome.open(page)
    assert text(chrome, "#overview h1") == "1 of 3 nodes as intended."
    found = texts(chrome, "#overview .list p")
    assert found[0] == "n2: drift"
    assert "KUBE-SVC-I5LIAMPLWKMBJ54B (shop/cart:http)" in found[1]
    assert found[2] == "n3: not reached"
    assert found[3].startswith("Connection timed out")
    assert "A plan waits for approval" in found
    assert "shop/orders has no endpoints" in found
    kept("report", chrome.picture(), tmp_path)
    chrome.open(page, width=420, dark=True)
    kept("report-phone", chrome.picture(), tmp_path)


def test_the_worst_node_comes_first_with_what_is_known_of_it(chrome: Browser, page: Path, tmp_path: Path) -> None:
    chrome.open(page, "nodes")
    rows = texts(chrome, "#nodes tbody tr")
    assert [row.split()[0] for row in rows] == ["drift", "not", "as"]
    assert "11 min ago" in rows[0]
    assert "1 rule" in rows[0]
    assert "40 s ago" in rows[2]
    kept("report-nodes", chrome.picture(), tmp_path)


def test_a_service_shows_who_gets_what_share_from_each_node(chrome: Browser, page: Path, tmp_path: Path) -> None:
    chrome.open(page, "service/shop/checkout", dark=True)
    assert "2 of 3 nodes can use none: there it is dropped." in text(chrome, ".pol.outside")
    assert chrome.evaluate("document.querySelectorAll('.wires path').length") == 3 + 4, (
        "frontends, and both lanes to each"
    )
    kept("report-service", chrome.picture(), tmp_path)
    seen_from(chrome, "n1")
    assert texts(chrome, ".ep")[0].split("\n")[:3] == ["10.244.2.31:8443", "inside 50 %", "checkout-1"]
    assert "outside: on another node; the policy is Local" in texts(chrome, ".ep")[0]
    assert text(chrome, ".pol.stop b") == "Dropped"
    seen_from(chrome, "n2")
    assert texts(chrome, ".ep .sh") == ["50 %", "50 %"], "the same inside and outside"
    chrome.go("service/shop/orders")
    assert text(chrome, ".pol.stop b") == "Refused"
    chrome.go("service/shop/nothing")
    assert "No Service shop/nothing" in text(chrome, "#service")


def seen_from(chrome: Browser, node: str) -> None:
    chrome.evaluate(
        "(() => { const s = document.querySelector('#from');"
        f"s.value = [...s.options].find(o => o.text === {node!r}).value; s.dispatchEvent(new Event('change')); }})()"
    )


def test_an_approver_sees_the_plan_in_colours_and_what_is_signed(
    chrome: Browser, page: Path, troubled: Fleet, tmp_path: Path
) -> None:
    plan = troubled.report(allowed_signers=troubled.allowed).plan
    assert plan is not None
    chrome.open(page, "plan")
    first = text(chrome, "#plan .chg")
    assert first.startswith("− removed shop/admin:http")
    assert "afterwards nothing answers at its addresses" in first
    assert "Before, 16 addresses could use its load balancer IP; then 256 addresses can." in text(chrome, "#plan")
    assert plan.release in text(chrome, "#plan")
    assert "alice has signed" in text(chrome, "#plan .sign")
    alone = tmp_path / "plan.html"
    alone.write_text(plan_page(plan), encoding="utf-8")
    chrome.open(alone)
    assert text(chrome, "h1") == "5 changes wait for approval."
    assert chrome.complaints() == []
    assert chrome.evaluate("document.scripts.length") == 0
    kept("report-plan", chrome.picture(most=1000), tmp_path)


def test_the_ledger_spells_out_failures_and_says_if_it_was_changed(
    chrome: Browser, page: Path, troubled: Fleet, tmp_path: Path
) -> None:
    chrome.open(page, "ledger")
    runs = texts(chrome, "#ledger .run")
    assert "bob" in runs[2]
    assert "changed 3 nodes, and failed on 1" in runs[2]
    assert "approved by alice" in runs[2]
    assert 'failed: the probe "cluster DNS" failed' in runs[2]
    kept("report-ledger", chrome.picture(), tmp_path)
    copy = WorkDirectory(tmp_path / "copy")
    lines = troubled.directory.ledger.read_text(encoding="utf-8").replace("bob", "eve", 1)
    copy.path.mkdir()
    copy.ledger.write_text(lines, encoding="utf-8")
    chrome.open(shop_page(tmp_path, objects(), directory=copy), "ledger")
    assert "its text does not have the hash that it carries" in text(chrome, ".band.bad")


def test_freshness_is_drawn_for_nodes_that_had_a_bad_moment(chrome: Browser, page: Path, tmp_path: Path) -> None:
    chrome.open(page, "freshness")
    assert texts(chrome, "#freshness .tl b") == ["n2", "n3"], "the worst of now comes first"
    assert texts(chrome, "#freshness .now")[0].startswith("drift since ")
    assert texts(chrome, "#freshness .legend li") == ["not confirmed lately", "not reached", "failed", "drift"]
    assert chrome.evaluate("document.querySelectorAll('#freshness .tl rect.f-drift').length") == 2, "one was put right"
    kept("report-freshness", chrome.picture(), tmp_path)


def test_services_are_found_by_what_is_known_of_them_filtered_and_ordered(
    chrome: Browser, page: Path, tmp_path: Path
) -> None:
    def names() -> list[str]:
        return texts(chrome, "#services tbody .name a")

    for query, found in (
        ("10.96.10.2", ["shop/checkout"]),
        ("catalog-2", ["shop/catalog"]),
        ("30443", ["shop/checkout"]),
        ("loadbalancer n1", ["shop/frontend"]),
    ):
        chrome.open(page, f"services/{query}")
        assert names() == found, query
    chrome.open(page, "services/zzz")
    assert 'Nothing matches "zzz"' in text(chrome, "#services tbody")
    chrome.evaluate("document.querySelector('#services .empty button').click()")
    assert len(names()) == 8
    chrome.evaluate(
        "[...document.querySelectorAll('#services .chip')].find(e => /outside/.test(e.textContent)).click()"
    )
    assert names() == ["shop/admin", "shop/checkout", "shop/frontend"]
    chrome.evaluate("[...document.querySelectorAll('#services th button')].pop().click()")
    assert names()[0] == "shop/admin", "it has the fewest endpoints"
    assert chrome.evaluate("[...document.querySelectorAll('#services th')].pop().ariaSort") == "ascending"
    kept("report-services", chrome.picture(), tmp_path)


def test_the_keyboard_alone_finds_and_opens_a_service(chrome: Browser, page: Path) -> None:
    chrome.open(page)
    chrome.press("/")
    wait(chrome, "document.activeElement.getAttribute('aria-label') === 'Search Services'")
    for key in "cat":
        chrome.press(key)
    wait(chrome, "document.querySelector('#services .count').textContent === '1 of 8 Services'")
    chrome.press("ArrowDown")
    chrome.press("Enter")
    wait(chrome, "location.hash === '#service/shop/catalog'")
    reached = []
    for _ in range(20):
        chrome.press("Tab")
        reached.append(chrome.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert chrome.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached[-1]
        if reached[-1] == "from":
            break
    assert reached[-1] == "from", reached


def wait(chrome: Browser, condition: str) -> None:
    end = time.monotonic() + 30
    while not chrome.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def test_names_that_would_be_markup_stay_text_and_the_policy_holds(chrome: Browser, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    found = objects()
    for each in found:
        for endpoint in each.get("endpoints") or ():
            endpoint["targetRef"] = {"kind": "Pod", "name": f"\u202e{evil}"}
        if each["kind"] == "Node":
            each["metadata"]["labels"]["topology.kubernetes.io/zone"] = evil
    directory = WorkDirectory(tmp_path / "dir").make()
    status = {"state": "applied", "drift": 1, "differences": [{"kind": evil, "rule": "{{7*7}}\u202e"}]}
    write_json(directory.answer_file("n1"), {"host": evil, "node": "n1", "status": status})
    file = shop_page(tmp_path, found, cluster=evil, source=evil, directory=directory)
    chrome.open(file)
    assert text(chrome, "header strong") == evil
    chrome.go("nodes")
    assert "{{7*7}}\\u202e" in text(chrome, "#nodes")
    chrome.go("service/shop/cart")
    assert evil in text(chrome, "#service .ends")
    assert "\u202e" not in text(chrome, "body")
    assert chrome.evaluate("document.images.length") == 0
    assert chrome.evaluate("document.scripts.length") == 2
    assert chrome.complaints() == []
    assert chrome.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'blocked')") == "blocked"
    assert (
        chrome.evaluate("(() => { try { document.body.innerHTML = 'x'; } catch { return 'blocked'; } })()") == "blocked"
    )
    assert any("Content Security Policy" in each for each in chrome.complaints())


def test_a_cluster_without_anything_says_what_is_missing(chrome: Browser, tmp_path: Path) -> None:
    chrome.open(shop_page(tmp_path, []))
    assert text(chrome, "h1") == "The cluster has no nodes."
    for view, words in (
        ("services", "No Services"),
        ("nodes", "No Nodes"),
        ("plan", "No plan"),
        ("ledger", "No ledger"),
        ("freshness", "Nothing was written down yet"),
    ):
        chrome.go(view)
        assert words in text(chrome, f"#{view}"), view
    assert chrome.complaints() == []


def test_ten_thousand_services_stay_usable(chrome: Browser, tmp_path: Path) -> None:
    gc.disable()  # as the command does
    large = shop_page(tmp_path, list(services(10_000, nodes=20)))
    gc.enable()
    assert large.stat().st_size < 8_000_000
    chrome("Performance.disable")
    # The processor's time of the page's thread: others may be busy on this machine.
    chrome("Performance.enable", timeDomain="threadTicks")

    def spent() -> float:
        found = {each["name"]: each["value"] for each in chrome("Performance.getMetrics")["metrics"]}
        return float(found["ScriptDuration"] + found["LayoutDuration"] + found["RecalcStyleDuration"])

    def cost(act: str) -> float:
        before = spent()
        chrome.evaluate(act)
        chrome.painted()
        return spent() - before

    chrome.open(large, "services")
    assert spent() < 3.0, "to open it"
    assert text(chrome, "#services .count") == "10,000 Services"
    assert chrome.evaluate("document.querySelectorAll('#services tbody tr').length") < 100, "only rows in sight exist"
    search = (
        "(async () => {{ const i = document.querySelector('#services input'); i.value = '{}';"
        "i.dispatchEvent(new Event('input')); await new Promise(done => setTimeout(done, 200)); }})()"
    )
    assert cost(search.format("node-12")) < 1.5, "the first search builds an index"
    assert text(chrome, "#services .count") == "2,500 of 10,000 Services"
    for query, count in (("svc-777", "11"), ("ns-7 nodeport", "0"), ("10.96.7.99", "1")):
        assert cost(search.format(query)) < 0.5, query
        assert text(chrome, "#services .count").startswith(f"{count} of"), query
    cost(search.format(""))
    for column in range(6):
        assert cost(f"document.querySelectorAll('#services th button')[{column}].click()") < 1.0, column
    assert cost("scrollTo(0, 200000)") < 0.5
    seen = texts(chrome, "#services tbody tr:not(.space)")
    assert 20 < len(seen) < 100
    assert chrome.evaluate("document.querySelector('#services tbody').offsetHeight") > 300_000
    assert cost("location.hash = '#service/ns-0/svc-40'") < 0.5
    assert chrome.complaints() == []


def test_on_paper_all_views_follow_each_other_in_light_colours(chrome: Browser, page: Path) -> None:
    chrome.open(page, dark=True)
    chrome("Emulation.setEmulatedMedia", media="print", features=[])
    assert chrome.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chrome.evaluate("[...document.querySelectorAll('section.view')].filter(e => e.offsetParent).length") == 6
    assert len(chrome("Page.printToPDF", printBackground=True)["data"]) > 20_000
    chrome("Emulation.setEmulatedMedia", media="")


def test_akp_report_writes_the_page_of_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shop.html"
    assert main(["report", "--cluster", str(SHOP), "--config", str(SHOP / "kube-proxy.yaml"), "-o", str(file)]) == 0
    assert "The states of 3 nodes." in file.read_text(encoding="utf-8")
    assert main(["report", "--config", str(SHOP / "kube-proxy.yaml"), "-o", str(file)]) == 2
    assert "say where the cluster is" in capsys.readouterr().err
