"""Health checks of Services and of the node, with no process that waits for them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.controlplane import netns
from tests.lab.program import OUTPUT

from . import health
from .bundles import replace_file
from .health import PORT, asked, bundle, change, over_tcp, request, service, shop, state, systemd, until_listening
from .host import Host, with_path
from .shims import path_with, shim

UNITS = "/run/systemd/system"
EXPOSURE = 25  # tenths: what systemd-analyze may find at most
WEB = """\
{
\t"service": {
\t\t"namespace": "shop",
\t\t"name": "web"
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %s
}"""


def answer(status: str, count: int, healthy: str = "true", version: str = "1.1", *, body: bool = True) -> str:
    """What kube-proxy answers at a health check port; the date is anybody's."""
    text = WEB % (count, healthy)
    close = "Connection: close\r\n" if version == "1.1" else ""
    return (
        f"HTTP/{version} {status}\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
        f"X-Load-Balancing-Endpoint-Weight: {count}\r\nDate: D\r\nContent-Length: {len(text)}\r\n{close}\r\n"
        + (text if body else "")
    )


def undated(text: str) -> str:
    return re.sub(r"Date: [A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT\r\n", "Date: D\r\n", text)


@pytest.fixture(scope="module", params=["dash", "busybox"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with two endpoints of web in IPv4 and one in IPv6."""
    each = Host(tmp_path_factory.mktemp("host"), "nft", request.param)
    try:
        each.apply(bundle(each.directory / "bundle", shop()))
        yield each
    finally:
        each.close()


def test_a_node_with_endpoints_says_how_many(host: Host) -> None:
    assert undated(asked(host)) == answer("200 OK", 2)
    assert undated(asked(host, f"{PORT}/ipv6")) == answer("200 OK", 1)


@pytest.mark.parametrize("path", ["/", "/healthz", "/%2e%2e/x?y=z", "*"])
def test_every_path_gets_the_same_answer(host: Host, path: str) -> None:
    assert undated(asked(host, text=request(path))) == answer("200 OK", 2)


def test_every_method_does_and_head_gets_no_body(host: Host) -> None:
    assert undated(asked(host, text=request(method="POST"))) == answer("200 OK", 2)
    assert undated(asked(host, text=request(method="HEAD"))) == answer("200 OK", 2, body=False)


def test_an_old_client_is_answered_in_its_version(host: Host) -> None:
    assert undated(asked(host, text=request(version="1.0", headers=""))) == answer("200 OK", 2, version="1.0")


@pytest.mark.parametrize(
    "text", ["hello\r\n\r\n", "GET /\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", "\r\n\r\n", "GET / HTTP/9\r\n\r\n"]
)
def test_what_is_no_request_is_told_so(host: Host, text: str) -> None:
    assert asked(host, text=text).startswith("HTTP/1.1 400 Bad Request")


def test_who_asks_nothing_gets_nothing(host: Host) -> None:
    assert asked(host, text="") == ""


def test_a_port_that_no_service_has_is_no_yes(host: Host) -> None:
    assert asked(host, "31999").startswith("HTTP/1.1 404 Not Found\r\n")


@pytest.mark.parametrize("what", ["x", "1;id", "$(id)", "../../etc", "-", "31000/ipv5"])
def test_only_a_port_can_be_named(host: Host, what: str) -> None:
    result = host.akp(what, program=health.HEALTH)
    assert result.code == 2
    assert "takes a port" in result.stderr


def test_a_delta_changes_the_answer_without_changing_a_rule(host: Host, tmp_path: Path) -> None:
    old = shop()
    gone = shop(0, 0)
    rules = host.rules()
    host.apply(change(tmp_path / "there", old, gone))
    assert undated(asked(host)) == answer("503 Service Unavailable", 0)
    host.apply(change(tmp_path / "back", gone, old))
    assert undated(asked(host)) == answer("200 OK", 2)
    assert host.rules() == rules
    # And so does the bundle that both make.
    host.apply(bundle(tmp_path / "whole", old), "--verify")
    assert undated(asked(host)) == answer("200 OK", 2)


def test_a_node_whose_rules_are_gone_is_not_healthy(host: Host) -> None:
    generation = "sed -n 's/^generation=\\(.............\\).*/\\1/p' $AKP_STATE/record | tr a-f A-F"
    host.sh(f"$ipt -t filter -F KUBE-PROXY-GEN-$({generation})")
    assert undated(asked(host)) == answer("503 Service Unavailable", 2, "false")
    assert host.akp("restore").code == 0
    assert undated(asked(host)) == answer("200 OK", 2)


def test_a_change_that_waits_for_two_periods_makes_the_node_unhealthy(host: Host) -> None:
    queued = host.state / "queued"
    try:
        queued.touch()
        os.utime(queued, (time.time() - 55,) * 2)
        assert undated(asked(host)) == answer("200 OK", 2)
        os.utime(queued, (time.time() - 61,) * 2)
        assert undated(asked(host)) == answer("503 Service Unavailable", 2, "false")
        # A sync that ends, even one that finds all in place, ends the wait.
        host.apply(host.directory / "bundle")
        assert undated(asked(host)) == answer("200 OK", 2)
    finally:
        queued.unlink(missing_ok=True)


def test_a_change_that_the_kernel_refuses_waits(host: Host, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "iptables-nft-restore").write_text("#!/bin/sh\ncat >/dev/null\necho no >&2\nexit 1\n")
    (tools / "iptables-nft-restore").chmod(0o755)
    path = f"{tools}:{host.environment['PATH']}"
    assert host.akp("apply", bundle(tmp_path / "other", shop(1)), PATH=path).code == 4
    assert (host.state / "queued").exists()
    assert undated(asked(host)) == answer("200 OK", 2)
    host.apply(host.directory / "bundle")
    assert not (host.state / "queued").exists()


@pytest.mark.parametrize("modes", [("iptables", "iptables"), ("nftables", "nftables"), ("iptables", "nftables")])
def test_a_node_is_healthy_while_a_change_is_under_way(
    new_host: Callable[..., Host], tmp_path: Path, modes: tuple[str, str]
) -> None:
    """Asked when all tables are switched, and nothing of it is recorded yet."""
    host = new_host()
    old, new = (bundle(tmp_path / str(i), shop(i + 1, mode=mode)) for i, mode in enumerate(modes))
    host.apply(old)
    (tmp_path / "request").write_text(request())
    ask = f'dash {health.HEALTH} {PORT} <{tmp_path}/request >{tmp_path}/answer; exec "$real" "$@"'
    tools = shim(host, tmp_path / "bin", "mv", "*/record.new*", ask)
    assert host.akp("apply", new, PATH=path_with(host, tools)).code == 0
    assert undated((tmp_path / "answer").read_bytes().decode()) == answer("200 OK", 1)


def test_a_change_that_ends_while_a_node_is_asked_does_not_make_it_unhealthy(
    new_host: Callable[..., Host], tmp_path: Path
) -> None:
    host = new_host()
    host.apply(bundle(tmp_path / "old", shop()))
    new = bundle(tmp_path / "new", shop(1))
    change = f'dash {new}/akp-node apply {new} >/dev/null </dev/null; exec "$real" "$@"'
    tools = shim(host, tmp_path / "bin", "iptables-nft", "*-C*", change)
    (tmp_path / "request").write_text(request())
    ask = f"dash {health.HEALTH} {PORT} <{tmp_path}/request"
    assert undated(host.sh(ask, PATH=path_with(host, tools))).startswith("HTTP/1.1 200 OK")
    assert host.akp("status").json["generation"] == shop(1).generation


def test_a_kernel_without_rules_is_not_healthy_whatever_is_under_way(new_host: Callable[..., Host]) -> None:
    host = new_host()
    host.apply(bundle(host.directory / "bundle", shop()))
    (host.state / "queued").touch()
    assert undated(asked(host)) == answer("200 OK", 2)
    host.sh("nft flush ruleset")
    assert undated(asked(host)) == answer("503 Service Unavailable", 2, "false")


def test_the_node_itself_is_asked_at_healthz_and_livez(host: Host) -> None:
    for path, keys in (
        ("/healthz", ["lastUpdated", "currentTime", "nodeEligible", "healthy", "status"]),
        ("/livez?verbose", ["lastUpdated", "currentTime", "healthy", "status"]),
    ):
        text = asked(host, "healthz", request(path))
        assert text.startswith(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\nDate: "
        )
        said = json.loads(text.partition("\r\n\r\n")[2])
        assert list(said) == keys
        assert said["healthy"] is True
        assert said["lastUpdated"] == said["currentTime"]
        assert list(said["status"]) == ["IPv4", "IPv6"]
        assert said["status"]["IPv6"]["healthy"] is True
    assert asked(host, "healthz", request("/")).startswith("HTTP/1.1 404 Not Found\r\n")


def test_a_node_that_is_to_go_fails_healthz_and_lives(new_host: Callable[..., Host], tmp_path: Path) -> None:
    host = new_host()
    leaving = health.node("n1", "172.18.0.11")
    leaving["spec"]["taints"] = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    host.apply(bundle(tmp_path / "bundle", health.render(leaving)))
    text = asked(host, "healthz", request("/healthz"))
    said = json.loads(text.partition("\r\n\r\n")[2])
    assert text.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert (said["nodeEligible"], said["healthy"]) == (False, True)
    assert asked(host, "healthz", request("/livez")).startswith("HTTP/1.1 200 OK\r\n")


def test_a_host_without_a_bundle_is_not_healthy(new_host: Callable[..., Host]) -> None:
    text = asked(new_host(), "healthz", request("/livez"))
    assert text.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert json.loads(text.partition("\r\n\r\n")[2])["lastUpdated"] == "0001-01-01T00:00:00Z"


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_systemd_listens_and_starts_the_program(mode: str, new_host: Callable[..., Host], tmp_path: Path) -> None:
    """As `inetd` does it: one process for each connection, which is its stdin and stdout."""
    host = new_host()
    host.sh("ip address add 172.18.0.11/32 dev lo")
    host.apply(bundle(tmp_path / "bundle", shop(mode=mode)))
    passed = [f"--setenv={name}={host.environment[name]}" for name in ("AKP_STATE", "PATH")]
    at = [f"--listen=172.18.0.11:{PORT}", f"--listen=[::1]:{PORT}"]
    activate = ["systemd-socket-activate", "--accept", "--inetd", *passed, *at]
    listening = subprocess.Popen(
        ["ip", "netns", "exec", host.name, *activate, "/bin/sh", str(health.HEALTH), str(PORT)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until_listening(host.name, "172.18.0.11", PORT)
        assert undated(over_tcp(host.name, "172.18.0.11", PORT)) == answer("200 OK", 2)
        # A request that comes in pieces.
        with netns.connect(host.name, "172.18.0.11", PORT, 60) as connection:
            for part in ("GET / HT", "TP/1.1\r\nHo", "st: x\r\n\r", "\n"):
                connection.sendall(part.encode())
                time.sleep(0.05)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        os.killpg(listening.pid, signal.SIGKILL)
        listening.wait()


@pytest.fixture
def visible_host() -> Iterator[Host]:
    """A host whose files are not in /tmp, which a unit with PrivateTmp does not see."""
    with tempfile.TemporaryDirectory(dir=OUTPUT) as directory:
        made = Host(Path(directory))
        yield made
        made.close()


def test_socket_units_follow_the_services(visible_host: Host, tmp_path: Path) -> None:
    host = visible_host
    (host.directory / "etc").mkdir()
    (host.directory / "etc" / "node.conf").write_text("health systemd\nhealthz 127.0.0.1:10256\n")
    with systemd(host) as running:

        def units() -> list[str]:
            told = running.systemctl("list-units", "--plain", "--no-legend", "akp-health*.socket")
            return [line.split()[0] for line in told.splitlines()]

        def apply(made: Path) -> list[str]:
            result = running.akp("apply", made)
            assert result.code == 0, result.stdout + result.stderr
            return list(result.json["warnings"])

        first = shop()
        assert apply(bundle(tmp_path / "first", first)) == []
        until_listening(host.name, "::1", PORT)
        assert undated(over_tcp(host.name, "127.0.0.1", PORT)) == answer("200 OK", 2)
        assert undated(over_tcp(host.name, "::1", PORT)) == answer("200 OK", 1)
        until_listening(host.name, "127.0.0.1", 10256)
        assert over_tcp(host.name, "127.0.0.1", 10256, request("/healthz")).startswith("HTTP/1.1 200 OK\r\n")
        assert units() == [f"akp-health@{PORT}.socket", "akp-healthz.socket"]

        # A second Service comes by a delta; the socket of the first stays the one it was.
        since = running.systemctl("show", "--property=ActiveEnterTimestampMonotonic", f"akp-health@{PORT}.socket")
        second = state(service(), service("cart", PORT + 1))
        assert apply(change(tmp_path / "second", first, second)) == []
        until_listening(host.name, "127.0.0.1", PORT + 1)
        assert '"name": "cart"' in over_tcp(host.name, "127.0.0.1", PORT + 1)
        assert over_tcp(host.name, "127.0.0.1", PORT).startswith("HTTP/1.1 503 Service Unavailable\r\n")
        assert since == running.systemctl(
            "show", "--property=ActiveEnterTimestampMonotonic", f"akp-health@{PORT}.socket"
        )

        # What answers is in a sandbox.
        for unit in ("akp-health@.service", "akp-healthz@.service"):
            analyse = ("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", f"{UNITS}/{unit}")
            analysed = subprocess.run(running.enter(*analyse), capture_output=True, text=True, check=False)
            assert analysed.returncode == 0, analysed.stdout + analysed.stderr

        # It survives clients that ask too much or nothing.
        for _ in range(250):
            health.resets(host.name, "127.0.0.1", PORT)
        assert running.systemctl("is-active", f"akp-health@{PORT}.socket") == "active\n"

        # The first one goes.
        third = bundle(tmp_path / "third", state(service("cart", PORT + 1)))
        assert apply(third) == []
        until_listening(host.name, "127.0.0.1", PORT, wanted=False)
        assert units() == [f"akp-health@{PORT + 1}.socket", "akp-healthz.socket"]

        # After a reboot /run is empty, and nothing in the kernel has changed.
        subprocess.run(
            running.enter("sh", "-c", "systemctl stop 'akp-health*.socket'; rm /run/systemd/system/akp-*"), check=True
        )
        assert running.akp("restore").code == 0
        until_listening(host.name, "127.0.0.1", PORT + 1)

        assert running.akp("cleanup").code == 0
        until_listening(host.name, "127.0.0.1", PORT + 1, wanted=False)
        assert units() == []
        left = subprocess.run(
            running.enter("sh", "-c", "ls /run/systemd/system"), capture_output=True, text=True, check=True
        )
        assert left.stdout == ""
        assert not host.state.exists()


def test_without_systemd_the_setting_is_a_warning(new_host: Callable[..., Host], tmp_path: Path) -> None:
    host = new_host()
    (tmp_path / "node.conf").write_text("health systemd\n")
    env = {"AKP_ETC": str(tmp_path), "AKP_HEALTH": str(health.HEALTH)}
    done = host.akp("apply", bundle(tmp_path / "bundle", shop()), **env)
    assert done.code == 0
    assert done.json["warnings"] == ["akp-health: setting health is systemd, but systemd does not run here"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("health.conf", "check ipv4 22 shop web"),
        ("health.conf", "check ipv4 6443 shop web"),
        ("health.conf", "check ipv4 31001 shop $(id)"),
        ("health.conf", "check ipv4 31001 shop web 1"),
        ("health.conf", "listen ipv4 /etc/shadow"),
        ("health.conf", "listen ipv4 @akp"),
        ("health.conf", "[Socket]"),
        ("health.conf", "eligible true"),
        ("health.conf", f"check ipv4 31001 shop {'w' * 64}"),
        ("health.counts", "eligible maybe"),
        ("health.counts", "count ipv4 31000 -1"),
        ("health.counts", "check ipv4 31001 shop web"),
    ],
)
def test_a_bundle_with_another_line_is_refused(host: Host, tmp_path: Path, name: str, line: str) -> None:
    made = bundle(tmp_path / "made", shop())
    replace_file(made, name, f"{(made / name).read_text()}{line}\n")
    result = host.akp("apply", made)
    assert result.code == 2
    assert f"{name} line " in result.json["error"], result.stdout


def test_nobody_holds_a_connection_for_long(host: Host) -> None:
    """A client that sends a byte now and then was served for half a minute."""
    began = time.monotonic()
    command = f"{{ for i in 1 2 3 4 5 6 7 8 9 10 11 12; do printf G; sleep 1; done; }} | dash {health.HEALTH} {PORT}"
    assert host.sh(command, check=False) == ""
    assert time.monotonic() - began < 20
    shell = ["busybox", "ash"] if host.shell == "busybox" else ["dash"]
    with subprocess.Popen(
        ["ip", "netns", "exec", host.name, *shell, health.HEALTH, str(PORT)],
        env=with_path(host.environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as silent:
        assert silent.stdout
        began = time.monotonic()
        assert silent.stdout.read() == b""
        assert time.monotonic() - began < 15


def test_a_request_starts_few_programs(host: Host, tmp_path: Path) -> None:
    """Each costs a node about a millisecond, and load balancers ask all day."""
    (tmp_path / "request").write_text(request())
    traced = host.sh(
        f"strace -f -qq -e trace=execve -e signal=none -z -o {tmp_path}/trace"
        f" dash {health.HEALTH} {PORT} <{tmp_path}/request"
    )
    assert traced.startswith("HTTP/1.1 200 OK")
    programs = [line for line in (tmp_path / "trace").read_text().splitlines() if "execve(" in line]
    assert len(programs) <= 6, programs
