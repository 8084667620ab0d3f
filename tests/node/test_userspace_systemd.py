"""userspace mode where systemd is init: the units of the role run the proxies, without root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from agentless_kube_proxy.bundle.write import write_bundle

from tests.lab.program import PROGRAMS
from tests.lab.systemd import SystemdHost
from tests.unit.build import Object, service, slice_of

from .test_userspace_units import TEMPLATES
from .userspace import NODE, PODS, SERVER, VIP, dns, state, web

UNITS = ("akp-userspace.service", "akp-userspace-udp.service")
CALL = """
import socket, sys
kind, ip, port = socket.SOCK_DGRAM if sys.argv[1] == "53" else socket.SOCK_STREAM, sys.argv[2], int(sys.argv[1])
with socket.socket(socket.AF_INET, kind) as caller:
    caller.settimeout(10)
    caller.connect((ip, port))
    if kind == socket.SOCK_DGRAM:
        caller.send(b"?")
    print(caller.recv(100).decode())
"""


@pytest.fixture(scope="module")
def host() -> Iterator[SystemdHost]:
    """A host with pods, and with the units that the role writes."""
    with SystemdHost(f"n1-{os.getpid()}") as made:
        templates = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES))
        for unit in UNITS:
            text = templates.get_template(f"{unit}.j2").render(kube_proxy_nginx_user="www-data")
            made.sh(f"cat >/etc/systemd/system/{unit} <<'END'\n{text}\nEND")
        made.sh("systemctl daemon-reload; ip route add 10.96.0.0/12 dev lo")
        made.sh("; ".join(f"ip addr add {ip}/32 dev lo" for ip in (NODE, *PODS)))
        argv = made.enter([sys.executable, "-c", SERVER, *PODS])
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as pods:
            assert pods.stdout is not None
            assert pods.stdout.readline() == "ready\n"
            yield made
            pods.terminate()


def akp(host: SystemdHost, *arguments: str | Path) -> dict[str, Any]:
    done = host.run(["sh", str(PROGRAMS["userspace"]), *map(str, arguments)], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def apply(host: SystemdHost, directory: Path, *objects: Object) -> dict[str, Any]:
    write_bundle(state(*objects), directory)
    return akp(host, "apply", directory)


def call(host: SystemdHost, ip: str = VIP, port: int = 80) -> str:
    """The pod that answers."""
    return host.run([sys.executable, "-c", CALL, str(port), ip]).stdout.strip()


def shown(host: SystemdHost, unit: str, name: str) -> str:
    return host.sh(f"systemctl show -P {name} {unit}").strip()


def wait_for_another(host: SystemdHost, unit: str, pid: str) -> None:
    """Until the unit runs, by another process."""
    deadline = time.monotonic() + 60
    while shown(host, unit, "MainPID") in ("0", pid) or shown(host, unit, "ActiveState") != "active":
        assert time.monotonic() < deadline, f"{unit} did not come back within a minute"
        time.sleep(0.1)


def test_units_run_the_proxies_and_start_them_anew(host: SystemdHost, tmp_path: Path) -> None:
    one = [*web(*PODS), *dns(PODS[0])]
    assert apply(host, tmp_path / "a", *one)["proxies"] == {"haproxy": "started", "nginx": "started"}
    assert {call(host) for _ in range(6)} == set(PODS)
    assert call(host, "10.96.0.10", 53) == PODS[0]
    pids = [shown(host, unit, "MainPID") for unit in UNITS]
    for pid, user in zip(pids, ("haproxy", "www-data"), strict=True):
        # Nobody in between: what runs is what the unit's user may do, and no more.
        status = dict(line.split(":\t", 1) for line in host.sh(f"cat /proc/{pid}/status").splitlines())
        assert status["Uid"].split()[0] == host.sh(f"id -u {user}").strip()
        assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"

    more = [service("more", clusterIP="10.96.7.8"), slice_of("more", PODS[1])]
    answer = apply(host, tmp_path / "b", *web(*PODS), *dns(PODS[1]), *more)
    assert answer["proxies"] == {"haproxy": "reloaded", "nginx": "reloaded"}
    assert [shown(host, unit, "MainPID") for unit in UNITS] == pids
    assert call(host, "10.96.7.8") == PODS[1]
    assert call(host, "10.96.0.10", 53) == PODS[1]
    assert apply(host, tmp_path / "c", *web(PODS[2]), *dns(PODS[1]), *more)["proxies"] == {"haproxy": "changed"}
    assert {call(host) for _ in range(3)} == {PODS[2]}

    for unit, pid in zip(UNITS, pids, strict=True):
        host.sh(f"kill -9 {pid}")
        wait_for_another(host, unit, pid)
    assert {call(host) for _ in range(3)} == {PODS[2]}, "systemd started it with what it had last"
    assert call(host, "10.96.0.10", 53) == PODS[1]
    assert akp(host, "status")["state"] == "applied"

    assert akp(host, "cleanup")["changed"] is True
    assert {shown(host, unit, "ActiveState") for unit in UNITS} == {"inactive"}
    assert host.sh("ls -d /run/akp-userspace* || :") == ""


def test_a_unit_that_is_missing_is_named(host: SystemdHost, tmp_path: Path) -> None:
    write_bundle(state(*web(*PODS)), tmp_path / "a")
    host.sh(f"mv /etc/systemd/system/{UNITS[0]} /root; systemctl daemon-reload")
    done = host.run(["sh", str(PROGRAMS["userspace"]), "apply", str(tmp_path / "a")], check=False)
    host.sh(f"mv /root/{UNITS[0]} /etc/systemd/system; systemctl daemon-reload")
    assert done.returncode == 3
    assert f"missing unit: {UNITS[0]}" in json.loads(done.stdout.splitlines()[-1])["error"]
