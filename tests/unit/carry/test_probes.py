"""Probes: real servers on the loopback, and shells that ask them."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentless_kube_proxy.carry.probes import InvalidProbe, ProbeFailed, node_script, parse_probes, run_probes

HERE = "127.0.0.1"


class Answers(http.server.BaseHTTPRequestHandler):
    """200 at /, 302 at /moved, 503 elsewhere."""

    def do_GET(self) -> None:
        self.send_response({"/": 200, "/moved": 302}.get(self.path, 503))
        if self.path == "/moved":
            self.send_header("Location", "/")
        self.end_headers()
        self.wfile.write("all is well '$(touch pwned)' * \\ \"quoted\" ünï\ntwo\nlines\n".encode())

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[int]:
    with http.server.ThreadingHTTPServer((HERE, 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """A server of datagrams."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((HERE, 0))

    def serve() -> None:
        while True:
            data, client = server.recvfrom(1000)
            if data == b"end":
                return
            server.sendto(b"heard " + data, client)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.sendto(b"end", server.getsockname())
    thread.join()
    server.close()


@pytest.fixture(scope="module")
def closed() -> int:
    with socket.socket() as free:
        free.bind((HERE, 0))
        return int(free.getsockname()[1])


def probe(**fields: Any) -> None:
    run_probes(parse_probes([{"timeout": 1, **fields}], HERE))


def test_what_answers_is_well(web: int, echo: int) -> None:
    probe(port=web)
    probe(type="http", port=web, contains="well")
    probe(type="http", port=web, path="/health", status=503)
    probe(type="http", port=web, path="/health", status=[503, 404])
    probe(type="udp", port=echo, send="you", contains="heard you")


def test_what_does_not_is_named_with_the_reason(web: int, echo: int, closed: int) -> None:
    for fields, reason in (
        ({"port": closed, "name": "shop"}, rf"shop \(tcp 127\.0\.0\.1:{closed}\): .*refused"),
        ({"type": "http", "port": web, "path": "/x"}, f"http 127.0.0.1:{web}/x: answers with status 503"),
        ({"type": "http", "port": web, "contains": "ill"}, "its answer does not contain 'ill'"),
        ({"type": "udp", "port": echo, "send": "x", "contains": "heard you"}, "does not contain 'heard you'"),
        ({"type": "udp", "port": closed, "send": "x"}, "refused"),
        ({"type": "https", "port": web}, "https 127"),
    ):
        with pytest.raises(ProbeFailed, match=reason):
            probe(**fields)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, r"kube_proxy_probes\[0\]: has no port"),
        ({"port": "x"}, r"kube_proxy_probes\[0\]: invalid literal"),
        ({"port": 1, "type": "icmp"}, "'icmp' is not one of tcp, udp, http, https"),
        ({"port": 1, "from": "moon"}, "'moon' is not one of control, node"),
        ({"port": 1, "type": "udp", "from": "node"}, "from the control host only"),
        ({"port": 1, "adress": "x"}, "has no adress"),
    ],
)
def test_what_is_no_probe_is_said(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidProbe, match=reason):
        parse_probes([given], HERE)


TOOLS = ("sh", "sed", "head", "sleep", "bash", "timeout")


@pytest.fixture(params=["curl", "wget", "busybox"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The commands of a node that has one program to ask with."""
    fetcher = "curl" if request.param == "curl" else "wget"
    real = {each: shutil.which(each) for each in (*TOOLS, request.param)}
    for name, target in real.items():
        if target:
            (tmp_path / (fetcher if name == request.param else name)).symlink_to(target)
    return str(tmp_path)


@pytest.mark.parametrize("shell", [["dash"], ["busybox", "ash"]], ids=lambda shell: shell[0])
def test_a_node_probes_with_what_it_has(shell: list[str], path: str, web: int, closed: int, tmp_path: Path) -> None:
    def say(*probes: dict[str, Any], timeout: int = 30) -> str:
        script = node_script(parse_probes([{"from": "node", "timeout": timeout, **each} for each in probes], HERE))
        argv = [str(shutil.which(shell[0])), *shell[1:], "-c", f"{script}echo well"]
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, env={"PATH": path}, cwd=tmp_path
        ).stdout

    assert say({"port": web}, {"type": "http", "port": web}) == "well\n"
    assert say({"type": "http", "port": web, "path": "/x", "status": 503}) == "well\n"
    assert say({"type": "http", "port": web, "path": "/x", "status": [404, 503]}) == "well\n"
    assert say({"type": "http", "port": web, "path": "/moved", "status": 302}) == "well\n"
    for part in ("all is well", "'$(touch", '* \\ "quoted"', "two\nlines\n", "ünï", "$(touch pwned)' "):
        assert say({"type": "http", "port": web, "contains": part}) == "well\n", part
    http = {"type": "http", "port": web}
    for bad in (
        {"port": closed, "name": 'the "shop"; echo $(id)'},
        {**http, "path": "/x"},
        {**http, "status": 204},
        {**http, "contains": "ill"},
        {**http, "contains": "all.is.well"},
        {**http, "contains": "other\nlines"},
        {**http, "contains": "'; touch pwned; '"},
        {**http, "port": closed},
        {**http, "port": closed, "contains": "all"},
    ):
        told = json.loads(say({"port": web}, bad, timeout=1))
        assert told["probe"] is True
        assert "does not answer from the node" in told["error"]
    assert not (tmp_path / "pwned").exists()
    assert node_script(parse_probes([{"port": 1}], HERE)) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", "-oProxyCommand=id"),
        ("address", "--help"),
        ("address", "n1 -x"),
        ("address", "$(id)"),
        ("path", "no slash"),
        ("path", "/ HTTP/1.1\r\nX: y"),
        ("path", "/\x00"),
    ],
)
def test_a_probe_names_a_host_and_a_path_and_no_option(field: str, value: str) -> None:
    with pytest.raises(InvalidProbe, match=rf"kube_proxy_probes\[0\]\.{field}"):
        parse_probes([{"port": 80, "type": "http", field: value}], HERE)
    with pytest.raises(InvalidProbe, match="address"):
        parse_probes([{"port": 80}], "-oProxyCommand=id")
