"""akp-pull, from a real nginx, with whatever a server or the way to it can do wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentless_kube_proxy.bundle.release import join, split

from tests.lab.program import PROGRAMS, PULL
from tests.lab.publisher import Publisher
from tests.lab.web import WebServer
from tests.node.host import Host, Result, failing_restores, with_path
from tests.node.shims import called, path_with, shim
from tests.node.signing import etc_of, new_key

SHOP = Path(__file__).parents[2] / "examples" / "shop"


def pull(host: Host, *options: str, **env: str) -> Result:
    """Run akp-pull, with the node program of the host's mode."""
    return host.akp(*options, program=PULL, AKP_NODE_PROGRAM=str(PROGRAMS[host.mode]), **env)


class Site:
    """A host that pulls from an nginx of its own, and the shop that is published there."""

    fetcher = "curl"

    def __init__(self, host: Host, web: WebServer, directory: Path) -> None:
        self.host, self.web = host, web
        self.cluster = directory / "cluster"
        shutil.copytree(SHOP, self.cluster)
        self.publisher = Publisher(directory / "publisher", web.www)
        self.configure()

    def configure(self, url: str = "", **settings: str) -> None:
        """Write the host's node.conf."""
        etc_of(self.host).mkdir(exist_ok=True)
        (etc_of(self.host) / "allowed_signers").write_text(self.publisher.allowed_signers)
        values = {
            "cluster": "shop",
            "node": "n1",
            "unsigned": "cleanup rollback",
            "url": url or self.web.url,
            **settings,
        }
        (etc_of(self.host) / "node.conf").write_text("".join(f"{key} {value}\n" for key, value in values.items()))

    def publish(self, address: str = "10.244.1.21", **options: float) -> None:
        """Publish, with this address for an endpoint of the frontend."""
        text = (SHOP / "frontend.yaml").read_text().replace("10.244.1.21", address)
        (self.cluster / "frontend.yaml").write_text(text)
        self.publisher.publish(self.cluster, **options)

    def pull(self, *options: str) -> Result:
        return pull(self.host, *options)

    def pulled(self) -> dict[str, object]:
        """Pull with success."""
        result = self.pull()
        assert result.code == 0, result.stdout + result.stderr
        return result.json

    def endpoint(self, address: str) -> bool:
        """Whether the host sends traffic there."""
        return f"--to-destination {address}:" in self.host.rules()

    def refuses(self, reason: str, code: int = 2) -> None:
        """A pull ends with this reason, and the host keeps what it has."""
        before = self.host.rules()
        result = self.pull()
        assert (result.code, reason in result.json["error"]) == (code, True), result.stdout + result.stderr
        assert self.host.rules() == before
        assert json.loads((self.host.state / "pull" / "last").read_text()) == result.json

    def rewrite(self, change: Callable[[str], str], *, signed: bool = True) -> None:
        """Change the text of the published release, and sign it again or not."""
        file = self.web.www / "n1.release"
        text, signatures = split(file.read_text())
        text = change(text)
        file.write_text(join(text, [self.publisher.sign(text)] if signed else signatures))
        later = time.time() + 100
        os.utime(file, (later, later))


@pytest.fixture
def site(new_host: Callable[..., Host], tmp_path: Path) -> Iterator[Site]:
    host = new_host()
    with WebServer(["ip", "netns", "exec", host.name]) as web:
        yield Site(host, web, tmp_path)


@pytest.fixture(params=["curl", "wget", "busybox"])
def any_fetcher(request: pytest.FixtureRequest, new_host: Callable[..., Host], tmp_path: Path) -> Iterator[Site]:
    """With each program that can fetch; busybox brings shell and wget."""
    host = new_host("nft", "busybox" if request.param == "busybox" else "dash")
    if request.param == "busybox":
        host.akp("--version")  # makes the directory of applets
        (host.directory / "busybox" / "wget").symlink_to(str(shutil.which("busybox")))
    with WebServer(["ip", "netns", "exec", host.name]) as web:
        found = Site(host, web, tmp_path)
        found.fetcher = "curl" if request.param == "curl" else "wget"
        found.configure(fetcher=found.fetcher)
        yield found


def test_what_is_published_is_applied_and_news_come_as_deltas(any_fetcher: Site) -> None:
    site = any_fetcher
    site.publish()
    answer = site.pulled()
    assert (answer["changed"], answer["fetched"], answer["delta"]) == (True, "new", False)
    assert site.endpoint("10.244.1.21")
    assert answer["generation"] == site.publisher.release("n1").bundles[0].generation
    site.web.requests()
    # A poll without news is one request, and nothing comes with it.
    answer = site.pulled()
    assert (answer["changed"], answer["fetched"]) == (False, "unchanged")
    assert site.web.requests() == ["8080 GET /n1.release 304 0"]
    site.publish("10.244.1.99")
    answer = site.pulled()
    assert (answer["changed"], answer["delta"]) == (True, True)
    assert site.endpoint("10.244.1.99")
    assert not site.endpoint("10.244.1.21")
    sizes = [each.size for each in site.publisher.release("n1").objects]
    assert answer["bytes"] == sizes[1] < sizes[0] / 2
    assert len(site.web.requests()) == 2


def test_a_server_without_etags_or_without_dates_will_do(any_fetcher: Site) -> None:
    site = any_fetcher
    site.publish()
    fetcher = {"fetcher": site.fetcher}
    site.configure(f"{site.web.url}/dates", **fetcher)
    site.pulled()
    site.web.requests()
    assert site.pulled()["fetched"] == "unchanged"
    assert site.web.requests() == ["8080 GET /dates/n1.release 304 0"]
    site.configure(f"{site.web.url}/no-validators", **fetcher)
    assert site.pulled()["fetched"] == "unchanged"
    assert site.web.requests()[0].startswith("8080 GET /no-validators/n1.release 200")


def test_a_file_share_will_do(site: Site) -> None:
    site.publish()
    site.configure(f"file://{site.web.www}")
    assert site.pulled()["changed"] is True
    assert site.pulled()["fetched"] == "unchanged"
    site.publish("10.244.1.99")
    assert site.pulled()["delta"] is True
    site.configure(str(site.web.www / "nowhere"))
    answer = site.pulled()
    assert (answer["fetched"], answer["changed"]) == ("offline", False)
    assert site.endpoint("10.244.1.99")


def test_a_certificate_of_the_host_and_a_ca_of_ones_own(new_host: Callable[..., Host], tmp_path: Path) -> None:
    host = new_host()
    with WebServer(["ip", "netns", "exec", host.name], tls=True) as web:
        site = Site(host, web, tmp_path)
        site.publish()
        url = f"https://127.0.0.1:{web.TLS_PORT}"
        names = {"ca": "ca.pem", "certificate": "client.pem", "key": "client.key"}
        files = {name: str(web.directory / file) for name, file in names.items()}
        for fetcher in ("curl", "wget"):
            site.configure(url, fetcher=fetcher)
            assert site.pulled()["fetched"] == "offline"  # nobody vouches for the server
            site.configure(url, fetcher=fetcher, ca=files["ca"])
            assert site.pulled()["fetched"] == "offline"  # nobody vouches for the host: 400
            site.configure(url, fetcher=fetcher, **files)
            assert site.pulled()["fetched"] == "new"
            assert site.pulled()["fetched"] == "unchanged"
            assert host.akp("cleanup").code == 0


def test_through_a_proxy(site: Site) -> None:
    site.publish()
    for fetcher in ("curl", "wget"):
        site.configure(proxy=f"http://127.0.0.1:{site.web.PROXY_PORT}", fetcher=fetcher)
        site.web.requests()
        assert site.pulled()["fetched"] == "new"
        ports = [line.split()[0] for line in site.web.requests()]
        assert ports.count("8081") == ports.count("8080") == 2
        assert site.host.akp("cleanup").code == 0


def test_a_report_is_left_when_there_is_something_to_say(site: Site) -> None:
    reports = site.web.www / "reports"
    for fetcher in ("curl", "wget"):
        site.publish()
        site.configure(report=f"{site.web.url}/reports/", fetcher=fetcher)
        answer = site.pulled()
        assert json.loads((reports / "n1.json").read_text()) == answer
        # A poll without news stays one request.
        site.web.requests()
        site.pulled()
        assert len(site.web.requests()) == 1
        site.rewrite(lambda text: text, signed=False)
        site.rewrite(lambda text: text.replace("shop", "other"))
        site.refuses("cluster")
        assert json.loads((reports / "n1.json").read_text())["ok"] is False
        assert site.host.akp("cleanup").code == 0
        (reports / "n1.json").unlink()
        (site.web.www / "n1.release").unlink()
    site.publish("10.244.1.99")
    site.configure(report=f"{site.web.directory}/status.json")
    answer = site.pulled()
    assert json.loads((site.web.directory / "status.json").read_text()) == answer
    # Nobody there to take it: no reason to fail.
    site.publish()
    site.configure(report="http://127.0.0.1:1/")
    assert site.pulled()["changed"] is True


def test_what_was_tampered_with_is_refused(site: Site) -> None:
    site.publish()
    site.pulled()
    site.publish("10.244.1.99")
    release = site.publisher.release("n1")
    objects = site.web.www / "objects"
    kept = {each.sha256: (objects / each.sha256).read_bytes() for each in release.objects}
    for name, data in kept.items():
        (objects / name).write_bytes(data[:-20] + bytes(20))
    site.refuses("is not what the release names")
    for name, data in kept.items():
        (objects / name).write_bytes(data + b"more")
    site.refuses("")
    # Cut short on the server.
    for name, data in kept.items():
        (objects / name).write_bytes(data[: len(data) // 2])
    site.refuses("")
    for name in kept:
        (objects / name).unlink()
    site.refuses("404")
    for name, data in kept.items():
        (objects / name).write_bytes(data)
    assert site.pulled()["changed"] is True
    assert site.endpoint("10.244.1.99")


def test_releases_that_do_not_count(site: Site, tmp_path: Path) -> None:
    site.publish()
    site.pulled()
    replay = (site.web.www / "n1.release").read_bytes()
    site.publish("10.244.1.99")
    good = (site.web.www / "n1.release").read_text()
    release = site.publisher.release("n1")

    site.rewrite(lambda text: text.replace("expires 1", "expires 2"), signed=False)
    site.refuses("does not fit the text")
    (site.web.www / "n1.release").write_text(split(good)[0])
    site.refuses("it has no signature")
    (site.web.www / "n1.release").write_text(good[: len(good) - 100])
    site.refuses("not signed by an allowed signer")
    (site.web.www / "n1.release").write_text(good[:150])
    site.refuses("not signed by an allowed signer")
    (site.web.www / "n1.release").write_text("<html>Please log in</html>\n")
    site.refuses("not signed by an allowed signer")
    mallory = new_key(tmp_path / "keys", "mallory")
    site.publisher.key, honest = mallory, site.publisher.key
    site.rewrite(lambda _text: split(good)[0])
    site.publisher.key = honest
    site.refuses("who is not in")
    (site.web.www / "n1.release").write_text((site.web.www / "n2.release").read_text())
    site.refuses("not for this node")
    site.rewrite(lambda _text: dataclasses.replace(release, cluster="staging").text())
    site.refuses('of cluster "staging"')
    site.rewrite(lambda _text: dataclasses.replace(release, expires=int(time.time()) - 5).text())
    site.refuses("expired")
    site.rewrite(lambda _text: re.sub(r"^(object \S+) \S+", r"\1 ../../etc/passwd", release.text(), flags=re.M))
    site.refuses("does not say where")

    (site.web.www / "n1.release").write_text(good)
    assert site.pulled()["changed"] is True
    (site.web.www / "n1.release").write_bytes(replay)
    site.refuses("replayed")
    assert site.endpoint("10.244.1.99")


def test_more_than_was_promised_is_not_taken(site: Site) -> None:
    site.publish()
    site.configure(limit="1000")
    site.refuses("more than 1000")
    (site.web.www / "n1.release").write_bytes(b"#" * 50_000_000)
    site.configure()
    result = site.pull()
    assert not site.host.chains("KUBE")
    assert result.code == 0
    assert result.json["fetched"] == "offline"


def service(number: int) -> dict[str, object]:
    """One of many Services, with a name that does not compress."""
    name = f"s{hashlib.sha256(str(number).encode()).hexdigest()[:40]}"
    spec = {"type": "ClusterIP", "clusterIP": f"10.97.{number // 250}.{number % 250 + 1}", "ports": [{"port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "many"}, "spec": spec}


def test_a_download_that_was_cut_is_resumed(any_fetcher: Site) -> None:
    site = any_fetcher
    many = [service(number) for number in range(400)]
    (site.cluster / "many.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": many}))
    site.publish()
    fetcher = {"fetcher": site.fetcher}
    full = site.publisher.release("n1").objects[0]
    site.configure(f"{site.web.url}/slow", **fetcher)
    shell = ["busybox", "ash"] if site.host.shell == "busybox" else ["dash"]
    pulling = subprocess.Popen(
        ["ip", "netns", "exec", site.host.name, "setsid", *shell, PULL],
        env=with_path(site.host.environment) | {"AKP_NODE_PROGRAM": str(PROGRAMS["iptables"])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    part = site.host.state / "pull" / f"part.{full.sha256}"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size):
        assert pulling.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(pulling.pid, signal.SIGKILL)
    pulling.wait()
    had = part.stat().st_size
    assert 0 < had < full.size
    site.web.requests()
    site.configure(**fetcher)
    answer = site.pulled()
    assert answer["bytes"] == full.size - had
    assert f"8080 GET /objects/{full.sha256} 206 {full.size - had}" in site.web.requests()
    assert site.endpoint("10.244.1.21")
    assert not list((site.host.state / "pull").glob("part.*"))


def test_without_the_server_everything_stays(site: Site) -> None:
    site.configure("http://127.0.0.1:1")
    answer = site.pulled()
    assert (answer["fetched"], answer["changed"], answer["generation"]) == ("offline", False, None)
    site.configure()
    assert site.pulled()["fetched"] == "absent"
    site.publish()
    site.pulled()
    site.configure("http://127.0.0.1:1")
    # Even then a flushed table comes back.
    site.host.sh("nft flush ruleset")
    answer = site.pulled()
    assert (answer["fetched"], answer["healed"], answer["changed"]) == ("offline", True, True)
    assert site.endpoint("10.244.1.21")
    assert "nothing could be pulled" in str(answer["warnings"])


def test_polls_without_news_mend_what_somebody_broke_and_say_when_nobody_publishes(site: Site) -> None:
    site.publish(valid_for=1)
    assert site.pull().code in (0, 2)
    site.publish(valid_for=4)
    site.pulled()
    site.host.sh("$ipt -t nat -F KUBE-SERVICES")
    assert site.pulled()["healed"] is True
    assert site.endpoint("10.244.1.21")
    site.host.sh("$ipt -A KUBE-FORWARD -j ACCEPT")
    assert site.pull("--verify").json["healed"] is True
    assert "-A KUBE-FORWARD -j ACCEPT" not in site.host.rules().splitlines()
    deadline = time.monotonic() + 60
    while "no new one is published" not in str(site.pulled()["warnings"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    # Signed anew, without news: only the release comes.
    site.publish()
    site.web.requests()
    answer = site.pulled()
    assert (answer["fetched"], answer["changed"]) == ("new", False)
    assert len(site.web.requests()) == 1
    assert answer["counter"] == site.publisher.release("n1").counter


def test_a_delta_that_does_not_fit_is_followed_by_the_full_bundle(site: Site) -> None:
    site.publish()
    site.pulled()
    site.publish("10.244.1.99")
    site.host.sh("nft flush ruleset")
    answer = site.pulled()
    assert (answer["changed"], answer["delta"]) == (True, False)
    assert site.endpoint("10.244.1.99")


def test_a_dry_run_tells_and_does_nothing(site: Site) -> None:
    site.publish()
    assert site.pull("--dry-run").json["changed"] is True
    assert not site.host.chains("KUBE")
    assert site.pulled()["changed"] is True


def test_what_is_missing_is_named(site: Site) -> None:
    site.publish()
    (etc_of(site.host) / "node.conf").write_text("cluster shop\n")
    assert "does not say where to pull from" in site.pull().json["error"]
    site.configure("ftp://127.0.0.1")
    assert "is not one of http://" in site.pull().json["error"]
    site.configure(fetcher="lynx")
    assert "fetcher is curl or wget" in site.pull().json["error"]
    site.configure(ca="/nonexistent.pem")
    assert "ca /nonexistent.pem cannot be read" in site.pull().json["error"]
    (etc_of(site.host) / "allowed_signers").unlink()
    assert "whose releases count" in site.pull().json["error"]
    assert "--jitter takes a number" in site.pull("--jitter", "soon").json["error"]


def test_a_pull_that_waits_for_hours_does_not_rely_on_its_files(site: Site, tmp_path: Path) -> None:
    """Meanwhile other runs clear what they take for left over."""
    site.publish()
    clear = f"rm -rf {site.host.state}/pull/work; exit 0"
    tools = shim(site.host, tmp_path / "bin", "sleep", "*", clear)
    result = pull(site.host, "--jitter", "9999", PATH=path_with(site.host, tools))
    assert (result.code, result.json.get("changed")) == (0, True), result.stdout + result.stderr
    assert called(tools, "sleep")
    assert not (site.host.state / "pull" / "work").exists()


def test_a_pull_whose_apply_fails_says_what_the_apply_said(site: Site) -> None:
    """Above all whether the kernel is as it was, and why not."""
    site.publish()
    site.pulled()
    site.publish("10.244.1.99")
    result = pull(site.host, PATH=failing_restores(site.host, site.host.directory / "failing"))
    assert (result.code, result.json["asBefore"]) == (4, False), result.stdout + result.stderr
    assert "part of the delta may be in force" in result.json["warnings"], result.stdout + result.stderr
    assert site.pulled()["changed"] is True
    assert site.endpoint("10.244.1.99")


def test_a_pull_that_fails_before_anything_is_touched_says_so(site: Site) -> None:
    site.publish()
    site.rewrite(lambda text: text.replace("expires", "expired", 1), signed=False)
    result = site.pull()
    assert (result.code, result.json["asBefore"]) == (2, True), result.stdout + result.stderr


def test_a_share_can_hold_anything(site: Site) -> None:
    """Only regular files of the announced size are read: links led out of the share, and FIFOs held a poll for ever."""
    site.publish()
    site.configure(f"file://{site.web.www}")
    objects = site.web.www / "objects"
    release = site.publisher.release("n1")
    kept = {each.sha256: (objects / each.sha256).read_bytes() for each in release.objects}
    (name,) = kept
    for make in (
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(kept[name] + b"more"),
    ):
        _remove(objects / name)
        make(objects / name)
        result = site.pull()
        assert (result.code, "no regular file" in result.json["error"]) == (2, True), result.stdout
        assert not list((site.host.state / "pull").glob("part.*"))
    _remove(objects / name)
    (objects / name).write_bytes(kept[name])
    text = (site.web.www / "n1.release").read_bytes()
    for make in (lambda path: path.symlink_to("/dev/zero"), lambda path: os.mkfifo(path)):
        (site.web.www / "n1.release").unlink()
        make(site.web.www / "n1.release")
        assert site.pulled()["fetched"] == "offline"
    (site.web.www / "n1.release").unlink()
    (site.web.www / "n1.release").write_bytes(text)
    assert site.pulled()["changed"] is True


def _remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()


def test_nothing_is_fetched_that_an_unsigned_release_names(site: Site) -> None:
    site.publish()
    site.rewrite(lambda text: re.sub(r"^(object \S+ \S+) \d+", r"\1 9", text, flags=re.M), signed=False)
    site.web.requests()
    site.refuses("does not fit the text")
    assert len(site.web.requests()) == 1


def test_a_report_follows_no_link(site: Site) -> None:
    victim = site.host.directory / "victim"
    victim.write_text("mine\n")
    folder = site.host.directory / "reports"
    folder.mkdir()
    (folder / "n1.json").symlink_to(victim)
    site.publish()
    site.configure(report=f"{folder}/")
    answer = site.pulled()
    assert json.loads((folder / "n1.json").read_text()) == answer
    assert not (folder / "n1.json").is_symlink()
    assert victim.read_text() == "mine\n"
    assert [each.name for each in folder.iterdir()] == ["n1.json"]
